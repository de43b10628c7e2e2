"""One process's view of which workers are alive: the registry's last answer, kept current in the background.

While the registry does not answer, the last answer stays valid: a lost registry must not stop running work.

A missing record does not mean a dead worker either, because a restarted registry is empty until the next heartbeats. So
there are two views. `workers` are the present records; they get new requests. `incarnations` are the workers whose
connections, streams and caches are kept: present, or absent for less than FORGET_S, unless another incarnation with the
same id or address shows that the former one has ended.

A router encodes and decodes text with its own tokenizer. A worker whose checkpoint has another vocabulary would take
its token ids for other words, so the router knows that worker, but gives it no requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from time import monotonic, time

import structlog

from cluster.state.registry import Registry, RegistryChanges, State, WorkerRecord
from tandem.errors import Unavailable
from tandem.tasks import end, forever

log = structlog.get_logger(__name__)

FORGET_S = 60.0  # of absence, after which a worker is forgotten
FULL_READ_S = 60.0  # after which all records are read again: a server that lost changes reuses their numbers
Incarnation = tuple[str, str]  # worker id, and the id of this incarnation


@dataclass(slots=True)
class _Presence:
    """One incarnation of a worker. Times are monotonic seconds."""

    record: WorkerRecord
    alive_at: float  # the latest time at which the worker was certainly alive
    absent_since: float | None = None  # None: present


class WorkerLiveness:
    def __init__(self, registry: Registry, refresh_s: float, vocabulary: str = "") -> None:
        """`vocabulary`: the digest of the reader's vocabulary; empty if it has none."""
        self.workers: dict[str, WorkerRecord] = {}
        self.registry_ok = False
        self._registry = registry
        self._refresh_s = refresh_s
        self._vocabulary = vocabulary
        self._presences: dict[Incarnation, _Presence] = {}
        self._read_at = -math.inf  # when the latest successful read began
        self._full_at = -math.inf  # likewise, of a read of all records
        self._full_asked_at = -math.inf  # likewise, of the latest such read that was not cancelled, successful or not
        self._full_reads = asyncio.Lock()
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
        """Without those of another vocabulary."""
        pool = (worker for worker in self.workers.values() if worker.role == role)
        return [worker for worker in pool if worker.state is not State.OTHER_VOCABULARY]

    @property
    def of_other_vocabulary(self) -> list[str]:
        """The ids of the workers that have another vocabulary than the reader."""
        return [name for name, worker in self.workers.items() if worker.state is State.OTHER_VOCABULARY]

    @property
    def needed(self) -> str:
        """For a sentence that no worker is there: what it must have, where others lack that."""
        return " with the vocabulary of this router's tokenizer" if self.of_other_vocabulary else ""

    @property
    def incarnations(self) -> dict[Incarnation, WorkerRecord]:
        """The last record of each worker that may be alive, present or not."""
        return {incarnation: presence.record for incarnation, presence in self._presences.items()}

    def age(self, record: WorkerRecord) -> float:
        """Seconds since the worker was known to be alive: since its last heartbeat after a read of all records,
        otherwise at most since the last read in which it was present."""
        now, presence = monotonic(), self._presences[record.worker_id, record.incarnation]
        exact = self._full_at == self._read_at or presence.absent_since is not None
        return max(0.0, now - (presence.alive_at if exact else max(presence.alive_at, self._read_at)))

    def ended(self, worker_id: str, incarnation: str, at: float) -> bool | None:
        """Whether an incarnation of a worker that seemed lost at `at` (monotonic seconds) has ended. None: unknown yet.

        True if another incarnation has its id or address, or if its record has been absent for two refreshes, which is
        longer than a live worker needs to return to a registry that restarted. False if the worker has sent a heartbeat
        since: seen in a full answer, by a change of its record, or because the record has not expired."""
        presence = self._presences.get((worker_id, incarnation))
        if presence is None:
            return True
        if presence.alive_at >= at:
            return False
        if presence.absent_since is not None:
            return True if self._read_at - presence.absent_since >= 2 * self._refresh_s else None
        return False if self._read_at - at >= self._registry.ttl_s else None

    async def refresh(self, *, changes_only: bool = False) -> None:
        """Reads all records, or only the changes since the last read. Callers who ask for all records at the same time,
        as when many workers are lost together, share one read."""
        if changes_only:
            await self._read(changes_only)
            return
        asked_at = monotonic()
        async with self._full_reads:
            if self._full_asked_at <= asked_at:
                began = monotonic()
                await self._read(changes_only)
                self._full_asked_at = began  # only now: this caller may be cancelled in its read

    async def _read(self, changes_only: bool) -> None:
        began = monotonic()
        try:
            changes = await self._registry.changes_since(self._mark if changes_only else ("", 0))
        except Unavailable as error:
            if self.registry_ok:
                log.warning("view.stale", error=error.message)
            self.registry_ok = False
            self._mark = ("", 0)  # the server that answers next may have lost changes, and reuse their numbers
            await self.nudge()  # time has passed, which a waiter may depend on
            return
        self.registry_ok = True
        if began >= self._read_at:  # otherwise a later read was answered first
            self._mark = changes.mark
            self._apply(changes, began)
        await self.nudge()

    def _apply(self, changes: RegistryChanges, began: float) -> None:
        records = dict(changes.records)
        for name, found in changes.records.items():
            if found is None:
                continue
            record = self._judged(found)
            # A record among the changes was written after the last read; a full answer contains its age.
            after = began - (time() - record.beat) if changes.full else self._read_at
            presence = self._presences.setdefault((record.worker_id, record.incarnation), _Presence(record, after))
            if not changes.full or replace(record, beat=presence.record.beat) != presence.record:
                presence.record = record
            records[name] = presence.record  # the same object as before if only the heartbeat is new
            presence.absent_since, presence.alive_at = None, max(presence.alive_at, after)
        present_records = records if changes.full else {**self.workers, **records}
        if changes.full or records:
            self.workers = {name: record for name, record in sorted(present_records.items()) if record is not None}
        self._full_at = began if changes.full else self._full_at
        addresses = {record.address for record in self.workers.values()}
        for incarnation, presence in list(self._presences.items()):
            present = self.workers.get(incarnation[0])
            if present is not None and present.incarnation == incarnation[1]:
                continue
            if present or presence.record.address in addresses or began - (presence.absent_since or began) >= FORGET_S:
                del self._presences[incarnation]
            elif presence.absent_since is None:
                presence.absent_since = began
        self._read_at = began

    def _judged(self, record: WorkerRecord) -> WorkerRecord:
        """The record, with the state of a worker that this process must not use."""
        if not self._vocabulary or record.vocabulary in ("", self._vocabulary):
            return record
        if (record.worker_id, record.incarnation) not in self._presences:
            log.warning("worker.other_vocabulary", worker=record.worker_id)
        return replace(record, state=State.OTHER_VOCABULARY)

    async def nudge(self) -> None:
        """Wakes the waiters of `newer_than` for a reason other than a change of the registry."""
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    @property
    def version(self) -> int:
        return self._version

    async def newer_than(self, version: int) -> int:
        """Waits for a version after `version` and returns it. The caller bounds the wait."""
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
            await self.refresh(changes_only=monotonic() - self._full_at < FULL_READ_S)
