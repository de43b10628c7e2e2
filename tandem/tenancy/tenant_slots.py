"""Slots, such as those of jobs or of threads, assigned to tenants in rotation: one tenant's backlog does not delay
another tenant."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantSlots:
    def __init__(self, most: int, most_each: int) -> None:
        """`most` slots, at most `most_each` of them for one named tenant."""
        self._free, self._most, self._most_each = most, most, most_each
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant; the first is served first

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Holds a slot; waits for one."""
        await self.take(tenant)
        try:
            yield
        finally:
            self.give(tenant)

    async def take(self, tenant: str) -> None:
        """Waits for a slot; the caller returns it with `give`."""
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(slot)
        self._serve()
        try:
            await slot
        except BaseException:
            if slot.cancel() or slot.cancelled():  # while it waited
                self._serve()
            else:  # it was assigned at the same moment
                self.give(tenant)
            raise

    def give(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        self._held += Counter()  # drops tenants without a slot
        self._serve()

    @property
    def free(self) -> int:
        """Slots that are neither taken nor about to be."""
        return self._free

    def _serve(self) -> None:
        while (tenant := self._next()) is not None and self._free:
            line = self._waiting.pop(tenant)
            line.popleft().set_result(None)
            if line:
                self._waiting[tenant] = line  # after the other tenants
            self._free -= 1
            self._held[tenant] += 1

    def _next(self) -> str | None:
        for tenant, line in list(self._waiting.items()):
            while line and line[0].done():  # cancelled
                line.popleft()
            if not line:
                del self._waiting[tenant]
            elif not tenant or self._held[tenant] < self._most_each:
                return tenant
        return None
