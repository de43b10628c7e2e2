"""The cluster as one process sees it: the last good answer of the registry, kept current in the background.

When the registry does not answer, the last view stays: a lost registry must not stop anything that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog

from cluster.registry import Registry, WorkerRecord
from tandem.errors import Unavailable
from tandem.tasks import end

log = structlog.get_logger(__name__)


class ClusterView:
    def __init__(self, registry: Registry, refresh_s: float) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.registry_ok = False
        self._registry = registry
        self._refresh_s = refresh_s
        self._changed = asyncio.Condition()
        self._version = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._follow(), name="cluster-view")

    async def stop(self) -> None:
        await end(self._task)

    def of_role(self, role: str) -> list[WorkerRecord]:
        return [worker for worker in self.workers.values() if worker.role == role]

    async def refresh(self) -> None:
        try:
            records = await self._registry.workers()
        except Unavailable as error:
            if self.registry_ok:
                log.warning("view.stale", error=error.message)
            self.registry_ok = False
            return
        self.registry_ok = True
        self.workers = {record.worker_id: record for record in records}
        await self.nudge()

    async def nudge(self) -> None:
        """Wake those who wait for a change, for a reason that the registry does not know."""
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    @property
    def version(self) -> int:
        return self._version

    async def newer_than(self, version: int) -> int:
        """Wait until something changed after `version`. The caller bounds the wait."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version > version)
            return self._version

    async def updates(self) -> AsyncIterator[dict[str, WorkerRecord]]:
        """The workers now, and again after each change."""
        version = -1
        while True:
            version = await self.newer_than(version)
            yield self.workers

    async def _follow(self) -> None:
        async for _ in self._registry.changes(self._refresh_s):
            await self.refresh()
