"""Determines each rank's part of a model, by transformers' plan, and the points where the ranks meet.

    q, k, v [heads * d, in]     this rank's heads      o [out, heads * d]     its columns, then the sum of all ranks
    gate, up [wide, in]         its part of `wide`     down [out, wide]       its columns, then the sum
    experts                     each expert likewise   head [vocab, in]       its part of the vocabulary, then all parts
    embedding [vocab, out]      its part of the vocabulary; rows of other ranks are zeros, then the sum

The plan names modules; no code is specific to a model family. If there are fewer KV heads than ranks, each head is on
several ranks, which compute the same bits. Everything else is whole on every rank: norms, latent projections, and a
vocabulary that the ranks cannot share. `cut` needs no weights, only shapes: engine/loading/part_loader.py then reads
the parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.core.weight_formats import GROUP
from engine.kv.kv_cache_spec import HeldHeads
from engine.parallel.rank_group import AGREEMENT, RankGroup
from engine.parallel.tp_plan import CUT, GATHERED, KNOWN, SPLIT, SUMMED
from tandem.errors import CheckpointRefused

HELD = "_tandem_held"  # attribute of an attention module with only some of the KV heads: a HeldHeads
KV = ("k_proj", "v_proj")
# Attention's products that may be cut by rows: their rows are heads, one after the other.
BY_HEADS = frozenset({"q_proj", *KV, "q_b_proj", "kv_b_proj"})


@dataclass(frozen=True)
class Part:
    """A rank's part of a parameter: stretches (start, length) along `dim`, concatenated."""

    dim: int
    stretches: tuple[tuple[int, int], ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of `whole`, copied."""
        return torch.cat([whole.narrow(self.dim, *stretch) for stretch in self.stretches], self.dim)


@dataclass
class Cut:
    """One rank's part of a model. `parts` are by parameter name; missing parameters are whole."""

    group: RankGroup
    parts: dict[str, Part] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # of the whole parameters of which there are parts
    meet: list[Callable[[PreTrainedModel], object]] = field(default_factory=list)  # inserts the group's calls
    sites: int = 0
    done: Counter[str] = field(default_factory=Counter)

    def take(self, model: PreTrainedModel) -> None:
        """Reduces a model, with weights or with shapes only, to this rank's part; ties stay."""
        taken: dict[int, nn.Parameter] = {}
        for name, part in self.parts.items():
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            whole = module._parameters[own]
            assert whole is not None
            if id(whole) not in taken:
                taken[id(whole)] = nn.Parameter(part.of(whole.data), requires_grad=False)
            module._parameters[own] = taken[id(whole)]
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # an index into the whole table, used for gradients only

    def check_groups(self, model: PreTrainedModel, format: str) -> None:
        """Raises CheckpointRefused where this rank's columns would end within a group of a format that has groups."""
        for name, part in self.parts.items():
            path = name.rpartition(".")[0]
            if format != "int4" or part.dim == 0 or type(model.get_submodule(path)) is not nn.Linear:
                continue
            if (columns := part.stretches[0][1]) % GROUP:
                raise CheckpointRefused(
                    f"{path} has {model.get_parameter(name).shape[1]} columns, {columns} for each of {self.group.size}"
                    f" ranks, which do not end where a group of {GROUP} columns of {format} does; serve it by fewer"
                    " ranks, or with weights = int8 or fp8"
                )

    def largest_of(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """For a product of which this rank has some columns: the largest of all ranks' numbers. All ranks ask for the
        same products in the same order."""
        part = self.parts.get(f"{name}.weight")
        if part is None or part.dim == 0:
            return None

        def over_ranks(own: torch.Tensor) -> torch.Tensor:
            return self.group.all_gather(own.flatten(), AGREEMENT).view(self.group.size, *own.shape).amax(0)

        return over_ranks

    def attach(self, model: PreTrainedModel) -> None:
        """Makes a model that has this rank's part meet the others in its forward."""
        for put in self.meet:
            put(model)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.out_features, module.in_features = module.weight.shape
            _fit_groups(module)


def cut(model: PreTrainedModel, group: RankGroup) -> Cut:
    """The part of `group.rank`, by the shapes of a whole model, which is not changed.

    Raises CheckpointRefused, with the module's name, for what the plan does not cut as Tandem understands it.
    """
    plan: dict[str, str] = model._tp_plan or {}
    own = Cut(group)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        for leaf, parameter in module.named_parameters(recurse=False):
            if style := _style(plan, f"{name}.{leaf}"):
                _check(style, f"{name}.{leaf}")
                own.done[style] += 1
                _bare(own, parameter, style, f"{name}.{leaf}")
        if (style := _style(plan, name)) is None:
            continue
        _check(style, name)
        own.done[style] += 1
        own.sites += 1
        if style in SUMMED:
            _hook(own, name, partial(_sum, group, own.sites))
        elif style in CUT:
            _product(own, module, style, name, modules[name.rpartition(".")[0]])
    _check_layers(model, own.done)
    _vocabulary(own, model, modules)
    own.shapes.update((name, model.get_parameter(name).shape) for name in own.parts)
    return own


def _style(plan: dict[str, str], name: str) -> str | None:
    """The plan's style for a module or a bare parameter; the plan has * for a layer's number."""
    return plan.get(".".join("*" if part.isdigit() else part for part in name.split(".")))


def _check(style: str, name: str) -> None:
    if style not in KNOWN:
        raise CheckpointRefused(f"the plan has the style {style} for {name}, which Tandem does not know")


def _check_layers(model: PreTrainedModel, done: Counter[str]) -> None:
    """Checks that every layer has sums: otherwise every rank would compute the whole model."""
    layers = model.config.get_text_config().num_hidden_layers
    sums = sum(count for style, count in done.items() if style in SUMMED or style in SPLIT or style == "rowwise")
    if sums < layers:
        raise CheckpointRefused(
            f"the plan of {type(model).__name__} leaves layers uncut: {sums} sums in {layers} layers"
        )


def _part(shape: torch.Size, dim: int, group: RankGroup, name: str, weights: int = 1) -> Part:
    """This rank's part of a weight, or of two that are concatenated along `dim`."""
    each, odd = divmod(shape[dim], weights)
    if odd:
        raise CheckpointRefused(f"{name} has {shape[dim]} rows or columns, which are not two weights in one")
    if each % group.size:
        raise CheckpointRefused(f"{name} has {each} rows or columns, which {group.size} ranks cannot share")
    own = each // group.size
    return Part(dim, tuple((weight * each + group.rank * own, own) for weight in range(weights)))


def _bare(own: Cut, weight: torch.Tensor, style: str, name: str) -> None:
    """Cuts a parameter that is not a product's: [experts, out, in], or one number for each head or column."""
    dim = {"colwise": max(weight.ndim - 2, 0), "rowwise": weight.ndim - 1}.get(style.removeprefix("packed_"))
    if dim is not None and (weight.ndim > 1 or style.endswith("colwise")):
        own.parts[name] = _part(weight.shape, dim, own.group, name, 2 if style.startswith("packed_") else 1)
    elif style in CUT:
        raise CheckpointRefused(f"{name} {list(weight.shape)} is not what Tandem cuts by {style}")


def _product(own: Cut, module: nn.Module, style: str, name: str, parent: nn.Module) -> None:
    if type(module) is not nn.Linear:
        raise CheckpointRefused(f"{name} is a {type(module).__name__}; Tandem cuts plain linear layers by {style}")
    group, shape = own.group, module.weight.shape
    if style in GATHERED:
        if shape[0] % group.size:  # such as the head of an odd vocabulary: whole on every rank
            return
        part = _part(shape, 0, group, name)
        _hook(own, name, partial(_gather, group, own.sites))
    elif style == "packed_colwise":
        part = _part(shape, 0, group, name, 2)
    elif style == "colwise":
        part = _columns_out(own, module, name, parent)
    elif style == "rowwise" or style in SPLIT:
        part = _part(shape, 1, group, name)
        if module.bias is not None and group.rank > 0:  # once in the sum
            own.meet.append(partial(_no_bias, name))
        if style in SPLIT:
            own.meet.append(partial(_register, name, "register_forward_pre_hook", partial(_split, part.stretches[0])))
        _hook(own, name, partial(_sum, group, own.sites))
    else:
        raise CheckpointRefused(f"{name}: Tandem does not cut a linear layer by {style}")
    own.parts[f"{name}.weight"] = part
    if module.bias is not None and part.dim == 0:
        own.parts[f"{name}.bias"] = part


def _columns_out(own: Cut, module: nn.Linear, name: str, parent: nn.Module) -> Part:
    """The part of a product whose output stays cut. Attention's are cut between heads, and note the KV heads."""
    group, shape, leaf = own.group, module.weight.shape, name.rpartition(".")[2]
    dim = getattr(parent, "head_dim", None)
    attends = hasattr(parent, "is_causal") or hasattr(parent, "num_key_value_groups")
    if attends and leaf not in BY_HEADS:
        raise CheckpointRefused(f"the plan cuts {name}, of whose rows Tandem does not know how they follow heads")
    if leaf not in KV or not isinstance(dim, int):
        return _part(shape, 0, group, name)
    heads, rest = divmod(shape[0], dim)
    if rest or (heads % group.size and group.size % heads):
        raise CheckpointRefused(f"{name} has {heads} KV heads, which {group.size} ranks cannot share evenly")
    first = group.rank * heads // group.size
    own.meet.append(partial(_hold, name.rpartition(".")[0], HeldHeads(first, heads)))
    return Part(0, ((first * dim, max(1, heads // group.size) * dim),))


def _vocabulary(own: Cut, model: PreTrainedModel, modules: dict[str, nn.Module]) -> None:
    """Cuts the table of input embeddings, which plans do not, unless a tied head stays whole."""
    whole: Any = model  # transformers' accessors are not typed
    table, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    names = {id(module): name for name, module in modules.items()}
    if not isinstance(table, nn.Embedding) or id(table) not in names or table.num_embeddings % own.group.size:
        return
    tied = head is not None and head.weight is table.weight
    if tied and f"{names.get(id(head))}.weight" not in own.parts:
        return
    name = names[id(table)]
    own.sites += 1
    own.parts[f"{name}.weight"] = part = _part(table.weight.shape, 0, own.group, name)
    own.meet.append(partial(_look_up_part, name, own.group, own.sites, part.stretches[0]))


def _fit_groups(module: nn.Module) -> None:
    """Corrects the number of query heads per KV head that transformers' eager attention stores."""
    held = held_heads(module)
    query, key = getattr(module, "q_proj", None), getattr(module, "k_proj", None)
    if held is not None and hasattr(module, "num_key_value_groups"):
        if not isinstance(query, nn.Linear) or not isinstance(key, nn.Linear):
            raise CheckpointRefused(
                f"{type(module).__name__} is cut, and has no q_proj and k_proj to count its heads by"
            )
        module.__dict__["num_key_value_groups"] = query.weight.shape[0] // key.weight.shape[0]


def held_heads(module: nn.Module) -> HeldHeads | None:
    """Which KV heads of the whole model an attention module has; None: all."""
    held: HeldHeads | None = module.__dict__.get(HELD)
    return held


# ---- what `meet` does to a model


def _hook(own: Cut, name: str, hook: Callable[..., object]) -> None:
    own.meet.append(partial(_register, name, "register_forward_hook", hook))


def _register(name: str, how: str, hook: Callable[..., object], model: PreTrainedModel) -> None:
    getattr(model.get_submodule(name), how)(hook)


def _hold(name: str, held: HeldHeads, model: PreTrainedModel) -> None:
    setattr(model.get_submodule(name), HELD, held)


def _no_bias(name: str, model: PreTrainedModel) -> None:
    bias: Any = model.get_submodule(name).bias
    bias.data = torch.zeros_like(bias.data)


def _look_up_part(name: str, group: RankGroup, site: int, rows: tuple[int, int], model: PreTrainedModel) -> None:
    """Looks up this rank's rows. Ids outside the whole vocabulary raise IndexError, as with one rank."""
    module: Any = model.get_submodule(name)
    first, count = rows

    def of_others(local: torch.Tensor) -> torch.Tensor:
        if group.rank == 0:
            return local >= count
        return local < 0 if group.rank == group.size - 1 else (local < 0) | (local >= count)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        local = ids - first
        others = of_others(local)
        found: torch.Tensor = type(module).forward(module, local.masked_fill(others, 0))  # of a class that may change
        return group.all_reduce(found.masked_fill(others.unsqueeze(-1), 0), site)

    module.forward = forward


def _sum(group: RankGroup, site: int, _module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(out, site)


def _gather(group: RankGroup, site: int, _module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return group.all_gather(out, site)


def _split(columns: tuple[int, int], _module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """This rank's part of an input that every rank has whole."""
    return inputs[0].narrow(-1, *columns), *inputs[1:]
