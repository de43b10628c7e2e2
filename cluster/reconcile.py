"""The supervisor's loop: brings the live workers to the wanted ones. Knows no Ray; a Host starts and ends processes.

    registry "wanted" ──▶ plan(wanted, seen, backoffs, now) ──▶ Host.create(id) ──▶ one task per life:
                                      ▲                         or Life.turn(id)     start → ready → wait → ended
                                      └──────── wake: a life ended, wanted changed, a delay is over

Nothing is polled: a life's end is the end of its wait(), a change of "wanted" is announced by the registry.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from time import monotonic
from typing import Protocol

import structlog

from cluster.lease import Lease
from cluster.registry import Registry
from cluster.supervisor import ROLES, Backoff, Phase, Seen, plan, role_of
from tandem.errors import InternalError, TandemError, Unavailable, WorkerLost
from tandem.tasks import end, forever, once

log = structlog.get_logger(__name__)
WANTED_EVERY_S = 5.0
"""How old a missed change of "wanted" may get."""
STOP_MARGIN_S = 5.0
"""A worker that has not stopped so long after its grace is killed."""
START_S = 900.0
"""A worker that has told of no progress of its start for so long is killed, and started again."""
TURN_MARGIN_S = 60.0
"""A worker that does not serve the other pool so long after its grace is killed."""
EVENTS_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Started:
    """What a worker says of itself once it serves."""

    address: str
    pid: int
    incarnation: str
    turns: bool = False  # it can serve the other pool as well


class Life(Protocol):
    """One worker process, which may serve as one worker after another. Every call raises WorkerLost once the process is
    dead, and only errors of the tree."""

    async def start(self, tell: Callable[[str], None]) -> Started:
        """Serves; again on a worker that serves already, the same answer. `tell` receives what it does meanwhile."""

    async def wait(self) -> None:
        """Returns when the service has ended by itself."""

    async def stop(self, grace_s: float) -> None:
        """Drains."""

    async def turn(self, worker_id: str, grace_s: float, tell: Callable[[str], None]) -> Started:
        """Drains, which ends wait(), and serves under another id with the weights that it has; then as start()."""

    def kill(self) -> None:
        """Ends the process; safe to repeat."""


class Host(Protocol):
    def create(self, worker_id: str) -> Life:
        """A new process, or a spare."""

    def keep_spares(self, count: int) -> None:
        """Brings the processes that may become a worker of either pool to `count`; they come in their own time."""

    async def survivors(self) -> dict[str, Life]:
        """Workers that an earlier life of this supervisor started."""


class Kind(StrEnum):
    STARTING = "starting"
    LOADING = "loading"  # still starting; `text` says how far it is
    READY = "ready"
    STOPPED = "stopped"  # drained, as it was told to or by itself
    FAILED = "failed"  # could not start, for a reason that starting again would not change
    DIED = "died"


@dataclass(frozen=True, slots=True)
class Event:
    """One change in one worker's life."""

    seq: int
    kind: Kind
    worker_id: str
    started: Started | None = None
    error: TandemError | None = None
    retry_in_s: float = 0.0
    text: str = ""


