"""Failed workers: when a fault struck each, and when the supervisor or a router noticed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from loadtest.harness.processes import Process
from loadtest.scenarios.chaos.tally import Detection, Tally
from tandem.async_client import AsyncClient
from tandem.cluster_results import Worker
from tandem.errors import DeadlineExceeded, TandemError

KNOWN_S = 30.0  # a failure that is unknown after so long is ended from outside, and counted as undetected
LOOK_S = 0.05


class FailureWatch:
    """Watches one cluster. It also owns the tasks that outlast the fault that started them."""

    def __init__(self, process: Process, target: str, tally: Tally) -> None:
        self._process, self._target, self._tally = process, target, tally
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asking: AsyncClient | None = None  # for what a router sees, many times a second
        self._workers: list[Worker] | None = None  # the last of it; None where that router did not answer
        self._hurt: dict[tuple[str, str], float] = {}  # id and incarnation of workers out of order, and until when

    async def over(self) -> None:
        """Until every fault is over."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def later(self, what: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def follow(self) -> None:
        """Records the supervisor's events of workers, until cancelled."""
        while True:
            try:
                line = await asyncio.to_thread(self._process.line, "event ", 1.0)
            except DeadlineExceeded:
                continue
            event = json.loads(line)
            if event["kind"] in ("died", "failed", "stopped"):
                for detection in self._tally.detections:
                    if not detection.by and detection.worker_id == event["worker_id"] and event["at"] >= detection.at:
                        detection.known_at, detection.by = event["at"], "supervisor"

    async def sample(self) -> None:
        """Samples a router's view, until cancelled, and records when a pool has no working worker: then no stream can
        continue."""
        try:
            while True:
                before = monotonic()
                await asyncio.sleep(LOOK_S)
                self._workers, now = await self._ask(), monotonic()
                if self._workers is not None:  # otherwise the router itself does not work
                    fit = {worker.role for worker in self._workers if self._in_order(worker, now)}
                    self._tally.look(before, now, in_order=fit >= {"prefill", "decode"})
        finally:
            if self._asking is not None:
                await self._asking.close()

    def detect(
        self, kind: str, fault: str, worker: Worker, at: float, recover: Callable[[], None] | None = None
    ) -> None:
        detection = Detection(kind, fault, worker.worker_id, worker.incarnation, at)
        self._tally.detections.append(detection)
        self.later(self._known(detection, recover))

    async def _known(self, detection: Detection, recover: Callable[[], None] | None) -> None:
        """Asks a router for its workers until this one is not ready there, or the supervisor has reported its end. A
        worker that cannot recover by itself and is still ready after KNOWN_S is a violation; `recover` ends it."""
        while True:
            ready, now = self._ready(detection), monotonic()
            if ready is False and detection.known_at is None:
                detection.known_at, detection.by = now, "router"
            if detection.by == "supervisor" or (detection.by and not recover):
                return
            if now > detection.at + KNOWN_S and (ready is not None or now > detection.at + 2 * KNOWN_S):
                break
            await asyncio.sleep(LOOK_S if detection.known_at is None else 1.0)
        if ready or detection.known_at is None:
            self._tally.violate(
                "undetected",
                f"{detection.fault} of {detection.worker_id}: after {now - detection.at:.0f} s it is ready",
            )
            if recover:
                detection.known_at, detection.by = None, "nobody"
                recover()

    def _ready(self, detection: Detection) -> bool | None:
        """Whether a router reports this incarnation of the worker as ready; None where no router answers."""
        states = {_incarnation(worker): worker.state for worker in self._workers or []}
        return states.get((detection.worker_id, detection.incarnation)) == "ready" if states else None

    async def _ask(self) -> list[Worker] | None:
        """The workers that a router sees; None where none answers within a second."""
        try:
            async with asyncio.timeout(1.0):
                if self._asking is None:
                    self._asking = AsyncClient(self._target)
                return (await self._asking.workers()).workers
        except (TandemError, TimeoutError):
            asking, self._asking = self._asking, None  # the next one may be another router
            if asking is not None:
                await asking.close()
            return None

    def detect_while(self, worker: Worker, fault: str, at: float, seconds: float) -> None:
        """One that comes back meanwhile is ready again, so it is looked at only as long as it hangs."""
        detection = Detection("hang", fault, worker.worker_id, worker.incarnation, at)
        self._tally.detections.append(detection)

        async def look() -> None:
            task = asyncio.create_task(self._known(detection, None))
            await asyncio.wait({task}, timeout=seconds)
            task.cancel()

        self.later(look())

    def _in_order(self, worker: Worker, now: float) -> bool:
        return worker.state == "ready" and now > self._hurt.get(_incarnation(worker), 0.0)

    def out_of_order(self, worker: Worker, until: float) -> None:
        self._hurt[_incarnation(worker)] = max(until, self._hurt.get(_incarnation(worker), 0.0))


def _incarnation(worker: Worker) -> tuple[str, str]:
    return worker.worker_id, worker.incarnation
