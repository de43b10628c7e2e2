"""Plans which workers to start, stop or switch to the other pool, from the wanted sizes, the live workers and the time.
Pure: no Ray, no clock, no sockets.

A place is a role and a number; its worker's id is `<role>-<number>`, which the next worker in the place reuses, or
`<model>/<role>-<number>` in a cluster of several models. If one
pool has a surplus worker and the other lacks one, the worker switches roles: it drains and returns under an id of the
other pool, with its weights. Idempotent: the same input gives the same plan, and after a plan has been executed the
next one is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

ROLES = ("router", "decode", "prefill")
MIN_BACKOFF_S = 0.2
MAX_BACKOFF_S = 30.0
STABLE_S = 10.0
"""A worker that was ready for this long clears the failures of its place."""


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class LiveWorker:
    worker_id: str
    phase: Phase
    can_switch_role: bool = False  # to the other pool


@dataclass(frozen=True, slots=True)
class Backoff:
    """A place's recent failures, and when it may be filled again."""

    failures: int = 0
    retry_at: float = 0.0

    def ended(self, now: float, ready_for: float) -> Backoff:
        """The backoff after one more incarnation has ended, which had been ready for `ready_for` seconds (0: never)."""
        failures = 1 if ready_for >= STABLE_S else self.failures + 1
        exponent = min(failures - 1, 16)  # keeps 2**n small however long a place keeps failing
        return Backoff(failures, now + min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2**exponent))


@dataclass(frozen=True, slots=True)
class Plan:
    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    switch: tuple[tuple[str, str], ...] = ()  # (worker, its id in the other pool)
    retry_at: float | None = None
    """When the first place in backoff may be filled; None: no place is."""


def pool_of(worker_id: str) -> str:
    """Its role, with its model before it in a cluster of several models, as in small/decode."""
    return worker_id.rpartition("-")[0]


def role_of(worker_id: str) -> str:
    return pool_of(worker_id).rpartition("/")[2]


def number_of(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])


def plan(
    wanted: Mapping[str, int],
    live: Iterable[LiveWorker],
    backoffs: Mapping[str, Backoff],
    now: float,
    model: str = "",
) -> Plan:
    """The next steps for the pools of `model`, which is empty for the only one. A stopping worker does not count, but
    keeps its id until it has ended. A role that `wanted` does not name is unknown, not unwanted: a registry that lost
    its content must not stop workers."""
    workers = list(live)
    start: list[str] = []
    stop: list[str] = []
    held: list[float] = []
    for role in (role for role in ROLES if role in wanted):
        pool = [worker for worker in workers if role_of(worker.worker_id) == role]
        serving = [worker for worker in pool if worker.phase is not Phase.STOPPING]
        surplus = max(0, len(serving) - wanted[role])
        # Workers that do not serve yet stop first, then the highest numbers, so scaling down never stops the last ready
        # one.
        serving.sort(key=lambda worker: (worker.phase is Phase.READY, -number_of(worker.worker_id)))
        stop += [worker.worker_id for worker in serving[:surplus]]
        missing = max(0, wanted[role] - len(serving))
        for worker_id in _free(f"{model}/{role}" if model else role, {worker.worker_id for worker in pool}, missing):
            retry_at = backoffs.get(worker_id, Backoff()).retry_at
            if retry_at <= now:
                start.append(worker_id)
            else:  # filling another place instead would bypass the backoff
                held.append(retry_at)
    able = {worker.worker_id for worker in workers if worker.can_switch_role and worker.phase is Phase.READY}
    leaving = [worker_id for worker_id in stop if worker_id in able and role_of(worker_id) != "router"]
    places = [worker_id for worker_id in start if role_of(worker_id) != "router"]  # of the other pool, if any leave
    switch = list(zip(leaving, places, strict=False))
    for worker_id, place in switch:
        stop.remove(worker_id)
        start.remove(place)
    return Plan(tuple(start), tuple(stop), tuple(switch), min(held, default=None))


def _free(pool: str, taken: set[str], count: int) -> list[str]:
    """The `count` lowest worker ids that are free."""
    candidates = (f"{pool}-{number}" for number in range(len(taken) + count))
    return [worker_id for worker_id in candidates if worker_id not in taken][:count]
