"""Weights of 4, 8 or 16 bits for the products of a model: rounded, packed, proven, and put in the weights' place.

    int8    -128 to 127, one scale for each output row
    fp8     e4m3 (4 bits of exponent, 3 of mantissa), one scale for each output row; the head has int8
    int4    -8 to 7, one scale for each 32 neighbours along the input; the head has int8
    bf16    bfloat16 under a model that computes in float32

A replaced layer keeps its object, bias and hooks. Its weight becomes a NaN tensor of the same shape and type without
memory, so that the self-check detects any other reader. An embedding that is tied to the head keeps its weight, because
looking up rows takes little time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from engine.core.weight_formats import BITS, group_of, of_head, weight_bytes
from engine.kernels import experts, fresh_memory, is_nothing, modules, nothing
from engine.kernels.experts import CodedStack, ExpertCodes
from engine.kernels.replacement import Compiled, compiled, own_class
from tandem.errors import CheckpointRefused

LARGEST = {"int8": 127.0, "fp8": 448.0}
CLIPPED = (1.0, 0.95, 0.9, 0.85, 0.8)  # int4: shares of a group's range that are tried
SUM_GAP = 1e-5  # of a float32 sum in another order, relative to the sum of absolute values
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8}  # of the result
ROWS_TRIED = (1, 13, 40)  # a part of a tile; several; panels that are widened first
PIECE = 1 << 20  # elements of a weight that are in float32 at a time
PANEL_ROWS = 64  # a multiple of the rows of every level's panel
_CODES = "_tandem_codes"

Largest = Callable[[torch.Tensor], torch.Tensor]


def rows_at_a_time(k: int) -> int:
    """Of a weight with k columns, in float32; whole panels."""
    return max(PANEL_ROWS, PIECE // k // PANEL_ROWS * PANEL_ROWS)


@dataclass(frozen=True)
class Codes:
    """A weight `[n, k]` as codes times scales, packed for `torch.ops.tandem.linear_codes`.

    With `order` the codes are of the columns in that order, so that columns which share scales become neighbours.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    group: int
    format: str
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Without the padding of the last panel."""
        return weight_bytes(self.n, self.k, self.format, self.group)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        out: torch.Tensor = torch.ops.tandem.linear_codes.default(
            x, self.codes, self.scales, bias, self.n, self.k, self.group, self.format
        )
        return out

    def weight(self) -> torch.Tensor:
        """The weight that the codes represent: float32 `[n, k]`."""
        return self._rows(0, self.n)

    def pieces(self) -> Iterator[torch.Tensor]:
        """The same, some rows after the other: as a whole it would take several times the memory of its codes."""
        rows = rows_at_a_time(self.k)
        for first in range(0, self.n, rows):
            yield self._rows(first, min(self.n, first + rows))

    def _rows(self, first: int, stop: int) -> torch.Tensor:
        """From the first row of a panel to the last one of a panel, or of the weight."""
        nbytes, groups = -(-self.k // 2) * BITS[self.format] // 4, -(-self.k // self.group)  # of a row
        end = None if stop == self.n else stop
        out: torch.Tensor = torch.ops.tandem.unpack_codes.default(
            self.codes[first * nbytes : end and end * nbytes],
            self.scales[first * groups : end and end * groups],
            *(stop - first, self.k, self.group, self.format),
        )
        return out if self.order is None else torch.empty_like(out).index_copy_(1, self.order, out)


@dataclass(frozen=True)
class Packer:
    """Packs codes in the form with which a device multiplies. `pack` has the arguments of `packed` and raises
    CheckpointRefused; with `zeros` it also takes those of int4 as integers `[n, groups]`. `pack_experts` is as the one
    below, and `adopter` serves what it returns."""

    pack: Callable[..., Codes]
    pack_experts: Callable[..., CodedStack | None]
    zeros: bool = False
    adopter: Callable[[], experts.Adopter] = experts.Adopter


def quantise(weight: torch.Tensor, format: str, packer: Packer | None = None, largest: Largest | None = None) -> Codes:
    """Rounds a weight `[n, k]` to the nearest codes, and verifies the packed form; in panels for CPU by default."""
    codes, scales = rounded(weight, format, largest)
    return (packer or PANELS).pack(codes, scales, group_of(format, weight.shape[1]), format)


def rounded(weight: torch.Tensor, format: str, largest: Largest | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes (int16 `[n, k]`) and scales (`[n, groups]`) nearest to a weight, by torch alone. `largest` is for a
    weight that is some columns of a larger one, whose rows share scales: it makes of each row's largest absolute value
    that of the whole row."""
    n, k = weight.shape
    group = group_of(format, k)
    codes = torch.empty(n, k, dtype=torch.int16, device=weight.device)
    pieces = [*zip(torch.split(weight, rows := rows_at_a_time(k)), torch.split(codes, rows), strict=True)]
    if format == "bf16":
        for part, own in pieces:
            own.copy_(part.bfloat16().view(torch.int16))
        return codes, torch.ones(n, 1, device=weight.device)

    def grouped(part: torch.Tensor) -> torch.Tensor:
        return F.pad(part.float(), (0, -k % group)).view(len(part), -1, group)  # [rows, groups, group]

    if format == "int4":
        scales = torch.cat([_int4_scales(grouped(part)) for part, _ in pieces])
    else:
        size = torch.cat([grouped(part).abs().amax(2) for part, _ in pieces])
        scales = (size if largest is None else largest(size)) / LARGEST[format]
    scales = torch.where(scales == 0, 1.0, scales)
    for (part, own), steps in zip(pieces, torch.split(scales, rows), strict=True):
        own.copy_(codes_of(grouped(part) / steps.unsqueeze(2), format).flatten(1)[:, :k])
    return codes, scales


