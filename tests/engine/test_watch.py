"""Watching a sequence: every event, once and in order, requested or followed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.engine_thread import SequenceStream, StepOutput
from tandem.errors import InternalError, Unavailable


def step(number: int) -> StepOutput:
    progress: Any = number
    return StepOutput(progress, 0.0, 0.0)


class Follower:
    """Collects its events; ends at `stop`."""

    def __init__(self, stop: int = 3) -> None:
        self.taken: list[Any] = []
        self._stop = stop

    def __call__(self, news: list[StepOutput]) -> bool:
        self.taken.append([one.progress for one in news])
        return news[-1].progress == self._stop


async def following(watch: SequenceStream, follower: Any) -> asyncio.Task[None]:
    task = asyncio.create_task(watch.follow(follower))
    await asyncio.sleep(0)
    return task


async def test_what_happened_before_comes_first_and_nothing_after_the_end() -> None:
    """At once: the push itself calls the follower, without waking its task."""
    watch, follower = SequenceStream(), Follower()
    watch._push([step(0)])
    watch._push([step(1)])
    task = await following(watch, follower)
    watch._push([step(2)])
    assert follower.taken == [[0, 1], [2]]
    watch._push([step(3)])
    watch._push([step(4)])
    watch._fail(InternalError("too late"))
    await task
    assert follower.taken == [[0, 1], [2], [3]]


async def test_an_end_that_had_come_before_is_seen() -> None:
    """No further push would come."""
    watch, follower = SequenceStream(), Follower()
    watch._push([step(3)])
    await watch.follow(follower)
    assert follower.taken == [[3]]


async def test_an_engine_that_broke_is_told_after_what_it_had_done() -> None:
    """Before a follower comes, and while it follows."""
    watch, follower = SequenceStream(), Follower()
    watch._push([step(0)])
    watch._fail(InternalError("the engine broke"))
    with pytest.raises(InternalError, match="the engine broke"):
        await watch.follow(follower)
    assert follower.taken == [[0]]
    watch, follower = SequenceStream(), Follower()
    task = await following(watch, follower)
    watch._fail(InternalError("the engine broke"))
    with pytest.raises(InternalError, match="the engine broke"):
        await task


async def test_what_the_follower_raises_ends_its_own_watch_alone() -> None:
    """The step still reaches the other watches."""

    def nobody_listens(news: list[StepOutput]) -> bool:
        raise Unavailable("the feed is closed")

    watch = SequenceStream()
    task = await following(watch, nobody_listens)
    watch._push([step(0)])
    watch._push([step(1)])
    with pytest.raises(Unavailable, match="the feed is closed"):
        await task


async def test_who_left_is_not_called_again() -> None:
    """A cancelled follower: its sequence goes on until it is dropped."""
    watch, follower = SequenceStream(), Follower()
    task = await following(watch, follower)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    watch._push([step(0)])
    assert follower.taken == []
