"""The pools of one model as this router sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.state.heartbeat import Heartbeat
from cluster.state.registry import Registry, WorkerRecord
from services.adapter_follower import AdapterFollower
from services.grpc_server import Channels
from services.router.execution.stream_mux import StreamMuxes
from services.router.preprocess.served_model import ServedModel
from services.router.routing.placement import RoutingConfig
from services.router.routing.prefix_index import PrefixIndex
from services.router.routing.request_scheduler import RequestScheduler
from services.worker_liveness import WorkerLiveness
from tandem.settings import Settings
from tandem.tasks import end, forever


class ModelPools:
    """The live workers of one model, their caches and load, and the shared streams with them. Models share none of
    this: each model's pools are a separate cluster in the registry (tandem/model_settings.py)."""

    def __init__(self, settings: Settings, channels: Channels, describe: Callable[[], WorkerRecord]) -> None:
        """`describe`: this router's record, with its load of this model."""
        self.settings = settings
        self.registry = Registry(settings.redis or "", settings.cluster, settings.heartbeat_ttl_s)
        self.view = WorkerLiveness(self.registry, settings.heartbeat_s)
        self.heartbeat = Heartbeat(self.registry, describe, settings.heartbeat_s)
        self.adapters = AdapterFollower(self.registry, settings.heartbeat_s, self.heartbeat.changed)
        self.served = ServedModel(self.view, settings.adapters, self.adapters)
        self.muxes = StreamMuxes(channels, settings.stream_interval_s)
        self.prefixes = PrefixIndex(self.view, channels)
        self.scheduler = RequestScheduler(self.view, settings.queue_timeout_s, _routing_config(settings))
        self._indexing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the registry; `announce` makes the router known."""
        await self.view.start()
        await self.adapters.start()

    async def announce(self) -> None:
        await self.heartbeat.start()
        if self.settings.place_by_prefix:
            self._indexing = forever(self.prefixes.follow, name="prefixes")

    def addresses(self) -> set[str]:
        """The addresses of all workers that may be alive."""
        return {record.address for record in self.view.incarnations.values() if record.role != "router"}

    async def stop(self) -> None:
        await end(self._indexing)
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
