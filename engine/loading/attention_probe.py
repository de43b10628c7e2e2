"""Learns a model's attention facts with one small forward, and refuses models that KV pages cannot represent.

Two forwards of three tokens, under two names in transformers' registry:

- `probe_kv` has a mask function that returns a `ProbeMask` in place of a tensor; the model passes it to every attention
  call, where it is recorded together with the shapes and keywords of the call.
- `isolation_kv` lets every token attend to itself alone. Then a token's logits may depend on its own id and position
  and on nothing else; if permuting the packed tokens changes them, the layers carry state that is not in pages
  (recurrent, linear, convolutional), or something is computed from the whole packed batch (dynamic rope).

Sparse indexers (engine.loading.index_probe) are found first; in both forwards a stand-in replaces them, and no choice
has an effect. Before the second forward engine.loading.state_probe finds other state that the model keeps, however
little it changes the logits: it is served, or refused by its structure. In the second forward, recurrent layers that
are served see each token as a sequence of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from engine.attention.implementation import switch
from engine.attention.mla import expander
from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec, Reach, SlidingWindowSpec, name_reach
from engine.loading import index_probe, state_probe
from engine.parallel.weight_cut import held_heads
from engine.runner.indexers import Indexers, given_mask
from engine.runner.mixers import Mixers
from engine.runner.recurrences import slow_lines_held
from tandem.errors import CheckpointRefused

PROBE, ISOLATION = "probe_kv", "isolation_kv"

# Keywords without effect on paged attention: no dropout in eval, no cache, outputs that Tandem does not request.
HARMLESS = frozenset(
    {"dropout", "position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"}
)
STATEFUL = ("linear", "conv", "mamba", "recurrent", "hybrid", "ssm", "rwkv", "sparse", "compressed", "indexed")
ISOLATION_TOLERANCE = 0.05  # of the logits' standard deviation; other tokens' influence is of order one


@dataclass(frozen=True)
class ProbeMask:
    """Replaces a mask tensor during the probe; `reach` is None if no supported reach fits."""

    reach: Reach | None

    def __getitem__(self, key: Any) -> IndexMask | ProbeMask:
        """The mask without the dimension of heads, as models pass it to sparse indexers. Or all of it, as the part for
        the last `logits_to_keep` tokens, where that is 0: Gemma 4's layers that share KV. Raises TypeError for any
        other part."""
        every = slice(None)
        if isinstance(key, tuple) and key and all(part in (every, slice(0, None)) for part in key):
            return self
        if key not in ((every, 0), (every, 0, every, every)):
            raise TypeError(f"the mask is indexed with {key}")
        return IndexMask(self.reach)


@dataclass(frozen=True)
class IndexMask:
    """The part of a `ProbeMask` that a sparse indexer gets."""

    reach: Reach | None


def _probe_mask(*, mask_function: Any, device: torch.device, local_size: int | None = None, **_sizes: Any) -> ProbeMask:
    """Called by transformers' mask builders; their other arguments are sizes and dtypes."""
    return ProbeMask(name_reach(mask_function, local_size, device))


# The calls of the running probe forward; only one thread of a process loads at a time.
_recorded_calls: list[CallFacts] = []


def _probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    indices: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Records one call. Raises CheckpointRefused for whatever `CallFacts` cannot express."""
    where = f"attention call {len(_recorded_calls)} ({type(module).__name__})"
    unknown = sorted(set(others) - HARMLESS)
    if unknown:
        raise CheckpointRefused(
            f"{where} passes keywords that Tandem's attention does not implement: {', '.join(unknown)}"
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise CheckpointRefused(f"{where} is not causal; only decoder models can be served")
    if not key.shape[2] == value.shape[2] == query.shape[2]:
        raise CheckpointRefused(
            f"{where} has {key.shape[2]} keys for {query.shape[2]} new tokens; pages hold one K and V for each token"
        )
    if key.shape[1] != value.shape[1] and expander(module) is None:
        raise CheckpointRefused(
            f"{where} has {key.shape[1]} key heads and {value.shape[1]} value heads; they must be equal"
        )
    reach = _reach(attention_mask, sliding_window, where)
    if indices is not None and (reach != FullAttentionSpec() or indices.shape != (1, query.shape[2], 1)):
        raise CheckpointRefused(f"{where} takes indices that are not those of an indexer, or in a {reach} mask")
    _recorded_calls.append(
        CallFacts(
            kv_heads=key.shape[1],
            heads=query.shape[1],
            k_dim=key.shape[3],
            v_dim=value.shape[3],
            reach=reach,
            softcap=softcap,
            sinks=s_aux is not None,
            scaling=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
            latent=expander(module) is not None,
            held=held_heads(module),
            indexed=indices is not None,
        )
    )
    return _own_value(module, query, key, value), None


def _isolation_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_mask: Any, **_known: Any
) -> tuple[torch.Tensor, None]:
    return _own_value(module, query, key, value), None


def _own_value(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Every token attends to itself alone: `[1, T, heads, v_dim]`."""
    expand = expander(module)
    if expand is not None:
        key, value = expand(key, value)
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()


