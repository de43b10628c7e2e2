"""The requirements of a model's attention calls, learnt from the model itself and not from its config.

`CallFacts` is the record for one attention *call*, in the order of a forward. `engine.loading.attention_probe` fills it
by running three tokens through the model; pages, kernels and the self-check read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

Position = TypeVar("Position", int, torch.Tensor)


@dataclass(frozen=True)
class FullAttentionSpec:
    """A token sees all tokens up to itself."""

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class SlidingWindowSpec:
    """The token at `p` sees `p - window + 1` to `p`."""

    window: int

    def __str__(self) -> str:
        return f"sliding {self.window}"


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec:
    """The token at `p` sees the positions of its chunk of `size` up to itself."""

    size: int

    def __str__(self) -> str:
        return f"chunked {self.size}"


Reach = FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec


def first_visible(reach: Reach, position: Position) -> Position:
    """The first position that the token at `position` sees; for an int, or elementwise for a tensor."""
    if isinstance(reach, SlidingWindowSpec):
        start = position - reach.window + 1
        return start.clamp(min=0) if isinstance(start, torch.Tensor) else max(start, 0)
    if isinstance(reach, ChunkedLocalAttentionSpec):
        return position // reach.size * reach.size
    return position * 0


@dataclass(frozen=True)
class HeldHeads:
    """One rank's KV heads of a model that is cut: heads from `first` on, of `whole` in the model."""

    first: int
    whole: int


@dataclass(frozen=True)
class CallFacts:
    """One attention call.

    `heads` are query heads; pages hold `kv_heads` heads of `k_dim` and `v_dim` elements a token. `latent` says that
    pages hold the compressed latent (`k_dim`) and the rotated key (`v_dim`) of an MLA module, one head each, which the
    module expands after they are read. `scaling` multiplies the scores before `softcap`.
    """

    kv_heads: int
    heads: int
    k_dim: int
    v_dim: int
    reach: Reach
    softcap: float | None
    sinks: bool
    scaling: float
    latent: bool = False
    held: HeldHeads | None = None  # this rank's part of the model's KV heads; None: all
    indexed: bool = False  # each token attends only to those that a sparse indexer has chosen for it

    @property
    def model_heads(self) -> int:
        """KV heads of the whole model, which a block holds."""
        return self.held.whole if self.held else self.kv_heads


class RecurrentState(NamedTuple):
    """One state of a recurrent layer: `key` is (layer, "conv" or "recurrent", index), `shape` that of one sequence."""

    key: tuple[int, str, int]
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: that of the model


class StateFacts(NamedTuple):
    """The recurrent states of a model, in the order in which its layers request them."""

    states: tuple[RecurrentState, ...]
    kernels: str  # the libraries that compute them


def describe(facts: Sequence[CallFacts]) -> str:
    """A table for people: one line for each run of equal calls."""
    lines = [f"{'calls':>9}  {'heads':>5}  {'kv':>3}  {'k_dim':>5}  {'v_dim':>5}  {'reach':<14}  notes"]
    start = 0
    for index, fact in enumerate(facts):
        if index + 1 < len(facts) and facts[index + 1] == fact:
            continue
        calls = f"{start}" if start == index else f"{start}-{index}"
        notes = [f"scaling {fact.scaling:.4g}"]
        notes += [f"softcap {fact.softcap:g}"] if fact.softcap is not None else []
        notes += ["sinks"] if fact.sinks else []
        notes += ["latent"] if fact.latent else []
        notes += ["indexed"] if fact.indexed else []
        lines.append(
            f"{calls:>9}  {fact.heads:>5}  {fact.kv_heads:>3}  {fact.k_dim:>5}  {fact.v_dim:>5}  "
            f"{fact.reach!s:<14}  {', '.join(notes)}"
        )
        start = index + 1
    return "\n".join(lines)


def reaches(facts: Sequence[CallFacts]) -> set[int]:
    """The windows and chunks of the calls, in tokens."""
    return {
        fact.reach.window if isinstance(fact.reach, SlidingWindowSpec) else fact.reach.size
        for fact in facts
        if not isinstance(fact.reach, FullAttentionSpec)
    }


def smallest_reach(facts: Sequence[CallFacts]) -> int | None:
    """The smallest window or chunk among the calls, in tokens; None when every call sees everything."""
    return min(reaches(facts), default=None)


MaskFunction = Callable[[Any, Any, Any, Any], Any]


def name_reach(mask_function: MaskFunction, local_size: int | None, device: torch.device) -> Reach | None:
    """The reach of a mask function of `transformers.masking_utils`, found by evaluating it; None if none fits.

    `mask_function(batch, head, q, kv)` says elementwise whether the token at `q` sees the one at `kv`, so the result
    does not depend on how the function was composed. `local_size` is the window or chunk that the builder announced;
    without one, the edges of windows and chunks of all powers of two to 2^20 are tested.
    """
    if local_size is not None and local_size < 1:
        return None  # a config that disables its window by 0 still builds the mask, but does not use it
    candidates: list[Reach] = (
        [SlidingWindowSpec(local_size), ChunkedLocalAttentionSpec(local_size)]
        if local_size is not None
        else [FullAttentionSpec()]
    )
    lengths = [local_size] if local_size is not None else [1 << power for power in range(21)]
    pairs = sorted({pair for length in lengths for pair in _edges(length)})
    q, kv = (torch.tensor(column, device=device) for column in zip(*pairs, strict=True))
    zero = torch.zeros((), dtype=torch.int64, device=device)
    visible = torch.as_tensor(mask_function(zero, zero, q, kv), device=device)
    for reach in candidates:
        if torch.equal(visible.expand_as(q), (first_visible(reach, q) <= kv) & (kv <= q)):
            return reach
    return None


def _edges(length: int) -> set[tuple[int, int]]:
    """(q, kv) pairs around every edge that a window or chunk of `length` would have."""
    pairs = set()
    for q in (0, 1, 2, length - 1, length, length + 1, 2 * length - 1, 2 * length, 2 * length + 1, 3 * length + 2):
        for edge in (q - length, q // length * length, q // 2, q, 1):
            pairs |= {(q, kv) for kv in range(edge - 2, edge + 3) if kv >= 0}
    return pairs
