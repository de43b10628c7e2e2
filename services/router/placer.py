"""Keeps the snapshot that the policy decides on, and lets requests wait their turn for room.

A worker's record is up to a heartbeat old. What this router has started and ended there since is added to it; the
worker itself has the last word ("not now"), and is then left alone until something about it changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

from cluster.registry import State, WorkerRecord
from services.router.policy import Candidate, Placement, Rules, begins_late, place
from services.view import ClusterView
from tandem.errors import Busy, NoWorker

# Output room that a decode worker reserves with the prompt (services/decode/servicer.py).
AHEAD_TOKENS = 64
# A worker that failed a request is left alone for so long, unless it comes back as a new incarnation.
SUSPECT_S = 5.0


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
class _Waiting:
    """A request that has no place yet."""

    tokens: int
    ahead: int
    near: str
    number: int  # in the order of arrival
    overtaken: int = 0  # tokens of later ones that were placed before it
    placement: Placement | None = None

    def turn(self) -> tuple[int, int]:
        """As in engine.scheduler: the shorter first, and later ones delay nobody by more tokens than it has itself."""
        return self.tokens - self.overtaken, self.number


class Placer:
    def __init__(self, view: ClusterView, queue_timeout_s: float, rules: Rules) -> None:
        self._view = view
        self._rules = rules
        self._queue_timeout_s = queue_timeout_s
        self._since: dict[str, _Since] = {}
        self._placements = 0
        self._arrivals = 0
        self._waiting: list[_Waiting] = []
        self._dispatched = -1  # the version of the view at which everybody who waits was tried last

    @asynccontextmanager
    async def placed(self, tokens: int, limit: int, remaining_s: float, near: str = "") -> AsyncIterator[Placement]:
        """Waits for room, and for a prefill worker that would begin soon; accounts for the request there until the
        block ends.

        Raises Busy when there is no room within the queue timeout or `remaining_s`, NoWorker when nobody is there.
        """
        self._arrivals += 1
        one = _Waiting(tokens, min(AHEAD_TOKENS, limit - tokens), near, self._arrivals)
        try:
            placement = await self._wait(one, min(self._queue_timeout_s, remaining_s))
            yield placement
        finally:
            if one in self._waiting:
                self._waiting.remove(one)
            if one.placement:
                blocks = self._blocks(one, one.placement)
                self._forget(one.placement)
                self._count(one.placement.decode, -1, -blocks)
                if one.placement.prefill:
                    self._count(one.placement.prefill, -1, -blocks)
            await self._view.nudge()

    async def prefilled(self, placement: Placement) -> None:
        """Its first token has come: the prompt is nobody's backlog any more. Safe to call twice."""
        self._forget(placement)
        if self._waiting:
            await self._view.nudge()

    def said_no(self, worker: Candidate) -> None:
        """It had no room after all: leave it alone until its next beat, or until something of ours ends there."""
        self._of(worker).full = True

    def suspect(self, worker: Candidate) -> None:
        """This life of it failed a request: leave it alone for a while."""
        self._of(worker).suspect_until = monotonic() + SUSPECT_S

    async def _wait(self, one: _Waiting, timeout_s: float) -> Placement:
        self._waiting.append(one)
        self._dispatched = -1
        try:
            async with asyncio.timeout(timeout_s):
                while one.placement is None:
                    version = self._view.version
                    if self._dispatched != version:
                        self._dispatched = version
                        if any(placed is not one for placed in self._dispatch()):
                            await self._view.nudge()  # wakes them
                    if one.placement is None:
                        await self._view.newer_than(version)
        except TimeoutError as error:
            if one.placement is None and (found := self._place(one, 0)):  # there is room; it must do without patience
                self._take(one, found)
            if one.placement is None:
                raise self._no_room(one, timeout_s) from error
        return one.placement

    def _dispatch(self) -> list[_Waiting]:
        """Places those who wait, in their order, and returns them. The first for whom it is too early keeps all others
        waiting."""
        queue = sorted(self._waiting, key=_Waiting.turn)
        for number, one in enumerate(queue):
            found = self._place(one, len(queue) - number - 1)
            if found is None or begins_late(found, one.tokens):
                return queue[:number]
            self._take(one, found)
        return queue

    def _place(self, one: _Waiting, behind: int) -> Placement | None:
        decodes, prefills = self._candidates("decode"), self._candidates("prefill")
        return place(decodes, prefills, one.tokens, one.ahead, self._rules, one.near, behind)

    def _take(self, one: _Waiting, placement: Placement) -> None:
        one.placement = placement
        self._waiting.remove(one)
        for other in self._waiting:
            if other.number < one.number:
                other.overtaken += one.tokens
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
        return -(-(_new(one, placement) + one.ahead) // placement.decode.block_size)

    def _no_room(self, one: _Waiting, timeout_s: float) -> Busy | NoWorker:
        if not any(record.state is State.READY for record in self._view.of_role("decode")):
            return NoWorker(
                f"no decode worker was ready within {timeout_s:.0f} s; `tandem workers` shows the pools",
                retry_after=5.0,
            )
        return Busy(
            f"no decode worker had room for {one.tokens} tokens within {timeout_s:.0f} s",
            reason="QUEUE_TIMEOUT",
            retry_after=1.0,
        )

    def _candidates(self, role: str) -> list[Candidate]:
        return [self._candidate(record) for record in self._view.of_role(role)]

    def _candidate(self, record: WorkerRecord) -> Candidate:
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
    shares = placement.prefill is None and placement.decode.worker_id == one.near
    return placement.decode.block_size if shares else one.tokens
