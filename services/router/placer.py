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
from services.router.policy import Candidate, Placement, Rules, place
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


class Placer:
    def __init__(self, view: ClusterView, queue_timeout_s: float, rules: Rules) -> None:
        self._view = view
        self._rules = rules
        self._queue_timeout_s = queue_timeout_s
        self._since: dict[str, _Since] = {}
        self._placements = 0
        self._turn = asyncio.Lock()  # asyncio locks are fair: first come, first placed

    @asynccontextmanager
    async def placed(self, tokens: int, limit: int, remaining_s: float, near: str = "") -> AsyncIterator[Placement]:
        """Waits for room, and accounts for the request there until the block ends.

        Raises Busy when there is no room within the queue timeout or `remaining_s`, NoWorker when nobody is there.
        """
        ahead = min(AHEAD_TOKENS, limit - tokens)
        placement = await self._wait(tokens, ahead, min(self._queue_timeout_s, remaining_s), near)
        size = placement.decode.block_size
        shares = placement.prefill is None and placement.decode.worker_id == near
        new = size if shares else tokens
        blocks = -(-(new + ahead) // size)
        self._placements += 1
        for worker in filter(None, (placement.decode, placement.prefill)):
            self._count(worker, +1, blocks)
            self._of(worker).last_used = self._placements
        self._of(placement.prefill or placement.decode).prompts[id(placement)] = new
        self._of(placement.decode).awaited.add(id(placement))
        try:
            yield placement
        finally:
            self.prefilled(placement)
            self._count(placement.decode, -1, -blocks)
            if placement.prefill:
                self._count(placement.prefill, -1, -blocks)
            await self._view.nudge()

    def prefilled(self, placement: Placement) -> None:
        """Its first token has come: the prompt is nobody's backlog any more. Safe to call twice."""
        self._of(placement.prefill or placement.decode).prompts.pop(id(placement), None)
        self._of(placement.decode).awaited.discard(id(placement))

    def said_no(self, worker: Candidate) -> None:
        """It had no room after all: leave it alone until its next beat, or until something of ours ends there."""
        self._of(worker).full = True

    def suspect(self, worker: Candidate) -> None:
        """This life of it failed a request: leave it alone for a while."""
        self._of(worker).suspect_until = monotonic() + SUSPECT_S

    async def _wait(self, tokens: int, ahead: int, timeout_s: float, near: str) -> Placement:
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while True:
                    version = self._view.version
                    found = place(
                        self._candidates("decode"), self._candidates("prefill"), tokens, ahead, self._rules, near
                    )
                    if found:
                        return found
                    await self._view.newer_than(version)
        except TimeoutError as error:
            if not any(record.state is State.READY for record in self._view.of_role("decode")):
                raise NoWorker(
                    f"no decode worker was ready within {timeout_s:.0f} s; `tandem workers` shows the pools",
                    retry_after=5.0,
                ) from error
            raise Busy(
                f"no decode worker had room for {tokens} tokens within {timeout_s:.0f} s",
                reason="QUEUE_TIMEOUT",
                retry_after=1.0,
            ) from error

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
