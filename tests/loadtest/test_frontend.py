"""Routers beside one another: the client counts right, the worker that computes nothing keeps to the protocol, and the
sides take turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest

from loadtest.comparison import frontend
from loadtest.comparison.frontend import Run, Shape, Side, Workers
from loadtest.comparison.instant_worker import Instant
from loadtest.comparison.peer_servers import Peers
from loadtest.harness.http_connection import Connection, completion
from loadtest.harness.stats import Section
from loadtest.microbench.hop import Straight
from tandem.errors import Unavailable
from tandem.v1 import decode_pb2, decode_pb2_grpc

# ---- the client

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}\n\n'
EVENTS = [b'data: {"choices":[{"text":"a"}]}\n\n'] * 3 + [USAGE, b"data: [DONE]\n\n"]


def chunked(events: list[bytes]) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[Connection]:
    """A connection to a server that answers each request with these pieces, and hangs up after an empty one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            await reader.read(1000)
            for piece in pieces:
                if not piece:
                    writer.close()
                    return
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = await Connection.open(server.sockets[0].getsockname()[1])
    try:
        yield connection
    finally:
        connection.close()
        server.close()


@pytest.mark.parametrize("size", [7, 100, 10_000])
async def test_messages_are_counted_however_they_are_cut(size: int) -> None:
    """A pattern on both sides of a cut is counted once; a connection serves one request after another."""
    whole = chunked(EVENTS)
    head = whole.index(b"\r\n\r\n") + 4
    async with answering(whole[:head], *(whole[at : at + size] for at in range(head, len(whole), size))) as connection:
        for _ in range(2):
            answer = await connection.complete(completion({"prompt": "x"}))
            assert (answer.messages, answer.tokens) == (4, 3)
            assert 0 < answer.ttft <= answer.seconds


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy",), "busy"),
        ((chunked(EVENTS[:2]),), "broke off"),
        ((chunked(EVENTS)[:90], b""), "hung up"),
    ],
)
async def test_an_answer_that_is_none_raises(pieces: tuple[bytes, ...], said: str) -> None:
    """An error, a stream without its end and a closed connection are no results."""
    async with answering(*pieces) as connection:
        with pytest.raises(Unavailable, match=said):
            await connection.complete(completion({"prompt": "x"}))


# ---- the worker that computes nothing


@asynccontextmanager
async def instant() -> AsyncIterator[tuple[str, decode_pb2_grpc.DecodeServiceStub]]:
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(Instant(0.0, 2048), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        yield f"127.0.0.1:{port}", decode_pb2_grpc.DecodeServiceStub(channel)
    await server.stop(0.1)


@pytest.mark.parametrize("before", [0, 2])
async def test_a_stream_has_its_first_token_on_the_call_and_the_others_in_the_feed(before: int) -> None:
    """Positions follow one another, `before` of an earlier attempt count among max_tokens, and the end is told."""
    async with instant() as (_, stub):
        feed = stub.Feed(decode_pb2.FeedRequest(feed_id="f"))
        assert (await feed.read()).incarnation
        request = decode_pb2.DecodeRequest(
            token_ids=[5] * (3 + before), prompt_tokens=3, max_tokens=6, feed_id="f", lane=7
        )
        call = [event async for event in stub.Decode(request)]
        assert [event.WhichOneof("event") for event in call] == ["admitted", "tokens"]
        told: list[decode_pb2.DecodeResponse] = []
        while not told or not told[-1].HasField("ended"):
            told += (await feed.read()).events
        feed.cancel()
    assert {event.lane for event in told} == {7}
    came = [event.tokens for event in (call[1], *told[:-1])]  # some perhaps together
    positions = [tokens.position + place for tokens in came for place in range(len(tokens.token_ids))]
    assert positions == list(range(3 + before, 9))


async def test_streams_straight_to_the_worker_have_all_their_tokens() -> None:
    """Two at once and one after them, which uses a feed again."""
    async with instant() as (address, _):
        straight = Straight(address, 2048, 3)
        both = await asyncio.gather(straight.stream(5), straight.stream(7))
        assert [stream.tokens for stream in both] == [5, 7]
        assert (await straight.stream(1)).tokens == 1
        assert len(straight._idle) == 2
        await straight.channel.close()


# ---- taking turns


def test_sides_take_turns_and_ratios_are_of_neighbours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A B C, C B A, ...; the first round does not count; Tandem is divided by each of the others."""
    sides = [Side(name, 1, "m", 1, 1) for name in ("tandem", "dynamo round-robin", "dynamo kv")]
    order: list[tuple[str, str]] = []

    @contextmanager
    def started(*_: object) -> Iterator[tuple[list[Side], Workers]]:
        yield sides, Workers("", lambda requests, prompt: [])

    async def alone(*_: object) -> Section:
        return Section("alone", "", [])

    async def load(side: Side, shape: Shape, seconds: float, texts: object) -> Run:
        order.append((side.name, shape.name))
        rate = 10.0 if side.name == "tandem" else 40.0
        return Run(rate, rate, 1 / rate, 1 / rate, 1.0, 0.1, 0.1, 0.0, 0.01, 1.0)

    monkeypatch.setattr(frontend, "started", started)
    monkeypatch.setattr(frontend, "_alone", alone)
    monkeypatch.setattr(frontend, "_load", load)
    monkeypatch.setattr(frontend, "pin", lambda *_: None)
    plan, ticks = frontend.Plan(rounds=2, layouts=("shared",)), list[str]()
    sections = frontend.run(Peers(None, tmp_path), plan, ticks.append)
    names = [side.name for side in sides]
    assert [name for name, shape in order[:18] if shape == "requests"] == [*names[::-1], *names, *names[::-1]]
    assert len(order) == 3 * 3 * 3
    assert len(ticks) == plan.ticks - 2 * (1 + len(sides))  # what starting tells
    saturated = sections[1]
    assert {row.ratio.median for row in saturated.rows if "a second" in row.what} == {0.25}
    assert {row.ratio.median for row in saturated.rows if "CPU" in row.what} == {4.0}
    assert all(row.ratio.count == 2 for row in saturated.rows)
