"""The supervisor's loop: starts and stops workers until the live ones match the wanted sizes. It does not know Ray: a
Host starts and ends processes (worker_process.py).

    registry "wanted" ──▶ plan(wanted, live, backoffs, now) ──▶ Host.create(id) ──▶ one task per worker:
                                      ▲                         or switch_role(id)  start → ready → wait → ended
                                      └──────── wake: a worker ended, wanted changed, a backoff is over

A worker's death ends its pending wait(), and the registry announces changes of "wanted". Only nodes that will end are
polled, because Ray does not announce them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import structlog

from cluster.state.lease import Lease
from cluster.state.registry import Registry
from cluster.supervision.reconcile_plan import ROLES, Backoff, LiveWorker, Phase, plan, role_of
from cluster.supervision.worker_process import Event, Host, Kind, Started, WorkerProcess
from tandem.errors import InternalError, TandemError, Unavailable, WorkerLost
from tandem.model_settings import model_of
from tandem.tasks import end, forever, once, within

log = structlog.get_logger(__name__)
WANTED_REFRESH_S = 5.0
"""How soon a missed change of "wanted" is noticed."""
NODES_LOOKED_AT_S = 1.0
"""How soon a node that will end is noticed."""
LATE_ASKED_S = 5.0
"""How soon survivors that did not say which workers they are are asked again."""
STOP_MARGIN_S = 5.0
"""A worker that has not stopped this long after its grace is killed."""
START_PROGRESS_TIMEOUT_S = 900.0
"""A worker that reports no progress of its start for this long is killed, and started again."""
ROLE_SWITCH_MARGIN_S = 60.0
"""A worker that switches roles and does not serve the other pool this long after its grace is killed."""
MAX_EVENTS = 1000


@dataclass(slots=True, eq=False)
class _Worker:
    worker_id: str
    process: WorkerProcess
    phase: Phase = Phase.STARTING
    started: Started | None = None
    ready_at: float = 0.0
    unserved: bool = False  # stopped before it served, so the way its process ended does not matter
    before: _Worker | None = None  # the worker as which this process serves until it has drained
    switched: bool = False  # the process continues as another worker
    found: bool = False  # an earlier supervisor started it, so it may serve before its start() has answered here
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Active from run() to the end of stop()."""

    def __init__(
        self,
        host: Host,
        registry: Registry,
        grace_s: float,
        clock: Callable[[], float] = monotonic,
        spares: int = 0,
        lease: Lease | None = None,
        start_s: float = START_PROGRESS_TIMEOUT_S,
    ) -> None:
        """Without `lease` nothing prevents a second supervisor. `start_s`: see START_PROGRESS_TIMEOUT_S."""
        self._host = host
        self._lease = lease
        self._registry = registry
        self._model = model_of(registry.cluster)
        self._grace_s = grace_s
        self._clock = clock
        self._spares = spares
        self._start_s = start_s
        self._wanted: dict[str, int] = {}
        self._workers: dict[str, _Worker] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._stopping = False
        self._retired = False
        self._found_survivors = asyncio.Event()  # not while run() looks for them
        self._found_survivors.set()
        self._wake = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._seq = 0
        self._new_event = asyncio.Condition()

    async def run(self) -> None:
        """Reconciles until stop(), or after retire() until the last worker has ended. Raises PreconditionFailed when
        another supervisor has this cluster's lease."""
        self._found_survivors.clear()
        try:
            if self._lease is not None:
                await self._take(self._lease)
            for worker_id, process in (await self._host.survivors()).items():
                self._watch(worker_id, process, found=True)
            self._wanted = dict(Counter(map(role_of, self._workers)))  # stays so if the registry has lost the sizes
        finally:
            self._found_survivors.set()
        follow = forever(self._follow_wanted, name="wanted")
        leave = forever(self._leave_nodes, name="leave nodes")
        late = forever(self._find_late, name="late survivors")
        try:
            while not self._stopping and (self._workers or self._host.silent or not self._retired):
                self._wake.clear()
                retry_at = self._reconcile()
                await within(self._wake, None if retry_at is None else max(0.0, retry_at - self._clock()))
                if self._keeping is not None and self._keeping.done() and not self._stopping:
                    self._keeping.result()
        finally:
            await end(follow)
            await end(leave)
            await end(late)

    async def _take(self, lease: Lease) -> None:
        try:
            await lease.take()
        except Unavailable as error:  # its workers may be alive; `keep` tries again
            log.warning("supervisor.registry_lost", error=error.message)
        self._keeping = asyncio.create_task(lease.keep(), name="lease")
        self._keeping.add_done_callback(lambda _: self._wake.set())

    async def stop(self, grace_s: float) -> int:
        """Drains everything, routers first so that no new request arrives, and ends run(). A supervisor that has just
        restarted first waits until it has found the earlier workers, which would otherwise remain. Returns the number
        of the last event."""
        self._stopping = True
        self._wake.set()
        await self._found_survivors.wait()
        self._host.keep_spares(0)
        deadline = self._clock() + grace_s
        for roles in (("router",), ("decode", "prefill")):
            pool = [worker for worker in list(self._workers.values()) if role_of(worker.worker_id) in roles]
            left = max(0.0, deadline - self._clock())
            await asyncio.gather(*(self._drain(worker, left) for worker in pool))
            await asyncio.gather(*(worker.ended.wait() for worker in pool))
        await self.leave()
        return self._seq

    async def leave(self) -> None:
        """Ends run() and leaves the workers to another supervisor, which need not wait for the lease."""
        self._stopping = True
        self._wake.set()
        await end(self._keeping)
        if self._lease is not None:
            await self._lease.release()

    def retire(self) -> None:
        """No worker is started any more, and run() ends with the last one. Until then workers drain as before."""
        self._retired = True
        self._wake.set()

    async def events(self, after: int) -> list[Event]:
        """Events after number `after`; waits for the first. A larger number than the latest is from an earlier
        incarnation of this supervisor; its caller gets all events."""
        async with self._new_event:
            await self._new_event.wait_for(lambda: self._seq != after)
        known = after if after < self._seq else 0
        return [event for event in self._events if event.seq > known]

    # ---- wanted against live workers

    def _reconcile(self) -> float | None:
        live = [
            LiveWorker(worker.worker_id, worker.phase, worker.started is not None and worker.started.can_switch_role)
            for worker in self._workers.values()
        ]
        steps = plan(self._wanted, live, self._backoffs, self._clock(), self._model)
        for worker_id in () if self._retired else steps.start:
            self._watch(worker_id, self._host.create(worker_id))
        for worker_id in steps.stop:
            once(self._drain(self._workers[worker_id], self._grace_s), name=f"drain {worker_id}")
        for worker_id, place in steps.switch:
            before = self._workers[worker_id]
            before.phase, before.switched = Phase.STOPPING, True
            self._watch(place, before.process, before)
        if self._wanted and all(worker.phase is not Phase.STARTING for worker in self._workers.values()):
            self._host.keep_spares(self._spares)  # a spare must not delay a worker that is needed now
        return steps.retry_at

    async def _follow_wanted(self) -> None:
        """Keeps `wanted` current. When the registry has lost the sizes or does not answer, the last known sizes stay in
        force and are written back."""
        async for _ in self._registry.changes(WANTED_REFRESH_S):
            try:
                sizes = {role: size for role, size in (await self._registry.wanted()).items() if role in ROLES}
                lost = {role: size for role, size in self._wanted.items() if role not in sizes}
                if lost:
                    await self._registry.keep_wanted(lost)
            except Unavailable as error:
                log.warning("supervisor.registry_lost", error=error.message)
                continue
            if {**self._wanted, **sizes} != self._wanted:
                self._wanted |= sizes
                self._wake.set()

    async def _leave_nodes(self) -> None:
        """Drains the workers of nodes that will end, such as those of a pod that Kubernetes has deleted. Their
        replacements start at once, elsewhere."""
        while True:
            try:
                leaving = await self._host.leaving()
            except Unavailable as error:
                log.warning("supervisor.nodes_unknown", error=error.message)
                leaving = set()
            for worker in self._workers.values():
                if worker.process.node in leaving and worker.phase is not Phase.STOPPING:
                    log.info("supervisor.node_ends", worker_id=worker.worker_id, node=worker.process.node)
                    once(self._drain(worker, self._grace_s), name=f"drain {worker.worker_id}")
            if leaving:
                self._wake.set()
            await asyncio.sleep(NODES_LOOKED_AT_S)

    async def _find_late(self) -> None:
        """Follows survivors that were silent when this supervisor started. One whose place another worker has now
        drains and ends."""
        while True:
            for worker_id, process in (await self._host.late_survivors()).items():
                if worker_id in self._workers:
                    log.warning("supervisor.second_process", worker_id=worker_id)
                    once(self._end_second(process), name=f"second {worker_id}")
                else:
                    self._watch(worker_id, process, found=True)
            self._wake.set()  # also where none was found: the last silent one may be dead
            await asyncio.sleep(LATE_ASKED_S)

    async def _end_second(self, process: WorkerProcess) -> None:
        """Ends a process whose id another one has: with grace, as it may serve."""
        try:
            async with asyncio.timeout(self._grace_s + STOP_MARGIN_S):
                await process.stop(self._grace_s)
        except (TimeoutError, TandemError) as error:
            log.warning("supervisor.stop_failed", error=repr(error))
        finally:
            process.kill()

    # ---- one worker

    def _watch(
        self, worker_id: str, process: WorkerProcess, before: _Worker | None = None, found: bool = False
    ) -> None:
        worker = self._workers[worker_id] = _Worker(worker_id, process, before=before, found=found)
        once(self._follow(worker), name=f"worker {worker_id}")

    async def _begin(self, worker: _Worker) -> Started:
        if worker.before is None:
            return await self._start(worker)
        report = partial(self._record_stage, worker)
        report(f"{worker.before.worker_id} drains and switches its role, with the weights that it has")
        try:
            async with asyncio.timeout(self._grace_s + ROLE_SWITCH_MARGIN_S):
                return await worker.process.switch_role(worker.worker_id, self._grace_s, report)
        except TimeoutError as error:
            raise WorkerLost(f"{worker.before.worker_id} did not become {worker.worker_id} in time") from error

    async def _start(self, worker: _Worker) -> Started:
        """Each stage that the worker reports restarts the time limit of `start_s`."""
        try:
            async with asyncio.timeout(self._start_s) as time_limit:

                def report(text: str) -> None:
                    with suppress(RuntimeError):  # the start is over
                        time_limit.reschedule(asyncio.get_running_loop().time() + self._start_s)
                    self._record_stage(worker, text)

                return await worker.process.start(report)
        except TimeoutError as error:
            message = f"{worker.worker_id} did not start: no stage completed for {self._start_s:g} s"
            raise WorkerLost(message) from error

    async def _follow(self, worker: _Worker) -> None:
        """Follows one worker from its start to its end."""
        await self._record(Kind.STARTING, worker)
        error: TandemError | None = None
        try:
            worker.started = await self._begin(worker)
            worker.ready_at = self._clock()
            if worker.phase is Phase.STARTING:
                worker.phase = Phase.READY
            self._wake.set()
            await self._record(Kind.READY, worker)
            await worker.process.wait()
        except TandemError as caught:
            error = caught
        except Exception as caught:
            log.exception("supervisor.bug", worker_id=worker.worker_id)
            error = InternalError(f"the supervisor lost track of {worker.worker_id}: {caught}")
        finally:
            if not worker.switched:  # otherwise the process serves as another worker now
                worker.process.kill()
        await self._forget(worker, error)

    async def _forget(self, worker: _Worker, error: TandemError | None) -> None:
        """After a worker has ended: withdraws its record and frees its place."""
        try:
            if worker.started:  # an incarnation that never reported leaves a record that expires
                await self._registry.withdraw(worker.worker_id, worker.started.incarnation)
        except Unavailable as caught:
            log.warning("supervisor.withdraw_failed", worker_id=worker.worker_id, error=caught.message)
        now = self._clock()
        if worker.phase is Phase.STOPPING:
            self._backoffs.pop(worker.worker_id, None)
            kind, error = Kind.STOPPED, None if worker.unserved else error
        else:
            ready_for = now - worker.ready_at if worker.started else 0.0
            self._backoffs[worker.worker_id] = self._backoffs.get(worker.worker_id, Backoff()).ended(now, ready_for)
            if error is None:
                kind = Kind.STOPPED
            elif worker.started or isinstance(error, WorkerLost):
                kind = Kind.DIED
            else:
                kind = Kind.FAILED
        del self._workers[worker.worker_id]
        self._wake.set()
        await self._record(kind, worker, error)
        worker.ended.set()

    async def _drain(self, worker: _Worker, grace_s: float) -> None:
        """Ends one worker: with grace if it may serve, otherwise at once. `_follow` does the rest.

        A worker that has stopped is not killed here: the kill could overtake the answer of its wait(), and an orderly
        end would look like a death.
        """
        if worker.switched:  # it drains already, and the process ends as another worker
            return
        worker.unserved = worker.phase is Phase.STARTING and not worker.found
        worker.phase = Phase.STOPPING
        if worker.unserved:
            if worker.before is not None:
                await within(worker.before.ended, grace_s)
            worker.process.kill()
            return
        try:
            async with asyncio.timeout(grace_s + STOP_MARGIN_S):
                await worker.process.stop(grace_s)
                await worker.ended.wait()
        except (TimeoutError, TandemError) as error:
            log.warning("supervisor.stop_failed", worker_id=worker.worker_id, error=repr(error))
            worker.process.kill()

    # ---- events

    async def _record(self, kind: Kind, worker: _Worker, error: TandemError | None = None) -> None:
        backoff = self._backoffs.get(worker.worker_id, Backoff())
        again = kind in (Kind.DIED, Kind.FAILED) and not self._stopping
        retry_in_s = max(0.0, backoff.retry_at - self._clock()) if again else 0.0
        log.info("supervisor.worker", kind=kind, worker_id=worker.worker_id, error=error and error.message)
        self._add(kind, worker, error, retry_in_s)
        await self._announce()

    def _record_stage(self, worker: _Worker, text: str) -> None:
        self._add(Kind.LOADING, worker, text=text)
        once(self._announce(), name="announce")

    def _add(
        self, kind: Kind, worker: _Worker, error: TandemError | None = None, retry_in_s: float = 0.0, text: str = ""
    ) -> None:
        self._seq += 1
        self._events.append(Event(self._seq, kind, worker.worker_id, worker.started, error, retry_in_s, text))

    async def _announce(self) -> None:
        async with self._new_event:
            self._new_event.notify_all()
