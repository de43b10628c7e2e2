"""The Triton kernels of engine/gpu/mixture/operators.py.

Arguments that differ from step to step are not specialised, so that no request waits for a compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.gpu.tiles import added, loaded, over_codes


@triton.jit(do_not_specialize=["pairs", "tiles"])
def plan(
    chosen,  # [pairs]
    out,  # [pairs + 3 * tiles]: the pairs in the order of their experts; expert, begin and end of each tile
    pairs,
    tiles,
    ROWS: tl.constexpr,  # pairs of a tile
    CHUNK: tl.constexpr,
):
    """A program for each expert. It counts the pairs of earlier experts, which precede its own.

    Its tiles begin at slot below // ROWS + min(expert, below), which is never before the end of earlier tiles: a tile
    that is not full needs a pair of its own expert. Slots between its tiles and those of the next expert are empty.
    """
    expert, at = tl.program_id(0), tl.arange(0, CHUNK)
    lower, own = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for start in range(0, pairs, CHUNK):
        found = tl.load(chosen + start + at, mask=start + at < pairs, other=-1)
        lower += ((found >= 0) & (found < expert)).to(tl.int32)
        own += (found == expert).to(tl.int32)
    below, count = tl.sum(lower, 0), tl.sum(own, 0)
    if count > 0:
        done = below
        for start in range(0, pairs, CHUNK):
            here = tl.load(chosen + start + at, mask=start + at < pairs, other=-1) == expert
            tl.store(out + done - 1 + tl.cumsum(here.to(tl.int32), 0), start + at, mask=here)
            done += tl.sum(here.to(tl.int32), 0)
    end = below + count
    first, following = below // ROWS + tl.minimum(expert, below), end // ROWS + tl.minimum(expert + 1, end)
    if expert == tl.num_programs(0) - 1:
        following = tiles
    for start in range(0, following - first, CHUNK):
        slot = first + start + at
        begin, inside = below + (start + at) * ROWS, slot < following
        tl.store(out + pairs + slot, tl.where(begin < end, expert, -1), mask=inside)
        tl.store(out + pairs + tiles + slot, begin, mask=inside)
        tl.store(out + pairs + 2 * tiles + slot, end, mask=inside)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def experts(
    x,
    weight,  # elements; or codes, as engine/gpu/codes.py has them
    scales,
    zeros,
    bias,
    plan,
    out,  # [pairs, columns]
    pairs,
    tiles,
    columns,
    depth,
    group,
    each,  # pairs of a row of x
    x_row,  # strides from here on; the elements of a row of x are contiguous
    w_expert,
    w_col,
    w_depth,
    s_col,
    b_expert,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,  # `depth` is a multiple of DEPTH
    FORMAT: tl.constexpr,
    GROUPED: tl.constexpr,  # a column has several scales
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The products of pairs with the weights of their experts, a tile of pairs of one expert in each program."""
    wide = tl.cdiv(columns, COLS)
    slot, first_col = tl.program_id(0) // wide, (tl.program_id(0) % wide).to(tl.int64) * COLS
    expert = tl.load(plan + pairs + slot).to(tl.int64)
    if expert < 0:
        return
    begin, end = tl.load(plan + pairs + tiles + slot), tl.load(plan + pairs + 2 * tiles + slot)
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    there, used = row < end - begin, col < columns - first_col
    pair = tl.load(plan + begin + row, mask=there, other=0)
    x_at = x + (pair // each).to(tl.int64)[:, None] * x_row
    w_at = weight + expert * w_expert + first_col * w_col + col[None, :] * w_col
    of_col = (expert * columns + first_col + col) * s_col
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, depth, DEPTH):  # as product_kernels.linear adds
        if FORMAT != 0:
            sums += over_codes(
                x_at, w_at, zeros + of_col, scales + of_col, start, depth, group, w_depth, there[:, None], used, DEPTH,
                WHOLE, FORMAT, GROUPED, ZEROS, EXACT,
            )  # fmt: skip
        else:
            a, b = loaded(x_at, w_at, start, depth, w_depth, there[:, None], used[None, :], DEPTH, WHOLE)
            sums = added(sums, a, b, EXACT)
    if FORMAT != 0 and not GROUPED:
        sums *= tl.load(scales + of_col, mask=used, other=0.0)[None, :]
    if BIAS:
        sums += tl.load(bias + expert * b_expert + first_col + col, mask=used, other=0.0).to(tl.float32)[None, :]
    o_at = out + pair.to(tl.int64)[:, None] * columns + first_col + col[None, :]
    tl.store(o_at, sums.to(out.dtype.element_ty), mask=there[:, None] & used[None, :])


@triton.jit
def rounded(x, like):
    return x.to(like.dtype).to(tl.float32)


@triton.jit
def clamped_gate(both, out, size, row_size, limit, alpha, INTERLEAVED: tl.constexpr, TILE: tl.constexpr):
    """`gate * sigmoid(gate * alpha) * (up + 1)` of rows of `size`, both clamped, rounded after each operation."""
    wide = tl.cdiv(size, TILE)
    row, at = (tl.program_id(0) // wide).to(tl.int64), tl.program_id(0) % wide * TILE + tl.arange(0, TILE)
    gate_at, up_at = at, at + size
    if INTERLEAVED:
        gate_at, up_at = 2 * at, 2 * at + 1
    found = tl.load(both + row * row_size + gate_at, mask=at < size, other=0.0)
    gate = found.to(tl.float32)
    up = tl.load(both + row * row_size + up_at, mask=at < size, other=0.0).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)  # NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    share = rounded(1.0 / (1.0 + tl.exp(-rounded(gate * alpha, found))), found)
    y = rounded(up + 1.0, found) * rounded(gate * share, found)
    tl.store(out + row * size + at, y.to(found.dtype), mask=at < size)


@triton.jit
def mix(y, shares, out, each, columns, s_row, TILE: tl.constexpr, ROUNDED: tl.constexpr):
    """The sum of a token's pairs times their shares, one after another in float32. ROUNDED: products are, as torch
    rounds them where both have the type of y."""
    wide = tl.cdiv(columns, TILE)
    token, col = (tl.program_id(0) // wide).to(tl.int64), tl.program_id(0) % wide * TILE + tl.arange(0, TILE)
    used = col < columns
    total = tl.zeros([TILE], tl.float32)
    for number in range(each):
        found = tl.load(y + (token * each + number) * columns + col, mask=used, other=0.0)
        part = found.to(tl.float32) * tl.load(shares + token * s_row + number).to(tl.float32)
        if ROUNDED:
            part = part.to(found.dtype).to(tl.float32)
        total += part
    tl.store(out + token * columns + col, total.to(out.dtype.element_ty), mask=used)
