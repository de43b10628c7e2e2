"""`services.launch` for a worker in a pod of a RayCluster: with the settings of its own pod.

A driver's settings are those of the driver's pod. A worker needs those of its own: address, CPU threads, what its pool
overrides. A process of Ray has the environment of its node's pod, so they are read from there.
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
    """`settings` are the driver's. Raises PreconditionFailed when this pod is of another cluster, or of the same one
    with another model: its pod template is older or newer than the driver's."""
    own = tandem_settings.load()
    if own.cluster != settings.cluster:
        raise PreconditionFailed(
            f"this pod's workers belong to cluster {own.cluster!r}, the supervisor to {settings.cluster!r}: one of them"
            " was not replaced in an upgrade; delete the older pods",
            reason="OTHER_CLUSTER",
            field="cluster",
        )
    return await launch.start(role, own, worker_id, say, engine)
