"""The policy of placement, over all workers and not over those that the router shortlists."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from services.router.routing.placement import Begun, PathLatencies, Placement, RoutingConfig, WorkerSnapshot
from services.router.routing.worker_selector import choose_decode, choose_prefill


def place(
    decodes: Sequence[WorkerSnapshot],
    prefills: Sequence[WorkerSnapshot],
    tokens: int,
    ahead: int,
    config: RoutingConfig,
    kv_holder: str = "",
    latencies: PathLatencies = MappingProxyType({}),
    begun: Begun | None = None,
) -> Placement | None:
    """The best placement of a request; None: no room now."""
    decode = choose_decode(decodes, tokens, ahead, config, kv_holder, latencies, begun)
    if decode is None:
        return None
    return choose_prefill(decode, prefills, tokens, config, kv_holder, latencies=latencies, begun=begun)
