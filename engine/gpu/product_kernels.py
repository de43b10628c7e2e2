"""The Triton kernels of engine/gpu/products.py, which has the order of their sums. Not yet run on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear(
    x,
    weight,
    bias,
    beside,
    out,
    rows,
    columns,
    depth,
    x_row,  # strides from here on; the elements of a row of x lie side by side
    w_col,
    w_depth,
    b_row,
    o_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    WHOLE: tl.constexpr,  # `depth` is a multiple of DEPTH
    BIAS: tl.constexpr,
    BESIDE: tl.constexpr,
    EXACT: tl.constexpr,
):
    tile = tl.program_id(0)
    high, wide = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLS)
    band = tile // (BAND * wide)  # tiles one below the other run at the same time: they read the same weights
    tall = tl.minimum(high - band * BAND, BAND)
    tile_row, tile_col = band * BAND + tile % (BAND * wide) % tall, tile % (BAND * wide) // tall
    first_row, first_col = tile_row.to(tl.int64) * ROWS, tile_col.to(tl.int64) * COLS
    row, col, at = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, DEPTH)
    there, used = row < rows - first_row, col < columns - first_col
    x_at = x + first_row * x_row + row[:, None] * x_row + at[None, :]
    w_at = weight + first_col * w_col + col[None, :] * w_col + at[:, None] * w_depth
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, depth, DEPTH):
        left, right = there[:, None], used[None, :]
        if not WHOLE:
            left, right = left & (start + at < depth)[None, :], right & (start + at < depth)[:, None]
        a = tl.load(x_at + start, mask=left, other=0.0)
        b = tl.load(w_at + start * w_depth, mask=right, other=0.0)
        if EXACT:  # noqa: SIM108 - decided when it is compiled
            sums = tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
        else:
            sums = tl.dot(a, b, sums)
    if BIAS:
        sums += tl.load(bias + first_col + col, mask=used, other=0.0).to(tl.float32)[None, :]
    y = sums.to(out.dtype.element_ty)
    here = there[:, None] & used[None, :]
    if BESIDE:
        found = tl.load(
            beside + first_row * b_row + first_col + row[:, None] * b_row + col[None, :], mask=here, other=0.0
        )
        y = (y.to(tl.float32) + found.to(tl.float32)).to(y.dtype)
    tl.store(out + first_row * o_row + first_col + row[:, None] * o_row + col[None, :], y, mask=here)


@triton.jit
def rms_norm(
    x,
    weight,
    out,
    rows,
    size,
    x_row,
    eps,
    offset,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """x over its root mean square, times (weight + offset); as tandem::rms_norm of engine/kernels/rows.cpp."""
    row, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    here = (row < rows)[:, None] & (at < size)[None, :]
    own = row.to(tl.int64)[:, None]
    found = tl.load(x + own * x_row + at[None, :], mask=here, other=0.0)
    wide = found.to(tl.float32)
    mean = tl.sum(wide * wide, 1) / size
    y = wide * (1.0 / tl.sqrt(mean + eps))[:, None]
    if ROUND_FIRST:
        y = y.to(found.dtype).to(tl.float32)
    factor = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32) + offset
    tl.store(out + own * size + at[None, :], (y * factor[None, :]).to(found.dtype), mask=here)


INTERPRETED = not isinstance(linear, triton.runtime.JITFunction)  # with TRITON_INTERPRET=1
