"""The modules of a model that operators replace, recognised by what a module computes and never by its name.

A replaced module changes its class (engine/kernels/replacement.py). So it can be switched back at any time, and
isinstance checks give the same result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, product
from typing import Any

import torch
import xxhash
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.kernels import DTYPES, experts, fresh_memory, panels_of
from engine.kernels.replacement import Compiled, compiled, own_class
from engine.kernels.weight_cache import WeightCache, digest_of, file_backed, placed
from tandem.errors import CheckpointRefused

PIECE = 3072  # rows of a weight that are packed at a time: a multiple of the panel of each instruction level
ROWS_TRIED = 13  # whole tiles and a remainder
PRODUCT_GAP = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative to the root mean square of the result
_PACKED = "_tandem_packed"  # the weight in panels, for torch.ops.tandem.linear
NORM = "_tandem_norm"  # (eps, offset, round_first) of a module that is an RMS norm
_TABLE = "_tandem_table"  # the panels of the product that an embedding is tied to, for torch.ops.tandem.look_up
REPLACEMENT = "_tandem_replacement"  # the class whose forward serves in place of the module's own


def prepare(model: nn.Module, cache: WeightCache | None = None) -> str:
    """Packs the weights of products, tests the product of each shape, and finds RMS norms; returns where the weights
    are.

    Raises CheckpointRefused when a product is wrong. (The self-check may run on a copy in float32, and would not see
    the operators for 16 bits.)
    """
    where = pack(model, cache)
    prove_shapes(model)
    find_norms(model)
    return where


def find_norms(model: nn.Module) -> None:
    """Marks each RMS norm below `model` for replacement by the compiled operator; `switch` replaces them."""
    for module in model.modules():
        if (norm := rms_norm_of(module)) is not None:
            module.__dict__.update({NORM: norm, REPLACEMENT: RmsNorm})


def switch(model: nn.Module, on: bool) -> None:
    """Switches the modules below `model` that have a replacement to its forward, or back. Packed experts have no way
    back: torch multiplies by their unpacked weights instead."""
    for module in model.modules():
        kind: Any = type(module)  # mypy considers nn.Module's classes unhashable
        if experts.has_stacks(module):
            experts.switch(module, on)
        elif not on and issubclass(kind, Compiled):
            module.__class__ = own_class(module)
        elif on and REPLACEMENT in module.__dict__ and not issubclass(kind, Compiled):
            module.__class__ = compiled(kind, module.__dict__[REPLACEMENT])


def pack(model: nn.Module, cache: WeightCache | None = None) -> str:
    """Gives every plain product its weight in panels, all in one stretch of memory, in the order of the modules.

    With a cache this memory is a mapped file, and the model's own weights move there too, unless they are in a file
    already; they keep their values. Without one they stay in place for other readers: an embedding that is tied to the
    head, an attention that reads its projections' weights, the comparison of the self-check. A mixture's experts have
    panels alone (engine/kernels/experts.py). Returns a line that says where the panels are. Raises CheckpointRefused
    when packed experts are wrong.
    """
    layers = [(layer, weight) for layer in model.modules() if (weight := weight_of(layer)) is not None]
    weights = {_key(weight): weight for _, weight in layers}  # tied weights are packed once
    mixtures = list(experts.found(model))
    stacks = [weight for mixture in mixtures for weight in experts.weights(mixture)]
    types = [weight.dtype for weight in (*weights.values(), *stacks)]
    sizes = [_packed_bytes(weight) for weight in weights.values()]
    sizes += [len(weight) * _packed_bytes(weight[0]) for weight in stacks]
    own = _in_memory(model) if cache is not None and layers else []
    kept: list[torch.Tensor] | None = None
    if cache is not None and layers:
        kept = cache.get(
            _name((*weights.values(), *stacks), own),
            [*sizes, *(each.nbytes for each in own)],
            lambda: chain(map(torch.ops.tandem.pack.default, weights.values()), map(experts.pack, stacks), own),
        )
    said = f"weights: {sum(sizes) >> 20} MiB in panels, in"
    if kept is None:
        for _ in pack_each(model):
            pass
        pack_experts(model)
        return f"{said} memory of this worker alone"
    panels = [part.view(dtype) for part, dtype in zip(kept, types, strict=False)]
    views = dict(zip(weights, panels, strict=False))
    for layer, weight in layers:
        _give_panels(layer, views[_key(weight)], weight)
    for tensor, part in zip(own, kept[len(types) :], strict=True):
        tensor.data = part.view(tensor.dtype).view(tensor.shape)
    adopter, of_stacks = experts.Adopter(), iter(panels[len(weights) :])
    for mixture in mixtures:
        adopter.adopt(mixture, experts.stacked(mixture, [next(of_stacks), next(of_stacks)]))
    return f"{said} a file that all workers share"


def pack_experts(model: nn.Module) -> None:
    """Packs the experts below `model`, one module after another, whose original weights it drops. Raises
    CheckpointRefused when a product is wrong."""
    adopter = experts.Adopter()
    for mixture in experts.found(model):
        adopter.adopt(mixture, experts.stacked(mixture, [*map(experts.pack, experts.weights(mixture))]))


def pack_each(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Packs weight by weight into one stretch of this process's memory, so that small ones share large memory pages.
    Yields the layers of each weight as soon as they have its panels. It holds no weight then, so the caller may drop
    it."""
    layers: dict[Any, list[nn.Module]] = {}  # tied weights are packed once
    for layer in model.modules():
        if (weight := weight_of(layer)) is not None:
            layers.setdefault(_key(weight), []).append(layer)
    sizes = [_packed_bytes(oriented(first)) for first, *_ in layers.values()]
    starts, total = placed(sizes)
    stretch = fresh_memory(total)
    for own, at, size in zip(layers.values(), starts, sizes, strict=True):
        weight = oriented(own[0])
        part = stretch[at : at + size].view(weight.dtype)
        pieces = map(torch.ops.tandem.pack.default, torch.split(weight, PIECE))
        filled = 0
        for piece in pieces:
            part[filled : filled + piece.numel()] = piece
            filled += piece.numel()
        assert filled == part.numel(), "a piece is no multiple of a panel"
        for layer in own:
            _give_panels(layer, part, weight)
        del weight
        yield own


