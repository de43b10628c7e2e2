"""Runs long work of requests, such as tokenising a long text, on threads.

A thread that runs Python competes with the event loop for the GIL, so few run at once. Tenants take turns, and work
whose request has ended meanwhile is never started.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tandem.errors import Busy
from tandem.tenancy.tenant_slots import TenantSlots

# Work on inputs up to this size runs on the event loop: a few milliseconds at one token per two bytes.
SHORT_BYTES = 2 * 1024
# Longer inputs have separate threads, so that medium ones do not wait for them.
MEDIUM_BYTES = 64 * 1024
MAX_TENANT_BYTES = 64 * 1024 * 1024  # of a tenant's inputs that wait or are worked on; the last one may exceed it

Result = TypeVar("Result")


class _ThreadPool:
    """Some threads, which are assigned to tenants in rotation."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._slots = TenantSlots(threads, threads)

    async def run(self, tenant: str, patience_s: float, work: Callable[..., Result], *args: Any) -> Result:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience_s):
                await self._slots.take(tenant)
        except TimeoutError as error:
            raise Busy(
                f"the text of the request was not processed within {patience_s:g} s",
                reason="QUEUE_TIMEOUT",
                retry_after=1.0,
            ) from error
        working = self._pool.submit(work, *args)
        # Not when the caller is cancelled: the thread is busy until the work is done.
        working.add_done_callback(lambda _: _soon(loop, lambda: self._slots.give(tenant)))
        return await asyncio.wrap_future(working)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Offload:
    def __init__(self, patience_s: float) -> None:
        """`patience_s`: the longest wait for a thread."""
        self._patience_s = patience_s
        self._medium = _ThreadPool(1, "medium-text")
        self._bytes: Counter[str] = Counter()  # of inputs that wait or are worked on, by tenant
        self._long = _ThreadPool(max(1, (os.cpu_count() or 1) // 2), "long-text")

    async def run(self, tenant: str, size: int, work: Callable[..., Result], *args: Any) -> Result:
        """Returns or raises what work(*args) does; `size` is that of its input, in bytes. Raises Busy when no thread
        came free, and at once for a tenant of whom too much waits. Work that has begun continues when the caller is
        cancelled."""
        if size <= SHORT_BYTES:
            return work(*args)
        if self._bytes[tenant] >= MAX_TENANT_BYTES:
            raise Busy(
                f"texts of {self._bytes[tenant]} bytes are being processed, and {MAX_TENANT_BYTES} is the limit",
                reason="BODIES",
                retry_after=1.0,
            )
        pool = self._medium if size <= MEDIUM_BYTES else self._long
        self._bytes[tenant] += size
        try:
            return await pool.run(tenant, self._patience_s, work, *args)
        finally:
            self._bytes[tenant] -= size
            if not self._bytes[tenant]:
                del self._bytes[tenant]

    def close(self) -> None:
        self._medium.close()
        self._long.close()


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
