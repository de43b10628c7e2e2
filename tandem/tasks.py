"""Background tasks: supervised from their creation, and reliably ended. And several streams merged into one.

A task that ends by an exception is silent until it is garbage collected, and a loop that returns early leaves no trace.
So every background task is created here, with a policy:

    forever   a loop: any end other than its owner's `end` is logged, and the loop restarts after a growing delay
    once      finite work: a failure is logged, and passed to `failed` if given

A task whose outcome its creator awaits needs neither (tests/rules/test_tasks.py lists those).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from time import monotonic
from typing import Any, TypeVar

import structlog

from tandem.errors import TandemError

log = structlog.get_logger(__name__)
RECANCEL_S = 0.5
MIN_RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.1, 5.0  # of a loop that ended: doubled with each failure in a row
RECOVERED_S = 30.0  # a loop that ran for longer has recovered: its next failure counts as the first
Item = TypeVar("Item")
_once: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references


def forever(work: Callable[[], Awaitable[object]], name: str) -> asyncio.Task[None]:
    """A task that runs `work` until it is cancelled. `work` is called again after it has returned or raised."""
    return asyncio.create_task(_forever(work, name), name=name)


async def _forever(work: Callable[[], Awaitable[object]], name: str) -> None:
    delay = MIN_RESTART_DELAY_S
    while True:
        began, why = monotonic(), "it returned"
        try:
            await work()
        except asyncio.CancelledError:
            if _cancelled():
                raise
            why = "an unexpected cancellation"  # a channel that closes ends its readers like this
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            log.exception("task.failed", task=name)
        if _cancelled():  # a library swallowed the cancellation
            raise asyncio.CancelledError
        if monotonic() - began > RECOVERED_S:
            delay = MIN_RESTART_DELAY_S
        log.error("task.restarts", task=name, why=why, delay_s=delay)
        await asyncio.sleep(delay)
        delay = min(2 * delay, MAX_RESTART_DELAY_S)


def once(
    work: Coroutine[Any, Any, object], name: str, failed: Callable[[BaseException], object] | None = None
) -> asyncio.Task[None]:
    """A task that runs `work` to its end. `failed` receives its error, except a cancellation."""
    task = asyncio.create_task(_logged(work, name, failed), name=name)
    _once.add(task)
    task.add_done_callback(_once.discard)
    return task


async def _logged(
    work: Coroutine[Any, Any, object], name: str, failed: Callable[[BaseException], object] | None
) -> None:
    try:
        await work
    except Exception as error:
        if isinstance(error, TandemError):
            log.warning("task.failed", task=name, error=error.message)
        else:
            log.exception("task.failed", task=name)
        if failed is not None:
            failed(error)


def _cancelled() -> bool:
    """Whether the current task was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancels the task and waits until it is over, whatever its outcome.

    One `cancel` is not always enough: a library with its own timeout may swallow it when both occur at the same time
    (redis-py's pub/sub reader does), so it is repeated until the task has ended.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=RECANCEL_S)


async def within(event: asyncio.Event, seconds: float | None) -> bool:
    """Whether the event was set within that time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def failed(task: asyncio.Task[Any]) -> bool:
    """Whether the task has ended by an error or a cancellation."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Ends the future with this error if it has not ended."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # retrieved: without a waiter, asyncio would log a warning


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all streams as they arrive; of each, one is read ahead. The first error ends all of them."""
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(stream))] = stream
                yield item
    finally:
        for task in waiting:
            task.cancel()  # all at once: a second cancellation may end the next line before it begins
        await asyncio.gather(*map(end, waiting))
        for task in waiting:
            if not task.cancelled():
                task.exception()  # retrieved: only the first error is raised
        for stream in streams:
            await stream.aclose()
