"""Long work is done beside the event loop, in turns, and only while somebody waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.router.preprocess import offload
from services.router.preprocess.offload import Offload
from tandem.errors import Busy

LONG = offload.MEDIUM_BYTES + 1


@asynccontextmanager
async def busy(work: Offload) -> AsyncIterator[threading.Event]:
    """All threads for long work are taken until the event is set."""
    go, begun = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        begun.release()
        assert go.wait(60)

    holding = [asyncio.create_task(work.run("", LONG, hold)) for _ in range(work._long._slots.free)]
    for _ in holding:
        await asyncio.to_thread(begun.acquire, timeout=60)
    try:
        yield go
    finally:
        go.set()
        await asyncio.gather(*holding)
        work.close()


async def test_work_whose_request_has_ended_is_never_begun() -> None:
    """A client that is gone costs nothing, and the one behind it gets its turn."""
    work, done = Offload(10.0), []
    async with busy(work) as go:
        waiting = [asyncio.create_task(work.run("a", LONG, done.append, number)) for number in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        go.set()
        await waiting[2]
    assert done == [2]


@pytest.mark.parametrize("turn_first", [True, False])
async def test_a_turn_that_comes_while_its_request_ends_goes_to_the_next(
    monkeypatch: pytest.MonkeyPatch, turn_first: bool
) -> None:
    """Cancelled in the very pass of the loop in which its turn came, before it or after it: no thread is lost."""
    work, done = Offload(10.0), []
    async with busy(work) as go:
        first, second = (asyncio.create_task(work.run("a", LONG, done.append, number)) for number in range(2))
        await asyncio.sleep(0)
        turn = work._long._slots.give

        def turn_and_end(tenant: str) -> None:
            if turn_first:
                turn(tenant)
            first.cancel()
            if not turn_first:
                turn(tenant)

        monkeypatch.setattr(work._long._slots, "give", turn_and_end)
        go.set()
        await asyncio.wait([first])
        await second
    assert first.cancelled()
    assert done == [1]
    assert work._long._slots.free > 0


async def test_tenants_take_turns() -> None:
    """Ten of one tenant do not come before the one of another."""
    work, done = Offload(10.0), []
    async with busy(work) as go:
        waiting = [asyncio.create_task(work.run("greedy", LONG, done.append, "greedy")) for _ in range(10)]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(work.run("polite", LONG, done.append, "polite")))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*waiting)
    assert done.index("polite") <= 1 + work._long._slots.free


async def test_who_gets_no_thread_in_time_is_told_to_come_again() -> None:
    """And is out of the queue; medium work has a thread of its own meanwhile, and short work needs none."""
    work = Offload(0.05)
    async with busy(work):
        with pytest.raises(Busy) as refused:
            await work.run("a", LONG, int)
        assert refused.value.reason == "QUEUE_TIMEOUT"
        assert not work._long._slots._waiting
        assert await work.run("a", offload.MEDIUM_BYTES, threading.current_thread) is not threading.current_thread()
        assert await work.run("a", offload.SHORT_BYTES, threading.current_thread) is threading.current_thread()


async def test_what_the_work_raises_comes_back_and_the_thread_stays() -> None:
    """However often it fails."""
    work = Offload(10.0)
    for _ in range(8):
        with pytest.raises(ZeroDivisionError):
            await work.run("a", LONG, divmod, 1, 0)
    assert await work.run("a", LONG, divmod, 7, 2) == (3, 1)
    work.close()


async def test_the_bytes_of_a_tenant_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more long text is refused at once, whatever brought it; those of others and short ones are not, and what has
    ended or was given up no longer counts."""
    monkeypatch.setattr(offload, "MAX_TENANT_BYTES", 3 * LONG)
    work = Offload(10.0)
    async with busy(work) as go:
        waiting = [asyncio.create_task(work.run("a", LONG, int)) for _ in range(3)]
        await asyncio.sleep(0)
        for size in (LONG, offload.MEDIUM_BYTES):
            with pytest.raises(Busy) as refused:
                await work.run("a", size, int)
            assert (refused.value.reason, refused.value.retry_after) == ("BODIES", 1.0)
        assert await work.run("a", offload.SHORT_BYTES, int) == 0
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        waiting += [asyncio.create_task(work.run(tenant, 9 * LONG, int)) for tenant in ("a", "b")]
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(*waiting[1:]) == [0] * 4
        assert await work.run("a", LONG, int) == 0
