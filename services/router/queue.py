"""Who waits for a place, and in which order. Pure: no clock, no sockets.

First those whose answer has begun: their clients are in the middle of it. Then the more urgent priority. Of one
priority the tenant that has had the fewest tokens, so that nobody's crowd keeps another one waiting (the virtual
token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Of one tenant the shorter
prompt, as in engine.scheduler; later ones delay nobody by more tokens than it has itself.

Every operation takes a number of steps that grows with the logarithm of how many wait:

    Queue ── a Class for each urgency ── a heap of its tenants ── a Line for each: a tree over its requests by arrival
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Generic, TypeVar

from services.router.sums import Sums

GENERATED = 2.0  # what a generated token counts as, in tokens of a prompt: the paper's weights
SAMPLED = 64  # tenants that `before` looks at, and urgencies that `add` looks at; the others are taken to be like them

Urgency = tuple[bool, int]


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that has no place yet."""

    tokens: int  # of the prompt
    tenant: str = ""
    priority: int = 0  # the smaller, the more urgent
    begun: bool = False  # its client has had tokens of it
    number: int = 0  # in the order of arrival


W = TypeVar("W", bound=Waiting)


class Line(Generic[W]):
    """The requests of one tenant and urgency: the one comes first that has the fewest tokens, less those of later ones
    that were placed before it.

    A segment tree by arrival. `_low[n]` is the least that a request below node n has left, `_add[n]` what is still to
    be added to all of them and is in `_low[n]` already.
    """

    def __init__(self) -> None:
        self.sizes = Sums()
        self._requests: list[W | None] = []  # None: it has left
        self._numbers: list[int] = []
        self._plant(8, [])

    def __len__(self) -> int:
        return self.sizes.count

    def __iter__(self) -> Iterator[W]:
        return (one for one in self._requests if one is not None)

    def __contains__(self, one: W) -> bool:
        at = bisect_left(self._numbers, one.number)
        return at < len(self._requests) and self._requests[at] is one

    def add(self, one: W) -> None:
        """It has the greatest number."""
        if len(self._requests) == self._size:
            self._regrow()
        self._requests.append(one)
        self._numbers.append(one.number)
        self.sizes.add(one.tokens)
        leaf = node = self._size + len(self._requests) - 1
        self._low[leaf] = one.tokens
        while node := node >> 1:
            self._low[leaf] -= self._add[node]
        self._mend(leaf)

    def remove(self, one: W) -> None:
        """One that is in it."""
        at = bisect_left(self._numbers, one.number)
        self._requests[at] = None
        self.sizes.add(one.tokens, -1)
        self._low[self._size + at] = math.inf
        self._mend(self._size + at)

    def overtake(self, number: int, tokens: int) -> None:
        """One with this number is placed before those that came earlier."""
        node = self._size + bisect_left(self._numbers, number)
        if node == 2 * self._size:  # it came after all of them
            self._low[1] -= tokens
            self._add[1] -= tokens
            return
        while node > 1:
            if node & 1:
                self._low[node - 1] -= tokens
                self._add[node - 1] -= tokens
            node >>= 1
            self._low[node] = min(self._low[2 * node], self._low[2 * node + 1]) + self._add[node]

    def first(self) -> tuple[float, W]:
        """Of one that is not empty, with the tokens that it has left."""
        node = 1
        while node < self._size:
            node *= 2
            if self._low[node + 1] < self._low[node]:
                node += 1
        one = self._requests[node - self._size]
        assert one is not None
        return self._low[1], one

    def _mend(self, node: int) -> None:
        while node := node >> 1:
            self._low[node] = min(self._low[2 * node], self._low[2 * node + 1]) + self._add[node]

    def _regrow(self) -> None:
        """Room for as many again as are left."""
        for node in range(1, self._size):
            for child in (2 * node, 2 * node + 1):
                self._low[child] += self._add[node]
                self._add[child] += self._add[node]
        left = [at for at, one in enumerate(self._requests) if one is not None]
        lows = [self._low[self._size + at] for at in left]
        self._requests = [self._requests[at] for at in left]
        self._numbers = [self._numbers[at] for at in left]
        self._plant(max(8, 1 << (2 * len(left) - 1).bit_length()), lows)

    def _plant(self, size: int, lows: list[float]) -> None:
        self._size = size
        self._add: list[float] = [0] * (2 * size)
        self._low: list[float] = [math.inf] * (2 * size)
        self._low[size : size + len(lows)] = lows
        for node in range(size - 1, 0, -1):
            self._low[node] = min(self._low[2 * node], self._low[2 * node + 1])


Entry = tuple[float, float, int, str]  # what the tenant had, tokens and number of its first request, the tenant


@dataclass(slots=True)
class Class(Generic[W]):
    """All of one urgency."""

    lines: dict[str, Line[W]] = field(default_factory=dict)
    heap: list[Entry] = field(default_factory=list)  # a tenant's entry is late where it has had more meanwhile
    entries: dict[str, Entry] = field(default_factory=dict)  # those of the heap that count
    count: int = 0
    tokens: int = 0


