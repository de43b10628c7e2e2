"""Products of tiles, and codes widened to be factors of them: what the kernels of engine/gpu have in common."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """`a @ b` in float32; operands of a's type unless EXACT. Codes of 8 bits and fewer are exact in all of them."""
    if EXACT:  # noqa: SIM108 - decided when it is compiled
        c = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        c = tl.dot(a, b.to(a.dtype))
    return c


@triton.jit
def e4m3(codes):
    """Bytes as float32, on every architecture: the exponent of e4m3, 120 smaller, in that of float32. No NaN."""
    bits = codes.to(tl.int32)
    return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def loaded(
    x_at,  # [ROWS, 1] addresses of rows
    w_at,  # [1, COLS] addresses of columns
    start,
    depth,
    w_depth,
    there,  # [ROWS, 1]
    used,  # [1, COLS]
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """DEPTH elements from `start` on of rows, `[ROWS, DEPTH]`, and of columns, `[DEPTH, COLS]`."""
    at = start + tl.arange(0, DEPTH)
    left, right = there, used
    if not WHOLE:
        left, right = left & (at < depth)[None, :], right & (at < depth)[:, None]
    a = tl.load(x_at + at[None, :], mask=left, other=0.0)
    return a, tl.load(w_at + at[:, None] * w_depth, mask=right, other=0)


@triton.jit
def added(sums, a, b, EXACT: tl.constexpr):
    """The sums and a tile's products: one chain in the tensor cores, unless EXACT."""
    if EXACT:
        sums += product(a, b, EXACT)
    else:
        sums = tl.dot(a, b, sums)
    return sums


@triton.jit
def over_codes(
    x_at,  # [ROWS, 1] addresses of rows
    w_at,  # [1, COLS] addresses of columns of codes, as engine/gpu/codes.py has them
    zeros_at,  # [COLS]
    scales_at,
    start,
    depth,
    group,
    w_depth,
    there,  # [ROWS, 1]
    used,  # [COLS]
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPED: tl.constexpr,
    ZEROS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The products of a tile with DEPTH codes from `start` on; with GROUPED, times the scales of their group."""
    if FORMAT == 3:  # int4: a byte has the codes of k and of k + DEPTH / 2, each plus its zero
        half = tl.arange(0, DEPTH // 2)
        low, high = start + half, start + DEPTH // 2 + half
        a = tl.load(x_at + low[None, :], mask=there & (low < depth)[None, :], other=0.0)
        other = tl.load(x_at + high[None, :], mask=there & (high < depth)[None, :], other=0.0)
        pair = tl.load(w_at + (start // 2 + half)[:, None], mask=used[None, :], other=0).to(tl.int32)
        zero = 8
        if ZEROS:
            zero = tl.load(zeros_at + start // group, mask=used, other=0).to(tl.int32)[None, :]
        found = product(a, (pair & 15) - zero, EXACT) + product(other, (pair >> 4) - zero, EXACT)
    else:
        a, b = loaded(x_at, w_at, start, depth, w_depth, there, used[None, :], DEPTH, WHOLE)
        if FORMAT == 2:
            b = e4m3(b)
        found = product(a, b, EXACT)
    if GROUPED:
        found *= tl.load(scales_at + start // group, mask=used, other=0.0)[None, :]
    return found