def represented(codes: torch.Tensor, scales: torch.Tensor, group: int, format: str) -> torch.Tensor:
    """The weight that codes `[n, k]` and scales `[n, groups]` represent: float32 `[n, k]`, by torch alone."""
    return values_of(codes, format) * scales.repeat_interleave(group, 1)[:, : codes.shape[1]]


def codes_of(units: torch.Tensor, format: str) -> torch.Tensor:
    """The codes (int16) nearest to numbers in units of their scale."""
    if format == "fp8":
        return units.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
    if format == "int4":
        return units.round().clamp(-8, 7).to(torch.int16) & 15
    return units.round().clamp(-128, 127).to(torch.int16) & 255


def values_of(codes: torch.Tensor, format: str) -> torch.Tensor:
    """The inverse of `codes_of`, by torch alone: the reference for the compiled operators."""
    if format == "fp8":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    if format == "bf16":
        return codes.view(torch.bfloat16).float()
    if format == "int4":
        return (codes - 16 * (codes > 7)).float()
    return (codes - 256 * (codes > 127)).float()


def packed(codes: torch.Tensor, scales: torch.Tensor, group: int, format: str) -> Codes:
    """Codes `[n, k]` (int16) and scales `[n, groups]` in panels. Raises CheckpointRefused if they differ."""
    n, k = codes.shape
    flat = torch.ops.tandem.pack_codes.default(codes, format)
    ours = Codes(
        fresh_memory(flat.nbytes).view(flat.dtype).copy_(flat),
        torch.ops.tandem.pack_scales.default(scales.contiguous()),
        n,
        k,
        group,
        format,
    )
    del flat
    generator = torch.Generator().manual_seed(0)
    tried = [torch.randn(rows, k, generator=generator).bfloat16() for rows in ROWS_TRIED]
    found = [[ours.multiply(x.to(dtype), None).float() for dtype in ROUNDING] for x in tried]
    same, last = True, 0
    for piece in ours.pieces():
        part, last = slice(last, last + len(piece)), last + len(piece)
        weight = represented(codes[part], scales[part], group, format)
        same &= torch.equal(piece, weight)
        for x, outs in zip(tried, found, strict=True):
            theirs = F.linear(x.float(), weight)
            size = F.linear(x.float().abs(), weight.abs())  # of what is summed
            for out, rounding_of in zip(outs, ROUNDING.values(), strict=True):
                gap = (out[:, part] - theirs).abs()
                same &= bool((gap <= rounding_of * theirs.abs() + SUM_GAP * size).all())  # false for NaN
    if not same:
        raise CheckpointRefused(
            f"a weight of {n} x {k} packed as {format} differs from its codes; serve it with weights = checkpoint"
        )
    return ours


