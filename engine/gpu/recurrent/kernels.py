"""The Triton kernels of engine/gpu/recurrent/operators.py, which has the order of their sums.

Nothing that differs from step to step is specialised, pointers included: inputs are parts of projections, whose
alignment to 16 bytes differs between steps. So a layer has one compiled kernel, in which each sum
has one order, and no request waits for a compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

DELTA = ("q", "k", "v", "decay", "beta", "states", "rows", "out", "tokens", "apart")
SCAN = ("x", "dt", "a", "b", "c", "d", "states", "rows", "y", "tokens", "d_head", "d_dim", "apart")
CONVOLUTION = ("x", "weight", "bias", "y", "tokens", "x_sequence", "x_token", "w_channel", "w_tap", "b_channel")
STEP = ("x", "weight", "bias", "states", "rows", "y", "w_channel", "w_tap", "b_channel", "apart")


@triton.jit(do_not_specialize=DELTA)
def gated_delta(
    q,  # float32 [n, tokens, k heads, dk]
    k,
    v,  # float32 [n, tokens, v heads, dv]
    decay,  # float32 [n, tokens, v heads], with CHANNELS [n, tokens, v heads, dk]
    beta,  # float32 [n, tokens, v heads]
    states,  # float32 [all rows, v heads, dk, dv], rows `apart` elements from one another
    rows,  # int64 [2, n]: that are read, -1 for zeros, and that are written
    out,  # float32 [n, tokens, v heads, dv]
    tokens,
    apart,
    share,  # v heads of a k head
    dk,
    dv,
    KEYS: tl.constexpr,
    COLS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (part, head, sequence) has COLS columns of a head's state in registers, for all tokens."""
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, i, j = tl.num_programs(1), tl.arange(0, KEYS), part * COLS + tl.arange(0, COLS)
    key, column = i < dk, j < dv
    here = key[:, None] & column[None, :]
    before, after = tl.load(rows + sequence), tl.load(rows + tl.num_programs(2) + sequence)
    of_state, place = head * dk * dv, i[:, None] * dv + j[None, :]
    state = tl.load(states + (before * apart + of_state) + place, mask=here & (before >= 0), other=0.0)
    tl.debug_barrier()  # the row may be the one that is written
    k_heads, first = heads // share, sequence * tokens
    of_key, of_head = (first * k_heads + head // share) * dk, first * heads + head
    q_at, k_at, v_at, out_at = q + of_key, k + of_key, v + of_head * dv, out + of_head * dv
    beta_at, decay_at = beta + of_head, decay + of_head * (dk if CHANNELS else 1)
    for _ in tl.range(tokens, num_stages=3):
        k_now = tl.load(k_at + i, mask=key, other=0.0)[:, None]
        q_now = tl.load(q_at + i, mask=key, other=0.0)[:, None]
        if CHANNELS:
            state *= tl.load(decay_at + i, mask=key, other=0.0)[:, None]
        else:
            state *= tl.load(decay_at)
        new = (tl.load(v_at + j, mask=column, other=0.0) - tl.sum(k_now * state, 0)) * tl.load(beta_at)
        state += k_now * new[None, :]
        tl.store(out_at + j, tl.sum(q_now * state, 0), mask=column)
        q_at, k_at, v_at, out_at = q_at + k_heads * dk, k_at + k_heads * dk, v_at + heads * dv, out_at + heads * dv
        beta_at, decay_at = beta_at + heads, decay_at + heads * (dk if CHANNELS else 1)
    tl.store(states + (after * apart + of_state) + place, state, mask=here)


@triton.jit(do_not_specialize=SCAN)
def state_space_scan(
    x,  # float32 [n, tokens, heads, dim]
    dt,  # float32 [n, tokens, heads], with OWN [n, tokens, heads, dim]
    a,  # float32 [heads], with OWN [heads, dim, size]
    b,  # float32 [n, tokens, groups, size]
    c,
    d,  # [heads, dim] of any strides, with SKIP
    states,  # float32 [all rows, heads, dim, size], rows `apart` elements from one another
    rows,  # int64 [2, n]: that are read, -1 for zeros, and that are written
    y,  # float32 [n, tokens, heads, dim]
    tokens,
    d_head,
    d_dim,
    apart,
    share,  # heads of a group
    dim,
    size,
    COLS: tl.constexpr,
    SIZE: tl.constexpr,
    OWN: tl.constexpr,
    SKIP: tl.constexpr,
):
    """Program (part, head, sequence) has the states of COLS channels of a head in registers, for all tokens."""
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, i, j = tl.num_programs(1), tl.arange(0, SIZE), part * COLS + tl.arange(0, COLS)
    used, channel = i < size, j < dim
    here = channel[:, None] & used[None, :]
    before, after = tl.load(rows + sequence), tl.load(rows + tl.num_programs(2) + sequence)
    of_state, place = head * dim * size, j[:, None] * size + i[None, :]
    state = tl.load(states + (before * apart + of_state) + place, mask=here & (before >= 0), other=0.0)
    tl.debug_barrier()  # the row may be the one that is written
    if OWN:  # noqa: SIM108 - decided when it is compiled
        rate = tl.load(a + of_state + place, mask=here, other=0.0)
    else:
        rate = tl.load(a + head)
    if SKIP:
        skip = tl.load(d + head * d_head + j * d_dim, mask=channel, other=0.0).to(tl.float32)
    groups, first = heads // share, sequence * tokens
    of_group, of_head = (first * groups + head // share) * size, first * heads + head
    x_at, y_at, b_at, c_at = x + of_head * dim, y + of_head * dim, b + of_group, c + of_group
    dt_at = dt + of_head * (dim if OWN else 1)
    for _ in tl.range(tokens, num_stages=3):
        x_now = tl.load(x_at + j, mask=channel, other=0.0)
        b_now = tl.load(b_at + i, mask=used, other=0.0)[None, :]
        c_now = tl.load(c_at + i, mask=used, other=0.0)[None, :]
        if OWN:
            step = tl.load(dt_at + j, mask=channel, other=0.0)
            state *= tl.exp(step[:, None] * rate)
        else:
            step = tl.load(dt_at)
            state *= tl.exp(step * rate)
        state += (step * x_now)[:, None] * b_now
        sums = tl.sum(state * c_now, 1)
        if SKIP:
            sums += skip * x_now
        tl.store(y_at + j, sums, mask=channel)
        x_at, y_at, b_at, c_at = x_at + heads * dim, y_at + heads * dim, b_at + groups * size, c_at + groups * size
        dt_at += heads * (dim if OWN else 1)
    tl.store(states + (after * apart + of_state) + place, state, mask=here)


@triton.jit
def activated(sums, like, SILU: tl.constexpr):
    """Sums in float32, rounded to the type of `like`, and then silu of them."""
    y = sums.to(like.dtype)
    if SILU:
        wide = y.to(tl.float32)
        y = (wide / (1.0 + tl.exp(-wide))).to(like.dtype)
    return y


@triton.jit(do_not_specialize=CONVOLUTION)
def short_convolution(
    x,  # [n, tokens, channels] of any strides, the channels side by side
    weight,  # [channels, width] of any strides
    bias,  # [channels], with BIAS
    y,  # [n, tokens, channels]
    tokens,
    channels,
    x_sequence,  # strides from here on
    x_token,
    w_channel,
    w_tap,
    b_channel,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (tile of tokens, tile of channels, sequence)."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel, sequence = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(2).to(tl.int64)
    used = channel < channels
    here = (token < tokens) & used[None, :]
    sums = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if BIAS:
        sums += tl.load(bias + channel * b_channel, mask=used, other=0.0).to(tl.float32)[None, :]
    now = tl.zeros([TOKENS, CHANNELS], x.dtype.element_ty)
    for tap in tl.static_range(WIDTH):
        at = token + (tap + 1 - WIDTH)
        now = tl.load(x + sequence * x_sequence + at * x_token + channel[None, :], mask=here & (at >= 0), other=0.0)
        factor = tl.load(weight + channel * w_channel + tap * w_tap, mask=used, other=0.0).to(tl.float32)[None, :]
        sums = tl.fma(now.to(tl.float32), tl.broadcast_to(factor, now.shape), sums)
    place = (sequence * tokens + token) * channels + channel[None, :]
    tl.store(y + place, activated(sums, now, SILU), mask=here)


@triton.jit(do_not_specialize=STEP)
def short_convolution_step(
    x,  # [n, channels]
    weight,  # [channels, width] of any strides
    bias,  # [channels], with BIAS
    states,  # of x's type [all rows, channels, kept], rows `apart` elements from one another
    rows,  # int64 [2, n]: that are read, -1 for zeros, and that are written
    y,  # [n, channels]
    channels,
    w_channel,
    w_tap,
    b_channel,
    apart,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (tile of channels, sequence). A channel belongs to one thread, which reads its state before it writes it:
    the row that is read may be the one that is written."""
    channel, sequence = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(1).to(tl.int64)
    used = channel < channels
    before, after = tl.load(rows + sequence), tl.load(rows + tl.num_programs(1) + sequence)
    past, next = states + before * apart + channel * KEPT, states + after * apart + channel * KEPT
    begun = used & (before >= 0)
    now = tl.load(x + sequence * channels + channel, mask=used, other=0.0)
    sums = tl.zeros([CHANNELS], tl.float32)
    if BIAS:
        sums += tl.load(bias + channel * b_channel, mask=used, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        factor = tl.load(weight + channel * w_channel + tap * w_tap, mask=used, other=0.0).to(tl.float32)
        if tap + 1 < WIDTH:
            found = tl.load(past + (KEPT + 1 - WIDTH + tap), mask=begun, other=0.0).to(tl.float32)
            sums = tl.fma(found, factor, sums)
        else:
            sums = tl.fma(now.to(tl.float32), factor, sums)
    for place in tl.static_range(KEPT):
        if place + 1 < KEPT:
            tl.store(next + place, tl.load(past + place + 1, mask=begun, other=0.0), mask=used)
        else:
            tl.store(next + place, now, mask=used)
    tl.store(y + sequence * channels + channel, activated(sums, now, SILU), mask=used)
