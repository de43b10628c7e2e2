"""Keeps a worker's record in the registry while the worker is alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, time

import structlog

from cluster.state.registry import Registry, WorkerRecord
from tandem.errors import PreconditionFailed, Unavailable
from tandem.tasks import end, forever, within

log = structlog.get_logger(__name__)

START_S = 10.0  # for the first record: a worker has loaded for minutes, and a registry may not answer for seconds


class Heartbeat:
    """Renews the record of one incarnation of one worker in the background, and at once when its state changes.

    Of two incarnations with one id, the registry keeps the one that began last. The other one keeps trying, in case the
    later one ends first.
    """

    def __init__(self, registry: Registry, describe: Callable[[], WorkerRecord], interval_s: float) -> None:
        self._registry = registry
        self._describe = describe
        self._interval_s = interval_s
        self._born = time()
        self._superseded = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.beats = 0  # attempts
        self.registry_ok = False  # the last one was answered
        self.round_trip_s: float | None = None  # of the last one that was answered

    async def start(self) -> None:
        """Writes the first record. Raises Unavailable if that fails for START_S: an unregistered worker must not start.
        Raises PreconditionFailed if a later incarnation of this worker is alive."""
        until = monotonic() + START_S
        while True:
            record = self._describe()
            try:
                kept = await self._beat(record, announce=True)
                break
            except Unavailable as error:
                if monotonic() > until:
                    raise
                log.warning("registry.beat_failed", error=error.message)
            await asyncio.sleep(self._interval_s)
        if not kept:
            raise PreconditionFailed(
                f"another {record.worker_id} that started later is alive in cluster {self._registry.cluster!r}",
                reason="SUPERSEDED",
                field="cluster",
                bound="a name that no other cluster on this registry has",
            )
        self._task = forever(self._run, name="heartbeat")

    def changed(self) -> None:
        self._changed.set()

    async def stop(self) -> None:
        await end(self._task)
        record = self._describe()
        try:
            await self._registry.withdraw(record.worker_id, record.incarnation)
        except Unavailable as error:
            log.warning("registry.withdraw_failed", error=error.message)  # the record expires by itself

    async def _run(self) -> None:
        while True:
            announce = await within(self._changed, self._interval_s)
            self._changed.clear()
            self.beats += 1
            try:
                kept = await self._beat(self._describe(), announce=announce)
            except Unavailable as error:
                log.warning("registry.beat_failed", error=error.message)  # serving continues; the next beat tries again
                continue
            if kept == self._superseded:
                self._superseded = not kept
                log.log(40 if self._superseded else 20, "registry.superseded", now=self._superseded)

    async def _beat(self, record: WorkerRecord, *, announce: bool) -> bool:
        """Raises Unavailable."""
        began = monotonic()
        try:
            kept = await self._registry.beat(record, announce=announce, born=self._born)
        except Unavailable:
            self.registry_ok = False
            raise
        self.registry_ok, self.round_trip_s = True, monotonic() - began
        return kept
