"""What the registry says of one model's supervisor and of the sizes of its pools, for the router's metrics.

The supervisor runs beside Ray's head and renews a lease in the registry. Without the head, or without the tables that
the head needs, it ends, and the lease expires. So routers, which run outside of Ray, tell of all three.
"""

from __future__ import annotations

import asyncio

from cluster.state.registry import Registry, State
from services.worker_liveness import WorkerLiveness
from tandem.errors import Unavailable
from tandem.tasks import end, forever
from tandem.telemetry.cluster_metrics import PoolSize, Supervision

READ_S = 10.0


class SupervisionWatch:
    def __init__(self, registry: Registry, view: WorkerLiveness) -> None:
        self._registry = registry
        self._view = view
        self._task: asyncio.Task[None] | None = None
        self.latest = Supervision()
        """As of the latest read; read on another thread."""

    def start(self) -> None:
        self._task = forever(self._follow, name="supervision")

    async def stop(self) -> None:
        await end(self._task)

    async def read(self) -> None:
        try:
            supervised, wanted = await self._registry.supervised(), await self._registry.wanted()
        except Unavailable:  # the view has logged it
            self.latest = Supervision()
            return
        pools = (PoolSize(role, size, self._ready(role)) for role, size in sorted(wanted.items()))
        self.latest = Supervision(supervised, tuple(pools))

    def _ready(self, role: str) -> int:
        return sum(worker.state is State.READY for worker in self._view.of_role(role))

    async def _follow(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(READ_S)
