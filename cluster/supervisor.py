"""What to start, to stop and to turn into what, given what is wanted, what is seen and the time. Pure: no Ray, no
clock, no sockets.

A place is a role and a number; its worker's id is `<role>-<number>`. A dead worker's id is used again by the next life
in the same place. Where one pool has a worker too many and the other one too few, the worker turns: it drains and comes
back under an id of the other pool, with its weights. Safe to repeat: the same input gives the same plan, and a plan
carried out leaves nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

ROLES = ("router", "decode", "prefill")
FIRST_DELAY_S = 0.2
LAST_DELAY_S = 30.0
STABLE_S = 10.0
"""A life that was ready for so long clears the failures of its place."""


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Seen:
    """One live worker."""

    worker_id: str
    phase: Phase
    turns: bool = False  # it can serve the other pool as well


@dataclass(frozen=True, slots=True)
class Backoff:
    """A place's recent failures, and when it may be filled again."""

    failures: int = 0
    retry_at: float = 0.0

    def ended(self, now: float, ready_for: float) -> Backoff:
        """After one more life has ended, which had been ready for so many seconds (0: never)."""
        failures = 1 if ready_for >= STABLE_S else self.failures + 1
        exponent = min(failures - 1, 16)  # keeps 2**n small however long a place keeps failing
        return Backoff(failures, now + min(LAST_DELAY_S, FIRST_DELAY_S * 2**exponent))


@dataclass(frozen=True, slots=True)
class Plan:
    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    turn: tuple[tuple[str, str], ...] = ()  # a worker, and the id under which it comes back
    retry_at: float | None = None
    """When a place that is held back may be filled; None if none is."""


def role_of(worker_id: str) -> str:
    return worker_id.rpartition("-")[0]


def number_of(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])


def plan(wanted: Mapping[str, int], seen: Iterable[Seen], backoffs: Mapping[str, Backoff], now: float) -> Plan:
    """The next steps. A stopping worker does not count, but keeps its id until it is gone. A role that `wanted` does
    not name is unknown, not unwanted: a registry that lost its content must not stop a worker."""
    workers = list(seen)
    start: list[str] = []
    stop: list[str] = []
    held: list[float] = []
    for role in (role for role in ROLES if role in wanted):
        mine = [worker for worker in workers if role_of(worker.worker_id) == role]
        serving = [worker for worker in mine if worker.phase is not Phase.STOPPING]
        surplus = max(0, len(serving) - wanted[role])
        # Those that do not serve yet go first, then the highest numbers: scaling down never takes the last ready one.
        serving.sort(key=lambda worker: (worker.phase is Phase.READY, -number_of(worker.worker_id)))
        stop += [worker.worker_id for worker in serving[:surplus]]
        missing = max(0, wanted[role] - len(serving))
        for worker_id in _free(role, {worker.worker_id for worker in mine}, missing):
            retry_at = backoffs.get(worker_id, Backoff()).retry_at
            if retry_at <= now:
                start.append(worker_id)
            else:  # the place waits; filling another in its stead would be a way around the delay
                held.append(retry_at)
    able = {worker.worker_id for worker in workers if worker.turns and worker.phase is Phase.READY}
    leaving = [worker_id for worker_id in stop if worker_id in able and role_of(worker_id) != "router"]
    places = [worker_id for worker_id in start if role_of(worker_id) != "router"]  # of the other pool, if any leave
    turn = list(zip(leaving, places, strict=False))
    for one, place in turn:
        stop.remove(one)
        start.remove(place)
    return Plan(tuple(start), tuple(stop), tuple(turn), min(held, default=None))


def _free(role: str, taken: set[str], count: int) -> list[str]:
    """The `count` lowest ids that nobody has."""
    candidates = (f"{role}-{number}" for number in range(len(taken) + count))
    return [worker_id for worker_id in candidates if worker_id not in taken][:count]
