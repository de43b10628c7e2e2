"""The Triton kernels of engine/gpu/products.py, which has the order of their sums.

By default Triton compiles another kernel for an argument that is 1 or a multiple of 16. Arguments that differ from step
to step are not specialised, so that no request waits for a compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.gpu.tiles import added, loaded, over_codes


@triton.jit
def store_part(out, y, first_row, first_col, row, col, begin, end, here):
    """Stores columns `begin` to `end` of the tile y into `out [rows, end - begin]`. Offsets within a tile have 32 bits:
    with 64 bits they would take the registers that a tile of 128 x 128 needs."""
    low, high, width = (begin - first_col).to(tl.int32), (end - first_col).to(tl.int32), end - begin
    inside = here & ((col >= low) & (col < high))[None, :]
    tl.store(out + (first_row * width - low) + (row[:, None] * width + col[None, :]), y, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def linear(
    x,  # DESCRIBED: x and weight are descriptors of tensors, which the device's copy engine reads
    weight,  # elements; or codes, as engine/gpu/codes.py has them
    scales,
    zeros,
    bias,
    beside,
    out,
    second,  # the outputs of the second and third of several weights that are adjacent in memory
    third,
    rows,
    columns,
    ends,  # of the columns of `out`
    ends_second,
    depth,
    group,
    x_row,  # strides from here on; the elements of a row of x are contiguous
    w_col,
    w_depth,
    s_col,
    b_row,
    o_row,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    WHOLE: tl.constexpr,  # `depth` is a multiple of DEPTH
    FORMAT: tl.constexpr,
    GROUPED: tl.constexpr,  # a column has several scales
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    BESIDE: tl.constexpr,
    SEVERAL: tl.constexpr,
    EXACT: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    tile = tl.program_id(0)
    high, wide = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLS)
    band = tile // (BAND * wide)  # programs of one column of tiles run at the same time: they read the same weights
    tall = tl.minimum(high - band * BAND, BAND)
    tile_row, tile_col = band * BAND + tile % (BAND * wide) % tall, tile % (BAND * wide) // tall
    first_row, first_col = tile_row.to(tl.int64) * ROWS, tile_col.to(tl.int64) * COLS
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    there, used = (row < rows - first_row)[:, None], col < columns - first_col
    if not DESCRIBED:
        x_at = x + first_row * x_row + row[:, None] * x_row
        w_at = weight + first_col * w_col + col[None, :] * w_col
    of_col = first_col * s_col + col * s_col
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, depth, DEPTH):
        if FORMAT != 0:
            sums += over_codes(
                x_at, w_at, zeros + of_col, scales + of_col, start, depth, group, w_depth, there, used, DEPTH, WHOLE,
                FORMAT, GROUPED, ZEROS, EXACT,
            )  # fmt: skip
        else:
            if DESCRIBED:
                a, b = x.load([tile_row * ROWS, start]), weight.load([tile_col * COLS, start]).T
            else:
                a, b = loaded(x_at, w_at, start, depth, w_depth, there, used[None, :], DEPTH, WHOLE)
            sums = added(sums, a, b, EXACT)
    if FORMAT != 0 and not GROUPED:
        sums *= tl.load(scales + of_col, mask=used, other=0.0)[None, :]
    if BIAS:
        sums += tl.load(bias + first_col + col, mask=used, other=0.0).to(tl.float32)[None, :]
    y = sums.to(out.dtype.element_ty)
    here = there & used[None, :]
    if BESIDE:
        beside_at = beside + first_row * b_row + first_col + row[:, None] * b_row + col[None, :]
        y = (y.to(tl.float32) + tl.load(beside_at, mask=here, other=0.0).to(tl.float32)).to(y.dtype)
    if SEVERAL:
        store_part(out, y, first_row, first_col, row, col, 0, ends, here)
        store_part(second, y, first_row, first_col, row, col, ends, ends_second, here)
        store_part(third, y, first_row, first_col, row, col, ends_second, columns, here)
    else:
        tl.store(out + first_row * o_row + first_col + row[:, None] * o_row + col[None, :], y, mask=here)


@triton.jit(do_not_specialize=["rows"])
def each_head(
    x,
    weight,
    out,
    rows,
    columns,
    depth,
    x_row,  # strides from here on; the elements of a row of x and of `out` are contiguous
    x_head,
    w_head,
    w_col,
    w_depth,
    o_row,
    o_head,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """As `linear`, of a plain weight for each head: `x [rows, heads, depth]`, `weight [heads, columns, depth]`."""
    first_row, first_col = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1) * COLS
    head = tl.program_id(2).to(tl.int64)
    row, col = tl.arange(0, ROWS), first_col + tl.arange(0, COLS)
    there, used = (row < rows - first_row)[:, None], (col < columns)[None, :]
    x_at = x + first_row * x_row + head * x_head + row[:, None] * x_row
    w_at = weight + head * w_head + col[None, :] * w_col
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, depth, DEPTH):
        a, b = loaded(x_at, w_at, start, depth, w_depth, there, used, DEPTH, WHOLE)
        sums = added(sums, a, b, EXACT)
    o_at = out + first_row * o_row + head * o_head + row[:, None] * o_row + col[None, :]
    tl.store(o_at, sums.to(out.dtype.element_ty), mask=there & used)


@triton.jit(do_not_specialize=["rows"])
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


@triton.jit
def rotate(
    x,
    cos,
    sin,
    out,
    heads,
    half,
    x_token,  # strides from here on
    x_head,
    c_token,
    s_token,
    o_token,
    o_head,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """x * cos + (-second half, first half) * sin of each head of a token, rounded after each operation."""
    token, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    here, used = (head < heads)[:, None] & (at < half)[None, :], at < half
    x_at = x + token * x_token + head[:, None] * x_head + at[None, :]
    low, high = tl.load(x_at, mask=here, other=0.0), tl.load(x_at + half, mask=here, other=0.0)
    c_at, s_at = cos + token * c_token + at, sin + token * s_token + at
    c_low, s_low = tl.load(c_at, mask=used, other=0.0)[None, :], tl.load(s_at, mask=used, other=0.0)[None, :]
    c_high = tl.load(c_at + half, mask=used, other=0.0)[None, :]
    s_high = tl.load(s_at + half, mask=used, other=0.0)[None, :]
    o_at = out + token * o_token + head[:, None] * o_head + at[None, :]
    tl.store(o_at, rounded_sum(low, c_low, -high, s_low), mask=here)
    tl.store(o_at + half, rounded_sum(high, c_high, low, s_high), mask=here)


@triton.jit
def normed_half(x, scale, weight, offset, at, used, ROUND_FIRST: tl.constexpr):
    """Half of each head `[heads, half]` times its `scale [heads]` and its weight, rounded as `rms_norm` rounds."""
    y = x.to(tl.float32) * scale[:, None]
    if ROUND_FIRST:
        y = y.to(x.dtype).to(tl.float32)
    factor = tl.load(weight + at, mask=used, other=0.0).to(tl.float32) + offset
    return (y * factor[None, :]).to(x.dtype)


@triton.jit
def place_heads(
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    out,
    k_pages,
    v_pages,
    blocks,
    slots,
    heads,
    kv_heads,
    half,
    v_size,
    eps,
    offset,
    q_token,  # strides from here on
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    c_token,
    s_token,
    kp_block,
    kp_slot,
    kp_head,
    vp_block,
    vp_slot,
    vp_head,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    V_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """The heads of a token: those of q and k normed and rotated, k and v into their pages."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block, slot = tl.load(blocks + token).to(tl.int64), tl.load(slots + token).to(tl.int64)
    of_q, of_k = tl.cdiv(heads, HEADS), tl.cdiv(kv_heads, HEADS)
    number = tl.arange(0, HEADS)
    if tile < of_q + of_k:
        is_q = tile < of_q
        head = tl.where(is_q, tile, tile - of_q) * HEADS + number
        at = tl.arange(0, HALF)
        used = at < half
        here_q = (head < heads)[:, None] & used[None, :] & is_q
        here_k = (head < kv_heads)[:, None] & used[None, :] & (tile >= of_q)
        q_at = q + token * q_token + head[:, None] * q_head + at[None, :]
        k_at = k + token * k_token + head[:, None] * k_head + at[None, :]
        low = tl.where(here_q, tl.load(q_at, mask=here_q, other=0.0), tl.load(k_at, mask=here_k, other=0.0))
        high = tl.where(
            here_q, tl.load(q_at + half, mask=here_q, other=0.0), tl.load(k_at + half, mask=here_k, other=0.0)
        )
        if NORMED:
            one, other = low.to(tl.float32), high.to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(one * one, 1) + tl.sum(other * other, 1)) / (2 * half) + eps)
            if is_q:
                low = normed_half(low, scale, q_weight, offset, at, used, ROUND_FIRST)
                high = normed_half(high, scale, q_weight + half, offset, at, used, ROUND_FIRST)
            else:
                low = normed_half(low, scale, k_weight, offset, at, used, ROUND_FIRST)
                high = normed_half(high, scale, k_weight + half, offset, at, used, ROUND_FIRST)
        c_at, s_at = cos + token * c_token + at, sin + token * s_token + at
        c_low, s_low = tl.load(c_at, mask=used, other=0.0)[None, :], tl.load(s_at, mask=used, other=0.0)[None, :]
        c_high = tl.load(c_at + half, mask=used, other=0.0)[None, :]
        s_high = tl.load(s_at + half, mask=used, other=0.0)[None, :]
        first, second = rounded_sum(low, c_low, -high, s_low), rounded_sum(high, c_high, low, s_high)
        o_at = out + (token * heads + head[:, None]) * 2 * half + at[None, :]
        p_at = k_pages + block * kp_block + slot * kp_slot + head[:, None] * kp_head + at[None, :]
        tl.store(o_at, first, mask=here_q)
        tl.store(o_at + half, second, mask=here_q)
        tl.store(p_at, first, mask=here_k)
        tl.store(p_at + half, second, mask=here_k)
    else:
        own, v_at = (tile - of_q - of_k) * HEADS + number, tl.arange(0, V_SIZE)
        here = (own < kv_heads)[:, None] & (v_at < v_size)[None, :]
        found = tl.load(v + token * v_token + own[:, None] * v_head + v_at[None, :], mask=here, other=0.0)
        tl.store(v_pages + block * vp_block + slot * vp_slot + own[:, None] * vp_head + v_at[None, :], found, mask=here)


