"""Requests that wait for some of the decode workers, because no other could ever take them. Pure.

They wait apart from the others, so that a worker they cannot use stays in use. They wait in lines, one for each set of
workers. No other request is placed on a worker that the first of a line waits for: of the room that it takes for a long
prompt, small requests would take each part as it comes free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from itertools import takewhile

from services.router.routing.placement import WorkerSnapshot
from services.router.routing.waiting_request import WaitingRequest
from services.router.routing.worker_pools import DecodePool


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
    def __init__(self) -> None:
        self._lines: dict[Hashable, dict[WaitingRequest, None]] = {}  # each in the order of `add`
        self._line_of: dict[WaitingRequest, Hashable] = {}

    def __len__(self) -> int:
        return len(self._line_of)

    @property
    def tokens(self) -> int:
        """The prompt tokens of all its requests."""
        return sum(waiting.tokens for waiting in self._line_of)

    def add(self, waiting: WaitingRequest, line: Hashable) -> None:
        self._lines.setdefault(line, {})[waiting] = None
        self._line_of[waiting] = line

    def remove(self, waiting: WaitingRequest) -> None:
        """Does nothing with a request that is not here."""
        if waiting in self._line_of:
            line = self._line_of.pop(waiting)
            del self._lines[line][waiting]
            if not self._lines[line]:
                del self._lines[line]

    def firsts(self) -> list[WaitingRequest]:
        """The first of each line, in the order in which they arrived."""
        return sorted((next(iter(line)) for line in self._lines.values()), key=lambda first: first.number)

    def reserved(self, waiting: WaitingRequest) -> Callable[[WorkerSnapshot], bool] | None:
        """Whether a worker is kept from this request, for one that is the first of its line and came before. None: no
        worker is."""
        before = list(takewhile(lambda first: first is not waiting, self.firsts()))
        return (lambda worker: any(first.suits(worker) for first in before)) if before else None