def round_experts(weight: torch.Tensor, format: str, name: str, packer: Packer | None = None) -> CodedStack:
    """Rounds the weights `[experts, n, k]` of a mixture. Raises CheckpointRefused if the packed codes differ."""
    each = (ExpertCodes(*rounded(own, format), group_of(format, weight.shape[2])) for own in weight)
    packed_all = (packer or PANELS).pack_experts(each, len(weight), format, name)
    assert packed_all is not None
    return packed_all


def pack_experts(each: Iterable[ExpertCodes | None], count: int, format: str, name: str) -> CodedStack | None:
    """Packs the codes of each expert; None if there are none of one. Of the first one the products are verified, too.
    Raises CheckpointRefused if they differ."""
    stack: CodedStack | None = None
    for expert, own in enumerate(each):
        if own is None or (stack is not None and own.group != stack.group):
            return None
        codes, scales, group, _ = own
        if stack is None:
            first = packed(codes, scales, group, format)
            flat = fresh_memory(count * first.codes.nbytes).view(count, -1)
            stack = CodedStack(
                flat, first.scales.new_empty(count, first.scales.numel()), first.n, first.k, group, format, name
            )
        stack.codes[expert] = torch.ops.tandem.pack_codes.default(codes, format)
        stack.scales[expert] = torch.ops.tandem.pack_scales.default(scales.contiguous())
        if not torch.equal(stack.weight(expert), represented(codes, scales, group, format)):
            raise CheckpointRefused(
                f"an expert of {stack.n} x {stack.k} packed as {format} differs from its codes; serve it with"
                " weights = checkpoint"
            )
    return stack


def _int4_scales(parts: torch.Tensor) -> torch.Tensor:
    """The scale of each group with the least squared error among some that cover its range, or nearly."""
    low, high = parts.amin(2), parts.amax(2)
    signed = torch.where(low.abs() >= high, low, high)  # goes to -8, which has no counterpart
    best, error = signed / -8, torch.full_like(signed, float("inf"))
    for part in CLIPPED:
        for scales in (signed / -8 * part, signed / 7 * part):
            steps = torch.where(scales == 0, 1.0, scales).unsqueeze(2)
            squared_error = ((parts / steps).round().clamp(-8, 7) * steps - parts).square().sum(2)
            best, error = torch.where(squared_error < error, scales, best), torch.minimum(squared_error, error)
    return best


PANELS = Packer(packed, pack_experts)  # for CPU


# ---- in a model


def apply(
    model: PreTrainedModel,
    format: str,
    packer: Packer | None = None,
    largest_of: Callable[[str], Largest | None] = lambda _: None,
    *,
    with_experts: bool = False,
) -> int:
    """Replaces the weight of every plain product below `model`, one after another; returns how many there were.
    `largest_of` has what `rounded` needs for a product of this name; `with_experts`: of a mixture's experts, too."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers: dict[tuple[int, torch.Size], list[tuple[str, Any]]] = {}  # tied weights are packed once
    for name, layer in model.named_modules():
        if (weight := modules.weight_of(layer)) is not None:
            layers.setdefault((weight.data_ptr(), weight.shape), []).append((name, layer))
    del weight  # each is dropped as soon as it is replaced
    for same in layers.values():
        name, first = same[0]
        own = of_head(format) if any(layer is head for _, layer in same) else format
        codes = quantise(modules.oriented(first), own, packer, largest_of(name))
        for _, layer in same:
            put(layer, codes)
    adopter, packed_experts = (packer or PANELS).adopter(), 0
    for mixture in list(experts.found(model)) if with_experts else []:
        named = zip(experts.weights(mixture), experts.names(mixture), strict=True)
        adopter.adopt(mixture, both := [round_experts(weight, format, name, packer) for weight, name in named])
        packed_experts += sum(stack.count for stack in both)
    return sum(map(len, layers.values())) + packed_experts


@contextmanager
def rounding(model: PreTrainedModel, format: str) -> Iterator[None]:
    """Inside, plain products are torch's, with weights that are rounded to a format at each call: the reference for
    `apply`, of which none is kept in memory."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers: list[Any] = [layer for layer in model.modules() if modules.weight_of(layer) is not None]

    def product(layer: Any, own: str, x: torch.Tensor) -> torch.Tensor:
        weight = layer.weight.detach()
        pieces = (rounded(part, own) for part in torch.split(weight, rows_at_a_time(weight.shape[1])))
        group = group_of(own, weight.shape[1])
        return _by_pieces(layer, x, (represented(*piece, group, own) for piece in pieces))

    for layer in layers:
        layer.__dict__["forward"] = partial(product, layer, of_head(format) if layer is head else format)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def put(layer: Any, codes: Codes) -> None:
    """Replaces a layer's weight by codes."""
    shape, dtype = layer.weight.shape, layer.weight.dtype
    layer.weight = nn.Parameter(nothing(shape, dtype, codes.codes.device), requires_grad=False)
    layer.__dict__[_CODES] = codes
    kind: Any = type(layer)  # mypy holds nn.Module's classes for unhashable
    layer.__class__ = compiled(kind, Dequantised)