@triton.jit
def rounded_sum(a, b, c, d):
    """a * b + c * d in their type, each operation rounded."""
    first = (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)
    second = (c.to(tl.float32) * d.to(tl.float32)).to(a.dtype)
    return (first.to(tl.float32) + second.to(tl.float32)).to(a.dtype)


@triton.jit
def gated(gate, up, out, size, g_row, u_row, ACT: tl.constexpr, TILE: tl.constexpr):
    """act(gate) * up of rows of `size`, rounded after each. ACT: 0 silu, 1 gelu, 2 gelu by tanh."""
    wide = tl.cdiv(size, TILE)
    row = (tl.program_id(0) // wide).to(tl.int64)
    at = (tl.program_id(0) % wide).to(tl.int64) * TILE + tl.arange(0, TILE)
    g = tl.load(gate + row * g_row + at, mask=at < size, other=0.0)
    u = tl.load(up + row * u_row + at, mask=at < size, other=0.0).to(tl.float32)
    x = g.to(tl.float32)
    if ACT == 0:
        y = x / (1.0 + tl.exp(-x))
    elif ACT == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * inner))  # 0.5 * (1 + tanh(a)) is 1 / (1 + exp(-2 a))
    tl.store(out + row * size + at, (y.to(g.dtype).to(tl.float32) * u).to(g.dtype), mask=at < size)


INTERPRETED = not isinstance(linear, triton.runtime.JITFunction)  # with TRITON_INTERPRET=1
