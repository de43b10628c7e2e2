"""Ending a background task for certain, and reading several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

PATIENCE_S = 0.5
Item = TypeVar("Item")


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel it and wait until it is over, whatever its outcome.

    One `cancel` is not always enough: a library that waits with a timeout of its own may swallow it when both come at
    once (redis-py's pub/sub reader does), so it is repeated until the task has ended.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_S)


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all streams as they come, one ahead of the reader from each. The first error ends all of them."""
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
            await end(task)
            if not task.cancelled():
                task.exception()  # seen: the first error is the one that is told
        for stream in streams:
            await stream.aclose()
