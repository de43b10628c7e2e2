"""Chooses the workers of a request: its decode worker, then its prefill worker. Pure functions over snapshots: no
clock, no sockets. They define the policy over all workers; the router runs them over the few workers of each pool that
worker_pools.py shortlists.

The decode worker is chosen first; it must have room now, or nothing starts. Then the prefill worker that can hand over
to it and would start the prompt soonest. Then local_or_remote.py decides which of the two computes the prompt.

Workers compute the shorter prompt first (engine.core.scheduler). The router keeps the same order, and holds back a
prompt that no prefill worker could start soon: the first worker that becomes free takes it, and until then it holds no
blocks on a decode worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from services.router.routing.local_or_remote import (
    LOCAL_COST_MARGIN,
    blocks_to_move,
    estimate_local,
    local_cost,
    local_or_remote,
    path_latency,
    why_only_local,
)
from services.router.routing.placement import Begun, PathLatencies, Placement, RoutingConfig, WorkerSnapshot

# The work that a prefill worker must have queued so that it does not become idle before the router's next prompt
# arrives.
BUFFERED_PROMPTS, BUFFERED_S = 2, 0.5
# A path's latency counts in the choice of the prefill worker if it exceeds this many times that of the shortest path.
LONG_PATH_RATIO = 2.0


def choose_decode(
    decodes: Sequence[WorkerSnapshot],
    tokens: int,
    ahead: int,
    config: RoutingConfig,
    kv_holder: str = "",
    latencies: PathLatencies = MappingProxyType({}),
    begun: Begun | None = None,
) -> WorkerSnapshot | None:
    """The best decode worker for a request of `tokens` tokens with `ahead` more to reserve; None: no room now.

    It is the least loaded one with room, by the share of its slots in use, then by free blocks; or another one that has
    cached more of the prompt and would compute the rest at clearly lower cost. Equal workers alternate.

    `kv_holder` is the decode worker that has the KV of all tokens but those of the last block, or "". If it has room
    for the new tokens, nothing moves. `begun`: only a worker that computes the same remaining tokens continues a
    request that has begun, preferably one with the same bits.
    """
    with_room = [
        worker for worker in decodes if worker.continues(begun) and has_room(worker, tokens, ahead, config, kv_holder)
    ]
    for worker in with_room:
        if worker.worker_id == kv_holder:
            return worker
    order = begun.sum_order if begun else ""
    same_order = [worker for worker in with_room if order and worker.sum_order == order]
    return _best_decode(same_order or with_room, tokens, config, latencies) if with_room else None


def choose_prefill(
    decode: WorkerSnapshot,
    prefills: Sequence[WorkerSnapshot],
    tokens: int,
    config: RoutingConfig,
    kv_holder: str = "",
    queued_behind: float = 0.0,
    latencies: PathLatencies = MappingProxyType({}),
    begun: Begun | None = None,
) -> Placement:
    """Which worker computes the prompt for this decode worker: of the prefill workers with the same KV layout, the one
    that would start soonest, or the decode worker itself. Uncached tokens and a clearly longer path count as waiting.
    Equal workers alternate. A request that has begun is recomputed only with the same KV type, because another type
    would round. `queued_behind` is the number of prompts that wait at the router behind this one, for each prefill
    worker."""
    if decode.worker_id == kv_holder:
        return Placement(decode, None, "the KV of the prompt is there already")
    compatible = [
        worker
        for worker in prefills
        if worker.usable and worker.layout_hash == decode.layout_hash and worker.continues(begun)
        if worker.max_model_len > tokens
    ]
    if config.local == "always" or not compatible:
        why = why_only_local(decode, prefills, tokens, config)
        return Placement(decode, None, why, estimate_local(decode, tokens, config))
    prefill = _best_prefill(compatible, decode, tokens, latencies)
    return local_or_remote(decode, prefill, tokens, config, queued_behind, latencies)


def has_room(worker: WorkerSnapshot, tokens: int, ahead: int, config: RoutingConfig, kv_holder: str = "") -> bool:
    """Whether a request can start on this decode worker now."""
    return (
        worker.usable
        and worker.running < worker.max_running
        and (worker.free_blocks - worker.state_blocks) * worker.block_size
        >= (worker.block_size if worker.worker_id == kv_holder else tokens) + ahead
        and worker.max_model_len > tokens
        and _meets_objective(worker, config)
    )


def _meets_objective(worker: WorkerSnapshot, config: RoutingConfig) -> bool:
    """Whether its streams would meet the objective with one more; the first stream is always accepted."""
    return config.tpot is None or worker.running == 0 or worker.step_s + worker.stream_s * worker.running <= config.tpot


def _best_decode(
    with_room: Sequence[WorkerSnapshot], tokens: int, config: RoutingConfig, latencies: PathLatencies
) -> WorkerSnapshot:
    least_loaded = min(
        with_room, key=lambda worker: (worker.running / worker.max_running, -worker.free_blocks, *_last_used(worker))
    )
    cached_more = [
        worker
        for worker in with_room
        if worker.cached > least_loaded.cached and worker.prompt_rate and config.local != "never"
    ]
    if not cached_more or not least_loaded.prompt_rate:
        return least_loaded
    best = min(cached_more, key=lambda worker: (local_cost(worker, tokens, config, latencies), *_last_used(worker)))
    limit_s = LOCAL_COST_MARGIN * local_cost(least_loaded, tokens, config, latencies)
    return best if local_cost(best, tokens, config, latencies) < limit_s else least_loaded


def _best_prefill(
    compatible: Sequence[WorkerSnapshot], decode: WorkerSnapshot, tokens: int, latencies: PathLatencies
) -> WorkerSnapshot:
    """The worker that would start soonest. The latency of a path counts where it is clearly longer than the shortest,
    because measured latencies of two equal paths always differ. It does not count if the prompt would wait at the
    router for the worker: an idle worker comes first, unless computing the tokens that another one has cached takes
    longer than the wait.
    """
    least_uncached, blocks = min(worker.uncached(tokens) for worker in compatible), blocks_to_move(decode, tokens)
    latency_s = {worker.worker_id: path_latency(latencies, decode, worker).seconds(blocks) for worker in compatible}
    long_s = LONG_PATH_RATIO * min(latency_s.values())

    def start_s(worker: WorkerSnapshot) -> float:
        path_s = latency_s[worker.worker_id]
        return _start_seconds(worker, tokens, least_uncached) + (path_s if path_s > long_s else 0.0)

    def order(worker: WorkerSnapshot, seconds: float) -> tuple[float, int, int, int, str]:
        return seconds, worker.running, -worker.free_blocks, *_last_used(worker)

    soonest = min(compatible, key=lambda worker: order(worker, start_s(worker)))
    if _starts_late(soonest, tokens):  # the router would hold the prompt back, and path latency is no reason for that
        return min(compatible, key=lambda worker: order(worker, _start_seconds(worker, tokens, least_uncached)))
    return soonest


def starts_late(placement: Placement, tokens: int) -> bool:
    """Whether its prefill worker has enough work without this prompt, so that deciding later loses nothing."""
    return placement.prefill is not None and _starts_late(placement.prefill, tokens)


def _starts_late(prefill: WorkerSnapshot, tokens: int) -> bool:
    buffered = len(prefill.prompts) >= BUFFERED_PROMPTS and prefill.prompt_rate > 0
    return buffered and queued_seconds(prefill, tokens) > BUFFERED_S


def queued_seconds(prefill: WorkerSnapshot, tokens: int) -> float:
    """Seconds until it would start a prompt; the queued tokens themselves while its rate is unknown."""
    return prefill.queued_before(prefill.uncached(tokens)) / (prefill.prompt_rate or 1.0)


def _start_seconds(prefill: WorkerSnapshot, tokens: int, least_uncached: int) -> float:
    """`queued_seconds`, and the time for what it computes beyond `least_uncached` tokens. The measured rates of two
    idle workers do not decide between them, or one of them would get every prompt."""
    beyond = prefill.uncached(tokens) - least_uncached
    return queued_seconds(prefill, tokens) + beyond / (prefill.prompt_rate or 1.0)


def _last_used(worker: WorkerSnapshot) -> tuple[int, str]:
    """Breaks ties: the worker that was used longest ago, so that idle workers share the load."""
    return worker.last_used, worker.worker_id
