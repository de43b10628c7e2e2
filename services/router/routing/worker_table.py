"""The candidates of both pools, kept up to date: the records of the registry, and this router's changes since then.

A worker's record is up to a heartbeat old. The requests that this router has started and ended there since are added to
it, until a newer record counts them. A worker that refused a request for lack of room gets no other until its record
changes, a request of this router ends there, or a short time has passed. A worker suspected to be dead gets none for a
while or until its next incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import monotonic

from cluster.state.registry import State, WorkerRecord
from services.router.routing.placement import Placement, RoutingConfig, WorkerSnapshot
from services.router.routing.worker_pools import CachedAt, DecodePool, PrefillPool

Cached = Callable[[WorkerRecord], int]

# The account of a worker without a record is kept for this time: the registry may have lost the record.
MAX_ABSENCE_S = 60.0
RECORDS_PER_SLICE = 16  # records that are applied before the event loop serves streams again


@dataclass(slots=True)
class _LocalChanges:
    """The requests that this router started and ended at one worker since the worker's last heartbeat."""

    incarnation: str
    beat: float = -1.0
    running: int = 0
    blocks: int = 0
    full_until: float = 0.0  # it refused a request for lack of room
    suspect_until: float = 0.0
    # Placements without a first token, by id():
    prompts: dict[int, int] = field(default_factory=dict)  # the prompt tokens to be computed there
    awaited: set[int] = field(default_factory=set)  # those that will decode there
    since: dict[int, float] = field(default_factory=dict)  # the beat to which each placement was added
    last_used: int = 0  # the number of the latest placement there


class WorkerTable:
    def __init__(self, config: RoutingConfig) -> None:
        self.decodes = DecodePool(config)
        self.prefills = PrefillPool()
        self._records: dict[str, WorkerRecord] = {}  # records that the pools have
        self._local: dict[str, _LocalChanges] = {}
        self._absent: dict[str, float] = {}  # since when an account has no record
        self._changed: set[str] = set()  # ids whose account has changed since their candidate was made
        self._resting: list[tuple[float, str]] = []  # a heap: until when a worker is left alone
        self._placements = 0
        self._newest: Mapping[str, WorkerRecord] | None = None  # the records that `_news` applies
        self._news: Iterator[bool] = iter(())

    def apply_some(self, records: Mapping[str, WorkerRecord]) -> bool:
        """Applies a slice of the records that have changed. False: all are applied."""
        if records is not self._newest:
            self._newest, self._news = records, self._changes(records)
        return next(self._news, False)

    def _changes(self, records: Mapping[str, WorkerRecord]) -> Iterator[bool]:
        for number, record in enumerate(
            [record for worker_id, record in records.items() if self._records.get(worker_id) is not record]
        ):
            if record.role in ("decode", "prefill"):
                self._take(record)
            if number % RECORDS_PER_SLICE == RECORDS_PER_SLICE - 1:
                yield True
        now = monotonic()
        for worker_id in self._records.keys() - records.keys():
            self._drop(self._records.pop(worker_id))
            self._absent[worker_id] = now
        for worker_id in [absent for absent, since_s in self._absent.items() if now - since_s > MAX_ABSENCE_S]:
            del self._absent[worker_id]
            self._local.pop(worker_id, None)

    def settle(self) -> None:
        """Rebuilds the candidates whose accounts have changed."""
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
            local = self._of(worker)
            local.last_used, local.since[id(placement)] = self._placements, local.beat
        self._of(placement.prefill or placement.decode).prompts[id(placement)] = computed
        self._of(placement.decode).awaited.add(id(placement))

    def first_token(self, placement: Placement) -> None:
        """The prompt is no longer part of a backlog. Safe to call twice."""
        self._of(placement.prefill or placement.decode).prompts.pop(id(placement), None)
        self._of(placement.decode).awaited.discard(id(placement))
        self._changed.update(worker.worker_id for worker in _both(placement))

    def end(self, placement: Placement, blocks: int, admitted: bool) -> None:
        """`admitted`: by its decode worker, whose records count the request until now. Those of its prefill worker
        count it until its first token, and if it was not admitted, no record has ever counted it: there it is
        subtracted only while the account still has it, which a newer record resets."""
        self.first_token(placement)
        for worker in _both(placement):
            local = self._of(worker)
            if local.since.pop(id(placement), None) == local.beat or (admitted and worker is placement.decode):
                self._count(worker, -1, -blocks)
            if admitted:  # otherwise its end made no room there
                local.full_until = 0.0

    def rejected(self, worker: WorkerSnapshot, until: float) -> None:
        """The worker had no room after all: it gets no requests until its record changes or a request of this router
        ends there, and at most until `until` (monotonic), because an idle worker's record does not change."""
        self._of(worker).full_until = until
        heappush(self._resting, (until, worker.worker_id))
        self._changed.add(worker.worker_id)

    def suspect(self, worker: WorkerSnapshot, until: float) -> None:
        """This incarnation failed a request: it gets no new ones until `until` (monotonic)."""
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

    def _candidate(self, record: WorkerRecord) -> WorkerSnapshot:
        local = self._local.get(record.worker_id)
        if local is None or local.incarnation != record.incarnation:
            local = self._local[record.worker_id] = _LocalChanges(record.incarnation)
        if local.beat != record.beat:  # the newer record counts this router's requests
            local.beat, local.running, local.blocks, local.full_until = record.beat, 0, 0, 0.0
        running, held = record.running + local.running, record.blocks_held + local.blocks
        ready, rests_until = record.state is State.READY, max(local.full_until, local.suspect_until)
        return WorkerSnapshot(  # by position, in the order of its fields: keywords take twice as long
            record.worker_id,
            record.incarnation,
            record.address,
            record.kv_meaning,
            running if running > 0 else 0,
            record.max_running,
            record.blocks_total - (held if held > 0 else 0),
            record.block_size,
            record.max_model_len,
            max(0, running - len(local.awaited)),  # streams
            tuple(local.prompts.values()),
            record.prompt_rate,
            record.step_s,
            record.stream_s,
            local.last_used,
            ready and (not rests_until or monotonic() >= rests_until),
            ready,
            record.sum_order,
            record.computes_with,
            record.tp,
            record.state_blocks,
            record.eos_token_ids,
        )

    def _of(self, worker: WorkerSnapshot) -> _LocalChanges:
        local = self._local.get(worker.worker_id)
        if local is None or local.incarnation != worker.incarnation:
            return _LocalChanges(worker.incarnation)  # that incarnation is over; its account is never read again
        return local

    def _count(self, worker: WorkerSnapshot, running: int, blocks: int) -> None:
        local = self._of(worker)
        local.running += running
        local.blocks += blocks
        self._changed.add(worker.worker_id)


def _both(placement: Placement) -> Iterable[WorkerSnapshot]:
    return (placement.decode, placement.prefill) if placement.prefill else (placement.decode,)
