"""The cluster as one process sees it: the last good answer of the registry, kept current in the background.

When the registry does not answer, the last view stays: a lost registry must not stop anything that runs.

A record that is missing is not a death either: a registry that restarted has forgotten every worker until the next
beat. So there are two views. `workers` are the present records, where new requests go. `lives` are those workers whose
connections, streams and caches stay: present, or absent for less than FORGET_S, until another life with the same id or
address shows that the former one is over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from time import monotonic, time

import structlog

from cluster.registry import News, Registry, WorkerRecord
from tandem.errors import Unavailable
from tandem.tasks import end, forever

log = structlog.get_logger(__name__)

FORGET_S = 60.0  # a worker absent for so long is forgotten
Life = tuple[str, str]  # worker id, incarnation


@dataclass(slots=True)
class _Seen:
    """One life of a worker. Times are monotonic seconds."""

    record: WorkerRecord
    outlived: float  # the worker has beaten since
    absent_since: float | None = None  # None: present


class ClusterView:
    def __init__(self, registry: Registry, refresh_s: float) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.registry_ok = False
        self._registry = registry
        self._refresh_s = refresh_s
        self._seen: dict[Life, _Seen] = {}
        self._read_at = -math.inf  # when the latest read that was answered began
        self._full_at = -math.inf  # likewise, of all records
        self._changed = asyncio.Condition()
        self._version = 0
        self._mark = ("", 0)  # of the registry's last answer
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.refresh()
        self._task = forever(self._follow, name="cluster-view")

    async def stop(self) -> None:
        await end(self._task)

    def of_role(self, role: str) -> list[WorkerRecord]:
        return [worker for worker in self.workers.values() if worker.role == role]

    @property
    def lives(self) -> dict[Life, WorkerRecord]:
        """The last record of each worker that may be alive, present or not."""
        return {life: seen.record for life, seen in self._seen.items()}

    def age(self, record: WorkerRecord) -> float:
        """Seconds since the worker was known to be alive: its last beat after a read of all records; otherwise no more
        than since the last read, in which it was present."""
        now, seen = monotonic(), self._seen.get((record.worker_id, record.incarnation))
        if seen is None:
            return record.age()
        exact = self._full_at == self._read_at or seen.absent_since is not None
        return max(0.0, now - (seen.outlived if exact else max(seen.outlived, self._read_at)))

    def ended(self, worker_id: str, incarnation: str, at: float) -> bool | None:
        """Whether a life of a worker that seemed lost at `at` (monotonic seconds) is over. None: not known yet.

        It is over when another life has its id or address, or when its record has been absent for two refreshes, which
        is longer than a living worker needs to come back into a registry that restarted. It is not when the worker has
        beaten since: seen in a full answer, by a change of its record, or because the record has not expired."""
        seen = self._seen.get((worker_id, incarnation))
        if seen is None:
            return True
        if seen.outlived >= at:
            return False
        if seen.absent_since is not None:
            return True if self._read_at - seen.absent_since >= 2 * self._refresh_s else None
        return False if self._read_at - at >= self._registry.ttl_s else None

    async def refresh(self, *, changes_only: bool = False) -> None:
        """Reads all records, or only those that have changed since the last time."""
        began = monotonic()
        try:
            news = await self._registry.news(self._mark if changes_only else ("", 0))
        except Unavailable as error:
            if self.registry_ok:
                log.warning("view.stale", error=error.message)
            self.registry_ok = False
            await self.nudge()  # time has passed, which those who wait may have waited for
            return
        self.registry_ok = True
        if began >= self._read_at:  # else a later read has been answered already
            self._mark = news.mark
            self._take(news, began)
        await self.nudge()

    def _take(self, news: News, began: float) -> None:
        records = dict(news.records)
        for name, record in news.records.items():
            if record is None:
                continue
            # A record among the changes was written after the read before; in a full answer, its age tells.
            after = began - (time() - record.beat) if news.full else self._read_at
            seen = self._seen.setdefault((record.worker_id, record.incarnation), _Seen(record, after))
            if not news.full or replace(record, beat=seen.record.beat) != seen.record:
                seen.record = record
            records[name] = seen.record  # the same object as before where the worker says nothing new
            seen.absent_since, seen.outlived = None, max(seen.outlived, after)
        found = records if news.full else {**self.workers, **records}
        if news.full or records:
            self.workers = {name: record for name, record in sorted(found.items()) if record is not None}
        self._full_at = began if news.full else self._full_at
        addresses = {record.address for record in self.workers.values()}
        for life, seen in list(self._seen.items()):
            present = self.workers.get(life[0])
            if present is not None and present.incarnation == life[1]:
                continue
            if present or seen.record.address in addresses or began - (seen.absent_since or began) >= FORGET_S:
                del self._seen[life]
            elif seen.absent_since is None:
                seen.absent_since = began
        self._read_at = began

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
            await self.refresh(changes_only=True)
