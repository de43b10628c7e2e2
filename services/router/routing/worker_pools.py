"""The workers of each pool, sorted by load, so that a placement examines only a few of them. Pure.

The policy is defined over all workers (services.router.routing.worker_selector). Over the workers that
`shortlist` returns it decides the same, with these exceptions, each of which costs time and never correctness:

- if more than SHORTLIST_SIZE workers have cached the beginning of a prompt, only that many are considered besides
  the least loaded ones;
- if every prefill worker has a prompt to compute, the chosen one would start at most n times as late as the best, where
  SHORTLIST_SIZE workers have n prompts or fewer each (n = 1: the same decision);
- path latencies count among the shortlisted workers only. One with a path not clearly longer than usual is among
  them.

An update moves a worker in two or three sorted lists: a binary search each, and a move of pointers; or one sort for
many updates together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any

from services.router.routing.local_or_remote import compute_seconds, may_prefill, prompt_rate_beside_streams
from services.router.routing.path_latency import PathLatencySnapshot
from services.router.routing.placement import Begun, RoutingConfig, WorkerSnapshot
from services.router.routing.size_histogram import SizeHistogram
from services.router.routing.worker_selector import LONG_PATH_RATIO, has_room

SHORTLIST_SIZE = 8
SORT_SHARE = 0.25  # of the keys: above it, sorting all of them is faster than moving this many

Key = tuple[Any, ...]  # numbers, and the worker's id at the end
CachedAt = Callable[[str], int]  # worker id -> leading tokens of the prompt that it has cached


class SortedWorkers:
    """Worker ids in ascending order of their keys, one key per worker. Sorted when they are read: many changes together
    cost one sort, a quarter of the time of moving each."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._by_id: dict[str, Key] = {}
        self._changed: dict[str, Key | None] = {}  # workers whose key has changed, with their old key in `_keys`

    def __iter__(self) -> Iterator[str]:
        return (key[-1] for key in self._sorted())

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._by_id

    def first_key(self) -> Key | None:
        return self._sorted()[0] if self._by_id else None

    def put(self, worker_id: str, key: Key | None) -> None:
        """None removes it."""
        before = self._by_id.get(worker_id)
        if before == key:
            return
        self._changed.setdefault(worker_id, before)
        if key is None:
            del self._by_id[worker_id]
        else:
            self._by_id[worker_id] = key

    def _sorted(self) -> list[Key]:
        if len(self._changed) > len(self._by_id) * SORT_SHARE:
            self._keys = sorted(self._by_id.values())
        else:
            for worker_id, before in self._changed.items():
                if before is not None:
                    del self._keys[bisect_left(self._keys, before)]
                if (key := self._by_id.get(worker_id)) is not None:
                    insort(self._keys, key)
        self._changed.clear()
        return self._keys


class PrefillCapacity:
    """The prompt tokens per second of several workers together, and the prompts that they have to compute."""

    def __init__(self) -> None:
        self._workers: dict[str, tuple[float, tuple[int, ...]]] = {}  # id -> (prompt tokens per second, prompts)
        self._by_rate = SortedWorkers()
        self._rate = 0.0
        self._prompts = SizeHistogram()

    @property
    def rate(self) -> float:
        """Prompt tokens per second."""
        return self._rate if self._workers else 0.0

    def queued_before(self, tokens: int) -> int:
        """Prompt tokens that they compute before a new prompt of `tokens` tokens."""
        return self._prompts.each_at_most(tokens)

    def rate_of(self, worker_id: str) -> float:
        """0: not among them."""
        return self._workers[worker_id][0] if worker_id in self._workers else 0.0

    def fastest(self) -> Iterator[str]:
        """One id, or none."""
        return islice(self._by_rate, 1)

    def put(self, worker_id: str, rate: float, prompts: tuple[int, ...]) -> None:
        """A `rate` of 0 removes it."""
        rate_before, prompts_before = self._workers.get(worker_id, (0.0, ()))
        if rate == rate_before and prompts == prompts_before:
            return
        prompts = prompts if rate else ()
        if prompts != prompts_before:
            removed = list(prompts_before)
            for tokens in prompts:
                if tokens in removed:
                    removed.remove(tokens)
                else:
                    self._prompts.add(tokens)
            for tokens in removed:
                self._prompts.add(tokens, -1)
        self._rate += rate - rate_before
        self._by_rate.put(worker_id, (-rate, worker_id) if rate else None)
        if rate:
            self._workers[worker_id] = rate, prompts
        else:
            self._workers.pop(worker_id, None)


