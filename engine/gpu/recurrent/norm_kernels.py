"""The Triton kernels of engine/gpu/recurrent/norms.py. As in kernels.py, nothing that differs from step to step is
specialised, so each sum has one order."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = ("x", "out", "rows", "x_row")
GATED = ("x", "gate", "weight", "out", "rows", "x_token", "gate_token")


@triton.jit(do_not_specialize=UNIT)
def unit(x, out, rows, size, x_row, eps, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Rows of float32, each over its length."""
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    here, own = (row < rows)[:, None] & (at < size)[None, :], row.to(tl.int64)[:, None]
    found = tl.load(x + own * x_row + at[None, :], mask=here, other=0.0)
    length = tl.sqrt(tl.sum(found * found, 1) + eps)
    tl.store(out + own * size + at[None, :], found * (1.0 / length)[:, None], mask=here)


@triton.jit(do_not_specialize=GATED)
def gated(
    x,  # [tokens, groups * size], the elements of a token side by side
    gate,  # likewise
    weight,  # [groups * size]
    out,  # [tokens, groups * size]
    rows,  # tokens * groups
    groups,
    size,
    x_token,  # strides
    gate_token,
    eps,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """Each group over its root mean square, times the weight, with a gate before or after."""
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    here, token = (row < rows)[:, None] & (at < size)[None, :], (row // groups).to(tl.int64)[:, None]
    place = (row % groups)[:, None] * size + at[None, :]
    found = tl.load(x + token * x_token + place, mask=here, other=0.0)
    opening = tl.load(gate + token * gate_token + place, mask=here, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-opening))
    if SILU:
        share *= opening
    y = found.to(tl.float32)
    if GATE_FIRST:
        y *= share
    y *= (1.0 / tl.sqrt(tl.sum(y * y, 1) / size + eps))[:, None]
    factor = tl.load(weight + place, mask=here, other=0.0).to(tl.float32)
    if ROUND_FIRST:  # to x's type, and the product to that of the result
        y = (y.to(found.dtype).to(tl.float32) * factor).to(out.dtype.element_ty).to(tl.float32)
    else:
        y *= factor
    if not GATE_FIRST:
        y *= share
    tl.store(out + token * (groups * size) + place, y.to(out.dtype.element_ty), mask=here)
