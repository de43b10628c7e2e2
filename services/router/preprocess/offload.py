"""Long work of requests, such as tokenising a long text, on threads beside the event loop.

The thread that runs a piece of Python competes with the event loop for the interpreter's lock, so few run at once.
Tenants take turns for them, and work whose request has ended before its turn is never begun.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tandem.errors import Busy

# Work on inputs of up to so many bytes is done at once, on the event loop: a few milliseconds at a token for two bytes.
SHORT_BYTES = 2 * 1024
# Longer ones have threads of their own, so that medium ones do not wait for them.
MEDIUM_BYTES = 64 * 1024

Result = TypeVar("Result")


class _ThreadPool:
    """Some threads, and who waits for them."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next one's first

    async def run(self, tenant: str, patience_s: float, work: Callable[..., Result], *args: Any) -> Result:
        loop = asyncio.get_running_loop()
        await self._acquire(tenant, patience_s)
        working = self._pool.submit(work, *args)
        working.add_done_callback(lambda _: _soon(loop, self._next))  # it goes on when nobody waits for it any more
        return await asyncio.wrap_future(working)

    async def _acquire(self, tenant: str, patience_s: float) -> None:
        if self._free:
            self._free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waiter)
        try:
            async with asyncio.timeout(patience_s):
                await waiter
        except TimeoutError as error:
            self._give_up(tenant, waiter)
            raise Busy(
                f"the text of the request was not looked at within {patience_s:g} s",
                reason="QUEUE_TIMEOUT",
                retry_after=1.0,
            ) from error
        except asyncio.CancelledError:
            self._give_up(tenant, waiter)
            raise

    def _give_up(self, tenant: str, waiter: asyncio.Future[None]) -> None:
        if waiter.done() and not waiter.cancelled():  # its turn came at the same moment
            self._next()
        elif waiter in (waiting := self._waiting.get(tenant, deque())):
            waiting.remove(waiter)
            if not waiting:
                del self._waiting[tenant]

    def _next(self) -> None:
        """A thread is free: the next of the tenant whose turn it is gets it, and the tenant goes to the end."""
        while self._waiting:
            tenant, waiting = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            first = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting
            if not first.done():  # else its request has just ended
                first.set_result(None)
                return
        self._free += 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Offload:
    def __init__(self, patience_s: float) -> None:
        """`patience_s`: the longest wait for a thread."""
        self._patience_s = patience_s
        self._medium = _ThreadPool(1, "medium-text")
        self._long = _ThreadPool(max(1, (os.cpu_count() or 1) // 2), "long-text")

    async def run(self, tenant: str, size: int, work: Callable[..., Result], *args: Any) -> Result:
        """What work(*args) returns or raises; `size` in bytes is of what it has to read. Raises Busy when no thread
        came free. Work that has begun goes on to its end when the caller is cancelled."""
        if size <= SHORT_BYTES:
            return work(*args)
        pool = self._medium if size <= MEDIUM_BYTES else self._long
        return await pool.run(tenant, self._patience_s, work, *args)

    def close(self) -> None:
        self._medium.close()
        self._long.close()


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
