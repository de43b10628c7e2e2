"""A lane: what one stream said, in order, to one reader."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.router.execution import stream_mux
from services.router.execution.stream_mux import Substream
from services.router.routing.placement import WorkerSnapshot
from tandem.errors import InternalError, WorkerLost
from tandem.v1 import decode_pb2, decode_pb2_grpc


class Call:
    """A Decode call that ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.done: Any = None

    def add_done_callback(self, callback: Any) -> None:
        self.done = callback

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> None:
        raise self._error or StopAsyncIteration


def said(position: int, *ids: int) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=decode_pb2.Tokens(position=position, token_ids=ids))


def a_substream() -> Substream:
    return Substream("feed", 1, "decode-0")


ENDED = decode_pb2.DecodeResponse(ended=decode_pb2.Ended())


class Reader:
    """Keeps what it is given; over at the end, or at `stop`."""

    def __init__(self, stop: int = -1) -> None:
        self.positions: list[int] = []
        self._stop = stop

    def __call__(self, event: decode_pb2.DecodeResponse) -> bool:
        if event.HasField("ended"):
            return True
        self.positions.append(event.tokens.position)
        return event.tokens.position == self._stop


async def test_what_came_early_is_taken_first_and_nothing_after_the_end() -> None:
    """Before anybody reads, while somebody does, and when nothing is wanted any more."""
    lane, reader = a_substream(), Reader(stop=13)
    lane.put(said(10, 1))
    lane.put(said(11, 1))
    reading = asyncio.create_task(lane.read(reader, Call()))
    await asyncio.sleep(0)
    lane.put(said(12, 1))
    assert reader.positions == [10, 11, 12]
    lane.put(said(13, 1))
    lane.put(said(14, 1))
    await reading
    assert reader.positions == [10, 11, 12, 13]


async def test_an_error_comes_after_what_was_said_before() -> None:
    """Of the feed, and of the call; and none after the end."""
    lane, reader = a_substream(), Reader()
    lane.put(said(10, 1))
    lane.fail(WorkerLost("the feed broke"))
    with pytest.raises(WorkerLost, match="the feed broke"):
        await lane.read(reader, Call())
    assert reader.positions == [10]
    lane, reader, call = a_substream(), Reader(), Call(WorkerLost("the call broke"))
    lane.put(said(10, 1))
    reading = asyncio.create_task(lane.read(reader, call))
    await asyncio.sleep(0)
    call.done(call)
    with pytest.raises(WorkerLost, match="the call broke"):
        await reading
    assert reader.positions == [10]
    lane = a_substream()
    lane.put(ENDED)
    lane.fail(WorkerLost("the feed broke"))
    await lane.read(reader, Call())


class Worker:
    """The stub and the calls of a decode worker whose feeds are open and silent."""

    def __init__(self) -> None:
        self.opened = 0
        self.cancelled = 0

    def Feed(self, request: decode_pb2.FeedRequest) -> Worker:
        self.opened += 1
        self._told = False
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def __aiter__(self) -> Worker:
        return self

    async def __anext__(self) -> decode_pb2.FeedResponse:
        if self._told:
            await asyncio.Event().wait()
        self._told = True
        return decode_pb2.FeedResponse(incarnation="a")


async def test_a_feed_that_serves_no_stream_is_closed_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while one of its streams goes on, however long that is silent. Whoever asks afterwards gets another one."""
    monkeypatch.setattr(stream_mux, "IDLE_CLOSE_S", 0.02)
    worker = Worker()
    monkeypatch.setattr(decode_pb2_grpc, "DecodeServiceStub", lambda channel: worker)
    channels: Any = SimpleNamespace(to=lambda address: None)
    known, decode = stream_mux.StreamMuxes(channels, 0.0), WorkerSnapshot("decode-0", "a", "h:1", "L", 0, 1, 1, 16, 64)
    async with asyncio.timeout(60):
        first = await known.of(decode)
        with first.substream():
            await asyncio.sleep(0.06)  # three times as long: nothing may happen in it
            assert await known.of(decode) is first
            assert not first.over
        await asyncio.wait({first.reading})
        assert (len(known._muxes), worker.opened, worker.cancelled) == (0, 1, 1)
        second = await known.of(decode)
        assert second is not first
        await asyncio.wait({second.reading})  # it was asked for, and nobody took a lane
        assert (len(known._muxes), worker.opened, worker.cancelled) == (0, 2, 2)
        third = await known.of(decode)
        third._close()
        assert await known.of(decode) is not third, "a feed that is being closed takes no stream"
        await known.close()


async def test_what_the_reader_finds_wrong_ends_its_stream_alone() -> None:
    """The feed, which puts, hears nothing of it."""

    def wrong(event: decode_pb2.DecodeResponse) -> bool:
        raise InternalError("a gap")

    lane = a_substream()
    reading = asyncio.create_task(lane.read(wrong, Call()))
    await asyncio.sleep(0)
    lane.put(said(10, 1))
    lane.put(said(11, 1))
    with pytest.raises(InternalError, match="a gap"):
        await reading
