"""Service of one client while another floods the router.

Starts a cluster on this machine with two tenants. `greedy` may have 64 requests in progress. It does one thing after
another, `--count` times each (resets and pings ten times as often), and then waits for `--seconds`:

    unread        opens streams and reads none of them
    connections   opens connections, sends the HTTP/2 preface on each, and leaves them open
    resets        opens a stream and resets it immediately, again and again, on one connection (CVE-2023-44487)
    pings         sends PING frames on one connection

`polite` requests eight tokens, again and again, over a connection that it keeps and over a new one each time. Prints
the results of the flood, and of polite's requests before and during each. Exits with 1 if a request of polite failed.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import grpc
import typer

from cluster.local_cluster import LocalCluster
from loadtest.harness.demo_model import DEMO
from loadtest.harness.options import Seconds, names
from loadtest.harness.stats import percentile
from tandem import settings
from tandem.async_client import AsyncClient
from tandem.errors import TandemError
from tandem.v1 import generation_pb2

GENERATE = "/tandem.v1.GenerationService/Generate"
GREEDY, POLITE = "greedy-key-0123456789", "polite-key-0123456789"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 1, 3, 4, 6, 7
FRAMES = {HEADERS: "HEADERS", RST_STREAM: "RST_STREAM", PING: "PING", GOAWAY: "GOAWAY"}
OFTEN = 10  # times `--count`: resets and pings
ANSWER_S = 10.0
AT_ONCE = 200  # connections that are being opened


@dataclass
class Polite:
    """The requests of a well-behaved client: seconds of each, and the reasons of failures."""

    kept: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)

    def row(self) -> str:
        def summary(seconds: list[float]) -> str:
            return f"{1000 * median(seconds):.0f} / {1000 * percentile(seconds, 0.99):.0f}" if seconds else "-"

        why = ", ".join(f"{count} {name}" for name, count in self.failed.items()) or "none failed"
        return f"{len(self.kept):>6} {summary(self.kept):>14} {len(self.new):>6} {summary(self.new):>14}   {why}"


@asynccontextmanager
async def served(target: str) -> AsyncIterator[Polite]:
    """Polite's requests, until the block ends; those that are under way then are waited for, so each way has one."""
    polite, over = Polite(), asyncio.Event()

    async def ask(client: AsyncClient, into: list[float]) -> None:
        began = perf_counter()
        try:
            await client.generate([5, 6, 7], max_tokens=8, ignore_eos=True, timeout=ANSWER_S)
            into.append(perf_counter() - began)
        except TandemError as error:
            polite.failed[error.reason] += 1

    async def keeps() -> None:
        async with AsyncClient(target, api_key=POLITE) as client:
            await ask(client, polite.kept)
            while not over.is_set():
                await ask(client, polite.kept)

    async def comes_anew() -> None:
        while not over.is_set() or not (polite.new or polite.failed):
            async with AsyncClient(target, api_key=POLITE) as client:
                await ask(client, polite.new)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keeps())
        tasks.create_task(comes_anew())
        try:
            yield polite
        finally:
            over.set()


# ---- what greedy does: each returns what became of it


async def unread(target: str, count: int, seconds: float) -> Counter[str]:
    asked = generation_pb2.GenerateRequest(
        token_ids={"ids": [5, 6, 7]}, sampling={"max_tokens": 900, "ignore_eos": True}
    )
    async with grpc.aio.insecure_channel(target) as channel:
        generate: Any = channel.unary_stream(
            GENERATE, request_serializer=generation_pb2.GenerateRequest.SerializeToString
        )
        calls = []
        for number in range(count):
            calls.append(generate(asked, metadata=(("authorization", f"Bearer {GREEDY}"),)))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        waiting = {asyncio.create_task(call.code()) for call in calls}
        ended, waiting = await asyncio.wait(waiting, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        while waiting and ended:  # until none has ended for so long
            ended, waiting = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        codes = [(await call.code()).name if call.done() else "left open" for call in calls]
        for call in calls:
            call.cancel()
    return Counter(codes)


async def connections(target: str, count: int, seconds: float) -> Counter[str]:
    host, port = target.rsplit(":", 1)
    outcomes: Counter[str] = Counter()
    places = asyncio.Semaphore(AT_ONCE)
    writers = []

    async def connect() -> None:
        async with places:
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), ANSWER_S)
                writers.append(writer)
                writer.write(PREFACE + frame(SETTINGS))
                answered = await asyncio.wait_for(reader.read(9), ANSWER_S)
                outcomes["answered" if answered else "closed"] += 1
            except TimeoutError:
                outcomes["not answered"] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1

    await asyncio.gather(*(connect() for _ in range(count)))
    await asyncio.sleep(seconds)
    for writer in writers:
        writer.close()
    return outcomes


