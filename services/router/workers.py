"""The candidates of both pools, kept up to date: the records of the registry, and what this router did since.

A worker's record is up to a heartbeat old. What this router has started and ended there since is added to it, until a
newer record counts it. A worker that said "not now" is left alone until its record changes, until something of ours
ends there, or for a moment; one that is suspected of being dead, for a while or until its next life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import monotonic

from cluster.registry import State, WorkerRecord
from services.router.policy import Candidate, Placement, Rules
from services.router.pools import CachedAt, Decodes, Prefills

Cached = Callable[[WorkerRecord], int]

# The account of a worker that has no record is kept for so long: it may be the registry that forgot.
ABSENT_S = 60.0
SLICE = 16  # records that are taken over before the streams have their turn again


@dataclass(slots=True)
class _Since:
    """What this router did at one worker since the worker's last beat."""

    incarnation: str
    beat: float = -1.0
    running: int = 0
    blocks: int = 0
    full_until: float = 0.0  # it said "not now"
    suspect_until: float = 0.0
    # Placements without a first token, by id():
    prompts: dict[int, int] = field(default_factory=dict)  # the prompt tokens to be computed there
    awaited: set[int] = field(default_factory=set)  # those that will decode there
    last_used: int = 0  # the number of the latest placement there


class Workers:
    def __init__(self, rules: Rules) -> None:
        self.decodes = Decodes(rules)
        self.prefills = Prefills(rules)
        self._records: dict[str, WorkerRecord] = {}  # those that the pools know
        self._since: dict[str, _Since] = {}
        self._absent: dict[str, float] = {}  # since when an account has no record
        self._changed: set[str] = set()  # ids whose account has changed since their candidate was made
        self._resting: list[tuple[float, str]] = []  # a heap: until when a worker is left alone
        self._placements = 0

    def __len__(self) -> int:
        """How many accounts there are."""
        return len(self._since)

    def news(self, records: Mapping[str, WorkerRecord]) -> Iterator[None]:
        """Takes over the records that have changed, a slice for each step."""
        for number, record in enumerate(
            [one for worker_id, one in records.items() if self._records.get(worker_id) is not one]
        ):
            if record.role in ("decode", "prefill"):
                self._take(record)
            if number % SLICE == SLICE - 1:
                yield
        now = monotonic()
        for worker_id in self._records.keys() - records.keys():
            self._drop(self._records.pop(worker_id))
            self._absent[worker_id] = now
        for worker_id in [one for one, since_s in self._absent.items() if now - since_s > ABSENT_S]:
            del self._absent[worker_id]
            self._since.pop(worker_id, None)

    def settle(self) -> None:
        """Makes the candidates anew whose accounts have changed."""
        now = monotonic()
        while self._resting and self._resting[0][0] <= now:
            self._changed.add(heappop(self._resting)[1])
        for worker_id in self._changed:
            if record := self._records.get(worker_id):
                self._put(record)
        self._changed.clear()

    def cached_at(self, cached: Cached) -> CachedAt:
        return lambda worker_id: cached(self._records[worker_id])

    def take(self, placement: Placement, blocks: int, computed: int) -> None:
        """A request is placed; `computed` tokens of its prompt are to be computed."""
        self._placements += 1
        for worker in _both(placement):
            self._count(worker, +1, blocks)
            self._of(worker).last_used = self._placements
        self._of(placement.prefill or placement.decode).prompts[id(placement)] = computed
        self._of(placement.decode).awaited.add(id(placement))

    def first_token(self, placement: Placement) -> None:
        """The prompt is nobody's backlog any more. Safe to call twice."""
        self._of(placement.prefill or placement.decode).prompts.pop(id(placement), None)
        self._of(placement.decode).awaited.discard(id(placement))
        self._changed.update(worker.worker_id for worker in _both(placement))

    def end(self, placement: Placement, blocks: int) -> None:
        self.first_token(placement)
        for worker in _both(placement):
            self._count(worker, -1, -blocks)

    def said_no(self, worker: Candidate, until: float) -> None:
        """It had no room after all: leave it alone until its record changes or something of ours ends there, and no
        longer than until then (monotonic): a worker to which nobody sends anything changes nothing."""
        self._of(worker).full_until = until
        heappush(self._resting, (until, worker.worker_id))
        self._changed.add(worker.worker_id)

    def suspect(self, worker: Candidate, until: float) -> None:
        """This life of it failed a request: leave it alone until then (monotonic)."""
        self._of(worker).suspect_until = until
        heappush(self._resting, (until, worker.worker_id))
        self._changed.add(worker.worker_id)

    def _take(self, record: WorkerRecord) -> None:
        before = self._records.get(record.worker_id)
        if before and before.role != record.role:
            self._drop(before)
        self._records[record.worker_id] = record
        self._absent.pop(record.worker_id, None)
        self._put(record)

    def _drop(self, record: WorkerRecord) -> None:
        (self.decodes if record.role == "decode" else self.prefills).drop(record.worker_id)

    def _put(self, record: WorkerRecord) -> None:
        (self.decodes if record.role == "decode" else self.prefills).put(self._candidate(record))

    def _candidate(self, record: WorkerRecord) -> Candidate:
        since = self._since.get(record.worker_id)
        if since is None or since.incarnation != record.incarnation:
            since = self._since[record.worker_id] = _Since(record.incarnation)
        if since.beat != record.beat:  # the record counts by now what we did
            since.beat, since.running, since.blocks, since.full_until = record.beat, 0, 0, 0.0
        running = max(0, record.running + since.running)
        return Candidate(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            address=record.address,
            layout_hash=record.layout_hash,
            running=running,
            max_running=record.max_running,
            free_blocks=record.blocks_total - max(0, record.blocks_held + since.blocks),
            block_size=record.block_size,
            max_model_len=record.max_model_len,
            streams=max(0, record.running + since.running - len(since.awaited)),
            prompts=tuple(since.prompts.values()),
            prompt_rate=record.prompt_rate,
            step_s=record.step_s,
            stream_s=record.stream_s,
            last_used=since.last_used,
            sum_order=record.sum_order,
            usable=record.state is State.READY and monotonic() >= max(since.full_until, since.suspect_until),
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
            since.full_until = 0.0
        self._changed.add(worker.worker_id)


def _both(placement: Placement) -> Iterable[Candidate]:
    return (placement.decode, placement.prefill) if placement.prefill else (placement.decode,)
