"""Reads products packed by GPTQ, AWQ, block-wise FP8 or torchao, by the descriptions of these formats.

    weight[n, k] = scale[n, group of k] * (integer[n, k] - zero[n, group of k])       in float32, rounded once

GPTQ        int32 words hold 32 / bits neighbours along the input, the lowest bits first; those of the zeros neighbours
            along the output. Version 1 stores each zero less one, `gptq_v2` stores it. `g_idx` has each input's group.
AWQ         `gemm`: a word holds 8 neighbours along the output, in the order 0 2 4 6 1 3 5 7 from the lowest bits up.
fp8         e4m3, and a scale for each block of `weight_block_size`; the last block of a row or column may be cut off.
torchao     one int8 or e4m3 for each weight, whatever its range, and a scale for each block; a file's metadata has each
            weight's class and block. The config has only the recipe.

The descriptions are the packers' sources: AutoGPTQ's nn_modules/qlinear/qlinear_cuda_old.py and GPTQModel's
utils/model.py (convert_gptq_v1_to_v2_format_module), AutoAWQ's modules/linear/gemm.py, transformers' integrations/
finegrained_fp8.py, which treats a cut-off block as a smaller one, and torchao's quantization/quant_primitives.py
(dequantize_affine) with prototype/safetensors/safetensors_support.py. Their kernels for 16 bits round scale * integer
to float16, or round the scale to bfloat16; this does neither, and differs from them by that much.

Contradictory files, and files that readers interpret differently, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from engine.core.packing_scheme import AWQ, FP8, GPTQ, PARTS, TORCHAO, WORD, Scheme, refused
from engine.core.weight_formats import group_of_part
from engine.kernels import experts, weight_quantization
from engine.parallel.weight_cut import Part
from tandem.errors import CheckpointRefused

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight neighbours in a word
FLOATS = ("F16", "BF16", "F32")
LIMITS = {"int4": 7, "int8": 127}
TORCHAO_CLASSES = {"Int8Tensor": "I8", "IntxUnpackedToInt8Tensor": "I8", "Float8Tensor": "F8_E4M3"}

# torchao's description of a weight: only its block is used; the other keys say how it was made and name kernels.
_KNOWN_DATA = {"block_size", "dtype", "target_dtype", "reduce_range", "mm_config", "kernel_preference"}


# (outputs, inputs) -> their integers, float32 `[n, k]`, also of fp8
Stored = Callable[[slice, slice], torch.Tensor]


class Coded(NamedTuple):
    """A weight as codes in one of Tandem's formats, its columns in the order of their groups."""

    codes: torch.Tensor  # int16 [n, k]
    scales: torch.Tensor  # float32 [n, groups]
    group: int
    format: str
    order: torch.Tensor  # [k]: the columns
    of_groups: torch.Tensor  # [groups]: the groups


