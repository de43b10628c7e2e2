"""The requests that wait for a placement, in their order. Pure: no clock, no sockets.

Requests whose answer has begun come first, because their clients are reading it; then the more urgent priority; within
a priority the tenant that has received the fewest tokens, so that no tenant's backlog delays another tenant (the
virtual token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024); within a tenant the
shorter prompt, as in engine.core.scheduler. Later requests delay a request by at most its own number of tokens.

Every operation is O(log n) in the number of waiting requests:

    FairQueue ── an UrgencyClass for each urgency ── a heap of tenants ── a TenantQueue for each: a tree by arrival
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count, islice
from typing import Generic, TypeVar

from services.router.routing.size_histogram import SizeHistogram

GENERATED_TOKEN_WEIGHT = 2.0  # weight of a generated token relative to a prompt token, as in the paper
MAX_SAMPLED = 64  # tenants in `before`, and urgencies in `add`; the others are extrapolated from these

Urgency = tuple[bool, int]


@dataclass(slots=True, eq=False)
class Waiting:
    """A request without a placement."""

    tokens: int  # of the prompt
    tenant: str = ""
    priority: int = 0  # smaller is more urgent
    begun: bool = False  # its client has received tokens
    number: int = 0  # in the order of arrival at its queue


W = TypeVar("W", bound=Waiting)


class TenantQueue(Generic[W]):
    """The requests of one tenant and urgency. The first is the one with the fewest tokens, less those of later requests
    that were placed before it.

    A segment tree by arrival. `_low[n]` is the minimum of the tokens left below node n, `_add[n]` a pending addition to
    all of them, which `_low[n]` already includes.
    """

    def __init__(self) -> None:
        self.sizes = SizeHistogram()
        self._requests: list[W | None] = []  # None: it has left
        self._numbers: list[int] = []
        self._plant(8, [])

    def __len__(self) -> int:
        return self.sizes.count

    def __contains__(self, request: W) -> bool:
        at = bisect_left(self._numbers, request.number)
        return at < len(self._requests) and self._requests[at] is request

    def add(self, request: W) -> None:
        """Adds a request, whose number must be the greatest."""
        if len(self._requests) == self._size:
            self._regrow()
        self._requests.append(request)
        self._numbers.append(request.number)
        self.sizes.add(request.tokens)
        leaf = node = self._size + len(self._requests) - 1
        self._low[leaf] = request.tokens
        while node := node >> 1:
            self._low[leaf] -= self._add[node]
        self._mend(leaf)

    def remove(self, request: W) -> None:
        """Removes a request of this queue."""
        at = bisect_left(self._numbers, request.number)
        self._requests[at] = None
        self.sizes.add(request.tokens, -1)
        self._low[self._size + at] = math.inf
        self._mend(self._size + at)

    def overtake(self, number: int, tokens: int) -> None:
        """The request with this number is placed before those that arrived earlier."""
        node = self._size + bisect_left(self._numbers, number)
        if node == 2 * self._size:  # it arrived after all of them
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
        """The first request, with the tokens that it has left. The queue must not be empty."""
        node = 1
        while node < self._size:
            node *= 2
            if self._low[node + 1] < self._low[node]:
                node += 1
        request = self._requests[node - self._size]
        assert request is not None
        return self._low[1], request

    def _mend(self, node: int) -> None:
        while node := node >> 1:
            self._low[node] = min(self._low[2 * node], self._low[2 * node + 1]) + self._add[node]

    def _regrow(self) -> None:
        """Rebuilds the tree with room for twice the remaining requests."""
        for node in range(1, self._size):
            for child in (2 * node, 2 * node + 1):
                self._low[child] += self._add[node]
                self._add[child] += self._add[node]
        left = [at for at, request in enumerate(self._requests) if request is not None]
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
class UrgencyClass(Generic[W]):
    """All of one urgency."""

    lines: dict[str, TenantQueue[W]] = field(default_factory=dict)
    heap: list[Entry] = field(default_factory=list)  # a tenant's entry is late where it has had more meanwhile
    entries: dict[str, Entry] = field(default_factory=dict)  # the valid entries of the heap
    count: int = 0
    tokens: int = 0


class FairQueue(Generic[W]):
    def __init__(self, beside: FairQueue[W] | None = None) -> None:
        """`beside`: a queue with the same tenants: what they received, and whether they wait, counts in both."""
        self.tokens = 0  # prompt tokens of all waiting requests
        self._classes: dict[Urgency, UrgencyClass[W]] = {}
        self._urgencies: list[Urgency] = []  # their keys, in order
        self._count = 0
        self._charged: dict[str, float] = {} if beside is None else beside._charged  # tokens of each tenant
        self._waiting: dict[str, int] = {} if beside is None else beside._waiting  # requests of each tenant
        self._arrivals: Iterator[int] = count(1) if beside is None else beside._arrivals
        self._latest = 0.0  # tokens that the latest placed tenant had received; in `_main` alone
        self._main = self if beside is None else beside

    def __len__(self) -> int:
        return self._count

    def add(self, request: W) -> None:
        """A tenant that returns starts level with the waiting tenants: unused share is not saved up."""
        if request.tenant not in self._waiting:
            tops = (self._top(self._classes[urgency])[0] for urgency in self._urgencies[:MAX_SAMPLED])
            self._charged[request.tenant] = max(self._charged.get(request.tenant, 0.0), min(tops, default=self._latest))
        self._append(request)

    def move(self, request: W, queue: FairQueue[W]) -> None:
        """Moves the first request to a queue beside this one, so it has overtaken those that arrived here earlier."""
        self.remove(request)
        self._overtakes(request)
        self.look_again(request.tenant)
        queue._append(request)

    def _append(self, request: W) -> None:
        request.number = next(self._arrivals)
        urgency = _urgency(request)
        if urgency not in self._classes:
            self._classes[urgency] = UrgencyClass()
            insort(self._urgencies, urgency)
        group = self._classes[urgency]
        line = group.lines.setdefault(request.tenant, TenantQueue())
        line.add(request)
        self._waiting[request.tenant] = self._waiting.get(request.tenant, 0) + 1
        self._count_in(group, request, 1)
        if line.first()[1] is request:
            self._enter(group, request.tenant)

    def remove(self, request: W) -> None:
        """Removes a request whose wait has ended. Idempotent."""
        urgency = _urgency(request)
        group = self._classes.get(urgency)
        line = group.lines.get(request.tenant) if group else None
        if group is None or line is None or request not in line:
            return
        line.remove(request)
        self._count_in(group, request, -1)
        self._waiting[request.tenant] -= 1
        if not self._waiting[request.tenant]:
            del self._waiting[request.tenant]
        if not line:
            del group.lines[request.tenant], group.entries[request.tenant]
        if not group.lines:
            del self._classes[urgency]
            self._urgencies.remove(urgency)

    def place(self, request: W) -> None:
        """Removes a request that was placed, and charges its prompt to its tenant, whose entries stay early enough for
        `_top`."""
        self.remove(request)
        self._overtakes(request)
        self.charge(request.tenant, request.tokens)
        self._main._latest = self._charged[request.tenant]

    def _overtakes(self, request: W) -> None:
        for begun in (False, True):
            group = self._classes.get((not begun, request.priority))
            if group and (line := group.lines.get(request.tenant)):
                line.overtake(request.number, request.tokens)

    def charge(self, tenant: str, tokens: float) -> None:
        self._charged[tenant] = self._charged.get(tenant, 0.0) + tokens

    def give_back(self, tenant: str, tokens: float) -> None:
        """Reverses a charge: the request will be queued again."""
        self._charged[tenant] = max(0.0, self._charged.get(tenant, 0.0) - tokens)
        self.look_again(tenant)

    def look_again(self, tenant: str) -> None:
        """This tenant may come earlier than before: it got tokens back, or was overtaken."""
        for group in self._classes.values():
            if tenant in group.lines:
                self._enter(group, tenant)

    def order(self, request: W) -> tuple[bool, int, float]:
        """Of two requests of different tenants in queues beside each other, the one with the smaller order comes
        first."""
        return *_urgency(request), self._charged.get(request.tenant, 0.0)

    def first(self) -> W | None:
        if not self._urgencies:
            return None
        group = self._classes[self._urgencies[0]]
        return group.lines[self._top(group)[3]].first()[1]

    def before(self, request: W) -> tuple[int, int]:
        """The number of requests before a waiting one, and their tokens, if no other request arrives. An estimate:
        it counts the more urgent requests, those of the same tenant that are not longer, and of each other tenant as
        many as it would get until its counter exceeds this tenant's; of many tenants it takes a sample."""
        urgency, count, tokens = _urgency(request), 0, 0
        for other in self._urgencies[: bisect_left(self._urgencies, urgency)]:
            count += self._classes[other].count
            tokens += self._classes[other].tokens
        group = self._classes.get(urgency)
        if group is None:
            return count, tokens
        own = group.lines.get(request.tenant)
        own_count, own_tokens = own.sizes.up_to(request.tokens) if own else (0, 0)
        if own and request in own:
            own_count, own_tokens = own_count - 1, own_tokens - request.tokens
        others = self._others_before(group, request.tenant, self._charged.get(request.tenant, 0.0) + own_tokens)
        return count + own_count + math.ceil(others[0]), tokens + own_tokens + math.ceil(others[1])

    def _others_before(self, group: UrgencyClass[W], tenant: str, reach: float) -> tuple[float, float]:
        """What the other tenants of a class have placed, one prompt after another, until they have had more than
        `reach`."""
        others = len(group.lines) - (tenant in group.lines)
        sampled, count, tokens = 0, 0.0, 0.0
        for name, line in islice(group.lines.items(), MAX_SAMPLED + 1):
            if name == tenant or sampled == MAX_SAMPLED:
                continue
            sampled += 1
            left = reach - self._charged[name]
            if left >= 0:
                mean = line.sizes.tokens / len(line)
                share = min(len(line), left // max(mean, 1.0) + 1)
                count, tokens = count + share, tokens + share * mean
        return (count * others / sampled, tokens * others / sampled) if sampled else (0.0, 0.0)

    def _count_in(self, group: UrgencyClass[W], request: W, times: int) -> None:
        group.count += times
        group.tokens += times * request.tokens
        self._count += times
        self.tokens += times * request.tokens

    def _entry(self, group: UrgencyClass[W], tenant: str) -> Entry:
        left, request = group.lines[tenant].first()
        return self._charged[tenant], left, request.number, tenant

    def _enter(self, group: UrgencyClass[W], tenant: str) -> None:
        """The tenant may come earlier than its entry says. Where it comes later, `_top` finds out."""
        group.entries[tenant] = self._entry(group, tenant)
        heappush(group.heap, group.entries[tenant])
        if len(group.heap) > 2 * len(group.entries) + 16:
            group.heap = list(group.entries.values())
            heapify(group.heap)

    def _top(self, group: UrgencyClass[W]) -> Entry:
        """The entry of the tenant that comes first."""
        while True:
            entry = group.heap[0]
            if group.entries.get(entry[3]) is not entry:
                heappop(group.heap)
                continue
            now = self._entry(group, entry[3])
            if now == entry:
                return entry
            group.entries[entry[3]] = now
            heapreplace(group.heap, now)


def _urgency(request: Waiting) -> Urgency:
    return not request.begun, request.priority