async def resets(target: str, count: int, seconds: float) -> Counter[str]:
    block = b"\x83\x86" + literal(4, GENERATE.encode()) + literal(1, b"x")
    block += literal(b"content-type", b"application/grpc") + literal(b"te", b"trailers")
    block += literal(b"authorization", f"Bearer {GREEDY}".encode())
    streams = itertools.count(1, 2)

    def message() -> bytes:
        number = next(streams)
        return frame(HEADERS, block, 4, number) + frame(RST_STREAM, struct.pack(">I", 8), 0, number)

    return await sent_on_one(target, message, count * OFTEN, seconds)


async def pings(target: str, count: int, seconds: float) -> Counter[str]:
    return await sent_on_one(target, lambda: frame(PING, bytes(8)), count * OFTEN, seconds)


async def sent_on_one(target: str, message: Callable[[], bytes], count: int, seconds: float) -> Counter[str]:
    """So often, in batches, on one connection. Counts what is sent, and the frames that come back until it closes."""
    host, port = target.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame(SETTINGS))
    outcomes: Counter[str] = Counter()

    async def answers() -> None:
        while True:
            head = await reader.readexactly(9)
            body, kind = await reader.readexactly(int.from_bytes(head[:3], "big")), head[3]
            why = body[8:].decode(errors="replace") if kind == GOAWAY else ""
            outcomes[f"{FRAMES.get(kind, 'other frames')} {why}".strip()] += 1

    reading = asyncio.create_task(answers())
    try:
        for first in range(0, count, 100):
            writer.write(b"".join(message() for _ in range(min(100, count - first))))
            async with asyncio.timeout(seconds):
                await writer.drain()
            await asyncio.sleep(0)
            outcomes["sent"] += min(100, count - first)
    except TimeoutError:
        outcomes["not taken"] += 1
    except OSError:
        pass  # the reader sees it, too
    done, _ = await asyncio.wait([reading], timeout=seconds)
    outcomes["closed" if done else "left open"] += 1
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    writer.close()
    return outcomes


def frame(kind: int, body: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """Of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def literal(name: int | bytes, value: bytes) -> bytes:
    """A header without indexing (RFC 7541, section 6.2.2), its name by its number in the static table."""
    named = bytes([name]) if isinstance(name, int) else b"\0" + bytes([len(name)]) + name
    return named + bytes([len(value)]) + value


# ---- the command

FLOODS: dict[str, Callable[[str, int, float], Awaitable[Counter[str]]]] = {
    "unread": unread,
    "connections": connections,
    "resets": resets,
    "pings": pings,
}


async def run(target: str, names: list[str], count: int, seconds: float) -> int:
    """Returns how many of polite's requests failed."""
    print(f"{'':>12} {'kept':>6} {'p50 / p99 ms':>14} {'new':>6} {'p50 / p99 ms':>14}   polite's failures", flush=True)
    async with served(target) as before:
        await asyncio.sleep(seconds)
    print(f"{'before':>12} {before.row()}", flush=True)
    failed = before.failed.total()
    for name in names:
        async with served(target) as during:
            outcomes = await FLOODS[name](target, count, seconds)
        failed += during.failed.total()
        summary_line = ", ".join(f"{number} {what}" for what, number in outcomes.most_common())
        print(f"{name:>12} {during.row()}\n{'':>12} greedy: {summary_line}", flush=True)
    async with served(target) as after:
        await asyncio.sleep(seconds)
    print(f"{'after':>12} {after.row()}", flush=True)
    return failed + after.failed.total()


def main(
    count: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of each flood; ten times of resets and pings.")
    ] = 10_000,
    seconds: Seconds = 10.0,
    only: Annotated[str, typer.Option(metavar="FLOOD,...", help="Floods to try.")] = ",".join(FLOODS),
) -> int:
    floods = list(names(only, FLOODS))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="tandem-flood-") as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"greedy {GREEDY} requests=64\npolite {POLITE}\n")
        overrides = settings.load(model=str(DEMO), port=0, api_keys=keys, kv_blocks=8192)
        with LocalCluster(overrides, lambda line: print(line, file=sys.stderr)) as cluster:
            return 1 if asyncio.run(run(cluster.target, floods, count, seconds)) else 0
