"""Harm on purpose: transports that wrap a real one and leave everything else to it, and an engine slowed down."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.core.block_pool import BlockPool
from kvtransfer.types import Peer, ReadStats
from tests.support.memory import block_view

Pair = tuple[int, int]
AfterRead = Callable[["Harm", Peer, Sequence[Pair]], Awaitable[None] | None]


class Harm:
    """`before` and `after` are called around every read of more than the warm-up; `read_pairs` may change what is
    read. `reads` counts them, so that a test can prove that its fault fired."""

    def __init__(
        self,
        inner: Any,
        *,
        before: AfterRead | None = None,
        after: AfterRead | None = None,
        read_pairs: Callable[[Sequence[Pair]], Sequence[Pair]] = lambda pairs: pairs,
    ) -> None:
        self._inner = inner
        self._before, self._after, self._read_pairs = before, after, read_pairs
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """The worker's callbacks are the real transport's."""
        if name in ("dial", "on_broken"):
            setattr(self._inner, name, value)
        else:
            super().__setattr__(name, value)

    async def read(self, peer: Peer, pairs: Sequence[Pair], *more: Any, **named: Any) -> ReadStats:
        if self._before:
            await _maybe(self._before(self, peer, pairs))
        stats: ReadStats = await self._inner.read(peer, self._read_pairs(pairs), *more, **named)
        self.reads += 1
        if self._after:
            await _maybe(self._after(self, peer, pairs))
        return stats


async def _maybe(result: Awaitable[None] | None) -> None:
    if result is not None:
        await result


def flip_a_byte(harm: Harm, peer: Peer, pairs: Sequence[Pair]) -> None:
    """Corrupt the first block that was read."""
    view = block_view(harm.region, pairs[0][1])
    view[5] ^= 0x40


def only_first(action: AfterRead) -> AfterRead:
    """Do it once."""

    def act(harm: Harm, peer: Peer, pairs: Sequence[Pair]) -> Awaitable[None] | None:
        return action(harm, peer, pairs) if harm.reads == 1 else None

    return act


def hold_until(event: asyncio.Event) -> AfterRead:
    """Nothing is read before the event."""

    async def wait(harm: Harm, peer: Peer, pairs: Sequence[Pair]) -> None:
        async with asyncio.timeout(60):
            await event.wait()

    return wait


def slow_down(worker: Any, step_s: float = 0.01, until: Callable[[], bool] = lambda: False) -> Callable[[], None]:
    """Each step of its engine takes so much longer, so that a stream is not over before what is to happen in it; until
    `until` holds, or what is returned is called."""
    step, over = worker.engine.step, threading.Event()

    def slow() -> Any:
        if not until():
            over.wait(step_s)
        return step()

    worker.engine.step = slow
    return over.set


def together(worker: Any, count: int) -> None:
    """Its engine runs no step until `count` sequences have joined it, so that they overlap."""
    engine, step = worker.engine, worker.engine.step
    begun = False

    def when_all_are_there() -> Any:
        nonlocal begun
        begun = begun or len(engine.scheduler.running) + len(engine.scheduler.waiting) >= count
        return step() if begun else []  # the engine's thread then waits for the next call, as for a sequence that joins

    engine.step = when_all_are_there


def forget_cached(pool: BlockPool) -> None:
    """Empties the prefix cache; held blocks stay."""
    while pool._cached:
        heapq.heappush(pool._free, pool._evict())
    for block in list(pool._hash_of):
        pool._forget(block)
