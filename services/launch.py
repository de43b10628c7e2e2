"""Starts a worker or a router of any role in this process; supervisor and tests know nothing more of services."""

from __future__ import annotations

import gc
import importlib
from typing import Protocol

from tandem.errors import SettingsError
from tandem.settings import Settings

# Imported only when asked for: the router must not load torch.
_MODULES = {
    "router": "services.router.servicer",
    "decode": "services.decode.servicer",
    "prefill": "services.prefill.servicer",
}


class Service(Protocol):
    address: str
    incarnation: str

    async def wait(self) -> None:
        """Until it has ended by itself: returns after a drain, raises when it broke."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Finish what runs for at most `grace_s` seconds, then end. Safe to call twice."""
        ...


async def start(role: str, settings: Settings, worker_id: str) -> Service:
    """A running service that has told the registry about itself. Raises what its role's `start` raises."""
    if role not in _MODULES:
        raise SettingsError(f"unknown role {role!r}", field="role", bound=", ".join(_MODULES))
    service: Service = await importlib.import_module(_MODULES[role]).start(settings, worker_id)
    # A full collection looks at every object that torch and transformers made, some 200 ms with every stream stopped.
    # What is alive now stays alive: collect once, then leave it out of all later ones.
    gc.collect()
    gc.freeze()
    return service
