"""What one message to a client costs when nothing is in it: the floor of the router's cost for a token.

    python -m loadtest.messages [--streams 16] [--messages 1500] [--every 0.006]

A process of its own has so many streams open, and at each tick, a model's pace, sends one message of ready bytes to
each of them: with grpc.aio as the router's gRPC front door does, and with asyncio's transports, on which its HTTP front
door stands (a chunk of a response is one write). Prints the CPU of that process for a message.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from time import perf_counter, process_time
from typing import Any

import grpc

METHOD = "/floor/Stream"
GRPC_BYTES, HTTP_BYTES = 40, 200  # of a delta, and of an event of OpenAI's stream
READ_BYTES = 1 << 16


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

    server = grpc.aio.server()
    _, service, method = METHOD.split("/")
    handlers = {method: grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await _ticks(send, opened, args)
    await server.stop(1.0)


async def ask_grpc(port: int, args: argparse.Namespace) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def one() -> None:
            async for _ in channel.unary_stream(METHOD)(b""):
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


KINDS = {"grpc": (serve_grpc, ask_grpc), "http": (serve_http, ask_http)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--messages", type=int, default=1500)
    parser.add_argument("--every", type=float, default=0.006, metavar="SECONDS")
    parser.add_argument("--serve", choices=list(KINDS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(KINDS[args.serve][0](args))
        return
    for kind, (_, ask) in KINDS.items():
        command = [sys.executable, "-m", "loadtest.messages", *sys.argv[1:], "--serve", kind]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            asyncio.run(ask(int(server.stdout.readline()), args))
            print(f"{kind}: {server.stdout.readline().strip()} us of CPU for a message")


if __name__ == "__main__":
    main()
