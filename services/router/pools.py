"""The workers of either role in order of their load, so that a placement looks at a few of them. Pure.

The policy is defined over all workers (services.router.policy.place). Over the workers that `shortlist` names it
decides the same, with these exceptions, each of which costs time and never correctness:

- where more than FEW workers have the beginning of a prompt, FEW of them are looked at besides the least loaded ones;
- where every prefill worker has a prompt to compute, the chosen one would begin at most n times as late as the best,
  where FEW workers have n prompts or fewer each (1: the same decision);
- ways count among those that are looked at. One whose way is not clearly longer than usual is among them.

An update moves a worker in two or three sorted lists: a binary search each, and a move of pointers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import Any

from services.router.policy import FAR, Candidate, Rules, computing, has_room, helps, pace_of
from services.router.sums import Sums
from services.router.ways import WaysAt

FEW = 8

Key = tuple[Any, ...]  # of numbers, and the worker's id at the end
CachedAt = Callable[[str], int]  # how many leading tokens of the prompt a worker has


class Order:
    """Keys in ascending order, one for each worker."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._of: dict[str, Key] = {}

    def __iter__(self) -> Iterator[str]:
        return (key[-1] for key in self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def least(self) -> Key | None:
        return self._keys[0] if self._keys else None

    def put(self, worker_id: str, key: Key | None) -> None:
        """None: it is not in this order."""
        before = self._of.get(worker_id)
        if before == key:
            return
        if before is not None:
            del self._keys[bisect_left(self._keys, before)]
            del self._of[worker_id]
        if key is not None:
            insort(self._keys, key)
            self._of[worker_id] = key


class Power:
    """What several workers compute together, and have to compute."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, tuple[int, ...]]] = {}  # prompt tokens per second, prompts
        self._quickest = Order()
        self._rate = 0.0
        self._prompts = Sums()

    @property
    def rate(self) -> float:
        """Prompt tokens per second."""
        return self._rate if self._of else 0.0

    def waiting(self, tokens: int) -> int:
        """Prompt tokens that they compute before a new prompt of so many."""
        return self._prompts.each_at_most(tokens)

    def pace(self, worker_id: str) -> float:
        """0: it is not among them."""
        return self._of[worker_id][0] if worker_id in self._of else 0.0

    def quickest(self) -> Iterator[str]:
        """The one, if there is any."""
        return islice(self._quickest, 1)

    def put(self, worker_id: str, pace: float, prompts: tuple[int, ...]) -> None:
        """A `pace` of 0 takes it out."""
        before_pace, before = self._of.get(worker_id, (0.0, ()))
        if pace == before_pace and prompts == before:
            return
        prompts = prompts if pace else ()
        if prompts != before:
            gone = list(before)
            for tokens in prompts:
                if tokens in gone:
                    gone.remove(tokens)
                else:
                    self._prompts.add(tokens)
            for tokens in gone:
                self._prompts.add(tokens, -1)
        self._rate += pace - before_pace
        self._quickest.put(worker_id, (-pace, worker_id) if pace else None)
        if pace:
            self._of[worker_id] = pace, prompts
        else:
            self._of.pop(worker_id, None)


class Decodes:
    def __init__(self, rules: Rules) -> None:
        self.workers: dict[str, Candidate] = {}
        self.alone = Power()  # of all, where there is no prefill worker
        self.beside = Power()  # of those that compute prompts beside prefill workers
        self._rules = rules
        self._load: dict[str, Order] = {}  # by the order of their sums
        self._free = Order()

    def put(self, one: Candidate) -> None:
        before = self.workers.get(one.worker_id)
        if before and before.sum_order != one.sum_order:
            self.drop(one.worker_id)
        self.workers[one.worker_id] = one
        usable = one.usable
        load = (one.running / one.max_running if one.max_running else 1.0, -one.free_blocks, one.last_used)
        alike = self._load.setdefault(one.sum_order, Order())
        alike.put(one.worker_id, (*load, one.worker_id) if usable else None)
        self._free.put(one.worker_id, (-one.free_blocks * one.block_size, one.worker_id) if usable else None)
        pace = pace_of(one, self._rules, "decode") if usable else 0.0
        self.alone.put(one.worker_id, pace, one.prompts)
        self.beside.put(one.worker_id, pace if pace and helps(one, self._rules) else 0.0, one.prompts)

    def drop(self, worker_id: str) -> None:
        if one := self.workers.pop(worker_id, None):
            self._load[one.sum_order].put(worker_id, None)
            self._free.put(worker_id, None)
            self.alone.put(worker_id, 0.0, ())
            self.beside.put(worker_id, 0.0, ())

    def shortlist(
        self, tokens: int, ahead: int, near: str, holders: Iterable[str], cached: CachedAt
    ) -> list[Candidate]:
        """The least loaded one with room of each order of sums, the one that is `near`, and `holders` of the prompt's
        beginning."""
        found = {name: self.workers[name] for name in (near, *holders) if name in self.workers}
        most_free = self._free.least()
        if most_free and -most_free[0] >= tokens + ahead:
            for alike in self._load.values():
                for worker_id in alike:
                    one = self.workers[worker_id]
                    if one.running >= one.max_running:
                        break
                    if has_room(one, tokens, ahead, self._rules):
                        found[one.worker_id] = one
                        break
        return [one.having(cached(name)) for name, one in found.items()]


class Prefills:
    def __init__(self, rules: Rules) -> None:
        self.workers: dict[str, Candidate] = {}
        self.power = Power()
        self._rules = rules
        self._work: dict[str, Order] = {}  # by layout: seconds of work that they have
        self._prompts: dict[str, Order] = {}  # by layout: how many prompts

    def able(self, layout_hash: str) -> int:
        """How many usable workers have this layout."""
        return len(self._work[layout_hash]) if layout_hash in self._work else 0

    def put(self, one: Candidate) -> None:
        before = self.workers.get(one.worker_id)
        if before and before.layout_hash != one.layout_hash:
            self.drop(one.worker_id)
        self.workers[one.worker_id] = one
        rate, rest = one.prompt_rate or 1.0, (one.running, -one.free_blocks, one.last_used, one.worker_id)
        work = self._work.setdefault(one.layout_hash, Order())
        prompts = self._prompts.setdefault(one.layout_hash, Order())
        work.put(one.worker_id, (sum(one.prompts) / rate, *rest) if one.usable else None)
        prompts.put(one.worker_id, (len(one.prompts) / rate, *rest) if one.usable else None)
        self.power.put(one.worker_id, pace_of(one, self._rules, "prefill") if one.usable else 0.0, one.prompts)

    def drop(self, worker_id: str) -> None:
        if one := self.workers.pop(worker_id, None):
            for orders in (self._work, self._prompts):
                orders[one.layout_hash].put(worker_id, None)
            if not any(other.layout_hash == one.layout_hash for other in self.workers.values()):
                del self._work[one.layout_hash], self._prompts[one.layout_hash]
            self.power.put(worker_id, 0.0, ())

    def shortlist(
        self,
        decode: Candidate,
        ways: WaysAt,
        holders: Iterable[str],
        cached: CachedAt,
        avoided: Collection[str] = (),
    ) -> list[Candidate]:
        """Those that have the least to do, by seconds and by prompts, and `holders` of the prompt's beginning, without
        the `avoided`. Where none is able, one that tells why."""
        if not self.able(decode.layout_hash):
            some = next((one for one in self.workers.values() if one.usable), None)
            return [some or one for one in islice(self.workers.values(), 1)]
        few = FEW + len(avoided)
        names = dict.fromkeys(islice(self._work[decode.layout_hash], few))
        names |= dict.fromkeys(islice(self._prompts[decode.layout_hash], few))
        names |= dict.fromkeys(self._usual_way(decode, ways))
        names |= dict.fromkeys(one for one in holders if one in self.workers)
        return [self.workers[name].having(cached(name)) for name in names if name not in avoided]

    def _usual_way(self, decode: Candidate, ways: WaysAt) -> list[str]:
        """The one with the least to do to which the way is not clearly longer than usual."""
        usual = ways.usual(elsewhere=True)
        if usual is None:
            return []
        far_s = FAR * usual.seconds(1)
        near = (one for one in self._work[decode.layout_hash] if ways[decode.worker_id, one].seconds(1) <= far_s)
        return list(islice(near, 1))


def expected_wait(
    decodes: Decodes, prefills: Prefills, tokens: int, queued: int, holders: Iterable[str], cached: CachedAt
) -> tuple[float, float, int]:
    """Seconds that a prompt of `tokens` tokens waits, and then is computed for, when prompts of `queued` tokens in all
    are placed before it; and how many of its tokens are to be computed. `holders` have its beginning. No seconds where
    no worker has said how fast it computes."""
    pools = [(prefills.power, prefills.workers), (decodes.beside, decodes.workers)]
    if not prefills.power.rate:
        pools = [(decodes.alone, decodes.workers)]
    some: list[tuple[Candidate, float]] = []  # with prompt tokens per second
    for power, workers in pools:
        names = dict.fromkeys((*holders, *power.quickest()))
        some += [(workers[name].having(cached(name)), power.pace(name)) for name in names if power.pace(name)]
    if not some:
        return 0.0, 0.0, tokens
    fresh = min(one.fresh(tokens) for one, _ in some)
    waiting = sum(power.waiting(fresh) for power, _ in pools)
    wait_s = (queued + waiting) / sum(power.rate for power, _ in pools)
    return wait_s, min(computing(one, pace, tokens) for one, pace in some), fresh
