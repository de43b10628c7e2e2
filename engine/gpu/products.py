"""Products and RMS norms on CUDA, in Triton, with bits that do not depend on the other rows
(tests/engine/test_gpu_products.py).

    out[row, column] = sum over k of x[row, k] * weight[column, k], + bias, rounded

The sum over k is one float32 chain in its order, in tiles of DEPTH, whatever the number of rows: k is never split. A
step of up to FEW rows has narrow tiles of columns, so that enough programs read the weight; a larger one has larger
tiles. Both add a row's products in the same order. Only the device can show that the instructions of both tiles agree:
engine/gpu/layers.py tries this at load.

cuBLAS, and torch's mean in an RMS norm, may use another order of sums for another number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.gpu import product_kernels as kernels
from engine.gpu.operators import BLACKWELL, HOPPER, capability_of, in_rows, operator, power_of_two

FEW = 64  # maximum rows of a step with narrow tiles
WIDE = 8192  # columns of a weight above which narrow tiles are twice as wide, with still enough programs
BAND = 8  # tiles of rows that read the same weights at the same time
NORM_ELEMENTS = 1024  # of a program, at least
SHARED = {80: 160 << 10, 89: 96 << 10, 90: 160 << 10, 100: 160 << 10}  # bytes that a thread block's tiles may take
COPIED = 16  # bytes: alignment of what the copy engine reads


@dataclass(frozen=True)
class Tiling:
    """Of a product with a weight of `n` columns. DEPTH alone decides in which order a row is summed."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @staticmethod
    def of(rows: int, n: int, dtype: torch.dtype, capability: int, depth: int | None = None) -> Tiling:
        """`capability`: of the device, as 90. `depth`: that of a weight of codes."""
        if dtype == torch.float32:
            return Tiling(32 if rows <= FEW else 64, 32 if rows <= FEW else 64, depth or 32, 4, 3)
        if rows > FEW:
            columns = 128 if depth is None else 64  # a group's sum takes registers, too
            return Tiling(
                256 if HOPPER <= capability < BLACKWELL and depth is None else 128, columns, depth or 64, 8, 4
            )
        # Of a tile with fewer than 64 rows Blackwell's product is another instruction, and that over codes permutes k.
        tall, columns = 16 if rows <= 16 and capability < BLACKWELL and depth is None else 64, 64 if n > WIDE else 32
        deep = depth or 128
        stages = min(6, SHARED.get(capability, SHARED[89]) // ((tall + columns) * deep * dtype.itemsize))
        return Tiling(tall, columns, deep, 4, stages)

    @property
    def launch(self) -> dict[str, int]:
        """Of the kernels `linear`, `each_head` and `experts`."""
        sizes = {"ROWS": self.rows, "COLS": self.columns, "DEPTH": self.depth}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Scaled:
    """The scales and format of a weight of codes (engine/gpu/codes.py)."""

    scales: torch.Tensor  # float32 [n, groups]
    zeros: torch.Tensor | None  # uint8 [n, groups]
    group: int
    format: int  # of FORMATS
    depth: int  # of a tile


FORMATS = {"int8": 1, "fp8": 2, "int4": 3}  # of the kernel; 0 is a weight as it is


def of_codes(scaled: Scaled | None, absent: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A kernel's arguments `scales, zeros, group, s_col`, and its constants. `absent` is passed for tensors that the
    kernel does not read."""
    if scaled is None:
        return (absent, absent, 1, 1), {"FORMAT": 0, "GROUPED": False, "ZEROS": False}
    groups, zeros = scaled.scales.shape[-1], scaled.zeros
    given = (scaled.scales, absent if zeros is None else zeros, scaled.group, groups)
    return given, {"FORMAT": scaled.format, "GROUPED": groups > 1, "ZEROS": zeros is not None}


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    beside: torch.Tensor | None = None,
    scaled: Scaled | None = None,
    widths: Sequence[int] = (),
) -> torch.Tensor:
    """`x [..., k]` times `weight [n, k]` of any strides, or times codes in rows that are `scaled`: `[..., n]`, plus
    `beside [..., n]` after rounding. `widths`, two or three numbers whose sum is n, split the outputs into groups: the
    result `[rows * n]` then holds the groups one after the other."""
    n, k = weight.shape[0], x.shape[-1]
    flat = in_rows(x)
    out = x.new_empty(flat.shape[0] * n) if widths else x.new_empty(*x.shape[:-1], n)
    rows = flat.shape[0]
    if rows == 0:
        return out
    capability = capability_of(x.device)
    tiling = Tiling.of(rows, n, x.dtype, capability, scaled.depth if scaled else None)
    added = in_rows(beside) if beside is not None else flat
    given = [each if each is not None else flat for each in (bias, added)]  # absent tensors are not read
    (scales, zeros, group, groups), of_format = of_codes(scaled, flat)
    first, second = (widths[0], widths[0] + widths[1]) if widths else (n, n)
    outs = (out, out[rows * first :], out[rows * second :]) if widths else (out, out, out)
    described = capability >= HOPPER and rows > FEW and scaled is None and copies(flat) and copies(weight)
    read = (flat, weight)
    if described:
        read = (_descriptor(flat, tiling.rows, tiling.depth), _descriptor(weight, tiling.columns, tiling.depth))
    kernels.linear[(cdiv(rows, tiling.rows) * cdiv(n, tiling.columns),)](
        *read, scales, zeros, *given, *outs, rows, n, first, second, k, group, flat.stride(0),
        *weight.stride(), groups, added.stride(0), n,
        **tiling.launch, **of_format, BAND=BAND, WHOLE=k % tiling.depth == 0, BIAS=bias is not None,
        BESIDE=beside is not None, SEVERAL=bool(widths), EXACT=exact(x.dtype), DESCRIBED=described,
    )  # fmt: skip
    return out


def copies(tensor: torch.Tensor) -> bool:
    """Whether the copy engine of Hopper and later devices can read tiles of it, `[rows, k]`."""
    small = tensor.element_size()
    aligned = tensor.stride(0) * small % COPIED == 0 and tensor.storage_offset() * small % COPIED == 0
    return small == 2 and tensor.stride(1) == 1 and aligned


def _descriptor(tensor: torch.Tensor, rows: int, depth: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, depth])


@operator("linear(Tensor x, Tensor weight, Tensor? bias, int n, int k) -> Tensor")
@operator("linear_add(Tensor x, Tensor weight, Tensor? bias, int n, int k, Tensor beside) -> Tensor")
def plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    assert weight.shape == (n, k), f"a weight of {tuple(weight.shape)} for {n} x {k}"
    return linear(x, weight, bias, beside)


@operator("linears(Tensor x, Tensor[] weights, Tensor?[] biases, int[] n, int k) -> Tensor[]")
def siblings(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None], n: list[int], k: int
) -> list[torch.Tensor]:
    """Computes up to three weights as one product if they are contiguous, as `engine.runner.traced_forward` places
    them."""
    if len(n) > 3:  # as a router and a shared expert are
        parts = (slice(3), slice(3, None))
        return [out for part in parts for out in siblings(x, weights[part], biases[part], n[part], k)]
    weight, bias = joined(weights), joined(biases)
    if len(n) == 1 or weight is None or (bias is None and any(each is not None for each in biases)):
        return [plain(x, *each, k) for each in zip(weights, biases, n, strict=True)]
    return _apart(x, linear(x, weight, bias, widths=n), n)


def _apart(x: torch.Tensor, flat: torch.Tensor, n: Sequence[int]) -> list[torch.Tensor]:
    """The contiguous outputs `[..., width]` of `flat`."""
    sizes = [flat.numel() // sum(n) * width for width in n]
    return [part.view(*x.shape[:-1], width) for part, width in zip(torch.split(flat, sizes), n, strict=True)]


def joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Contiguous tensors as one; None if they are not contiguous, or if one is missing."""
    there = [part for part in parts if part is not None]
    if len(there) < len(parts) or not all(part.is_contiguous() for part in there):
        return None
    first, end = there[0], there[0].storage_offset()
    for part in there:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != end:
            return None
        end += part.numel()
    return first.as_strided((sum(map(len, there)), *first.shape[1:]), first.stride())


@operator(
    "linear_codes(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, int n, int k, int group,"
    " int depth, str format) -> Tensor"
)
@operator(
    "linear_codes_add(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, int n, int k, int group,"
    " int depth, str format, Tensor beside) -> Tensor"
)
def over_codes(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    group: int,
    depth: int,
    format: str,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """The numbers describe the codes: engine/gpu/codes.py."""
    assert len(codes) == n, f"codes of {len(codes)} outputs for {n}"
    assert x.shape[-1] == k, f"{x.shape[-1]} inputs for {k}"
    kept = codes.view(torch.int8) if format == "int8" else codes
    return linear(x, kept, bias, beside, Scaled(scales, zeros, group, FORMATS[format], depth))


@operator(
    "linears_codes(Tensor x, Tensor[] codes, Tensor[] scales, Tensor?[] zeros, Tensor?[] biases, int[] n, int k,"
    " int group, int depth, str format) -> Tensor[]"
)
def siblings_over_codes(
    x: torch.Tensor,
    codes: list[torch.Tensor],
    scales: list[torch.Tensor],
    zeros: list[torch.Tensor | None],
    biases: list[torch.Tensor | None],
    n: list[int],
    k: int,
    group: int,
    depth: int,
    format: str,
) -> list[torch.Tensor]:
    given: list[Sequence[torch.Tensor | None]] = [codes, scales, zeros, biases]
    together = [joined(parts) for parts in given]
    whole, scale, zero, bias = together
    apart = any(
        one is None and any(part is not None for part in parts) for one, parts in zip(together, given, strict=True)
    )
    if len(n) > 3 or whole is None or scale is None or apart:
        each = zip(codes, scales, zeros, biases, n, strict=True)
        return [over_codes(x, *one, k, group, depth, format) for one in each]
    kept = whole.view(torch.int8) if format == "int8" else whole
    return _apart(x, linear(x, kept, bias, None, Scaled(scale, zero, group, FORMATS[format], depth), n), n)


@operator("rms_norm(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> Tensor")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, round_first: bool) -> torch.Tensor:
    """`x [..., n]` over its root mean square, times `weight [n]` + offset; `round_first` rounds before the product."""
    n = weight.numel()
    flat = in_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size = flat.shape[0], power_of_two(n)
    if rows:
        tile = max(1, NORM_ELEMENTS // size)
        kernels.rms_norm[(cdiv(rows, tile),)](
            flat, weight, out, rows, n, flat.stride(0), eps, offset,
            ROWS=tile, SIZE=size, ROUND_FIRST=round_first, num_warps=8 if size > 4096 else 4,
        )  # fmt: skip
    return out


@operator("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor")
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `x [1, heads, tokens, d]` by `cos` and `sin [1, 1, tokens, d]`; of others by torch."""
    one, heads, tokens, d = x.shape
    half = d // 2
    if (
        one != 1
        or not (cos.shape == sin.shape == (1, 1, tokens, d))
        or {x.stride(3), cos.stride(3), sin.stride(3)} != {1}
    ):
        turned: torch.Tensor = x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
        return turned
    out = x.new_empty(tokens, heads, d)
    size = power_of_two(half)
    tile = min(max(1, NORM_ELEMENTS // size), power_of_two(heads))
    kernels.rotate[(tokens, cdiv(heads, tile))](
        x, cos, sin, out, heads, half, x.stride(2), x.stride(1), cos.stride(2), sin.stride(2), *out.stride()[:2],
        HEADS=tile, HALF=size, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out.transpose(0, 1).unsqueeze(0)


@operator(
    "heads(Tensor q, Tensor k, Tensor v, Tensor? q_weight, Tensor? k_weight, float eps, float offset, bool round_first,"
    " Tensor cos, Tensor sin, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor blocks, Tensor slots) -> Tensor"
)
def heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Norms (with weights) and rotates the heads of `q [1, tokens, heads, d]` and `k`, writes k and `v` into their
    slots of pages, and returns q, `[tokens, heads, d]`."""
    _, tokens, count, d = q.shape
    normed = q_weight is not None and k_weight is not None
    innermost = {each.stride(-1) for each in (q, k, v, cos, sin, k_pages, v_pages)}
    if not (cos.shape == sin.shape == (1, 1, tokens, d)) or d % 2 or innermost != {1} or k_pages.dtype != k.dtype:
        pairs = [(q, q_weight), (k, k_weight)]
        ours = [x if weight is None else rms_norm(x, weight, eps, offset, round_first) for x, weight in pairs]
        query, key = (rotate(x.transpose(1, 2), cos, sin)[0].transpose(0, 1) for x in ours)
        k_pages[blocks, slots], v_pages[blocks, slots] = key.to(k_pages.dtype), v[0].to(v_pages.dtype)
        return query
    out, kv_heads, v_size, half = q.new_empty(tokens, count, d), k.shape[2], v.shape[3], d // 2
    sizes = [power_of_two(size) for size in (half, v_size)]
    tile = min(max(1, NORM_ELEMENTS // max(sizes)), power_of_two(kv_heads))
    weights = (q_weight, k_weight) if normed else (q, q)  # not read
    if tokens:
        kernels.place_heads[(tokens, cdiv(count, tile) + 2 * cdiv(kv_heads, tile))](
            q, k, v, *weights, cos, sin, out, k_pages, v_pages, blocks, slots, count, kv_heads, half, v_size, eps,
            offset, *q.stride()[1:3], *k.stride()[1:3], *v.stride()[1:3], cos.stride(2), sin.stride(2),
            *k_pages.stride()[:3], *v_pages.stride()[:3], HEADS=tile, HALF=sizes[0], V_SIZE=sizes[1],
            NORMED=normed, ROUND_FIRST=round_first, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@operator("gated(Tensor gate, Tensor up, str act) -> Tensor")
def gated(gate: torch.Tensor, up: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) * up, of equal shapes. Both may be columns of one product, as those of experts are."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    rows, width, apart = 1, gate.numel(), (0, 0)
    if not (gate.is_contiguous() and up.is_contiguous()):
        gate, up = in_rows(gate), in_rows(up)
        (rows, width), apart = gate.shape, (gate.stride(0), up.stride(0))
    if gate.numel():
        kernels.gated[(rows * cdiv(width, NORM_ELEMENTS),)](
            gate, up, out, width, *apart, ACT=ACTS[act], TILE=NORM_ELEMENTS, num_warps=4
        )
    return out


def cdiv(number: int, unit: int) -> int:
    """How many units it takes."""
    return -(-number // unit)


def exact(dtype: torch.dtype) -> bool:
    """The interpreter multiplies the raw bits of 16-bit floats; a GPU rounds float32 to TF32 unless told not to."""
    return bool(dtype == torch.float32 or kernels.INTERPRETED)
