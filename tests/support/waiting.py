"""Waiting for what other tasks, threads and processes do, where none of them tells.

Time in which this process wanted a core and others had it does not count (tests/support/stopwatch.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from tests.support.stopwatch import Stopwatch

T = TypeVar("T")
AGAIN_S, MOST_S = 0.005, 0.05  # between two looks, at first and after half a second


def wait_until(condition: Callable[[], T], within_s: float = 30.0, explain: Callable[[], object] = lambda: "") -> T:
    """The first true value that the condition returns. Fails with the explanation when there is none in time."""
    watch, pause = Stopwatch(), AGAIN_S
    while not (value := condition()):
        assert watch.within(within_s), f"not within {within_s} s: {explain()}"
        time.sleep(pause)
        pause = min(1.1 * pause, MOST_S)
    return value


async def until(condition: Callable[[], T], within_s: float = 30.0, explain: Callable[[], object] = lambda: "") -> T:
    """`wait_until` for a test whose own event loop has to run meanwhile."""
    watch, pause = Stopwatch(), AGAIN_S
    while not (value := condition()):
        assert watch.within(within_s), f"not within {within_s} s: {explain()}"
        await asyncio.sleep(pause)
        pause = min(1.1 * pause, MOST_S)
    return value
