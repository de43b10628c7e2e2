"""Makes the transport that the settings name. Apart from the interface, so that a backend may import that."""

from __future__ import annotations

import logging

from kvtransfer.auto_transport import AutoTransport
from kvtransfer.transport import Transport
from kvtransfer.types import Region
from tandem.errors import SettingsError, TandemError, Unavailable

log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"


def make_transport(
    kind: str, region: Region, worker_id: str, incarnation: str, layout_hash: str, host: str = LOOPBACK
) -> Transport:
    """`kind` is "nixl", "nccl", "auto" or "inprocess"; only the backends of that kind are imported. `host`: this
    worker's own address, for connections that a transport accepts. Raises SettingsError, Unavailable."""
    if kind == "nixl":
        from kvtransfer.backends.nixl_transport import NixlTransport

        transport = NixlTransport(region, worker_id, incarnation, layout_hash)
        transport.start()
        return transport
    if kind == "nccl":
        from kvtransfer.backends.nccl.transport import NcclTransport

        return NcclTransport(region, worker_id, incarnation, layout_hash, host)
    if kind == "auto":
        return _auto(region, worker_id, incarnation, layout_hash, host)
    if kind == "inprocess":
        from kvtransfer.backends.in_process import InProcessTransport

        return InProcessTransport(region, worker_id, incarnation, layout_hash)
    raise SettingsError(
        f"unknown KV transport {kind!r}", field="transport", bound='"nixl", "nccl", "auto" or "inprocess"'
    )


def _auto(region: Region, worker_id: str, incarnation: str, layout_hash: str, host: str) -> Transport:
    """Of the transports that can be made here, the default first. Raises what the default raises if none can."""
    made: list[Transport] = []
    errors: list[TandemError] = []
    for kind in ("nixl", "nccl"):
        try:
            made.append(make_transport(kind, region, worker_id, incarnation, layout_hash, host))
        except (Unavailable, SettingsError) as error:
            log.warning("no transport %s on this worker: %s", kind, error.message)
            errors.append(error)
    if not made:
        raise errors[0]
    return AutoTransport(made)
