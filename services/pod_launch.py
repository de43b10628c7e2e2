"""`services.launch` for a worker in a pod of a RayCluster, with the settings of that pod.

The driver passes the settings of its own pod. A worker needs those of the worker's pod (address, CPU threads, the
pool's overrides), which it reads from its environment: Ray's processes have the environment of their pod.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services import launch
from tandem import settings as tandem_settings
from tandem.errors import PreconditionFailed
from tandem.settings import Settings

prepare = launch.prepare


async def start(
    role: str, settings: Settings, worker_id: str, say: Callable[[str], None], engine: Any = None
) -> launch.Service:
    """`settings` are the driver's. Raises PreconditionFailed if this pod belongs to another cluster, or to this cluster
    with another model because its pod template is older or newer than the driver's."""
    own = tandem_settings.load()
    if own.cluster != settings.cluster:
        raise PreconditionFailed(
            f"this pod's workers belong to cluster {own.cluster!r}, the supervisor to {settings.cluster!r}: one of them"
            " was not replaced in an upgrade; delete the older pods",
            reason="OTHER_CLUSTER",
            field="cluster",
        )
    return await launch.start(role, own, worker_id, say, engine)
