"""Who waits for a place, and in which order. Pure: no clock, no sockets.

First those whose answer has begun: their clients are in the middle of it. Then the more urgent priority. Of one
priority the tenant that has had the fewest tokens, so that nobody's crowd keeps another one waiting (the virtual
token counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Of one tenant the shorter
prompt, as in engine.scheduler; later ones delay nobody by more tokens than it has itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

GENERATED = 2.0  # what a generated token counts as, in tokens of a prompt: the paper's weights


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that has no place yet."""

    tokens: int  # of the prompt
    tenant: str = ""
    priority: int = 0  # the smaller, the more urgent
    begun: bool = False  # its client has had tokens, or waits for another completion of a prompt that is served
    number: int = 0  # in the order of arrival
    overtaken: int = 0  # tokens of later ones of the same tenant that were placed before it


W = TypeVar("W", bound=Waiting)


class Queue(Generic[W]):
    def __init__(self) -> None:
        self._waiting: list[W] = []
        self._had: dict[str, float] = {}  # tokens of each tenant
        self._arrivals = 0
        self._latest = 0.0  # what the tenant had that was placed last

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[W]:
        return iter(self._waiting)

    def add(self, one: W) -> None:
        """A tenant that comes back starts where those who wait are: what it did not use before is nothing saved."""
        waiting = {other.tenant for other in self._waiting}
        if one.tenant not in waiting:
            least = min((self._had[tenant] for tenant in waiting), default=self._latest)
            self._had[one.tenant] = max(self._had.get(one.tenant, 0.0), least)
        self._arrivals += 1
        one.number = self._arrivals
        self._waiting.append(one)

    def remove(self, one: W) -> None:
        """It gives up. Safe to repeat."""
        self._waiting = [other for other in self._waiting if other is not one]

    def place(self, one: W) -> None:
        """It has its place, and its tenant has had its prompt."""
        self.remove(one)
        for other in self._waiting:
            if other.number < one.number and (other.tenant, other.priority) == (one.tenant, one.priority):
                other.overtaken += one.tokens
        self.had(one.tenant, one.tokens)
        self._latest = self._had[one.tenant]

    def had(self, tenant: str, tokens: float) -> None:
        self._had[tenant] = self._had.get(tenant, 0.0) + tokens

    def first(self) -> W | None:
        return min(self._waiting, key=self._turn, default=None)

    def before(self, one: W) -> list[W]:
        """Who comes before it, if each tenant gets in turn what it waits for and nobody else comes."""
        urgency = _urgency(one)
        equals = sorted((other for other in self._waiting if _urgency(other) == urgency), key=self._turn)
        own = [other for other in equals if other.tenant == one.tenant and self._turn(other) < self._turn(one)]
        reach = self._had[one.tenant] + sum(other.tokens for other in own)  # what its tenant has had when it comes
        found = [other for other in self._waiting if _urgency(other) < urgency] + own
        had = dict(self._had)
        for other in equals:
            if other.tenant != one.tenant and had[other.tenant] <= reach:
                found.append(other)
                had[other.tenant] += other.tokens
        return found

    def _turn(self, one: W) -> tuple[tuple[bool, int], float, int, int]:
        return _urgency(one), self._had[one.tenant], one.tokens - one.overtaken, one.number


def _urgency(one: Waiting) -> tuple[bool, int]:
    return not one.begun, one.priority
