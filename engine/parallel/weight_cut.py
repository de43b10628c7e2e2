"""Cuts a loaded model to one rank's part, by the plan that transformers has for it, and has the ranks meet.

    q, k, v [heads * d, in]     this rank's heads      o [out, heads * d]     its columns, then the sum of all ranks
    gate, up [wide, in]         its part of `wide`     down [out, wide]       its columns, then the sum
    experts                     each expert likewise   head [vocab, in]       its part of the vocabulary, then all parts

The plan names modules; nothing here knows a family. Of KV heads that are fewer than ranks each is on several ranks,
which compute the same bits. What is not cut is whole on every rank: norms, embeddings, latent projections.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.kv.kv_cache_spec import HeldHeads
from engine.parallel.rank_group import RankGroup
from engine.parallel.tp_plan import CUT, GATHERED, KNOWN, SPLIT, SUMMED
from tandem.errors import CheckpointRefused

HELD = "_tandem_held"  # of an attention module: a HeldHeads, where it has only some of the KV heads
KV = ("k_proj", "v_proj")
# Attention's products that may be cut by rows: their rows are heads, one after the other.
BY_HEADS = frozenset({"q_proj", *KV, "q_b_proj", "kv_b_proj"})


def cut(model: PreTrainedModel, group: RankGroup) -> str:
    """Leaves `model` this rank's part of its weights; returns a line about what is left.

    Raises CheckpointRefused, with the module's name, for what the plan does not cut as Tandem understands it.
    """
    whole = sum(parameter.numel() for parameter in model.parameters())
    plan: dict[str, str] = model._tp_plan or {}
    sites = 0
    done: Counter[str] = Counter()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        for own, parameter in list(module.named_parameters(recurse=False)):
            if style := _style(plan, f"{name}.{own}"):
                _check(style, f"{name}.{own}")
                part = _bare(parameter.data, style, group, f"{name}.{own}")
                module._parameters[own] = nn.Parameter(part, requires_grad=False)
                done[style] += 1
        if (style := _style(plan, name)) is None:
            continue
        _check(style, name)
        done[style] += 1
        sites += 1
        if style in SUMMED:
            module.register_forward_hook(partial(_sum, group, sites))
        elif style in CUT:
            parent, _, leaf = name.rpartition(".")
            _product(module, style, group, sites, (name, leaf, modules[parent]))
    _check_layers(model, done)
    for module in modules.values():
        _fit_groups(module)
    left = sum(parameter.numel() for parameter in model.parameters())
    return f"rank {group.rank} of {group.size} has {left / 1e6:.1f} of {whole / 1e6:.1f} million parameters"


def _style(plan: dict[str, str], name: str) -> str | None:
    """Of a module or a bare parameter, whose layer's number is * in the plan."""
    return plan.get(".".join("*" if part.isdigit() else part for part in name.split(".")))


def _check(style: str, name: str) -> None:
    if style not in KNOWN:
        raise CheckpointRefused(f"the plan has the style {style} for {name}, which Tandem does not know")


def _check_layers(model: PreTrainedModel, done: Counter[str]) -> None:
    """That every layer ends in sums: a model that is computed whole on every rank has nothing of several ranks."""
    layers = model.config.get_text_config().num_hidden_layers
    sums = sum(count for style, count in done.items() if style in SUMMED or style in SPLIT or style == "rowwise")
    if sums < layers:
        raise CheckpointRefused(
            f"the plan of {type(model).__name__} leaves layers uncut: {sums} sums in {layers} layers"
        )