class Queue(Generic[W]):
    def __init__(self) -> None:
        self.tokens = 0  # of the prompts of all who wait
        self._classes: dict[Urgency, Class[W]] = {}
        self._urgencies: list[Urgency] = []  # their keys, in order
        self._count = 0
        self._had: dict[str, float] = {}  # tokens of each tenant
        self._waiting: dict[str, int] = {}  # requests of each tenant
        self._arrivals = 0
        self._latest = 0.0  # what the tenant had that was placed last

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[W]:
        return (one for found in self._classes.values() for line in found.lines.values() for one in line)

    def add(self, one: W) -> None:
        """A tenant that comes back starts where those who wait are: what it did not use before is nothing saved."""
        if one.tenant not in self._waiting:
            tops = (self._top(self._classes[urgency])[0] for urgency in self._urgencies[:SAMPLED])
            self._had[one.tenant] = max(self._had.get(one.tenant, 0.0), min(tops, default=self._latest))
        self._arrivals += 1
        one.number = self._arrivals
        urgency = _urgency(one)
        if urgency not in self._classes:
            self._classes[urgency] = Class()
            insort(self._urgencies, urgency)
        found = self._classes[urgency]
        line = found.lines.setdefault(one.tenant, Line())
        line.add(one)
        self._waiting[one.tenant] = self._waiting.get(one.tenant, 0) + 1
        self._count_in(found, one, 1)
        if line.first()[1] is one:
            self._enter(found, one.tenant)

    def remove(self, one: W) -> None:
        """It gives up. Safe to repeat."""
        urgency = _urgency(one)
        found = self._classes.get(urgency)
        line = found.lines.get(one.tenant) if found else None
        if found is None or line is None or one not in line:
            return
        line.remove(one)
        self._count_in(found, one, -1)
        self._waiting[one.tenant] -= 1
        if not self._waiting[one.tenant]:
            del self._waiting[one.tenant]
        if not line:
            del found.lines[one.tenant], found.entries[one.tenant]
        if not found.lines:
            del self._classes[urgency]
            self._urgencies.remove(urgency)

    def place(self, one: W) -> None:
        """It has its place, and its tenant has had its prompt: so its entries stay early enough for `_top`."""
        self.remove(one)
        for begun in (False, True):
            found = self._classes.get((not begun, one.priority))
            if found and (line := found.lines.get(one.tenant)):
                line.overtake(one.number, one.tokens)
        self.had(one.tenant, one.tokens)
        self._latest = self._had[one.tenant]

    def had(self, tenant: str, tokens: float) -> None:
        self._had[tenant] = self._had.get(tenant, 0.0) + tokens

    def give_back(self, tenant: str, tokens: float) -> None:
        """It was counted as had, and is to be asked for again."""
        self._had[tenant] = max(0.0, self._had.get(tenant, 0.0) - tokens)
        for found in self._classes.values():
            if tenant in found.lines:
                self._enter(found, tenant)

    def first(self) -> W | None:
        if not self._urgencies:
            return None
        found = self._classes[self._urgencies[0]]
        return found.lines[self._top(found)[3]].first()[1]

    def before(self, one: W) -> tuple[int, int]:
        """How many come before one that waits, and of how many tokens, if each tenant gets in turn what it waits for
        and nobody else comes. Close to that: of its own tenant who is not longer, of the others what their counters
        say, of many tenants by a sample."""
        urgency, count, tokens = _urgency(one), 0, 0
        for other in self._urgencies[: bisect_left(self._urgencies, urgency)]:
            count += self._classes[other].count
            tokens += self._classes[other].tokens
        found = self._classes.get(urgency)
        if found is None:
            return count, tokens
        own = found.lines.get(one.tenant)
        own_count, own_tokens = own.sizes.up_to(one.tokens) if own else (0, 0)
        if own and one in own:
            own_count, own_tokens = own_count - 1, own_tokens - one.tokens
        others = self._others_before(found, one.tenant, self._had.get(one.tenant, 0.0) + own_tokens)
        return count + own_count + math.ceil(others[0]), tokens + own_tokens + math.ceil(others[1])

    def _others_before(self, found: Class[W], tenant: str, reach: float) -> tuple[float, float]:
        """What the other tenants of a class have placed, one prompt after another, until they have had more than
        `reach`."""
        others = len(found.lines) - (tenant in found.lines)
        seen, count, tokens = 0, 0.0, 0.0
        for name, line in islice(found.lines.items(), SAMPLED + 1):
            if name == tenant or seen == SAMPLED:
                continue
            seen += 1
            left = reach - self._had[name]
            if left >= 0:
                mean = line.sizes.tokens / len(line)
                some = min(len(line), left // max(mean, 1.0) + 1)
                count, tokens = count + some, tokens + some * mean
        return (count * others / seen, tokens * others / seen) if seen else (0.0, 0.0)

    def _count_in(self, found: Class[W], one: W, times: int) -> None:
        found.count += times
        found.tokens += times * one.tokens
        self._count += times
        self.tokens += times * one.tokens

    def _entry(self, found: Class[W], tenant: str) -> Entry:
        left, one = found.lines[tenant].first()
        return self._had[tenant], left, one.number, tenant

    def _enter(self, found: Class[W], tenant: str) -> None:
        """The tenant may come earlier than its entry says. Where it comes later, `_top` finds out."""
        found.entries[tenant] = self._entry(found, tenant)
        heappush(found.heap, found.entries[tenant])
        if len(found.heap) > 2 * len(found.entries) + 16:
            found.heap = list(found.entries.values())
            heapify(found.heap)

    def _top(self, found: Class[W]) -> Entry:
        """The entry of the tenant whose turn it is."""
        while True:
            entry = found.heap[0]
            if found.entries.get(entry[3]) is not entry:
                heappop(found.heap)
                continue
            now = self._entry(found, entry[3])
            if now == entry:
                return entry
            found.entries[entry[3]] = now
            heapreplace(found.heap, now)


def _urgency(one: Waiting) -> Urgency:
    return not one.begun, one.priority
