"""What a message to a client costs when nothing is in it, and a call that is only passed on: the floors of the router.

    python -m loadtest.messages [--streams 16] [--messages 1500] [--every 0.006] [--calls 300]

A process of its own has so many streams open, and at each tick, a model's pace, sends one message of ready bytes to
each of them: with grpc.aio as the router's gRPC front door does, and with asyncio's transports, on which its HTTP front
door stands (a chunk of a response is one write). Prints the CPU of that process for a message.

Then one call after another, through a bare grpc.aio process that asks another one and passes its message on, and
straight to that other one, in turn. Prints by how much later the message comes through it (median).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from time import perf_counter, process_time
from typing import IO, Any

import grpc

METHOD = "/floor/Stream"
GRPC_BYTES, HTTP_BYTES = 40, 200  # of a delta, and of an event of OpenAI's stream
READ_BYTES = 1 << 16
CALLS_S = 120.0  # that a server of calls lives at most


async def _ticks(send: Callable[[], None], opened: asyncio.Event, args: argparse.Namespace) -> None:
    """`send` at each tick, once all are open. Prints microseconds of CPU for a message."""
    await opened.wait()
    used, began = process_time(), perf_counter()
    for number in range(1, args.messages + 1):
        send()
        await asyncio.sleep(max(0.0, began + number * args.every - perf_counter()))
    print(f"{(process_time() - used) / (args.messages * args.streams) * 1e6:.1f}", flush=True)


async def serve_grpc(args: argparse.Namespace) -> None:
    boxes: list[asyncio.Queue[bytes]] = []
    opened = asyncio.Event()

    async def stream(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        box: asyncio.Queue[bytes] = asyncio.Queue()
        boxes.append(box)
        if len(boxes) == args.streams:
            opened.set()
        for _ in range(args.messages):
            yield await box.get()

    def send() -> None:
        for box in boxes:
            box.put_nowait(bytes(GRPC_BYTES))

    server, port = _server(stream)
    print(port, flush=True)
    await server.start()
    await _ticks(send, opened, args)
    await server.stop(1.0)


async def ask_grpc(port: int, args: argparse.Namespace) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def one() -> None:
            stream: Any = channel.unary_stream(METHOD)
            async for _ in stream(b""):
                pass

        await asyncio.gather(*(one() for _ in range(args.streams)))


async def serve_http(args: argparse.Namespace) -> None:
    transports: list[asyncio.Transport] = []
    opened = asyncio.Event()

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transports.append(transport)
            if len(transports) == args.streams:
                opened.set()

    def send() -> None:
        for transport in transports:
            transport.write(bytes(HTTP_BYTES))

    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await _ticks(send, opened, args)
    for transport in transports:
        transport.close()


async def ask_http(port: int, args: argparse.Namespace) -> None:
    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while await reader.read(READ_BYTES):
            pass
        writer.close()

    await asyncio.gather(*(one() for _ in range(args.streams)))


async def serve_calls(args: argparse.Namespace) -> None:
    """Answers each call with a message, the one that it gets from `--behind` if there is one."""

    async def answer(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        yield bytes(GRPC_BYTES)

    async def passed_on(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        stream: Any = behind.unary_stream(METHOD)
        async for message in stream(request):
            yield message

    async with grpc.aio.insecure_channel(f"127.0.0.1:{args.behind}") as behind:
        server, port = _server(passed_on if args.behind else answer)
        print(port, flush=True)
        await server.start()
        await server.wait_for_termination(CALLS_S)


async def ask_calls(ports: list[int], calls: int) -> list[float]:
    """Seconds by which each call's message came later from the first port than from the second."""
    found = []
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) for port in ports]
        ways: list[Any] = [channel.unary_stream(METHOD) for channel in channels]
        for _ in range(calls):
            took = []
            for stream in ways:
                began = perf_counter()
                async for _ in stream(bytes(GRPC_BYTES)):
                    took.append(perf_counter() - began)
            found.append(took[0] - took[1])
    return found


def _server(handler: Callable[[bytes, Any], AsyncGenerator[bytes, None]]) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    _, service, method = METHOD.split("/")
    handlers: dict[str, Any] = {method: grpc.unary_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    return server, server.add_insecure_port("127.0.0.1:0")


KINDS = {"grpc": (serve_grpc, ask_grpc), "http": (serve_http, ask_http)}


@contextmanager
def served(kind: str, *arguments: str) -> Iterator[IO[str]]:
    """The lines of a process that serves it; the first one is its port."""
    command = [sys.executable, "-m", "loadtest.messages", *sys.argv[1:], "--serve", kind, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--messages", type=int, default=1500)
    parser.add_argument("--every", type=float, default=0.006, metavar="SECONDS")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--serve", choices=[*KINDS, "calls"], help=argparse.SUPPRESS)
    parser.add_argument("--behind", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(KINDS[args.serve][0](args) if args.serve in KINDS else serve_calls(args))
        return
    for kind, (_, ask) in KINDS.items():
        with served(kind) as lines:
            asyncio.run(ask(int(lines.readline()), args))
            print(f"{kind}: {lines.readline().strip()} us of CPU for a message")
    with served("calls") as straight:
        port = int(straight.readline())
        with served("calls", "--behind", str(port)) as through:
            later = asyncio.run(ask_calls([int(through.readline()), port], args.calls))
    print(f"passed on: {statistics.median(later) * 1e3:.2f} ms later")


if __name__ == "__main__":
    main()
