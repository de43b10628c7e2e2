"""The autoscaler's loop, beside the supervisor's: looks at what the workers tell the registry, has cluster.autoscale
judge it, says so in the registry and, if it is on, writes the wanted sizes there, which the supervisor follows.

    worker records ──▶ Eyes.look ──▶ Autoscaler.judge ──▶ verdicts: registry "autoscale", log
                                                           └─ on: registry "wanted" ──▶ cluster.reconcile

The requests' path knows nothing of this: a router adds to one number for each request, and its heartbeat tells it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic, time

import structlog

from cluster.autoscale import POOLS, Autoscaler, Look, Pool, Rules, Verdict, places
from cluster.registry import Registry, State, WorkerRecord
from tandem.errors import Unavailable
from tandem.settings import Settings

log = structlog.get_logger(__name__)
LOOK_EVERY_S = 1.0


def rules_of(settings: Settings) -> Rules:
    return Rules(settings.limits, settings.autoscale_hold_s, settings.slo_ttft_s, settings.slo_tpot_s)


class Eyes:
    """Turns worker records into looks."""

    def __init__(self, tpot_s: float | None) -> None:
        self._tpot_s = tpot_s
        self._arrived: dict[str, int] = {}  # what each router had counted, by incarnation

    def look(self, records: Sequence[WorkerRecord], at: float) -> Look:
        routers = [record for record in records if record.role == "router"]
        counted = {record.incarnation: record.arrived for record in routers}
        # What a router counted before it was seen first came at an unknown time.
        arrived = sum(count - self._arrived.get(life, count) for life, count in counted.items())
        self._arrived |= counted
        self._arrived = {life: count for life, count in self._arrived.items() if life in counted}
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
        """What is to be done of all of them, for what a draining worker does not finish goes on elsewhere; what can be
        done of those that are ready."""
        ready = [record for record in records if record.state is State.READY]
        rates = [record.prompt_rate for record in ready if record.prompt_rate]
        return Pool(
            workers=len(ready),
            running=sum(record.running for record in records),
            held=sum(record.blocks_held for record in records),
            backlog=sum(record.backlog for record in records),
            places=sum(places(one.max_running, one.step_s, one.stream_s, self._tpot_s) for one in ready),
            blocks=sum(record.blocks_total for record in ready),
            rate=len(ready) * sum(rates) / len(rates) if rates else 0.0,
        )


class Scaling:
    """Runs until it is cancelled."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        clock: Callable[[], float] = monotonic,
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._on = settings.autoscale == "on"
        self._registry = registry
        self._clock = clock
        self._every_s = every_s
        self._eyes = Eyes(settings.slo_tpot_s)
        self._autoscaler = Autoscaler(rules_of(settings))
        self._said: dict[str, int] = {}  # what was wanted last, by role

    async def run(self) -> None:
        async for _ in self._registry.changes(self._every_s):
            try:
                await self._look()
            except Unavailable as error:
                log.warning("autoscale.registry_lost", error=error.message)
            except Exception:  # the pools keep their sizes, and `tandem autoscale` says that nothing is heard
                log.exception("autoscale.bug")

    async def _look(self) -> None:
        look = self._eyes.look(await self._registry.workers(), self._clock())
        verdicts = self._autoscaler.judge(look, await self._registry.wanted())
        mode = "on" if self._on else "dry-run"
        for verdict in verdicts:
            if verdict.wanted != self._said.get(verdict.role, verdict.size):
                log.info("autoscale.verdict", mode=mode, **asdict(verdict))
            self._said[verdict.role] = verdict.wanted
        pools = [asdict(verdict) for verdict in verdicts]
        await self._registry.tell_scaling(json.dumps({"mode": mode, "at": time(), "pools": pools}))
        if self._on and (changes := _changes(verdicts)):
            await self._registry.want(changes)


def _changes(verdicts: Sequence[Verdict]) -> dict[str, int]:
    return {verdict.role: verdict.wanted for verdict in verdicts if verdict.wanted != verdict.size}
