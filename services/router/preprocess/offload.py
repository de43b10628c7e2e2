"""Runs long work of requests, such as tokenising a long text, on threads.

A thread that runs Python competes with the event loop for the GIL, so few run at once. Tenants take turns, and work
whose request has ended meanwhile is never started.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tandem.errors import Busy

# Work on inputs up to this size runs on the event loop: a few milliseconds at one token per two bytes.
SHORT_BYTES = 2 * 1024
# Longer inputs have separate threads, so that medium ones do not wait for them.
MEDIUM_BYTES = 64 * 1024

Result = TypeVar("Result")


class _ThreadPool:
    """Some threads, and the requests that wait for one."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next tenant first

    async def run(self, tenant: str, patience_s: float, work: Callable[..., Result], *args: Any) -> Result:
        loop = asyncio.get_running_loop()
        await self._acquire(tenant, patience_s)
        working = self._pool.submit(work, *args)
        # Not when the caller is cancelled: the thread is busy until the work is done.
        working.add_done_callback(lambda _: _soon(loop, self._next))
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
        if waiter.done() and not waiter.cancelled():  # it got a thread at the same moment
            self._next()
        elif waiter in (waiting := self._waiting.get(tenant, deque())):
            waiting.remove(waiter)
            if not waiting:
                del self._waiting[tenant]

    def _next(self) -> None:
        """Gives a free thread to the first request of the next tenant, and moves the tenant to the end."""
        while self._waiting:
            tenant, waiting = next(iter(self._waiting.items()))
            del self._waiting[tenant]
            first = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting
            if not first.done():  # otherwise its request has just ended
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
        """Returns or raises what work(*args) does; `size` is that of its input, in bytes. Raises Busy when no thread
        came free. Work that has begun continues when the caller is cancelled."""
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
