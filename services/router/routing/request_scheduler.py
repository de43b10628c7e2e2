"""Places requests on workers, and queues them until there is room.

The policy's input is in services.router.routing.worker_table. A worker may still refuse a request for lack of room.

A waiting request does not look for a place itself: every event that may have made room calls `_dispatch`, which places
waiting requests in their order, a few at a time, and wakes only those.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic

from cluster.state.registry import State
from engine.core.step_time import WORTHWHILE
from services.router.routing.constrained_queue import ConstrainedQueue, constraint
from services.router.routing.fair_queue import GENERATED_TOKEN_WEIGHT, FairQueue
from services.router.routing.path_latency import PathLatencyTracker
from services.router.routing.placement import Placement, RoutingConfig, WorkerSnapshot
from services.router.routing.useful_wait import UsefulWait
from services.router.routing.waiting_request import WaitingRequest
from services.router.routing.worker_pools import expected_wait
from services.router.routing.worker_selector import choose_decode, choose_prefill, starts_late
from services.router.routing.worker_table import WorkerTable
from services.worker_liveness import Incarnation, WorkerLiveness
from tandem.errors import Busy, NoWorker, ResumeFailed

# A worker that failed a request gets no new ones for this time, unless it comes back as a new incarnation.
SUSPECT_S = 5.0
# Likewise, at most, a worker that refused a request for lack of room.
REJECTED_S = 0.5
# The rate at which places become free is estimated from the latest placements while other requests waited in the queue:
# at least and at most this many.
MIN_SAMPLES, MAX_SAMPLES = 4, 32
WHY_ALONE = "workers were lost while they began with this request, so one decode worker begins it alone"
PLACEMENTS_PER_SLICE = 2  # placements before the event loop serves streams again


class RequestScheduler:
    def __init__(self, view: WorkerLiveness, queue_timeout_s: float, config: RoutingConfig) -> None:
        self._view = view
        self._config = config
        self._latencies = PathLatencyTracker()
        self._workers = WorkerTable(config)
        self._avoided: dict[tuple[Incarnation, Incarnation], float] = {}  # (decode, prefill) -> until when
        self._queue_timeout_s = queue_timeout_s
        self.arrived = 0  # prompt tokens to be computed that have arrived, refused ones included
        self._queue: FairQueue[WaitingRequest] = FairQueue()
        self._constrained = ConstrainedQueue(self._queue)
        self._places: deque[float] = deque(maxlen=MAX_SAMPLES)  # times of placements while the queue was not empty
        self._kept_up = False  # whether `keep_up` applies the view's news in the background
        self._dispatching: asyncio.Handle | None = None
        self._useful_wait = UsefulWait(config.ttft, monotonic())
        self._placed: dict[int, WaitingRequest] = {}  # by the id() of its placement

    @asynccontextmanager
    async def placed(
        self,
        waiting: WaitingRequest,
        remaining_s: float,
        *,
        ttft_s: float | None = None,
        spent_s: float = 0.0,
        follows: bool = False,
    ) -> AsyncIterator[Placement]:
        """Waits for room, and for a prefill worker that would begin soon; accounts for the request there until the
        block ends. `waiting` is new for each attempt. The first token is useless `ttft_s` after the request's arrival,
        which was `spent_s` ago. No estimate refuses what has begun, has another completion at its `kv_holder`, or
        `follows` one that has begun (it waits `remaining_s`).

        Raises Busy when the expected or the actual wait is too long; DeadlineExceeded at once when not even an idle
        cluster would be in time; NoWorker when no decode worker is ready; ResumeFailed when none gives its next tokens.
        """
        self._catch_up()
        estimated = not (waiting.begun or follows or waiting.kv_holder)
        waiting.kv_holder = self._workers.decodes.sharing(waiting.kv_holder)
        if not self._queue:
            self._places.clear()
        self._queue.add(waiting)
        try:
            useful_s = self._useful(waiting, remaining_s, ttft_s, spent_s) if estimated else math.inf
        except BaseException:
            self._queue.remove(waiting)  # it was never placed, so this makes no room for others
            raise
        try:
            yield await self._wait(waiting, remaining_s, useful_s, patient=follows)
        finally:
            self._leave(waiting)
            self._dispatch_soon()

    async def keep_up(self) -> None:
        """Applies the view's changes, some workers at a time, and places waiting requests. Call it after each change;
        otherwise the next request applies all of them at once."""
        self._kept_up = True
        while self._workers.apply_some(self._view.workers):  # noqa: ASYNC110, no wait; newer records may arrive
            await asyncio.sleep(0)
        self._dispatch()

    def waiting(self) -> int:
        """The number of answers that wait for a place."""
        return len(self._queue) + len(self._constrained)

    def waiting_tokens(self) -> int:
        """The prompt tokens of waiting requests."""
        return self._queue.tokens + self._constrained.tokens

    def generated(self, tenant: str, tokens: int) -> None:
        """A tenant was sent tokens; tenants that received fewer come first."""
        self._queue.charge(tenant, GENERATED_TOKEN_WEIGHT * tokens)

    def admitted(self, placement: Placement) -> None:
        """The decode worker has admitted the request, so the worker's next record counts it."""
        if waiting := self._placed.get(id(placement)):
            waiting.admitted = True

    def prefilled(self, placement: Placement) -> None:
        """The first token has arrived: the prompt is no longer part of a backlog. Safe to call twice."""
        self._workers.first_token(placement)
        if waiting := self._placed.get(id(placement)):
            self._computes(waiting, placement)
        self._dispatch_soon()

    def observe_path(self, placement: Placement, latency: tuple[float, int, float] | None) -> None:
        """A request took this path to its end, with this `RequestTimeline.path_latency`."""
        if latency is not None:
            prefill = placement.prefill.worker_id if placement.prefill else ""
            self._latencies.observe(placement.decode.worker_id, prefill, *latency, now=monotonic())

    def rejected(self, placement: Placement, *, full: bool) -> None:
        """This was no attempt: the request will be placed again, and is counted only once. `full`: the decode worker
        gets no requests until its record changes, a request of this router ends there, or REJECTED_S have passed."""
        if full:
            self._workers.rejected(placement.decode, monotonic() + REJECTED_S)
            self._dispatch_after(REJECTED_S)
        if waiting := self._placed.get(id(placement)):
            waiting.refused = True

    def suspect(self, worker: WorkerSnapshot) -> None:
        """This incarnation failed a request: it gets no new ones for a while."""
        self._workers.suspect(worker, monotonic() + SUSPECT_S)
        self._dispatch_after(SUSPECT_S)

    def suspect_unless_alone(self, worker: WorkerSnapshot, role: str) -> None:
        """The same, unless the worker is the only one of its pool: it is alive, so it may still serve."""
        if len(self._view.of_role(role)) > 1:
            self.suspect(worker)

    def avoid(self, decode: WorkerSnapshot, prefill: WorkerSnapshot) -> None:
        """A handoff between them failed, as a transfer or as a call: these incarnations are not paired for a while."""
        now = monotonic()
        self._avoided = {pair: until for pair, until in self._avoided.items() if until > now}
        self._avoided[decode.identity, prefill.identity] = now + SUSPECT_S
        self._dispatch_after(SUSPECT_S)

    def lost(self, decode: WorkerSnapshot, prefill: WorkerSnapshot) -> None:
        """The decode worker lost its prefill worker, or did not reach it. Others get no prompts from that one either,
        unless the decode worker has just lost another one: its own connection is the likelier cause then."""
        before = set(self._avoided_by(decode)) - {prefill.worker_id}
        self.avoid(decode, prefill)
        if not before:
            self.suspect(prefill)

    def _useful(self, waiting: WaitingRequest, remaining_s: float, ttft_s: float | None, spent_s: float) -> float:
        """The seconds for which waiting is useful. Raises Busy if the expected wait is longer, and DeadlineExceeded if
        even an immediate start would be too late."""
        return self._useful_wait.seconds(*self._expected(waiting), remaining_s, ttft_s, spent_s, monotonic())

    def _expected(self, waiting: WaitingRequest) -> tuple[float, float]:
        """The expected seconds of waiting and of computing: by the workers' rates, or by the pace at which places came
        free lately."""
        self._workers.settle()
        before, queued = self._queue.before(waiting)
        queued += self._constrained.tokens_before(waiting, self._workers.decodes)
        pools, cached = self._workers, self._workers.cached_at(waiting.cached)
        holders = [name for role in ("prefill", "decode") for name in waiting.holders(role)[:1]]
        wait_s, own_s, waiting.computed = expected_wait(
            pools.decodes, pools.prefills, waiting.tokens, queued, holders, cached
        )
        if not waiting.is_job:
            self.arrived += waiting.computed
        if len(self._places) >= MIN_SAMPLES and before:
            every = (monotonic() - self._places[0]) / len(self._places)
            wait_s = max(wait_s, every * (before + 1))
        return wait_s, own_s

    async def _wait(self, waiting: WaitingRequest, remaining_s: float, useful_s: float, *, patient: bool) -> Placement:
        """`patient`: until `remaining_s` have passed, and not only for the queue timeout."""
        if self._queue.first() is waiting:  # otherwise requests before it could not be placed either
            self._dispatch()
        while waiting.placement is None and not waiting.unplaceable:
            timeout_s = min(self._queue_timeout_s, remaining_s)
            patience_s = min(timeout_s, useful_s)
            try:
                async with asyncio.timeout(patience_s):
                    await waiting.placed.wait()
            except TimeoutError as error:
                self._catch_up()
                waiting.leaving = waiting.begun
                if waiting.placement is None and useful_s >= timeout_s and (placement := self._place(waiting, 0)):
                    self._take(waiting, placement)  # there is room, though no prefill worker can begin soon
                remaining_s -= patience_s
                if waiting.placement is None and (not patient or remaining_s <= 0):
                    raise self._no_room(waiting, patience_s) from error
        if waiting.unplaceable:
            raise ResumeFailed(
                "no decode worker has the checkpoint and the type of KV that its tokens so far were computed with",
                reason="OTHER_MODEL",
            )
        assert waiting.placement
        return waiting.placement

    def _dispatch_after(self, seconds: float) -> None:
        """Dispatches when a worker that was avoided for this time may be used again."""
        asyncio.get_running_loop().call_later(seconds, self._dispatch_soon)

    def _dispatch_soon(self) -> None:
        """Dispatches once, however many requests end in this iteration of the event loop."""
        if self._dispatching is None and self.waiting():
            self._dispatching = asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Places waiting requests in their order while there is room, some in each iteration of the event loop. The
        first that cannot be placed keeps all others from the workers that it waits for."""
        if self._dispatching:
            self._dispatching.cancel()
            self._dispatching = None
        self._workers.settle()
        for _ in range(PLACEMENTS_PER_SLICE):
            first = self._queue.first()
            if not any(map(self._advances, filter(None, (*self._constrained.firsts(first), first)))):
                return
        self._dispatch_soon()

    def _advances(self, first: WaitingRequest) -> bool:
        """Places the first of a line or of the queue, ends its wait, or moves it from the queue to a line. False: it
        stays where it waits."""
        if self._refuse_if_unplaceable(first):
            return True
        in_queue = first is self._queue.first()
        placement = self._place(first, len(self._queue) - 1 if in_queue else 0)
        if placement is None:
            line = constraint(first, self._workers.decodes) if in_queue else None
            return line is not None and self._constrained.add(first, line)
        if starts_late(placement, first.tokens):
            return False
        self._take(first, placement)
        return True

    def _refuse_if_unplaceable(self, waiting: WaitingRequest) -> bool:
        """True: no decode worker gives its remaining tokens, and its wait has ended."""
        if self._workers.decodes.continues(waiting.begun_with):
            return False
        self._constrained.remove(waiting)
        waiting.unplaceable = True
        waiting.placed.set()
        return True

    def _place(self, waiting: WaitingRequest, queued_behind: int) -> Placement | None:
        self._workers.settle()
        latencies = self._latencies.at(monotonic())
        decode = choose_decode(
            self._decodes(waiting),
            waiting.tokens,
            waiting.ahead,
            self._config,
            waiting.kv_holder,
            latencies,
            waiting.begun_with,
        )
        if decode is None:
            return None
        if waiting.alone:
            return replace(choose_prefill(decode, (), waiting.tokens, self._config), why_local=WHY_ALONE)
        avoided = [name for name in self._avoided_by(decode) if self._workers.prefills.workers[name].usable]
        share = queued_behind / max(1, self._workers.prefills.usable_count(decode.layout_hash) - len(avoided))
        prefills = self._prefills(waiting, decode, avoided)
        placement = choose_prefill(
            decode, prefills, waiting.tokens, self._config, waiting.kv_holder, share, latencies, waiting.begun_with
        )
        if avoided and placement.prefill is None:
            why = f"handoffs from {' and '.join(avoided)} to {decode.worker_id} failed lately"
            return replace(placement, why_local=f"{why}; {placement.why_local}" if prefills else why)
        return placement

    def _avoided_by(self, decode: WorkerSnapshot) -> list[str]:
        """Ids of live prefill workers that must not hand over to this decode worker now."""
        if not self._avoided:
            return []
        now = monotonic()
        return self._workers.prefills.alive(
            prefill for (to, prefill), until in self._avoided.items() if until > now and to == decode.identity
        )

    def _decodes(self, waiting: WaitingRequest) -> list[WorkerSnapshot]:
        cached, holders = self._workers.cached_at(waiting.cached), waiting.holders("decode")
        about = waiting.tokens, waiting.ahead, waiting.kv_holder, holders, cached, waiting.unsuited
        reserved = None if waiting.leaving else self._constrained.reserved(waiting)
        return self._workers.decodes.shortlist(*about, reserved)

    def _prefills(
        self, waiting: WaitingRequest, decode: WorkerSnapshot, avoided: Sequence[str]
    ) -> list[WorkerSnapshot]:
        cached, holders = self._workers.cached_at(waiting.cached), waiting.holders("prefill")
        avoided = [*avoided, *self._workers.prefills.alive(waiting.unsuited)]
        about = waiting.tokens, decode, self._latencies.at(monotonic()), holders, cached, avoided
        return self._workers.prefills.shortlist(*about)

    def _take(self, waiting: WaitingRequest, placement: Placement) -> None:
        waiting.placement = placement
        self._placed[id(placement)] = waiting
        waiting.placed.set()
        if waiting.is_job:
            self.arrived += waiting.computed
        if not self._constrained.place(waiting):  # it was in the queue
            if self._queue:
                self._places.append(monotonic())
            else:
                self._places.clear()
        self._workers.take(placement, waiting.blocks(placement), waiting.new_tokens(placement))
        self._computes(waiting, placement)

    def _computes(self, waiting: WaitingRequest, placement: Placement) -> None:
        learns = placement.prefill or not self._workers.prefills.capacity.rate  # where `_expected` looks
        if learns and waiting.new_tokens(placement) >= WORTHWHILE:  # fewer hardly move the rate
            self._useful_wait.computes(monotonic())

    def _leave(self, waiting: WaitingRequest) -> None:
        self._constrained.remove(waiting)
        if placement := waiting.placement:
            self._workers.end(placement, waiting.blocks(placement), waiting.admitted)
            del self._placed[id(placement)]
        if waiting.refused:
            self._constrained.give_back(waiting.tenant, waiting.tokens)
            self.arrived -= waiting.computed

    def _catch_up(self) -> None:
        """Applies one slice of the view's news; all of them if `keep_up` is never called."""
        while self._workers.apply_some(self._view.workers) and not self._kept_up:
            pass

    def _no_room(self, waiting: WaitingRequest, timeout_s: float) -> Busy | NoWorker:
        if not any(record.state is State.READY for record in self._view.of_role("decode")):
            return NoWorker(
                f"no decode worker{self._view.needed} was ready within {timeout_s:.0f} s;"
                " `tandem workers` shows the pools",
                retry_after=5.0,
            )
        return Busy(
            f"no place became free for {waiting.tokens} tokens within {timeout_s:.1f} s",
            reason="QUEUE_TIMEOUT",
            retry_after=1.0,
        )
