"""Whether a prompt is computed on its decode worker (locally) or on a prefill worker (remotely). Pure.

The decode worker computes it if that costs all requests together clearly less time. Costs in seconds:

    remote  one step + (prompt tokens queued before this one + its own uncached tokens) / the prefill worker's rate
            + the delay of each prompt that waits for that worker, there or at the router
            + the latency of the path, and the delay of the second token while the KV moves
    local   the same on the decode worker, at the rate that its streams leave
            + the delay of each prompt that waits there
            + the delay of each stream there; 0 where the streams still meet an objective
            + the latency of the path
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from engine.core.step_time import LEAST_TOKENS
from services.router.routing.placement import (
    NO_LATENCY,
    Estimate,
    PathLatencies,
    PathLatency,
    Placement,
    RoutingConfig,
    WorkerSnapshot,
)

# The local cost must be below this share of the remote cost: estimates err, and a decode worker cannot hand over the
# work again.
LOCAL_COST_MARGIN = 0.8


def local_or_remote(
    decode: WorkerSnapshot,
    prefill: WorkerSnapshot,
    tokens: int,
    config: RoutingConfig,
    queued_behind: float = 0.0,
    latencies: PathLatencies = MappingProxyType({}),
) -> Placement:
    """Decides where a prompt of `tokens` tokens is computed for this decode worker, given the best prefill worker."""
    local_estimate, remote_estimate = estimate_local(decode, tokens, config), _estimate(prefill, 1.0, tokens)
    if config.local == "never" or local_estimate is None or remote_estimate is None:
        return Placement(decode, prefill, "", remote_estimate)
    local_s = local_cost(decode, tokens, config, latencies)
    remote_s = remote_cost(prefill, decode, tokens, queued_behind, latencies)
    if local_s >= LOCAL_COST_MARGIN * remote_s:
        return Placement(decode, prefill, "", replace(remote_estimate, local_cost_s=local_s, remote_cost_s=remote_s))
    beside = "1 stream" if decode.streams == 1 else f"{decode.streams} streams"
    why = (
        f"an estimated cost of {local_s:.2f} s locally, alongside {beside},"
        f" against {remote_s:.2f} s on {prefill.worker_id}"
    )
    return Placement(decode, None, why, replace(local_estimate, local_cost_s=local_s, remote_cost_s=remote_s))


def why_only_local(
    decode: WorkerSnapshot, prefills: Sequence[WorkerSnapshot], tokens: int, config: RoutingConfig
) -> str:
    """The reason in the receipt if there was no choice."""
    if config.local == "always":
        return "local_prefill is always"
    if not prefills:
        return "there is no prefill worker"
    if not any(worker.usable for worker in prefills):
        return "no prefill worker is ready"
    same = [worker for worker in prefills if worker.usable and worker.layout_hash == decode.layout_hash]
    if same and all(worker.max_model_len <= tokens for worker in same):
        return f"no prefill worker takes a prompt of {tokens} tokens"
    return f"no prefill worker has the KV layout of {decode.worker_id}"


def remote_cost(
    prefill: WorkerSnapshot,
    decode: WorkerSnapshot,
    tokens: int,
    queued_behind: float = 0,
    latencies: PathLatencies = MappingProxyType({}),
) -> float:
    """Seconds that the remote path costs all requests; `queued_behind` prompts wait at the router behind this one, for
    each prefill worker."""
    uncached = prefill.uncached(tokens)
    queued = prefill.queued_before(uncached)
    own = prefill.step_s + (queued + uncached * (1 + len(prefill.prompts) + queued_behind)) / prefill.prompt_rate
    return own + path_latency(latencies, decode, prefill).seconds(blocks_to_move(decode, tokens))


def local_cost(
    decode: WorkerSnapshot, tokens: int, config: RoutingConfig, latencies: PathLatencies = MappingProxyType({})
) -> float:
    """Seconds that the local path costs all requests."""
    rate, uncached = prompt_rate_beside_streams(decode, config), decode.uncached(tokens)
    own = decode.step_s + (decode.queued_before(uncached) + uncached * (1 + len(decode.prompts))) / rate
    delay = 0.0 if _keeps_objective(decode, config) else decode.streams * uncached / decode.prompt_rate
    return own + delay + path_latency(latencies, decode).first_s


def estimate_local(decode: WorkerSnapshot, tokens: int, config: RoutingConfig) -> Estimate | None:
    """For a prompt that the decode worker computes; None while its rate is unknown."""
    return _estimate(decode, prompt_share(decode, config), tokens)


def _estimate(worker: WorkerSnapshot, share: float, tokens: int) -> Estimate | None:
    if not worker.prompt_rate:
        return None
    rate = worker.prompt_rate * share
    wait_s = worker.queued_before(worker.uncached(tokens)) / rate
    return Estimate(wait_s, compute_seconds(worker, rate, tokens))


def compute_seconds(worker: WorkerSnapshot, rate: float, tokens: int) -> float:
    """Seconds of computing a prompt at `rate` tokens per second, after the step under way."""
    return worker.step_s + worker.uncached(tokens) / rate


def prompt_rate_beside_streams(decode: WorkerSnapshot, config: RoutingConfig) -> float:
    """Prompt tokens per second that a decode worker computes while its streams continue."""
    return decode.prompt_rate * prompt_share(decode, config)


def prompt_share(decode: WorkerSnapshot, config: RoutingConfig) -> float:
    """The share of a decode worker's time for prompts while its streams continue, as engine.core.step_time bounds its
    steps."""
    if not (decode.streams and decode.step_s and decode.prompt_rate):
        return 1.0
    streams_s = decode.step_s + decode.stream_s * (decode.streams - 1)
    longest_s = max(config.decode_slowdown_limit * decode.step_s, config.mixed_step_floor_s)
    prompts_s = max(longest_s - streams_s, LEAST_TOKENS / decode.prompt_rate)
    return prompts_s / (streams_s + prompts_s)


def may_prefill(decode: WorkerSnapshot, config: RoutingConfig) -> bool:
    """Whether this decode worker computes prompts alongside prefill workers without harm to any stream."""
    return config.local == "measured" and _keeps_objective(decode, config)


def _keeps_objective(decode: WorkerSnapshot, config: RoutingConfig) -> bool:
    """Whether its streams meet the objective while it computes prompts: not where `decode_slowdown_limit` alone exceeds
    it."""
    return (
        config.mixed_step_floor_s > 0
        and config.tpot is not None
        and config.decode_slowdown_limit * decode.step_s <= config.tpot
    )


def path_latency(
    latencies: PathLatencies, decode: WorkerSnapshot, prefill: WorkerSnapshot | None = None
) -> PathLatency:
    return latencies.get((decode.worker_id, prefill.worker_id if prefill else ""), NO_LATENCY)


def blocks_to_move(decode: WorkerSnapshot, tokens: int) -> int:
    """Blocks of the prompt that the decode worker has not cached, and those of its recurrent states."""
    return -(-decode.uncached(tokens) // decode.block_size) + decode.state_blocks
