"""Requests that wait for some of the decode workers, because no other could ever take them. Pure.

They wait apart from the others, so that a worker they cannot use stays in use: in lines, one for each set of workers,
each in the order of a fair queue. The first ones of the lines and of the queue are placed in this order, too. A worker
that the first of a line waits for takes no request that comes after it: of the room that it needs for a long prompt,
small requests would take each part as it comes free.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable

from services.router.routing.fair_queue import FairQueue
from services.router.routing.placement import WorkerSnapshot
from services.router.routing.waiting_request import WaitingRequest
from services.router.routing.worker_pools import DecodePool

# A dispatch compares the first request of each line with those of all lines before it: its cost grows with the square
# of their number. A request that would begin one more line stays in the queue, where it keeps all others waiting.
MAX_LINES = 16


def constraint(waiting: WaitingRequest, decodes: DecodePool) -> Hashable | None:
    """Equal for requests that the same workers could take if they had room. None: every usable worker could."""
    unsuited = decodes.left_out(waiting.unsuited)
    if not unsuited and waiting.begun_with is None and all(length > waiting.tokens for length in decodes.lengths):
        return None  # without a look at each worker
    if not any(
        worker.usable and (worker.identity in unsuited or not waiting.runs_on(worker))
        for worker in decodes.workers.values()
    ):
        return None
    computes_with = waiting.begun_with.computes_with if waiting.begun_with else ""
    length = min((length for length in decodes.lengths if length > waiting.tokens), default=math.inf)
    return computes_with, length, frozenset(unsuited)


class ConstrainedQueue:
    def __init__(self, queue: FairQueue[WaitingRequest]) -> None:
        """`queue`: of all other requests. What a tenant received by either, and whether it waits, counts in both."""
        self._queue = queue
        self._lines: dict[Hashable, FairQueue[WaitingRequest]] = {}
        self._line_of: dict[WaitingRequest, Hashable] = {}

    def __len__(self) -> int:
        return len(self._line_of)

    @property
    def tokens(self) -> int:
        """The prompt tokens of all its requests."""
        return sum(line.tokens for line in self._lines.values())

    def add(self, waiting: WaitingRequest, line: Hashable) -> bool:
        """Moves the first of the queue to this line. False: there are MAX_LINES others."""
        if line not in self._lines:
            if len(self._lines) == MAX_LINES:
                return False
            self._lines[line] = FairQueue(self._queue)
        self._queue.move(waiting, self._lines[line])
        self._line_of[waiting] = line
        return True

    def remove(self, waiting: WaitingRequest) -> None:
        """Removes it from its line, or else from the queue. Idempotent."""
        self._leave(waiting, FairQueue.remove)

    def place(self, waiting: WaitingRequest) -> bool:
        """FairQueue.place, in its line, or else in the queue. False: in the queue."""
        return self._leave(waiting, FairQueue.place)

    def _leave(
        self, waiting: WaitingRequest, leave: Callable[[FairQueue[WaitingRequest], WaitingRequest], None]
    ) -> bool:
        if waiting not in self._line_of:
            leave(self._queue, waiting)
            return False
        name = self._line_of.pop(waiting)
        leave(self._lines[name], waiting)
        if not self._lines[name]:
            del self._lines[name]
        return True

    def give_back(self, tenant: str, tokens: float) -> None:
        """FairQueue.give_back, in the queue and in all lines."""
        self._queue.give_back(tenant, tokens)
        for line in self._lines.values():
            line.look_again(tenant)

    def tokens_before(self, waiting: WaitingRequest, decodes: DecodePool) -> int:
        """Those of FairQueue.before, in the line where the request would wait."""
        line = self._lines.get(constraint(waiting, decodes)) if self._lines else None
        return line.before(waiting)[1] if line else 0

    def firsts(self, before: WaitingRequest | None = None) -> list[WaitingRequest]:
        """The first of each line, in their order; only those that come before this request, if one is given."""
        firsts = sorted(filter(None, (line.first() for line in self._lines.values())), key=self._order)
        return firsts if before is None else firsts[: bisect_left(firsts, self._order(before), key=self._order)]

    def reserved(self, waiting: WaitingRequest) -> Callable[[WorkerSnapshot], bool] | None:
        """Tells whether a worker is kept from this request, for the first request of a line that comes before it. None:
        no worker is."""
        before = self.firsts(waiting)
        return (lambda worker: any(first.suits(worker) for first in before)) if before else None

    def _order(self, waiting: WaitingRequest) -> tuple[bool, int, float, bool, int]:
        """Of one tenant, a request in a line comes before those in the queue, whose first it was when it moved."""
        return *self._queue.order(waiting), waiting not in self._line_of, waiting.number