class DecodePool:
    def __init__(self, config: RoutingConfig) -> None:
        self.workers: dict[str, WorkerSnapshot] = {}
        self.capacity = PrefillCapacity()  # of all workers, used without prefill workers
        self.spare_capacity = PrefillCapacity()  # of those that may compute prompts alongside prefill workers
        self.lengths: Counter[int] = Counter()  # max_model_len -> its workers
        self._config = config
        self._by_load: dict[tuple[str, str], SortedWorkers] = {}  # (computes_with, sum_order) -> its workers
        self._by_free_tokens = SortedWorkers()

    def put(self, worker: WorkerSnapshot) -> None:
        before = self.workers.get(worker.worker_id)
        kind = worker.computes_with, worker.sum_order
        if before and (before.computes_with, before.sum_order) != kind:
            self.drop(worker.worker_id)
            before = None
        self._count(worker, before)
        self.workers[worker.worker_id] = worker
        usable = worker.usable
        load = (
            worker.running / worker.max_running if worker.max_running else 1.0,
            -worker.free_blocks,
            worker.last_used,
        )
        group = self._by_load.setdefault(kind, SortedWorkers())
        group.put(worker.worker_id, (*load, worker.worker_id) if usable else None)
        self._by_free_tokens.put(
            worker.worker_id, (-worker.free_blocks * worker.block_size, worker.worker_id) if usable else None
        )
        rate = prompt_rate_beside_streams(worker, self._config) if usable else 0.0
        self.capacity.put(worker.worker_id, rate, worker.prompts)
        spare_rate = rate if may_prefill(worker, self._config) else 0.0
        self.spare_capacity.put(worker.worker_id, spare_rate, worker.prompts)

    def drop(self, worker_id: str) -> None:
        if worker := self.workers.pop(worker_id, None):
            self._count(None, worker)
            self._by_load[worker.computes_with, worker.sum_order].put(worker_id, None)
            self._by_free_tokens.put(worker_id, None)
            self.capacity.put(worker_id, 0.0, ())
            self.spare_capacity.put(worker_id, 0.0, ())

    def _count(self, now: WorkerSnapshot | None, before: WorkerSnapshot | None) -> None:
        if now:
            self.lengths[now.max_model_len] += 1
        if before:
            self.lengths[before.max_model_len] -= 1
            if not self.lengths[before.max_model_len]:
                del self.lengths[before.max_model_len]

    def continues(self, begun: Begun | None) -> bool:
        """False where there are workers, but none that would give the remaining tokens of the request."""
        return begun is None or not self.workers or any(worker.continues(begun) for worker in self.workers.values())

    def left_out(self, unsuited: Collection[tuple[str, str]]) -> Collection[tuple[str, str]]:
        """`unsuited`, unless no other worker is ready: one that rests or is suspected is waited for."""
        others = unsuited and any(one.ready and one.identity not in unsuited for one in self.workers.values())
        return unsuited if others else ()

    def sharing(self, worker_id: str) -> str:
        """`worker_id` if that worker lets another answer begin with a running answer's KV, otherwise "": with recurrent
        layers the state at the prompt's last full block is gone by then."""
        worker = self.workers.get(worker_id)
        return worker_id if worker and not worker.state_blocks else ""

    def shortlist(
        self,
        tokens: int,
        ahead: int,
        kv_holder: str,
        holders: Iterable[str],
        cached: CachedAt,
        unsuited: Collection[tuple[str, str]] = (),
        reserved: Callable[[WorkerSnapshot], bool] | None = None,
    ) -> list[WorkerSnapshot]:
        """The least loaded worker with room of each kind, `kv_holder`, and `holders` of the prompt's beginning, without
        those that are `reserved`, and without the `unsuited` (`left_out`)."""
        unsuited = self.left_out(unsuited)

        def takes(worker: WorkerSnapshot) -> bool:
            return worker.identity not in unsuited and not (reserved and reserved(worker))

        chosen = {name: self.workers[name] for name in (kv_holder, *holders) if name in self.workers}
        chosen = {name: one for name, one in chosen.items() if takes(one)}
        most_free = self._by_free_tokens.first_key()
        if most_free and -most_free[0] >= tokens + ahead:
            for group in self._by_load.values():
                for worker_id in group:
                    worker = self.workers[worker_id]
                    if worker.running >= worker.max_running:
                        break
                    if has_room(worker, tokens, ahead, self._config) and takes(worker):
                        chosen[worker.worker_id] = worker
                        break
        return [worker.with_cached(cached(name)) for name, worker in chosen.items()]


