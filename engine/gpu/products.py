"""Products and RMS norms on CUDA, in Triton, with bits that do not depend on the other rows. Not yet run on a GPU:
Triton's interpreter proves the numbers, ptxas the machine code (tests/engine/test_gpu_products.py).

    out[row, column] = sum over k of x[row, k] * weight[column, k], + bias, rounded

The sum over k is one float32 chain in its order, in tiles of DEPTH, whatever the number of rows: k is never split. A
step of up to FEW rows has narrow tiles of columns, so that enough programs read the weight; a larger one has larger
tiles. For a row both do the same additions in the same order. That the instructions of both tiles agree is for the
device to show: engine/gpu/layers.py tries it at load.

cuBLAS chooses another order of sums for another number of rows, and torch's mean does so for an RMS norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.gpu import product_kernels as kernels
from engine.gpu.operators import operator

FEW = 64  # rows of a step up to which it has narrow tiles
WIDE = 8192  # columns of a weight from which narrow tiles are twice as wide and still make enough programs
BAND = 8  # tiles of rows that read the same weights at the same time
NORM_ELEMENTS = 1024  # of a program, at least


@dataclass(frozen=True)
class Tiling:
    """Of a product with a weight of `n` columns. DEPTH alone decides in which order a row is summed."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @staticmethod
    def of(rows: int, n: int, dtype: torch.dtype, depth: int | None = None) -> Tiling:
        """`depth`: that of a weight of codes."""
        if dtype == torch.float32:
            return Tiling(32 if rows <= FEW else 64, 32 if rows <= FEW else 64, depth or 32, 4, 3)
        if rows <= FEW:
            return Tiling(64, 64 if n > WIDE else 32, depth or 64, 4, 5)
        return Tiling(128, 128, depth or 64, 8, 4)

    @property
    def launch(self) -> dict[str, int]:
        """Of `kernels.linear`."""
        sizes = {"ROWS": self.rows, "COLS": self.columns, "DEPTH": self.depth, "BAND": BAND}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Scaled:
    """What a weight of codes has beside them: engine/gpu/codes.py."""

    scales: torch.Tensor  # float32 [n, groups]
    zeros: torch.Tensor | None  # uint8 [n, groups]
    group: int
    format: int  # of FORMATS
    depth: int  # of a tile


FORMATS = {"int8": 1, "fp8": 2, "int4": 3}  # of the kernel; 0 is a weight as it is


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    beside: torch.Tensor | None = None,
    scaled: Scaled | None = None,
) -> torch.Tensor:
    """`x [..., k]` times `weight [n, k]` of any strides, or times codes in rows that are `scaled`: `[..., n]`, plus
    `beside [..., n]` after rounding."""
    n, k = weight.shape[0], x.shape[-1]
    flat = _rows(x, k)
    out = x.new_empty(*x.shape[:-1], n)
    rows = flat.shape[0]
    if rows == 0:
        return out
    tiling = Tiling.of(rows, n, x.dtype, scaled.depth if scaled else None)
    added = _rows(beside, n) if beside is not None else flat
    given = [each if each is not None else flat for each in (bias, added)]  # what is not there is not read
    scales, zeros, group, groups = flat, flat, 1, 1
    if scaled is not None:
        scales, group, groups = scaled.scales, scaled.group, scaled.scales.shape[1]
        zeros = scaled.zeros if scaled.zeros is not None else flat
    kernels.linear[(up(rows, tiling.rows) * up(n, tiling.columns),)](
        flat, weight, scales, zeros, *given, out, rows, n, k, group, flat.stride(0), *weight.stride(), groups,
        added.stride(0), n, **tiling.launch, WHOLE=k % tiling.depth == 0, FORMAT=scaled.format if scaled else 0,
        GROUPED=groups > 1, ZEROS=scaled is not None and scaled.zeros is not None, BIAS=bias is not None,
        BESIDE=beside is not None, EXACT=_exact(x.dtype),
    )  # fmt: skip
    return out


@operator("linear(Tensor x, Tensor weight, Tensor? bias, int n, int k) -> Tensor")
def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, n: int, k: int) -> torch.Tensor:
    assert weight.shape == (n, k), f"a weight of {tuple(weight.shape)} for {n} x {k}"
    return linear(x, weight, bias)


@operator(
    "linear_codes(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, int n, int k, int group,"
    " int depth, str format) -> Tensor"
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
) -> torch.Tensor:
    """The last ones say what codes are: engine/gpu/codes.py."""
    assert len(codes) == n, f"codes of {len(codes)} outputs for {n}"
    assert x.shape[-1] == k, f"{x.shape[-1]} inputs for {k}"
    kept = codes.view(torch.int8) if format == "int8" else codes
    return linear(x, kept, bias, scaled=Scaled(scales, zeros, group, FORMATS[format], depth))


@operator("rms_norm(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> Tensor")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, round_first: bool) -> torch.Tensor:
    """`x [..., n]` over its root mean square, times `weight [n]` + offset; `round_first` rounds before the product."""
    n = weight.numel()
    flat = _rows(x, n)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size = flat.shape[0], 1 << (n - 1).bit_length()
    if rows:
        tile = max(1, NORM_ELEMENTS // size)
        kernels.rms_norm[(up(rows, tile),)](
            flat, weight, out, rows, n, flat.stride(0), eps, offset,
            ROWS=tile, SIZE=size, ROUND_FIRST=round_first, num_warps=8 if size > 4096 else 4,
        )  # fmt: skip
    return out


def up(number: int, unit: int) -> int:
    """How many units it takes."""
    return -(-number // unit)


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    flat = x.reshape(-1, width)
    return flat if flat.stride(1) == 1 or width == 1 else flat.contiguous()


def _exact(dtype: torch.dtype) -> bool:
    """The interpreter multiplies the raw bits of 16-bit floats; a GPU rounds float32 to TF32 unless told not to."""
    return bool(dtype == torch.float32 or kernels.INTERPRETED)
