"""Follows the list of the adapters that were loaded while the cluster runs (cluster/state/adapter_list.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cluster.state import adapter_list
from cluster.state.adapter_list import AdapterList, LoadedAdapter
from cluster.state.registry import Registry
from tandem.errors import Unavailable
from tandem.tasks import end, forever

log = structlog.get_logger(__name__)


class AdapterFollower:
    """`list` is the registry's list as last read. It stays if the registry does not answer or has lost its list."""

    def __init__(self, registry: Registry, refresh_s: float, changed: Callable[[], None]) -> None:
        """`changed` is called after each new version."""
        self.list = AdapterList()
        self._registry = registry
        self._refresh_s = refresh_s
        self._changed = changed
        self._reading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the list before it returns, if the registry answers."""
        await self._refresh()
        self._task = forever(self._follow, name="adapters")

    async def stop(self) -> None:
        await end(self._task)

    async def add(self, name: str, adapter: LoadedAdapter) -> int:
        """Returns the list's new version. Raises InvalidRequest for a name that is taken, TooLarge, Unavailable."""
        version = await adapter_list.add(self._registry, name, adapter, self.list)
        await self._refresh()
        return version

    async def remove(self, name: str) -> int:
        """Returns the list's new version. Raises NotFound, Unavailable."""
        version = await adapter_list.remove(self._registry, name, self.list)
        await self._refresh()
        return version

    async def _follow(self) -> None:
        async for _ in self._registry.changes(self._refresh_s):
            await self._refresh()

    async def _refresh(self) -> None:
        async with self._reading:
            try:
                found = await adapter_list.read(self._registry)
                if found.version < self.list.version:
                    log.warning("adapters.restored", version=self.list.version, instead_of=found.version)
                    await adapter_list.restore(self._registry, self.list)
            except Unavailable as error:
                log.debug("adapters.not_read", error=error.message)  # the view and the heartbeat report it
                return
            if found.version > self.list.version:
                await self._take(found)
                self.list = found
                self._changed()
            else:
                await self._again()

    async def _take(self, found: AdapterList) -> None:
        """Hook: applies the new list, before `list` shows it."""

    async def _again(self) -> None:
        """Hook: the list is unchanged."""
