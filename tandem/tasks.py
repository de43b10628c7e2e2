"""Ending a background task for certain."""

from __future__ import annotations

import asyncio
from typing import Any

PATIENCE_S = 0.5


async def end(task: asyncio.Task[Any] | None) -> None:
    """Cancel it and wait until it is over, whatever its outcome.

    One `cancel` is not always enough: a library that waits with a timeout of its own may swallow it when both come at
    once (redis-py's pub/sub reader does), so it is repeated until the task has ended.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_S)
