"""What a process sees of its cluster: the registry, and a router also the supervisor and the sizes of the pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Reach(NamedTuple):
    """How a process last reached the registry. None: not known, or not permitted to know."""

    up: bool = True
    round_trip_s: float | None = None
    memory: tuple[int, int] | None = None  # bytes in use, and the limit; 0: no limit


class RegistryReach(Collector):
    def __init__(self, reach: Callable[[], Reach]) -> None:
        self._reach = reach

    def collect(self) -> Iterator[Metric]:
        reach = self._reach()
        yield _gauge("tandem_registry_up", "1 while the registry answers this process.", reach.up)
        if reach.round_trip_s is not None:
            yield _gauge("tandem_registry_round_trip_seconds", "Of the latest answered call.", reach.round_trip_s)
        if reach.memory is not None:
            used, most = reach.memory
            yield _gauge("tandem_registry_memory_used_bytes", "Memory of the registry's server.", used)
            if most:
                yield _gauge("tandem_registry_memory_limit_bytes", "Its maxmemory.", most)


class PoolSize(NamedTuple):
    """Of a pool of which the registry has a wanted size."""

    role: str
    wanted: int
    ready: int  # workers that this router may give requests


class Supervision(NamedTuple):
    """What the registry says of one model's supervisor. Without a registry that answers, nothing is known."""

    up: bool | None = None  # one holds the lease
    pools: tuple[PoolSize, ...] = ()


class SupervisionSeen(Collector):
    def __init__(self, supervision: Callable[[], Supervision]) -> None:
        self._supervision = supervision

    def collect(self) -> Iterator[Metric]:
        seen = self._supervision()
        if seen.up is not None:
            yield _gauge("tandem_supervisor_up", "1 while a supervisor holds the lease of this model.", seen.up)
        wanted = GaugeMetricFamily("tandem_wanted_workers", "Workers that a pool is to have.", labels=["role"])
        ready = GaugeMetricFamily("tandem_ready_workers", "Of these, those that are ready.", labels=["role"])
        for pool in seen.pools:
            wanted.add_metric([pool.role], pool.wanted)
            ready.add_metric([pool.role], pool.ready)
        yield from (wanted, ready)


def _gauge(name: str, about: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, value=value)
