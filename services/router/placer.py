"""Keeps the snapshot that the policy decides on, and lets requests wait their turn for room.

A worker's record is up to a heartbeat old. What this router has started and ended there since is added to it; the
worker itself has the last word ("not now"), and is then left alone until something about it changes.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

from cluster.registry import State, WorkerRecord
from services.router.policy import Candidate, Placement, Rules, begins_late, expected_wait, place
from services.router.queue import GENERATED, Queue, Waiting
from services.router.ways import Ways
from services.view import ClusterView
from tandem.errors import Busy, DeadlineExceeded, NoWorker

Cached = Callable[[WorkerRecord], int]

# Output room that a decode worker reserves with the prompt (services/decode/servicer.py).
AHEAD_TOKENS = 64
# A worker that failed a request is left alone for so long, unless it comes back as a new incarnation.
SUSPECT_S = 5.0
# Placements while others wait: from so many on, and from the latest so many, one knows how fast places come free.
FEW, LATEST = 4, 32
LEAST_RETRY_S = 0.1


@dataclass(slots=True)
class _Since:
    """What this router did at one worker since the worker's last beat."""

    incarnation: str
    beat: float = -1.0
    running: int = 0
    blocks: int = 0
    full: bool = False
    suspect_until: float = 0.0
    # Placements without a first token, by id():
    prompts: dict[int, int] = field(default_factory=dict)  # the prompt tokens to be computed there
    awaited: set[int] = field(default_factory=set)  # those that will decode there
    last_used: int = 0  # the number of the latest placement there


@dataclass(slots=True, eq=False)
class _Waiting(Waiting):
    ahead: int = 0
    near: str = ""
    cached: Cached = lambda record: 0
    placement: Placement | None = None


