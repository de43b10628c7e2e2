"""Makes the transport that the settings name. Apart from the interface, so that a backend may import that."""

from __future__ import annotations

from kvtransfer.transport import Transport
from kvtransfer.types import Region
from tandem.errors import SettingsError

LOOPBACK = "127.0.0.1"


def make_transport(
    kind: str, region: Region, worker_id: str, incarnation: str, layout_hash: str, host: str = LOOPBACK
) -> Transport:
    """`kind` is "nixl", "nccl" or "inprocess"; only the backend of that kind is imported. `host`: this worker's own
    address, for connections that a transport accepts. Raises SettingsError, Unavailable."""
    if kind == "nixl":
        from kvtransfer.backends.nixl_transport import NixlTransport

        transport = NixlTransport(region, worker_id, incarnation, layout_hash)
        transport.start()
        return transport
    if kind == "nccl":
        from kvtransfer.backends.nccl.transport import NcclTransport

        return NcclTransport(region, worker_id, incarnation, layout_hash, host)
    if kind == "inprocess":
        from kvtransfer.backends.in_process import InProcessTransport

        return InProcessTransport(region, worker_id, incarnation, layout_hash)
    raise SettingsError(f"unknown KV transport {kind!r}", field="transport", bound='"nixl", "nccl" or "inprocess"')