def _part(weight: torch.Tensor, dim: int, group: RankGroup, name: str) -> torch.Tensor:
    """This rank's part along one dimension, in memory of its own."""
    count = weight.shape[dim]
    if count % group.size:
        raise CheckpointRefused(f"{name} has {count} rows or columns, which {group.size} ranks cannot share")
    return _own(weight.narrow(dim, group.rank * (count // group.size), count // group.size))


def _own(part: torch.Tensor) -> torch.Tensor:
    return part.clone(memory_format=torch.contiguous_format)


def _packed(weight: torch.Tensor, dim: int, group: RankGroup, name: str) -> torch.Tensor:
    """The part of two weights that lie behind each other along `dim`."""
    return torch.cat([_part(half, dim, group, name) for half in weight.chunk(2, dim)], dim)


def _bare(weight: torch.Tensor, style: str, group: RankGroup, name: str) -> torch.Tensor:
    """A parameter that no product owns: [experts, out, in], or one number for each head or column."""
    rows = max(weight.ndim - 2, 0)
    if style == "colwise":
        return _part(weight, rows, group, name)
    if style == "packed_colwise":
        return _packed(weight, rows, group, name)
    if style == "rowwise" and weight.ndim > 1:
        return _part(weight, weight.ndim - 1, group, name)
    if style == "packed_rowwise" and weight.ndim > 1:
        return _packed(weight, weight.ndim - 1, group, name)
    if style in CUT:
        raise CheckpointRefused(f"{name} {list(weight.shape)} is not what Tandem cuts by {style}")
    return weight


def _product(module: nn.Module, style: str, group: RankGroup, site: int, where: tuple[str, str, nn.Module]) -> None:
    name, leaf, parent = where
    if type(module) is not nn.Linear:
        raise CheckpointRefused(f"{name} is a {type(module).__name__}; Tandem cuts plain linear layers by {style}")
    weight: torch.Tensor = module.weight.data
    bias: torch.Tensor | None = None if module.bias is None else module.bias.data
    if style in GATHERED:
        if weight.shape[0] % group.size:  # such as the head of an odd vocabulary: whole on every rank
            return
        weight, bias = _rows(weight, bias, partial(_part, dim=0, group=group, name=name))
        module.register_forward_hook(partial(_gather, group, site))
    elif style == "packed_colwise":
        weight, bias = _rows(weight, bias, partial(_packed, dim=0, group=group, name=name))
    elif style == "colwise":
        weight, bias = _columns_out(module, group, (name, leaf, parent))
    elif style == "rowwise" or style in SPLIT:
        weight = _part(weight, 1, group, name)
        if bias is not None and group.rank > 0:  # once in the sum
            bias = torch.zeros_like(bias)
        if style in SPLIT:
            module.register_forward_pre_hook(partial(_split, group.rank, weight.shape[1]))
        module.register_forward_hook(partial(_sum, group, site))
    else:
        raise CheckpointRefused(f"{name}: Tandem does not cut a linear layer by {style}")
    module.weight = nn.Parameter(weight, requires_grad=False)
    module.out_features, module.in_features = weight.shape
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)


def _rows(weight: torch.Tensor, bias: torch.Tensor | None, part: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return part(weight), None if bias is None else part(bias)


def _columns_out(
    module: nn.Linear, group: RankGroup, where: tuple[str, str, nn.Module]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The part of a product whose output stays cut. Attention's are cut between heads, and note the KV heads."""
    name, leaf, parent = where
    weight: torch.Tensor = module.weight.data
    bias: torch.Tensor | None = None if module.bias is None else module.bias.data
    dim = getattr(parent, "head_dim", None)
    attends = hasattr(parent, "is_causal") or hasattr(parent, "num_key_value_groups")
    if attends and leaf not in BY_HEADS:
        raise CheckpointRefused(f"the plan cuts {name}, of whose rows Tandem does not know how they follow heads")
    if leaf not in KV or not isinstance(dim, int):
        return _rows(weight, bias, partial(_part, dim=0, group=group, name=name))
    heads, rest = divmod(weight.shape[0], dim)
    if rest or (heads % group.size and group.size % heads):
        raise CheckpointRefused(f"{name} has {heads} KV heads, which {group.size} ranks cannot share evenly")
    count = max(1, heads // group.size)
    first = group.rank * heads // group.size
    setattr(parent, HELD, HeldHeads(first, heads))
    return _rows(weight, bias, lambda whole: _own(whole.narrow(0, first * dim, count * dim)))


def _fit_groups(module: nn.Module) -> None:
    """Query heads for each KV head, of which transformers' eager attention keeps a number."""
    held: HeldHeads | None = module.__dict__.get(HELD)
    query, key = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
    if held is not None and hasattr(module, "num_key_value_groups"):
        if not isinstance(query, nn.Linear) or not isinstance(key, nn.Linear):
            raise CheckpointRefused(
                f"{type(module).__name__} is cut, and has no q_proj and k_proj to count its heads by"
            )
        module.__dict__["num_key_value_groups"] = query.out_features // key.out_features


def held_heads(module: nn.Module) -> HeldHeads | None:
    """Which KV heads of the whole model an attention module has; None: all."""
    held: HeldHeads | None = module.__dict__.get(HELD)
    return held


def _sum(group: RankGroup, site: int, _module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(out, site)


def _gather(group: RankGroup, site: int, _module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return group.all_gather(out, site)


def _split(rank: int, width: int, _module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """This rank's part of an input that every rank has whole."""
    return inputs[0][..., rank * width : (rank + 1) * width], *inputs[1:]