def _give_panels(layer: nn.Module, panels: torch.Tensor, weight: torch.Tensor) -> None:
    layer.__dict__.update({_PACKED: (panels, *weight.shape), REPLACEMENT: Linear})


def _key(weight: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return weight.data_ptr(), weight.shape, weight.stride()


def _packed_bytes(weight: torch.Tensor) -> int:
    """The size of a weight's panels, which pad rows and columns independently."""
    size = torch.ops.tandem.pack.default
    rows, columns, corner = (size(part).numel() for part in (weight[:, :1], weight[:1], weight[:1, :1]))
    nbytes: int = rows * columns // corner * weight.element_size()
    return nbytes


def _in_memory(model: nn.Module) -> list[torch.Tensor]:
    """Parameters that take memory of this process, because loading them has changed their type, and that stay."""
    dropped = {weight.data_ptr() for mixture in experts.found(model) for weight in experts.weights(mixture)}
    parameters = [each for each in model.parameters() if each.numel() and each.is_contiguous()]
    parameters = [each for each in parameters if each.data_ptr() not in dropped]
    return [each for each, on_disk in zip(parameters, file_backed(parameters), strict=True) if not on_disk]


def _name(weights: Iterable[torch.Tensor], own: Iterable[torch.Tensor]) -> str:
    """The cache key of what `pack` keeps: 32 hex digits that change with any bit of a weight and with the operators."""
    digest = xxhash.xxh3_128(panels_of().encode())
    for kind, tensors in (("panels of", weights), ("as it is", own)):
        for tensor in tensors:
            digest.update(f"{kind} {digest_of(tensor.detach())};".encode())
    return digest.hexdigest()


def tables_of(model: nn.Module) -> dict[int, nn.Embedding]:
    """Embeddings that could look up rows of panels, by the address of their weight; none of a subclass, whose forward
    does more."""
    plain = [each for each in model.modules() if type(each) is nn.Embedding and each.max_norm is None]
    return {each.weight.data_ptr(): each for each in plain if each.weight.dtype in DTYPES}


def tie(table: nn.Embedding, layer: nn.Module) -> None:
    """Has an embedding look up rows of the panels of the product that it is tied to."""
    table.__dict__.update({_TABLE: layer.__dict__[_PACKED], REPLACEMENT: Embedding})


def panels(model: nn.Module) -> list[torch.Tensor]:
    """The packed weights of its products, each once."""
    packed = [each.__dict__[_PACKED][0] for each in model.modules() if _PACKED in each.__dict__]
    packed += [stack.panels for stack in experts.stacks(model) if isinstance(stack, experts.Stack)]
    return list({id(tensor): tensor for tensor in packed}.values())


def mapped_bytes(model: nn.Module) -> int:
    """Bytes in mapped files that a step reads: of panels, and of weights without a product.

    The kernel counts them as available, because the files could be read again; in effect they are not.
    """
    others = {
        id(tensor): tensor
        for each in model.modules()
        for name, tensor in each._parameters.items()
        if tensor is not None and not (name == "weight" and _PACKED in each.__dict__)
    }
    tensors = [*panels(model), *others.values()]
    return sum(each.nbytes for each, on_disk in zip(tensors, file_backed(tensors), strict=True) if on_disk)


def packed_shapes(model: nn.Module) -> Iterator[tuple[int, int, torch.dtype]]:
    """Rows, columns and type of the weights that have panels below `model`; a tied one once per use."""
    for layer in model.modules():
        if (packed := layer.__dict__.get(_PACKED)) is not None:
            panels, n, k = packed
            yield n, k, panels.dtype


def weight_of(layer: nn.Module, dtypes: Collection[torch.dtype] = DTYPES) -> torch.Tensor | None:
    """The weight [out, in] of a plain product whose type the operators serve, None of anything else."""
    if type(layer) not in (nn.Linear, Conv1D):
        return None
    weight = oriented(layer)
    return weight if weight.dtype in dtypes and weight.numel() > 0 else None


def oriented(layer: Any) -> torch.Tensor:
    """The weight of a product as [out, in]; a Conv1D stores it as [in, out]."""
    weight: torch.Tensor = layer.weight.detach()
    return weight.T if isinstance(layer, Conv1D) else weight


def prove_shapes(model: nn.Module) -> None:
    """`prove` of one product of each type and shape of weight."""
    layers = {
        (weight.dtype, weight.shape, layer.bias is None): layer
        for layer in model.modules()
        if (weight := weight_of(layer)) is not None
    }
    for layer in layers.values():
        prove(layer)


def prove(layer: Any) -> None:
    """Compares the compiled product with torch's on random rows. Raises CheckpointRefused if they differ."""
    weight = oriented(layer)
    x = torch.randn(ROWS_TRIED, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.inference_mode():
        ours = multiply(layer, x).float()
        theirs = layer.forward(x).float()  # without the sum over ranks that may follow it
    allowed = PRODUCT_GAP[weight.dtype] * theirs.square().mean().sqrt()
    if not (ours - theirs).abs().max() <= allowed:  # also for NaN
        raise CheckpointRefused(
            f"the compiled product with a weight of {tuple(weight.shape)} in {weight.dtype} differs from torch's; "
            'load it with kernels="reference"'
        )


def multiply(layer: Any, x: torch.Tensor) -> torch.Tensor:
    panels, out_features, in_features = layer.__dict__[_PACKED]
    out: torch.Tensor = torch.ops.tandem.linear.default(x, panels, layer.bias, out_features, in_features)
    return out


class Linear(Compiled):
    """A product over panels, with results that do not depend on the other rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.__dict__[_PACKED][0].dtype:
            out: torch.Tensor = super().forward(x)  # type: ignore[misc]  # the module's own
            return out
        return multiply(self, x)


class Embedding(Compiled):
    """Looks up rows of the panels of a product."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.tandem.look_up.default(ids, *self.__dict__[_TABLE])
        return out


class RmsNorm(Compiled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = _only_parameter(self)
        if x.dtype != weight.dtype or x.dtype not in DTYPES:
            out: torch.Tensor = super().forward(x)  # type: ignore[misc]  # the module's own
        else:
            out = torch.ops.tandem.rms_norm.default(x, weight, *self.__dict__[NORM])
        return out


def _only_parameter(module: Any) -> torch.Tensor:
    (weight,) = module._parameters.values()
    parameter: torch.Tensor = weight
    return parameter


def rms_norm_of(
    module: nn.Module, rms_norm: Callable[..., torch.Tensor] | None = None
) -> tuple[float, float, bool] | None:
    """The (eps, offset, round_first) with which `rms_norm` equals the module; None if there are none. The default is
    `tandem::rms_norm`.

    A candidate has one vector of weights and nothing else, its eps among its attributes, and a forward of one argument:
    a gate as a second argument would be dropped. The test input has a mean other than 0, so that a layer norm differs,
    and rows so small that eps matters.
    """
    parameters = list(module._parameters.values())
    if len(parameters) != 1 or module._modules or module._buffers or module._forward_hooks:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight = parameters[0]
    if weight is None or weight.dim() != 1 or weight.dtype not in DTYPES:
        return None
    ours_of = rms_norm or torch.ops.tandem.rms_norm.default
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, weight.numel(), generator=generator) + 0.5
    x = (x * torch.logspace(-4, 2, 24).unsqueeze(1)).to(weight)
    epsilons = {value for value in vars(module).values() if type(value) is float}
    try:
        with torch.inference_mode():
            expected = module(x)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape or expected.dtype != x.dtype:
        return None
    for eps, offset, round_first in product(sorted(epsilons), (0.0, 1.0), (True, False)):
        with torch.inference_mode():
            ours = ours_of(x, weight, eps, offset, round_first)
        if _equal(ours, expected):
            return eps, offset, round_first
    return None


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal up to the order of a float32 sum, which in 16 bits changes the rounding of a few elements per thousand."""
    if ours.dtype == torch.float32:
        return torch.allclose(ours, theirs, rtol=2e-6, atol=0)
    return (ours != theirs).float().mean().item() < 5e-3 and torch.allclose(ours, theirs, rtol=2**-7, atol=0)
