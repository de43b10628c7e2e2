"""Places for jobs, given to tenants in rotation: nobody's backlog keeps another tenant's job waiting."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    def __init__(self, most: int, most_each: int) -> None:
        """`most` places; of them `most_each` for one tenant that has a name."""
        self._free, self._most, self._most_each = most, most, most_each
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant; who is first is served first

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """A place, within; waits for one."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        self._serve()
        try:
            await mine
            yield
        finally:
            if mine.cancelled() or not mine.done():  # cancelled while it waited
                mine.cancel()
            else:
                self._free += 1
                self._held[tenant] -= 1
                self._held += Counter()  # drops those with none
            self._serve()

    @property
    def free(self) -> int:
        """Places that are neither taken nor waited for by somebody who may have them."""
        return self._free

    def _serve(self) -> None:
        while self._free and (tenant := self._next()) is not None:
            line = self._waiting.pop(tenant)
            line.popleft().set_result(None)
            if line:
                self._waiting[tenant] = line  # behind the others
            self._free -= 1
            self._held[tenant] += 1

    def _next(self) -> str | None:
        for tenant, line in list(self._waiting.items()):
            while line and line[0].done():  # given up
                line.popleft()
            if not line:
                del self._waiting[tenant]
            elif not tenant or self._held[tenant] < self._most_each:
                return tenant
        return None
