"""The pools of one model as this router sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import sample

import structlog

from cluster.state.heartbeat import Heartbeat
from cluster.state.registry import Registry, State, WorkerRecord
from services.adapter_follower import AdapterFollower
from services.grpc_server import Channels
from services.router.execution.stream_mux import StreamMuxes
from services.router.preprocess.served_model import ServedModel
from services.router.routing.placement import RoutingConfig
from services.router.routing.prefix_index import PrefixIndex
from services.router.routing.request_scheduler import RequestScheduler
from services.router.supervision_watch import SupervisionWatch
from services.worker_liveness import WorkerLiveness
from tandem.errors import TandemError
from tandem.grpc_errors import calling
from tandem.settings import Settings
from tandem.tasks import end, forever

log = structlog.get_logger(__name__)

REACH_AT_ONCE = 8  # decode workers that are asked at the same time, until the first one answers
REACH_AGAIN_S = 0.5  # until others, or the same ones, are asked


class ModelPools:
    """The live workers of one model, their caches and load, and the shared streams with them. Models share none of
    this: each model's pools are a separate cluster in the registry (tandem/model_settings.py)."""

    def __init__(
        self, settings: Settings, channels: Channels, describe: Callable[[], WorkerRecord], vocabulary: str = ""
    ) -> None:
        """`describe`: this router's record, with its load of this model. `vocabulary`: as WorkerLiveness."""
        self.settings = settings
        self.registry = Registry(settings.redis or "", settings.cluster, settings.heartbeat_ttl_s)
        self.view = WorkerLiveness(self.registry, settings.heartbeat_s, vocabulary)
        self.supervision = SupervisionWatch(self.registry, self.view)
        self.heartbeat = Heartbeat(self.registry, describe, settings.heartbeat_s)
        self.adapters = AdapterFollower(self.registry, settings.heartbeat_s, self.heartbeat.changed)
        self.served = ServedModel(self.view, settings.adapters, self.adapters)
        self.muxes = StreamMuxes(channels, settings.stream_interval_s)
        self.prefixes = PrefixIndex(self.view, channels)
        self.scheduler = RequestScheduler(self.view, settings.queue_timeout_s, _routing_config(settings))
        self.reached = False  # a decode worker has answered this router
        self._unreached: set[tuple[str, str]] = set()  # incarnations of which the log says why they did not answer
        self._reaching: asyncio.Task[None] | None = None
        self._indexing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the registry; `announce` makes the router known."""
        await self.view.start()
        await self.adapters.start()
        self.supervision.start()
        self._reaching = forever(self._reach, name="reach")

    async def announce(self) -> None:
        await self.heartbeat.start()
        if self.settings.place_by_prefix:
            self._indexing = forever(self.prefixes.follow, name="prefixes")

    def addresses(self) -> set[str]:
        """The addresses of all workers that may be alive."""
        return {record.address for record in self.view.incarnations.values() if record.role != "router"}

    async def _reach(self) -> None:
        """Asks ready decode workers until the first one answers. A record does not show whether the network lets this
        router through, nor whether the worker accepts its certificate and token: during an upgrade that changes these,
        former workers do not."""
        async for _ in self.view.updates():
            if not self.reached and (ready := [one for one in self.view.of_role("decode") if one.state is State.READY]):
                await asyncio.gather(*map(self._ask, sample(ready, min(len(ready), REACH_AT_ONCE))))
                await asyncio.sleep(REACH_AGAIN_S)

    async def _ask(self, worker: WorkerRecord) -> None:
        try:
            with calling(worker.worker_id):
                await self.muxes.of(worker)  # within its own time limit
        except TandemError as error:
            if (incarnation := (worker.worker_id, worker.incarnation)) not in self._unreached:
                self._unreached.add(incarnation)
                log.warning("decode_worker.not_reached", worker=worker.worker_id, error=error.message)
            return
        self.reached = True
        self.heartbeat.changed()

    async def stop(self) -> None:
        await end(self._reaching)
        await end(self._indexing)
        await self.supervision.stop()
        await self.adapters.stop()
        await self.heartbeat.stop()
        await self.view.stop()
        await self.muxes.close()
        await self.registry.close()


def _routing_config(settings: Settings) -> RoutingConfig:
    return RoutingConfig(
        local=settings.local_prefill,
        decode_slowdown_limit=settings.stretch,
        mixed_step_floor_s=settings.beside_s,
        ttft=settings.slo_ttft_s,
        tpot=settings.slo_tpot_s,
    )