class PrefillPool:
    def __init__(self) -> None:
        self.workers: dict[str, WorkerSnapshot] = {}
        self.capacity = PrefillCapacity()
        self._by_work: dict[str, SortedWorkers] = {}  # layout -> its workers, by seconds of queued work
        self._by_prompts: dict[str, SortedWorkers] = {}  # layout -> its workers, by queued prompts

    def usable_count(self, layout_hash: str) -> int:
        """How many usable workers have this layout."""
        return len(self._by_work[layout_hash]) if layout_hash in self._by_work else 0

    def alive(self, incarnations: Iterable[tuple[str, str]]) -> list[str]:
        """The ids of those incarnations that are in this pool."""
        return [one[0] for one in incarnations if one[0] in self.workers and self.workers[one[0]].identity == one]

    def put(self, worker: WorkerSnapshot) -> None:
        before = self.workers.get(worker.worker_id)
        if before and before.layout_hash != worker.layout_hash:
            self.drop(worker.worker_id)
        self.workers[worker.worker_id] = worker
        rate, rest = (
            worker.prompt_rate or 1.0,
            (worker.running, -worker.free_blocks, worker.last_used, worker.worker_id),
        )
        work = self._by_work.setdefault(worker.layout_hash, SortedWorkers())
        prompts = self._by_prompts.setdefault(worker.layout_hash, SortedWorkers())
        work.put(worker.worker_id, (sum(worker.prompts) / rate, *rest) if worker.usable else None)
        prompts.put(worker.worker_id, (len(worker.prompts) / rate, *rest) if worker.usable else None)
        self.capacity.put(worker.worker_id, worker.prompt_rate if worker.usable else 0.0, worker.prompts)

    def drop(self, worker_id: str) -> None:
        if worker := self.workers.pop(worker_id, None):
            for orders in (self._by_work, self._by_prompts):
                orders[worker.layout_hash].put(worker_id, None)
            if not any(other.layout_hash == worker.layout_hash for other in self.workers.values()):
                del self._by_work[worker.layout_hash], self._by_prompts[worker.layout_hash]
            self.capacity.put(worker_id, 0.0, ())

    def shortlist(
        self,
        tokens: int,
        decode: WorkerSnapshot,
        latencies: PathLatencySnapshot,
        holders: Iterable[str],
        cached: CachedAt,
        avoided: Collection[str] = (),
    ) -> list[WorkerSnapshot]:
        """The workers with the least queued work, by seconds and by prompts, and `holders` of the prompt's beginning,
        without the `avoided` and those that are too short for `tokens` tokens. If none is usable, or all are too short,
        one from which the reason follows."""
        if not self.usable_count(decode.layout_hash):
            usable = next((worker for worker in self.workers.values() if worker.usable), None)
            return [usable or worker for worker in islice(self.workers.values(), 1)]
        by_work, by_prompts = self._by_work[decode.layout_hash], self._by_prompts[decode.layout_hash]

        def takes(name: str) -> bool:
            return name not in avoided and self.workers[name].max_model_len > tokens

        names = dict.fromkeys(islice(filter(takes, by_work), SHORTLIST_SIZE))
        names |= dict.fromkeys(islice(filter(takes, by_prompts), SHORTLIST_SIZE))
        names |= dict.fromkeys(filter(takes, self._usual_path(decode, latencies)))
        names |= dict.fromkeys(name for name in holders if name in by_work and takes(name))
        if not names:
            names = dict.fromkeys(islice((name for name in by_work if name not in avoided), 1))
        return [self.workers[name].with_cached(cached(name)) for name in names]

    def _usual_path(self, decode: WorkerSnapshot, latencies: PathLatencySnapshot) -> list[str]:
        """The least loaded worker whose path is not clearly longer than usual, if any."""
        usual = latencies.usual(remote=True)
        if usual is None:
            return []
        long_s = LONG_PATH_RATIO * usual.seconds(1)
        close = (
            worker
            for worker in self._by_work[decode.layout_hash]
            if latencies[decode.worker_id, worker].seconds(1) <= long_s
        )
        return list(islice(close, 1))


def expected_wait(
    decodes: DecodePool, prefills: PrefillPool, tokens: int, queued: int, holders: Iterable[str], cached: CachedAt
) -> tuple[float, float, int]:
    """The expected seconds until a prompt of `tokens` tokens starts, the seconds of computing it, and how many of its
    tokens are computed, when prompts of `queued` tokens in all come before it. `holders` have cached its beginning.
    0 seconds while no worker's rate is known."""
    pools = [(prefills.capacity, prefills.workers), (decodes.spare_capacity, decodes.workers)]
    if not prefills.capacity.rate:
        pools = [(decodes.capacity, decodes.workers)]
    candidates: list[tuple[WorkerSnapshot, float]] = []  # with prompt tokens per second
    for capacity, workers in pools:
        names = dict.fromkeys((*holders, *capacity.fastest()))
        candidates += [
            (workers[name].with_cached(cached(name)), rate) for name in names if (rate := capacity.rate_of(name))
        ]
    if not candidates:
        return 0.0, 0.0, tokens
    uncached = min(worker.uncached(tokens) for worker, _ in candidates)
    queued += sum(capacity.queued_before(uncached) for capacity, _ in pools)
    wait_s = queued / sum(capacity.rate for capacity, _ in pools)
    return wait_s, min(compute_seconds(worker, rate, tokens) for worker, rate in candidates), uncached