def pack_in_place(model: nn.Module) -> int:
    """Packs one product after another, proves each, and drops its original weight, so that only one weight at a time is
    in memory twice. Returns the bytes that were dropped. An embedding that is tied to a product looks up its panels; a
    weight that any other module reads stays. Afterwards only the compiled operators serve. Raises CheckpointRefused
    when a product is wrong."""
    tables = modules.tables_of(model)
    others = {
        each.data_ptr()
        for module in model.modules()
        if modules.weight_of(module) is None and module not in tables.values()
        for each in module.parameters(recurse=False)
    }
    dropped = 0
    for layers in modules.pack_each(model):
        weights: dict[int, Any] = {id(each.weight): each.weight for each in layers}
        for layer in layers:
            modules.prove(layer)
        for weight in weights.values():
            table = tables.get(weight.data_ptr())
            if weight.data_ptr() in others or (table is not None and type(layers[0]) is not nn.Linear):
                continue
            if table is not None:
                modules.tie(table, layers[0])
            dropped += weight.nbytes
            weight.data = nothing(weight.shape, weight.dtype, weight.device)
    modules.pack_experts(model)
    return dropped


def weight_in(layer: Any) -> Any:
    """A layer's weight, rebuilt from codes if necessary; None if it has none."""
    codes: Codes | None = layer.__dict__.get(_CODES)
    return codes.weight() if codes is not None else getattr(layer, "weight", None)


def bytes_in(model: nn.Module) -> int:
    """Bytes of the weights below `model`, those of codes and packed experts in the place of what they replace."""
    plain = sum(each.nbytes for each in model.parameters() if not is_nothing(each))
    packed = sum(stack.nbytes for stack in experts.stacks(model))
    return plain + packed + sum(codes.nbytes for codes in codes_in(model))


def codes_in(model: nn.Module) -> Iterator[Codes]:
    """The codes of each weight, once."""
    by_id = {id(codes): codes for layer in model.modules() if (codes := layer.__dict__.get(_CODES)) is not None}
    yield from by_id.values()


def switch(model: nn.Module, on: bool) -> None:
    """Products by the compiled operators, or by torch with the same weights; after `modules.switch`."""
    for layer in model.modules():
        kind: Any = type(layer)
        wanted = Quantised if on else Dequantised
        if _CODES in layer.__dict__ and not issubclass(kind, wanted):
            layer.__class__ = compiled(own_class(layer), wanted)


class Quantised(Compiled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = self.bias  # type: ignore[attr-defined]  # the module's own
        return _codes(self).multiply(x, bias)


class Dequantised(Compiled):
    """torch's product with the weights that the codes represent, rebuilt for each call: the self-check's reference."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _by_pieces(self, x, _codes(self).pieces())


def _by_pieces(layer: Any, x: torch.Tensor, pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """torch's product with a weight in float32, of which one piece is in memory at a time."""
    out = torch.cat([F.linear(x.float(), piece) for piece in pieces], -1)
    return (out if layer.bias is None else out + layer.bias.float()).to(x.dtype)


def _codes(layer: Any) -> Codes:
    codes: Codes = layer.__dict__[_CODES]
    return codes
