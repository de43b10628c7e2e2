"""A lane: what one stream said, in order, to one reader."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from services.router.feeds import Lane
from tandem.errors import WorkerLost
from tandem.v1 import common_pb2, decode_pb2


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
    scores = common_pb2.Logprobs(chosen=[-1.0 * token for token in ids])
    return decode_pb2.DecodeResponse(tokens=decode_pb2.Tokens(position=position, token_ids=ids, logprobs=scores))


def a_lane() -> Lane:
    return Lane("feed", 1, "decode-0")


async def test_a_reader_that_is_behind_gets_several_steps_at_once() -> None:
    """With where the first of them stands, their log probabilities, and what was said last."""
    lane = a_lane()
    for position in range(10, 14):
        event = said(position, position)
        event.tokens.preemptions = position
        lane.put(event)
    lane.put(decode_pb2.DecodeResponse(ended=decode_pb2.Ended(reason=common_pb2.FINISH_REASON_LENGTH)))
    async with aclosing(lane.events(Call())) as events:
        tokens = (await anext(events)).tokens
        assert (tokens.position, list(tokens.token_ids), tokens.preemptions) == (10, [10, 11, 12, 13], 13)
        assert list(tokens.logprobs.chosen) == [-10.0, -11.0, -12.0, -13.0]
        assert (await anext(events)).ended.reason == common_pb2.FINISH_REASON_LENGTH


async def test_what_does_not_follow_is_not_joined() -> None:
    """A gap stays a gap, for the router to find."""
    lane = a_lane()
    lane.put(said(10, 1))
    lane.put(said(12, 3))
    async with aclosing(lane.events(Call())) as events:
        assert list((await anext(events)).tokens.token_ids) == [1]
        assert (await anext(events)).tokens.position == 12


async def test_an_error_comes_after_what_was_said_before() -> None:
    """Of the feed, and of the call."""
    lane = a_lane()
    lane.put(said(10, 1))
    lane.fail(WorkerLost("the feed broke"))
    async with aclosing(lane.events(Call())) as events:
        assert (await anext(events)).tokens.position == 10
        with pytest.raises(WorkerLost, match="the feed broke"):
            await anext(events)
    lane, call = a_lane(), Call(WorkerLost("the call broke"))
    lane.put(said(10, 1))
    async with aclosing(lane.events(call)) as events:
        assert (await anext(events)).tokens.position == 10
        call.done(call)
        with pytest.raises(WorkerLost, match="the call broke"):
            await anext(events)