def _reach(mask: Any, sliding_window: int | None, where: str) -> Reach:
    """The reach of the mask, checked against the `sliding_window` keyword if there is one."""
    if mask is None:  # the model builds no mask, so eager attention has none either: only the keyword counts
        return SlidingWindowSpec(sliding_window) if sliding_window is not None else FullAttentionSpec()
    if not isinstance(mask, ProbeMask):
        raise CheckpointRefused(f"{where} gets a mask that the model built or edited itself ({type(mask).__name__})")
    if mask.reach is None:
        raise CheckpointRefused(f"{where} has a mask that is neither full, sliding nor chunked causal")
    if sliding_window is not None and mask.reach != SlidingWindowSpec(sliding_window):
        raise CheckpointRefused(f"{where} has a {mask.reach} mask but passes sliding_window={sliding_window}")
    return mask.reach


AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)
AttentionInterface.register(ISOLATION, _isolation_attention)


class Learnt(NamedTuple):
    """One `CallFacts` for each attention call of a forward, in order, and the recurrent layers and sparse indexers, if
    there are any."""

    calls: tuple[CallFacts, ...]
    mixers: Mixers | None
    indexers: Indexers | None


def learn_facts(model: PreTrainedModel, compiled: bool = False) -> Learnt:
    """What pages and slots must hold for this model. `compiled`: Tandem's operators may serve it.

    Leaves the model switched to the isolation probe; the caller selects its attention. Raises CheckpointRefused with
    the reason for a model that pages cannot serve.
    """
    with slow_lines_held() as write:
        learnt = _learnt(model, compiled)
    if learnt.mixers is not None and not learnt.mixers.by_operators:
        write()
    return learnt


def _learnt(model: PreTrainedModel, compiled: bool) -> Learnt:
    device = next(model.parameters()).device
    ids = torch.tensor([[1, 2, 3]], device=device) % model.config.get_text_config().vocab_size
    switch(model, "eager")
    indexers = index_probe.find(model)
    switch(model, PROBE)
    _recorded_calls.clear()
    try:
        with index_probe.standing_in(indexers, _probe_index):
            _forward(model, ids, torch.tensor([[0, 1, 2]], device=device))
    except (TypeError, AttributeError, RuntimeError, IndexError, KeyError, ValueError) as error:
        raise CheckpointRefused(
            f"{type(model).__name__} edits or indexes its attention mask, or cannot run on token ids and positions "
            f"alone: {error}"
        ) from error
    facts = tuple(_recorded_calls)
    switch(model, ISOLATION)
    # In a model with indexers, `index_probe.find` has already looked for other states.
    mixers = state_probe.learn(model, compiled) if indexers is None else None
    _check_calls(model, facts, mixers)
    _check_isolation(model, ids, mixers, indexers)
    return Learnt(facts, mixers, indexers)


def _probe_index(mask: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Stands in for a sparse indexer; returns one position per token, which the probe ignores."""
    if not isinstance(mask, IndexMask) or mask.reach != FullAttentionSpec():
        raise CheckpointRefused(f"a sparse indexer gets a mask that is not the causal one ({mask})")
    return _nothing_chosen(mask, hidden)


def _nothing_chosen(_mask: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, hidden.shape[1], 1, dtype=torch.int32, device=hidden.device)


def _check_calls(model: PreTrainedModel, facts: tuple[CallFacts, ...], mixers: Mixers | None) -> None:
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    if 0 < layers <= len(facts) or (mixers and (facts or len(mixers.each) >= layers)):
        return
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or () if _is_stateful(str(kind))})
    if not facts:
        reason = "makes no call to transformers' attention interface"
    else:
        reason = f"makes {len(facts)} attention calls in {layers} decoder layers"
    state = f"; layers of type {', '.join(kinds)} keep state that is not in KV pages" if kinds else ""
    raise CheckpointRefused(f"{type(model).__name__} {reason}{state}, so its sequences cannot be kept in KV pages")


def _is_stateful(kind: str) -> bool:
    return any(word in kind for word in STATEFUL)


def _check_isolation(
    model: PreTrainedModel, ids: torch.Tensor, mixers: Mixers | None, indexers: Indexers | None
) -> None:
    """Permutes packed tokens and their positions together; under self-only attention, and with recurrent layers that
    see each token as a sequence, the logits must follow."""
    order = torch.tensor([2, 1, 0], device=ids.device)  # not a rotation, so that the neighbours on both sides change
    positions = torch.tensor([[0, 1, 2]], device=ids.device)
    more = {} if indexers is None else {"attention_mask": given_mask(ids.device)}
    apart = index_probe.standing_in(indexers, _nothing_chosen)
    with apart, state_probe.isolated(mixers, ids.shape[1], next(model.parameters())):
        straight = _forward(model, ids, positions, **more)
        permuted = _forward(model, ids[:, order], positions[:, order], **more)
    gap = ((straight[order] - permuted).abs().amax() / straight.std()).item()
    if not gap <= ISOLATION_TOLERANCE:
        raise CheckpointRefused(
            f"{type(model).__name__} lets packed tokens influence each other outside of attention (by {gap:.2g} "
            "standard deviations of the logits): its layers carry recurrent, linear or convolutional state that is "
            "neither in KV pages nor in the cache's state interface, or it ignores position_ids"
        )


def _forward(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    """Logits `[T, vocab]` in float32."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits
    return logits[0].float()
