"""The inputs of the routing policy and its decision: worker snapshots, path latencies, estimates, placements. Pure.

Times are in seconds: measured by the workers themselves, or observed by earlier requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Literal, NamedTuple


class Begun(NamedTuple):
    """The checkpoint, KV type and order of sums with which a request's tokens so far were computed. A decode worker
    with another checkpoint or KV type would continue with other tokens."""

    computes_with: str
    sum_order: str = ""  # workers with equal values compute equal bits; "": unknown


@dataclass(slots=True)
class WorkerSnapshot:
    """One worker as a router knows it: its last record, and what this router has sent there since. Treat it as
    immutable; it is not frozen because a frozen one takes twice as long to make, and a router makes thousands per
    second."""

    worker_id: str
    incarnation: str
    address: str
    layout_hash: str  # of the meaning of its KV: it reads from workers with an equal one, whatever their block layout
    running: int  # requests in progress, this router's included
    max_running: int
    free_blocks: int  # blocks that can be allocated, without those of this router's newest requests
    block_size: int
    max_model_len: int
    streams: int = 0  # of `running`, those that have their first token
    prompts: tuple[int, ...] = ()  # tokens of each prompt sent there that has not led to a first token yet
    prompt_rate: float = 0.0  # prompt tokens per second; 0: unknown
    step_s: float = 0.0  # seconds of a step of one stream; 0: unknown
    stream_s: float = 0.0  # seconds that each further stream adds
    last_used: int = 0  # the number of this router's latest placement there; 0: none
    usable: bool = True  # ready, not suspected to be dead, did not reject a request just now
    ready: bool = True  # as its record says, so that it will be usable soon
    sum_order: str = ""  # workers with equal values compute equal bits; "": unknown
    computes_with: str = ""  # workers with equal values give the same tokens
    tp: int = 1  # its number of ranks
    state_blocks: int = 0  # blocks for recurrent states in each transfer, in addition to those of KV
    eos_token_ids: Sequence[int] = ()  # the end tokens of its checkpoint
    cached: int = 0  # leading tokens of the current prompt that it need not compute

    def with_cached(self, cached: int) -> WorkerSnapshot:
        """The snapshot for another prompt (dataclasses.replace takes three times as long)."""
        return WorkerSnapshot(*(*_all_but_cached(self), cached)) if cached != self.cached else self

    @property
    def identity(self) -> tuple[str, str]:
        """The worker id and its incarnation."""
        return self.worker_id, self.incarnation

    @property
    def begun(self) -> Begun:
        """The Begun of tokens that it computes."""
        return Begun(self.computes_with, self.sum_order)

    def continues(self, begun: Begun | None) -> bool:
        """Whether it computes the same remaining tokens of a request that has begun; low bits of logits may differ by
        sum order."""
        return begun is None or self.computes_with == begun.computes_with

    def uncached(self, tokens: int) -> int:
        """How many tokens of a prompt of `tokens` tokens it would have to compute; at least 1."""
        return max(1, tokens - self.cached)

    def queued_before(self, tokens: int) -> int:
        """Prompt tokens that it computes before a new prompt of `tokens` tokens: the shorter prompt comes first, so a
        longer one delays the new one by no more than the new one's own length."""
        return sum(min(tokens, prompt) for prompt in self.prompts)


_all_but_cached: Callable[[WorkerSnapshot], tuple[Any, ...]] = attrgetter(
    *(worker.name for worker in fields(WorkerSnapshot) if worker.name != "cached")
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of waiting for the prompt's turn, of computing it, and the cost of either path for all requests together
    (0 if there was no choice)."""

    wait_s: float
    compute_s: float
    local_cost_s: float = 0.0
    remote_cost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    decode: WorkerSnapshot
    prefill: WorkerSnapshot | None  # None: the decode worker computes the prompt
    why_local: str = ""
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True)
class PathLatency:
    """Seconds that requests spend on one path through the cluster, apart from queueing and computing."""

    first_s: float = 0.0  # of messages and reservations, to the first token
    moving_s: float = 0.0  # that the second token waits for the KV
    block_s: float = 0.0  # that each block adds to `moving_s`

    def seconds(self, blocks: int) -> float:
        return self.first_s + self.moving_s + self.block_s * blocks


# By decode worker and prefill worker; "": the decode worker computes the prompt.
PathLatencies = Mapping[tuple[str, str], PathLatency]
NO_LATENCY = PathLatency()
Local = Literal["measured", "never", "always"]


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """The settings that the policy depends on."""

    local: Local = "measured"  # whether decode workers compute prompts that prefill workers could compute
    decode_slowdown_limit: float = 2.0  # how many times as long as a step of one stream a step with prompts may take
    mixed_step_floor_s: float = 0.0  # seconds that it may take even if the limit is less; 0: none
    ttft: float | None = None  # seconds after which a first token is of no use; None: no objective
    tpot: float | None = None  # seconds that a step of streams may take; None: no objective