class Placer:
    def __init__(self, view: ClusterView, queue_timeout_s: float, rules: Rules) -> None:
        self._view = view
        self._rules = rules
        self.ways = Ways()
        self._queue_timeout_s = queue_timeout_s
        self._since: dict[str, _Since] = {}
        self._placements = 0
        self.arrived = 0  # prompt tokens to be computed that have come, refused ones included
        self._queue: Queue[_Waiting] = Queue()
        self._places: deque[float] = deque(maxlen=LATEST)  # when somebody was placed while others waited
        self._dispatched = -1  # the version of the view at which everybody who waits was tried last

    @asynccontextmanager
    async def placed(
        self,
        tokens: int,
        limit: int,
        remaining_s: float,
        near: str = "",
        cached: Cached = lambda record: 0,
        *,
        tenant: str = "",
        priority: int = 0,
        ttft_s: float | None = None,
        begun: bool = False,
    ) -> AsyncIterator[Placement]:
        """Waits for room, and for a prefill worker that would begin soon; accounts for the request there until the
        block ends. `cached` says how many leading tokens a worker has already; its first token is of no use after
        `ttft_s`. One that has `begun` is refused for no estimate.

        Raises Busy at once when it would wait too long, and after the queue timeout or `remaining_s` when it did;
        DeadlineExceeded at once when not even an idle cluster would be in time; NoWorker when nobody is there.
        """
        ahead = min(AHEAD_TOKENS, limit - tokens)
        one = _Waiting(tokens, tenant, priority, begun, ahead=ahead, near=near, cached=cached)
        if not self._queue:
            self._places.clear()
        self._queue.add(one)
        try:
            useful_s = math.inf if begun else self._useful(one, remaining_s, ttft_s)
        except (Busy, DeadlineExceeded):
            self._queue.remove(one)  # nobody need look whether it is their turn now
            raise
        try:
            yield await self._wait(one, min(self._queue_timeout_s, remaining_s), useful_s)
        finally:
            self._queue.remove(one)
            if one.placement:
                blocks = self._blocks(one, one.placement)
                self._forget(one.placement)
                self._count(one.placement.decode, -1, -blocks)
                if one.placement.prefill:
                    self._count(one.placement.prefill, -1, -blocks)
            await self._view.nudge()

    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._queue)

    def waiting_tokens(self) -> int:
        """Of their prompts."""
        return sum(one.tokens for one in self._queue)

    def generated(self, tenant: str, tokens: int) -> None:
        """A tenant was sent so many tokens: who had fewer comes before it."""
        self._queue.had(tenant, GENERATED * tokens)

    async def prefilled(self, placement: Placement) -> None:
        """Its first token has come: the prompt is nobody's backlog any more. Safe to call twice."""
        self._forget(placement)
        if self._queue:
            await self._view.nudge()

    def took(self, placement: Placement, way: tuple[float, int, float] | None) -> None:
        """A request came this way to its end, in so many seconds, blocks and seconds (services.router.receipt)."""
        if way is not None:
            self.ways.took(placement.decode.worker_id, placement.prefill.worker_id if placement.prefill else "", *way)

    def said_no(self, worker: Candidate) -> None:
        """It had no room after all: leave it alone until its next beat, or until something of ours ends there."""
        self._of(worker).full = True

    def suspect(self, worker: Candidate) -> None:
        """This life of it failed a request: leave it alone for a while."""
        self._of(worker).suspect_until = monotonic() + SUSPECT_S

    def _useful(self, one: _Waiting, remaining_s: float, ttft_s: float | None) -> float:
        """For how many seconds waiting is of use to it. Raises Busy where that is expected to be too short, and
        DeadlineExceeded where no wait at all would be."""
        wait_s, own_s = self._expected(one)
        if own_s > remaining_s:  # nor would it be of use later
            raise DeadlineExceeded(
                f"its prompt takes about {own_s:.2f} s to compute, and its deadline comes in {remaining_s:.2f} s",
                field="deadline",
                bound=f"at least {own_s:.2f} s",
            )
        wanted = [(remaining_s, "its deadline")]
        if ttft_s is not None:
            wanted.append((ttft_s, "its objective"))
        if self._rules.ttft is not None and wait_s > 0:  # a prompt that would be late anyway is not refused for that
            wanted.append((self._rules.ttft, "the objective"))
        within_s, whose = min(wanted)
        if wait_s + own_s > within_s:
            raise Busy(
                f"its first token would come in about {wait_s + own_s:.1f} s, after {whose} of {within_s:.1f} s",
                reason="OVERLOADED",
                retry_after=max(LEAST_RETRY_S, wait_s + own_s - within_s),
            )
        return max(0.0, within_s - own_s)

    def _expected(self, one: _Waiting) -> tuple[float, float]:
        """Seconds until its turn, and of computing it: by the workers' rates, or by how places came free lately."""
        before = self._queue.before(one)
        decodes, prefills = (self._candidates(role, one.cached) for role in ("decode", "prefill"))
        self.arrived += min((worker.fresh(one.tokens) for worker in prefills or decodes), default=one.tokens)
        wait_s, own_s = expected_wait(decodes, prefills, one.tokens, sum(other.tokens for other in before), self._rules)
        if len(self._places) >= FEW and before:
            every = (monotonic() - self._places[0]) / len(self._places)
            wait_s = max(wait_s, every * (len(before) + 1))
        return wait_s, own_s

    async def _wait(self, one: _Waiting, timeout_s: float, useful_s: float) -> Placement:
        self._dispatched = -1
        patience_s = min(timeout_s, useful_s)
        try:
            async with asyncio.timeout(patience_s):
                while one.placement is None:
                    version = self._view.version
                    if self._dispatched != version:
                        self._dispatched = version
                        if any(placed is not one for placed in self._dispatch()):
                            await self._view.nudge()  # wakes them
                    if one.placement is None:
                        await self._view.newer_than(version)
        except TimeoutError as error:
            if one.placement is None and useful_s >= timeout_s and (found := self._place(one, 0)):
                self._take(one, found)  # there is room; it must do without patience
            if one.placement is None:
                raise self._no_room(one, patience_s) from error
        return one.placement

    def _dispatch(self) -> list[_Waiting]:
        """Places those who wait, in their order, and returns them. The first for whom it is too early keeps all others
        waiting."""
        placed: list[_Waiting] = []
        while (one := self._queue.first()) is not None:
            found = self._place(one, len(self._queue) - 1)
            if found is None or begins_late(found, one.tokens):
                break
            self._take(one, found)
            placed.append(one)
        return placed

    def _place(self, one: _Waiting, behind: int) -> Placement | None:
        decodes, prefills = (self._candidates(role, one.cached) for role in ("decode", "prefill"))
        return place(decodes, prefills, one.tokens, one.ahead, self._rules, one.near, behind, self.ways.known)

    def _take(self, one: _Waiting, placement: Placement) -> None:
        one.placement = placement
        self._queue.place(one)
        if self._queue:
            self._places.append(monotonic())
        else:
            self._places.clear()
        blocks = self._blocks(one, placement)
        self._placements += 1
        for worker in filter(None, (placement.decode, placement.prefill)):
            self._count(worker, +1, blocks)
            self._of(worker).last_used = self._placements
        self._of(placement.prefill or placement.decode).prompts[id(placement)] = _new(one, placement)
        self._of(placement.decode).awaited.add(id(placement))

    def _forget(self, placement: Placement) -> None:
        self._of(placement.prefill or placement.decode).prompts.pop(id(placement), None)
        self._of(placement.decode).awaited.discard(id(placement))

    @staticmethod
    def _blocks(one: _Waiting, placement: Placement) -> int:
        tokens = placement.decode.block_size if _shares(one, placement) else one.tokens
        return -(-(tokens + one.ahead) // placement.decode.block_size)

    def _no_room(self, one: _Waiting, timeout_s: float) -> Busy | NoWorker:
        if not any(record.state is State.READY for record in self._view.of_role("decode")):
            return NoWorker(
                f"no decode worker was ready within {timeout_s:.0f} s; `tandem workers` shows the pools",
                retry_after=5.0,
            )
        return Busy(
            f"no place came free for {one.tokens} tokens within {timeout_s:.1f} s",
            reason="QUEUE_TIMEOUT",
            retry_after=1.0,
        )

    def _candidates(self, role: str, cached: Cached) -> list[Candidate]:
        return [self._candidate(record, cached(record)) for record in self._view.of_role(role)]

    def _candidate(self, record: WorkerRecord, cached: int) -> Candidate:
        since = self._since.get(record.worker_id)
        if since is None or since.incarnation != record.incarnation:
            since = self._since[record.worker_id] = _Since(record.incarnation)
        if since.beat != record.beat:  # the record counts by now what we did
            since.beat, since.running, since.blocks, since.full = record.beat, 0, 0, False
        return Candidate(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            address=record.address,
            layout_hash=record.layout_hash,
            running=max(0, record.running + since.running),
            max_running=record.max_running,
            free_blocks=record.blocks_total - record.blocks_held - since.blocks,
            block_size=record.block_size,
            max_model_len=record.max_model_len,
            streams=max(0, record.running + since.running - len(since.awaited)),
            prompts=tuple(since.prompts.values()),
            prompt_rate=record.prompt_rate,
            step_s=record.step_s,
            stream_s=record.stream_s,
            cached=cached,
            last_used=since.last_used,
            usable=record.state is State.READY and not since.full and monotonic() >= since.suspect_until,
        )

    def _of(self, worker: Candidate) -> _Since:
        since = self._since.get(worker.worker_id)
        if since is None or since.incarnation != worker.incarnation:
            return _Since(worker.incarnation)  # that life is over; nobody looks at its account again
        return since

    def _count(self, worker: Candidate, running: int, blocks: int) -> None:
        since = self._of(worker)
        since.running += running
        since.blocks += blocks
        if running < 0:
            since.full = False


def _new(one: _Waiting, placement: Placement) -> int:
    """Tokens that must be computed: of the last block only, where the KV of the others is."""
    if _shares(one, placement):
        return placement.decode.block_size
    return (placement.prefill or placement.decode).fresh(one.tokens)


def _shares(one: _Waiting, placement: Placement) -> bool:
    return placement.prefill is None and placement.decode.worker_id == one.near
