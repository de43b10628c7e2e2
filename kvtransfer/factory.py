"""Makes the transport that the settings name. It is separate from the interface, which backends import."""

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
    """`kind` is "nixl", "nccl" or "auto"; only the backends of that kind are imported. `host`: this worker's own
    address, for connections that a transport accepts. Raises SettingsError, Unavailable."""
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
    raise SettingsError(f"unknown KV transport {kind!r}", field="transport", bound='"nixl", "nccl" or "auto"')


def _auto(region: Region, worker_id: str, incarnation: str, layout_hash: str, host: str) -> Transport:
    """Combines the transports that work here, the default first. If none does, raises the error of the default."""
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