@dataclass(frozen=True)
class Product:
    """A packed product, or a part of one. transformers uses it like a slice of a file, and reads its weight when it
    loads the layer."""

    name: str
    stored: Stored
    zeros: torch.Tensor | None  # float32 [n, groups]
    scales: torch.Tensor  # float32 [n, groups]
    group_of: torch.Tensor  # [k]
    group: int
    fp8: bool = False
    own: Part | None = None  # what it has of the product that is stored

    def __getitem__(self, _all: Any) -> torch.Tensor:
        return self.weight()

    def get_shape(self) -> list[int]:
        return [len(self.scales), len(self.group_of)]

    def part(self, part: Part | None) -> Product:
        """A rank's part of a whole product: some of its outputs, with their scales, or some of its inputs, with the
        scales of their groups."""
        if part is None:
            return self
        zeros, scales, group_of, group = self.zeros, self.scales, self.group_of, self.group
        if part.dim == 0:
            zeros, scales = zeros if zeros is None else part.of(zeros), part.of(scales)
        else:
            group_of = part.of(group_of.unsqueeze(0)).squeeze(0)
            group = group_of_part(group, len(self.group_of), len(group_of)) or 1  # of which there are no codes
        return replace(self, zeros=zeros, scales=scales, group_of=group_of, group=group, own=part)

    def integers(self) -> torch.Tensor:
        n, k = self.get_shape()
        if self.own is None:
            return self.stored(slice(0, n), slice(0, k))
        pieces = [slice(first, first + count) for first, count in self.own.stretches]
        if self.own.dim == 0:
            return torch.cat([self.stored(rows, slice(0, k)) for rows in pieces])
        return torch.cat([self.stored(slice(0, n), columns) for columns in pieces], 1)

    def units(self) -> torch.Tensor:
        """The weight in units of its scales: float32 `[n, k]`."""
        integers = self.integers()
        return integers if self.zeros is None else integers - self.zeros[:, self.group_of]

    def weight(self) -> torch.Tensor:
        """float32 `[n, k]`."""
        return self.units() * self.scales[:, self.group_of]

    def coded(self, format: str | None = None) -> Coded | None:
        """Its codes in Tandem's narrowest format, or in this one; None if there are none."""
        units = self.units()
        k = units.shape[1]
        low, high = int(units.min().item()), int(units.max().item())
        if format is None:
            format = "fp8" if self.fp8 else "int4" if low >= -8 and high <= 7 else "int8"
        order = self.group_of.argsort(stable=True)
        in_order = self.group_of[order]
        group = self.group if self.group < k else k + k % 2
        if group % 2 == 1 or (format in LIMITS and (low < -LIMITS[format] - 1 or high > LIMITS[format])):
            return None
        of_groups = in_order[::group]
        if not torch.equal(of_groups.repeat_interleave(group)[:k], in_order):
            return None
        codes = weight_quantization.codes_of(units[:, order], format)
        return Coded(codes, self.scales[:, of_groups], group, format, order, of_groups)

    def codes(self, packer: weight_quantization.Packer) -> weight_quantization.Codes | None:
        """The weight's codes in one of Tandem's formats; None if no format represents it bit for bit."""
        found = self.coded()
        if found is None:
            return None
        units_coded, scales, group, format, order, of_groups = found
        if packer.zeros and format == "int8" and (whole := self._half_bytes()) is not None:
            integers, zeros = whole
            codes = packer.pack(integers[:, order], scales, group, "int4", zeros=zeros[:, of_groups])
        else:
            codes = packer.pack(units_coded, scales, group, format)
        if not torch.equal(order, torch.arange(len(order))):
            codes = replace(codes, order=order.to(codes.codes.device))
        return codes if torch.equal(codes.weight().cpu(), self.weight()) else None

    def with_zeros(self) -> experts.ExpertCodes | None:
        """Integers of 4 bits and their zeros, of a weight with its columns in place; None if it has no such form."""
        found, whole = self.coded("int8"), self._half_bytes()
        if found is None or whole is None or not torch.equal(found.order, torch.arange(len(found.order))):
            return None
        integers, zeros = whole
        same = torch.equal((integers - zeros[:, self.group_of]).float() * self.scales[:, self.group_of], self.weight())
        return experts.ExpertCodes(integers, found.scales, found.group, zeros[:, found.of_groups]) if same else None

    def _half_bytes(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Unsigned integers of 4 bits `[n, k]` and their zeros `[n, groups]`; None if the weight has no such form."""
        integers = self.integers()
        if self.zeros is None or integers.max() - integers.min().clamp(max=0) > 15:
            return None
        shift = 8 if integers.min() < 0 else 0
        zeros = (self.zeros + shift).to(torch.int16)
        return None if zeros.min() < 0 or zeros.max() > 255 else ((integers + shift).to(torch.int16), zeros)


def beside(products: list[Product]) -> Product | None:
    """One product whose outputs are those of several; None if their columns are grouped differently."""
    first = products[0]
    for each in products[1:]:
        same = torch.equal(each.group_of, first.group_of) and (each.group, each.fp8) == (first.group, first.fp8)
        if not same or (each.zeros is None) != (first.zeros is None):
            return None

    def stored(outputs: slice, inputs: slice) -> torch.Tensor:
        return torch.cat([each.integers() for each in products])[outputs, inputs]

    zeros = None if first.zeros is None else torch.cat([each.zeros for each in products if each.zeros is not None])
    scales = torch.cat([each.scales for each in products])
    return Product(first.name, stored, zeros, scales, first.group_of, first.group, first.fp8)


@dataclass(frozen=True)
class Weights:
    """A checkpoint's tensors as if it were not quantised: by name, an object that returns the values when indexed."""

    method: str
    tensors: dict[str, Any]
    products: dict[str, Product]  # by module
    files: list[Any]  # kept open while the tensors are read


# ---- reading the files


def read(files: list[Path], scheme: Scheme) -> Weights:
    """Opens the files of a checkpoint. Raises CheckpointRefused if its tensors contradict the scheme."""
    opened: list[Any] = [safe_open(file, framework="pt") for file in files]  # not typed
    tensors = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118 - not a dict
    if scheme.method == FP8:
        products = _blocks(tensors, scheme)
    elif scheme.method == TORCHAO:
        products = _described(tensors, opened)
    else:
        products = _words(tensors, scheme)
    for name, product in products.items():
        if f"{name}.weight" in tensors:
            raise refused(scheme.method, f"has {name} twice, packed and as a plain weight")
        tensors[f"{name}.weight"] = product
    if not products:
        raise refused(scheme.method, "has no packed weights, contrary to its quantization_config")
    return Weights(scheme.method, tensors, products, opened)


# `_words`, `_blocks` and `_described` take the tensors of their products out of `tensors`.


def _words(tensors: dict[str, Any], scheme: Scheme) -> dict[str, Product]:
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    parts = {name: {part: tensors.pop(f"{name}.{part}", None) for part in PARTS[scheme.method]} for name in names}
    return {name: _product(name, found, scheme) for name, found in parts.items()}


def _product(name: str, parts: dict[str, Any], scheme: Scheme) -> Product:
    """A product of GPTQ or AWQ."""
    method, many = scheme.method, WORD // scheme.bits
    qweight, qzeros, scales, g_idx = (parts.get(part) for part in PARTS[GPTQ])
    if qweight is None or qzeros is None or scales is None:
        raise refused(method, f"lacks the {'scales' if scales is None else 'zeros'} of {name}")
    rows, columns = _shape(qweight, 2, name)
    n, k = scheme.dense_shape(rows, columns)
    group = k if scheme.group == -1 else scheme.group
    groups = -(-k // group)
    for tensor, shape, dtypes in ((qweight, (rows, columns), ("I32",)), (qzeros, (groups, n // many), ("I32",))):
        _check(method, name, tensor, shape, dtypes)
    _check(method, name, scales, (groups, n), FLOATS)
    if n % many or (method == AWQ and k % group):
        raise refused(method, f"has {name} with {n} outputs and {k} inputs, which do not fill its words or groups")
    group_of = torch.arange(k) // group
    if g_idx is not None:
        _check(method, name, g_idx, (k,), ("I32", "I64"))
        indices = g_idx[...].long()
        if indices.min() < 0 or indices.max() >= groups:
            raise refused(method, f"has inputs of {name} in groups that are not there")
        if scheme.ordered and not torch.equal(indices, group_of):
            raise refused(method, f"has inputs of {name} in other groups than with desc_act = false")
        group_of = indices
    elif not scheme.ordered:
        raise refused(method, f"lacks the g_idx of {name}, contrary to its desc_act = true")
    places = AWQ_PLACES if method == AWQ else tuple(range(many))
    zeros = _unpacked(qzeros[...], scheme.bits, places).flatten(1)  # [groups, n]
    if scheme.less_one:
        if (zeros == 2**scheme.bits - 1).any():
            raise refused(
                method, f"has zeros in {name} that readers of this format interpret differently; save it as gptq_v2"
            )
        zeros = zeros + 1
    if scheme.symmetric and (zeros != 2 ** (scheme.bits - 1)).any():
        raise refused(method, f"is declared symmetric, but the zeros of {name} are not in the middle")

    def stored(outputs: slice, inputs: slice) -> torch.Tensor:
        packed, plain = (inputs, outputs) if method == GPTQ else (outputs, inputs)
        first = packed.start // many
        words, within = slice(first, -(-packed.stop // many)), slice(packed.start - first * many, None)
        if method == GPTQ:
            found = _unpacked(qweight[words, plain], scheme.bits, places).transpose(1, 2).flatten(0, 1)[within]
            return found[: packed.stop - packed.start].T.float()
        found = _unpacked(qweight[plain, words], scheme.bits, places).flatten(1)[:, within]
        return found[:, : packed.stop - packed.start].T.float()

    return Product(name, stored, zeros.T.float().contiguous(), scales[...].float().T.contiguous(), group_of, group)


def _unpacked(words: torch.Tensor, bits: int, places: tuple[int, ...]) -> torch.Tensor:
    """int32 `[a, b]` to `[a, b, 32 / bits]`."""
    shifts = torch.tensor(places, dtype=torch.int32) * bits
    unpacked: torch.Tensor = (words.unsqueeze(2) >> shifts) & (2**bits - 1)
    return unpacked


def _blocks(tensors: dict[str, Any], scheme: Scheme) -> dict[str, Product]:
    """The products of an fp8 checkpoint."""
    products = {}
    for name in [name for name, tensor in tensors.items() if tensor.get_dtype().startswith("F8_E")]:
        if name.endswith("_scale_inv"):
            continue  # scales as F8_E8M0, which are read with their weight
        if not name.endswith(".weight") or f"{name}_scale_inv" not in tensors:
            raise refused(FP8, f"has no scales for {name}")
        tensor, scales, layer = tensors.pop(name), tensors.pop(f"{name}_scale_inv"), name.removesuffix(".weight")
        (n, k), (high, wide) = _shape(tensor, 2, name), scheme.block
        _check(FP8, name, tensor, (n, k), ("F8_E4M3",))
        _check(FP8, name, scales, (-(-n // high), -(-k // wide)), (*FLOATS, "F8_E8M0"))
        group_of = torch.arange(k) // wide
        products[layer] = Product(
            layer, partial(_plain, tensor), None, _for_rows(scales, high, n), group_of, wide, fp8=True
        )
    return products


def _described(tensors: dict[str, Any], opened: list[Any]) -> dict[str, Product]:
    """The products of a torchao checkpoint."""
    products = {}
    for file in opened:
        metadata = file.metadata() or {}
        try:
            descriptions = {name: json.loads(metadata[name]) for name in json.loads(metadata["tensor_names"])}
            kinds = {
                name: (description["_type"], description.get("_data", {})) for name, description in descriptions.items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise refused(TORCHAO, f"does not describe its tensors as torchao does ({error!r:.80})") from error
        for name, (kind, data) in kinds.items():
            if kind != "Tensor" and name not in products:
                products[name] = _of_torchao(name, kind, data, tensors)
    return {name.removesuffix(".weight"): product for name, product in products.items()}


def _of_torchao(name: str, kind: str, data: dict[str, Any], tensors: dict[str, Any]) -> Product:
    """One product of a torchao checkpoint."""
    if kind not in TORCHAO_CLASSES or not name.endswith(".weight"):
        raise refused(
            TORCHAO, f"has {name} as {kind}; served are weights of layers as {', '.join(sorted(TORCHAO_CLASSES))}"
        )
    more = sorted(key for key, value in data.items() if key not in _KNOWN_DATA and value is not None)
    if more:
        raise refused(TORCHAO, f"has {', '.join(more)} for {name}, and only weights are served quantised")
    at = f"{name.removesuffix('weight')}_weight_"
    parts = {each.removeprefix(at): tensors.pop(each) for each in list(tensors) if each.startswith(at)}
    qdata, scale, zero_point = (parts.get(part) for part in ("qdata", "scale", "zero_point"))
    if qdata is None or scale is None or not parts.keys() <= {"qdata", "scale", "zero_point"}:
        raise refused(TORCHAO, f"has {', '.join(sorted(parts)) or 'nothing'} of {name}; required are qdata and scale")
    (n, k), block = _shape(qdata, 2, name), data.get("block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise refused(TORCHAO, f"has blocks of {block} in {name}; served are blocks of two positive numbers")
    high, wide = block
    _check(TORCHAO, name, qdata, (n, k), (TORCHAO_CLASSES[kind],))
    _check(TORCHAO, name, scale, (-(-n // high), -(-k // wide)), FLOATS)
    zeros = None
    if zero_point is not None:
        _check(TORCHAO, name, zero_point, (-(-n // high), -(-k // wide)), ("I8",))
        zeros = _for_rows(zero_point, high, n) if zero_point[...].any() else None

    layer, group_of = name.removesuffix(".weight"), torch.arange(k) // wide
    fp8 = kind == "Float8Tensor"
    return Product(layer, partial(_plain, qdata), zeros, _for_rows(scale, high, n), group_of, wide, fp8)


def _plain(tensor: Any, outputs: slice, inputs: slice) -> torch.Tensor:
    """`Stored` for a tensor with one element for each weight."""
    values: torch.Tensor = tensor[outputs, inputs]
    return values.float()


def _for_rows(tensor: Any, high: int, n: int) -> torch.Tensor:
    """The values that blocks of `high` rows share, in float32, for each of n rows."""
    values: torch.Tensor = tensor[...]
    return values.float().repeat_interleave(high, 0)[:n].contiguous()


def _shape(tensor: Any, dimensions: int, name: str) -> tuple[int, ...]:
    shape = tuple(tensor.get_shape())
    if len(shape) != dimensions:
        raise CheckpointRefused(f"{name} has the shape {shape} where {dimensions} dimensions are expected")
    return shape


def _check(method: str, name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Checks that a tensor of `name` agrees with the config."""
    if tuple(tensor.get_shape()) != shape or tensor.get_dtype() not in dtypes:
        raise refused(
            method,
            f"has a tensor of {name} in {tensor.get_dtype()} {tuple(tensor.get_shape())} where its quantization_config"
            f" asks for {' or '.join(dtypes)} {shape}",
        )
