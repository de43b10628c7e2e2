"""Background tasks are supervised: none ends without a trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

import pytest
from structlog.testing import capture_logs

from tandem import tasks
from tandem.errors import Unavailable
from tandem.tasks import end, forever, merged, once


class Loop:
    """Work for `forever` that ends in a different way at each call, then runs for good."""

    def __init__(self, *endings: Callable[[], None]) -> None:
        self._endings = list(endings)
        self.steady = asyncio.Event()

    async def __call__(self) -> None:
        await asyncio.sleep(0)
        if self._endings:
            self._endings.pop(0)()
            return
        self.steady.set()
        await asyncio.Event().wait()


def raises(error: BaseException) -> Callable[[], None]:
    def ending() -> None:
        raise error

    return ending


@pytest.fixture(autouse=True)
def without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MIN_RESTART_DELAY_S", 0.001)


async def test_a_loop_that_ends_is_started_again() -> None:
    """After an exception, a return, and an unexpected cancellation; each is in the log."""
    work = Loop(raises(ValueError("bad record")), lambda: None, raises(asyncio.CancelledError()))
    with capture_logs() as logs:
        task = forever(work, name="watching")
        async with asyncio.timeout(60):
            await work.steady.wait()
    assert [entry["why"] for entry in logs if entry["event"] == "task.restarts"] == [
        "ValueError: bad record",
        "it returned",
        "an unexpected cancellation",
    ]
    await end(task)
    assert task.cancelled()


async def test_the_delay_between_two_starts_grows_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that fails at once every time does not occupy the process."""
    monkeypatch.setattr(tasks, "MAX_RESTART_DELAY_S", 0.005)
    work = Loop(*[lambda: None] * 5)
    with capture_logs() as logs:
        task = forever(work, name="watching")
        async with asyncio.timeout(60):
            await work.steady.wait()
    await end(task)
    assert [entry["delay_s"] for entry in logs] == [0.001, 0.002, 0.004, 0.005, 0.005]


async def test_a_loop_that_swallows_its_cancellation_is_not_started_again() -> None:
    """As redis-py's pub/sub reader does."""
    calls = 0

    async def swallows() -> None:
        nonlocal calls
        calls += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    task = forever(swallows, name="watching")
    await asyncio.sleep(0)
    await end(task)
    assert calls == 1
    assert task.cancelled()


async def test_the_failure_of_work_that_ends_is_reported() -> None:
    """To the log and to whoever wants it; nobody has to await the task."""
    seen: list[BaseException] = []

    async def fails(error: Exception) -> None:
        raise error

    with capture_logs() as logs:
        bug, expected = KeyError("x"), Unavailable("gone")
        await asyncio.wait({once(fails(bug), name="a bug", failed=seen.append)})
        await asyncio.wait({once(fails(expected), name="a refusal", failed=seen.append)})
    assert seen == [bug, expected]
    assert [(entry["task"], entry["log_level"]) for entry in logs] == [("a bug", "error"), ("a refusal", "warning")]


async def test_work_that_is_cancelled_has_not_failed() -> None:
    """Its owner ended it on purpose."""
    seen: list[BaseException] = []
    task = once(asyncio.sleep(60), name="leaving", failed=seen.append)
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled()
    assert not seen


async def test_streams_whose_reader_is_cancelled_twice_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of a request with many prompts has gone: none of them goes on because the first one ends slowly."""
    monkeypatch.setattr(tasks, "RECANCEL_S", 0.01)
    told, over = set[int](), asyncio.Event()

    async def stream(number: int) -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
            yield number
        finally:
            told.add(number)
            while not over.is_set():
                with suppress(asyncio.CancelledError):
                    await over.wait()

    async def read() -> None:
        async with aclosing(merged([stream(0), stream(1)])) as items:
            async for _ in items:
                pass

    reader = asyncio.create_task(read())
    await asyncio.sleep(0.01)  # both wait
    try:
        async with asyncio.timeout(60):
            await end(reader)
        assert told == {0, 1}
    finally:
        over.set()