@dataclass(slots=True, eq=False)
class _Worker:
    worker_id: str
    life: Life
    phase: Phase = Phase.STARTING
    started: Started | None = None
    ready_at: float = 0.0
    unserved: bool = False  # ended on purpose before it served: how its process went is no news
    before: _Worker | None = None  # what this process serves as until it has drained
    turned: bool = False  # the process goes on as another worker
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs from run() to the end of stop()."""

    def __init__(
        self,
        host: Host,
        registry: Registry,
        grace_s: float,
        clock: Callable[[], float] = monotonic,
        spares: int = 0,
        lease: Lease | None = None,
        start_s: float = START_S,
    ) -> None:
        """Without `lease` nothing keeps a second supervisor away."""
        self._host = host
        self._lease = lease
        self._registry = registry
        self._grace_s = grace_s
        self._clock = clock
        self._spares = spares
        self._start_s = start_s
        self._wanted: dict[str, int] = {}
        self._workers: dict[str, _Worker] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._stopping = False
        self._wake = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._seq = 0
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Reconciles until stop(). Raises PreconditionFailed when another supervisor has this cluster's lease."""
        if self._lease is not None:
            try:
                await self._lease.take()
            except Unavailable as error:  # its workers may be alive; `keep` tries again
                log.warning("supervisor.registry_lost", error=error.message)
            self._keeping = asyncio.create_task(self._lease.keep(), name="lease")
            self._keeping.add_done_callback(lambda _: self._wake.set())
        for worker_id, life in (await self._host.survivors()).items():
            self._watch(worker_id, life)
        follow = forever(self._follow_wanted, name="wanted")
        try:
            while not self._stopping:
                self._wake.clear()
                retry_at = self._reconcile()
                await _wait(self._wake, None if retry_at is None else max(0.0, retry_at - self._clock()))
                if self._keeping is not None and self._keeping.done() and not self._stopping:
                    self._keeping.result()
        finally:
            await end(follow)

    async def stop(self, grace_s: float) -> None:
        """Drains everything, routers first so that no new request arrives, and ends run()."""
        self._stopping = True
        self._wake.set()
        self._host.keep_spares(0)
        deadline = self._clock() + grace_s
        for roles in (("router",), ("decode", "prefill")):
            mine = [worker for worker in list(self._workers.values()) if role_of(worker.worker_id) in roles]
            left = max(0.0, deadline - self._clock())
            await asyncio.gather(*(self._drain(worker, left) for worker in mine))
            await asyncio.gather(*(worker.ended.wait() for worker in mine))
        await end(self._keeping)
        if self._lease is not None:
            await self._lease.release()

    async def events(self, after: int) -> list[Event]:
        """What happened since event `after`; waits until something did. A caller that knows more than has happened
        talks to a new life of this supervisor and gets everything."""
        async with self._news:
            await self._news.wait_for(lambda: self._seq != after)
        known = after if after < self._seq else 0
        return [event for event in self._events if event.seq > known]

    # ---- wanted against seen

    def _reconcile(self) -> float | None:
        seen = [
            Seen(worker.worker_id, worker.phase, worker.started is not None and worker.started.turns)
            for worker in self._workers.values()
        ]
        todo = plan(self._wanted, seen, self._backoffs, self._clock())
        for worker_id in todo.start:
            self._watch(worker_id, self._host.create(worker_id))
        for worker_id in todo.stop:
            once(self._drain(self._workers[worker_id], self._grace_s), name=f"drain {worker_id}")
        for worker_id, place in todo.turn:
            before = self._workers[worker_id]
            before.phase, before.turned = Phase.STOPPING, True
            self._watch(place, before.life, before)
        if self._wanted and all(worker.phase is not Phase.STARTING for worker in self._workers.values()):
            self._host.keep_spares(self._spares)  # a spare must not delay who is needed now
        return todo.retry_at

    async def _follow_wanted(self) -> None:
        """Keeps `wanted` current. A registry that lost it, or does not answer, changes nothing: the last known stays,
        and is written back."""
        async for _ in self._registry.changes(WANTED_EVERY_S):
            try:
                found = {role: size for role, size in (await self._registry.wanted()).items() if role in ROLES}
                lost = {role: size for role, size in self._wanted.items() if role not in found}
                if lost:
                    await self._registry.want(lost)
            except Unavailable as error:
                log.warning("supervisor.registry_lost", error=error.message)
                continue
            if {**self._wanted, **found} != self._wanted:
                self._wanted |= found
                self._wake.set()

    # ---- one life

    def _watch(self, worker_id: str, life: Life, before: _Worker | None = None) -> None:
        worker = self._workers[worker_id] = _Worker(worker_id, life, before=before)
        once(self._live(worker), name=f"life of {worker_id}")

    async def _begin(self, worker: _Worker) -> Started:
        if worker.before is None:
            return await self._start(worker)
        tell = partial(self._tell_stage, worker)
        tell(f"{worker.before.worker_id} drains and becomes it, with the weights that it has")
        try:
            async with asyncio.timeout(self._grace_s + TURN_MARGIN_S):
                return await worker.life.turn(worker.worker_id, self._grace_s, tell)
        except TimeoutError as error:
            raise WorkerLost(f"{worker.before.worker_id} did not become {worker.worker_id} in time") from error

    async def _start(self, worker: _Worker) -> Started:
        """Each stage that the worker tells of is progress, and gives it `start_s` again."""
        try:
            async with asyncio.timeout(self._start_s) as limit:

                def tell(text: str) -> None:
                    with suppress(RuntimeError):  # the start is over
                        limit.reschedule(asyncio.get_running_loop().time() + self._start_s)
                    self._tell_stage(worker, text)

                return await worker.life.start(tell)
        except TimeoutError as error:
            message = f"{worker.worker_id} did not come up: no stage of its start ended for {self._start_s:g} s"
            raise WorkerLost(message) from error

    async def _live(self, worker: _Worker) -> None:
        """Follows one worker from its start to its end."""
        await self._tell(Kind.STARTING, worker)
        error: TandemError | None = None
        try:
            worker.started = await self._begin(worker)
            worker.ready_at = self._clock()
            if worker.phase is Phase.STARTING:
                worker.phase = Phase.READY
            self._wake.set()
            await self._tell(Kind.READY, worker)
            await worker.life.wait()
        except TandemError as caught:
            error = caught
        except Exception as caught:
            log.exception("supervisor.bug", worker_id=worker.worker_id)
            error = InternalError(f"the supervisor lost track of {worker.worker_id}: {caught}")
        finally:
            if not worker.turned:  # else it belongs to the worker that it has become
                worker.life.kill()
        await self._forget(worker, error)

    async def _forget(self, worker: _Worker, error: TandemError | None) -> None:
        """After the end of a life: its place may be filled again."""
        try:
            if worker.started:  # that life's record and no other; of one that never said who it is, it expires
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
            kind = _kind_of_end(worker, error)
        del self._workers[worker.worker_id]
        self._wake.set()
        await self._tell(kind, worker, error)
        worker.ended.set()

    async def _drain(self, worker: _Worker, grace_s: float) -> None:
        """Ends one worker: with grace if it serves, at once if it does not yet. Its life task does the rest.

        A worker that has stopped is not killed here: its wait() has an answer on the way, and the kill could overtake
        it, so that an orderly end would look like a death.
        """
        if worker.turned:  # it drains, and the process ends as another worker
            return
        worker.unserved, worker.phase = worker.phase is Phase.STARTING, Phase.STOPPING
        if worker.unserved:
            if worker.before is not None:
                await _wait(worker.before.ended, grace_s)
            worker.life.kill()
            return
        try:
            async with asyncio.timeout(grace_s + STOP_MARGIN_S):
                await worker.life.stop(grace_s)
                await worker.ended.wait()
        except (TimeoutError, TandemError) as error:
            log.warning("supervisor.stop_failed", worker_id=worker.worker_id, error=repr(error))
            worker.life.kill()

    # ---- small things

    async def _tell(self, kind: Kind, worker: _Worker, error: TandemError | None = None) -> None:
        backoff = self._backoffs.get(worker.worker_id, Backoff())
        again = kind in (Kind.DIED, Kind.FAILED) and not self._stopping
        retry_in_s = max(0.0, backoff.retry_at - self._clock()) if again else 0.0
        log.info("supervisor.worker", kind=kind, worker_id=worker.worker_id, error=error and error.message)
        self._add(kind, worker, error, retry_in_s)
        await self._announce()

    def _tell_stage(self, worker: _Worker, text: str) -> None:
        self._add(Kind.LOADING, worker, text=text)
        once(self._announce(), name="announce")

    def _add(
        self, kind: Kind, worker: _Worker, error: TandemError | None = None, retry_in_s: float = 0.0, text: str = ""
    ) -> None:
        self._seq += 1
        self._events.append(Event(self._seq, kind, worker.worker_id, worker.started, error, retry_in_s, text))

    async def _announce(self) -> None:
        async with self._news:
            self._news.notify_all()


def _kind_of_end(worker: _Worker, error: TandemError | None) -> Kind:
    if error is None:
        return Kind.STOPPED
    return Kind.DIED if worker.started or isinstance(error, WorkerLost) else Kind.FAILED


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    """Until the event, or for so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
