"""The autoscaler's loop, next to the supervisor's: observes the workers' records in the registry, passes them to
cluster.autoscale_policy, publishes the verdicts in the registry and, if it is on, writes the wanted sizes there, which
the supervisor follows.

    worker records ──▶ Observer.look ──▶ AutoscalePolicy.judge ──▶ verdicts: registry "autoscale", log
                                                               └─ on: registry "wanted" ──▶ the supervisor

The path of requests is not involved: a router increments one counter per request, and its heartbeat reports it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic, time

import structlog

from cluster.autoscale_policy import POOLS, AutoscalePolicy, Look, Pool, Rules, Verdict
from cluster.state.registry import Registry, State, WorkerRecord
from tandem.errors import Unavailable
from tandem.linear_fit import places
from tandem.settings import Settings

log = structlog.get_logger(__name__)
INTERVAL_S = 1.0


class Observer:
    """Turns worker records into observations."""

    def __init__(self, tpot_s: float | None) -> None:
        self._tpot_s = tpot_s
        self._arrived: dict[str, int] = {}  # each router's counter, by incarnation

    def look(self, records: Sequence[WorkerRecord], at: float) -> Look:
        routers = [record for record in records if record.role == "router"]
        counted = {record.incarnation: record.arrived for record in routers}
        # A router's count before its first observation has unknown times.
        arrived = sum(count - self._arrived.get(incarnation, count) for incarnation, count in counted.items())
        self._arrived |= counted
        self._arrived = {router: count for router, count in self._arrived.items() if router in counted}
        return Look(
            at=at,
            routers=len(routers),
            arrived=arrived,
            queued=sum(record.waiting for record in routers),
            queued_tokens=sum(record.backlog for record in routers),
            block_size=max((record.block_size for record in records), default=1),
            pools={role: self._pool([record for record in records if record.role == role]) for role in POOLS},
        )

    def _pool(self, records: list[WorkerRecord]) -> Pool:
        """The load of all workers, because requests that a draining worker does not finish continue elsewhere; the
        capacity of ready workers."""
        ready = [record for record in records if record.state is State.READY]
        rates = [record.prompt_rate for record in ready if record.prompt_rate]
        return Pool(
            workers=len(ready),
            running=sum(record.running for record in records),
            held=sum(record.blocks_held for record in records),
            backlog=sum(record.backlog for record in records),
            places=sum(places(record.max_running, record.step_s, record.stream_s, self._tpot_s) for record in ready),
            blocks=sum(record.blocks_total for record in ready),
            rate=len(ready) * sum(rates) / len(rates) if rates else 0.0,
        )


class Autoscaler:
    """Runs until it is cancelled."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        clock: Callable[[], float] = monotonic,
        every_s: float = INTERVAL_S,
    ) -> None:
        self._on = settings.autoscale == "on"
        self._registry = registry
        self._clock = clock
        self._every_s = every_s
        self._observer = Observer(settings.slo_tpot_s)
        self._policy = AutoscalePolicy(
            Rules(settings.limits, settings.autoscale_hold_s, settings.slo_ttft_s, settings.slo_tpot_s)
        )
        self._logged: dict[str, int] = {}  # role -> the wanted size of the last verdict

    async def run(self) -> None:
        async for _ in self._registry.changes(self._every_s):
            try:
                await self._look()
            except Unavailable as error:
                log.warning("autoscale.registry_lost", error=error.message)
            except Exception:  # the pools keep their sizes, and `tandem autoscale` reports the silence
                log.exception("autoscale.bug")

    async def _look(self) -> None:
        look = self._observer.look(await self._registry.workers(), self._clock())
        verdicts = self._policy.judge(look, await self._registry.wanted())
        mode = "on" if self._on else "dry-run"
        for verdict in verdicts:
            if verdict.wanted != self._logged.get(verdict.role, verdict.size):
                log.info("autoscale.verdict", mode=mode, **asdict(verdict))
            self._logged[verdict.role] = verdict.wanted
        pools = [asdict(verdict) for verdict in verdicts]
        await self._registry.publish_scaling(json.dumps({"mode": mode, "at": time(), "pools": pools}))
        if self._on and (changes := _changes(verdicts)):
            await self._registry.set_wanted(changes)


def _changes(verdicts: Sequence[Verdict]) -> dict[str, int]:
    return {verdict.role: verdict.wanted for verdict in verdicts if verdict.wanted != verdict.size}
