"""The Triton kernels of engine/gpu/attention/paged_attention.py, which has the order of their sums.

Logits are in base 2, where exp2 is one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.gpu.tiles import e4m3, product

LOG2_E = tl.constexpr(1.4426950408889634)
FULL, WINDOW, CHUNK = 0, 1, 2  # values of REACH; `span` is the size in tokens of a window or chunk


@triton.jit
def first_visible(position, span, REACH: tl.constexpr):
    """The first key that the query at `position` sees."""
    first = position * 0
    if REACH == 1:
        first = tl.maximum(position - span + 1, 0)
    if REACH == 2:
        first = position // span * span
    return first


@triton.jit
def bounds(begin, end, part, SPLIT: tl.constexpr, PARALLEL: tl.constexpr):
    """Of a program's keys: a part of the row's, or all of them."""
    if PARALLEL:
        begin, end = tl.maximum(begin, part * SPLIT), tl.minimum(end, part * SPLIT + SPLIT)
    return begin, end


@triton.jit
def nothing(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """A softmax sum before the first key."""
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    return top, total, tl.zeros([ROWS, SIZE], tl.float32)


@triton.jit
def merged(top, total, values, other_top, other_total, other_values):
    """Two softmax sums as one: maximum of the logits `[rows]`, sum `[rows]`, weighted values `[rows, d]`."""
    new = tl.maximum(top, other_top)
    safe = tl.where(new == float("-inf"), 0.0, new)
    ours, theirs = tl.exp2(top - safe), tl.exp2(other_top - safe)
    return new, total * ours + other_total * theirs, values * ours[:, None] + other_values * theirs[:, None]


@triton.jit
def with_sinks(top, total, values, sinks, head, here):
    """A sink takes part in the sum and adds no value."""
    sink = tl.load(sinks + head, mask=here, other=0.0).to(tl.float32) * LOG2_E
    return merged(top, total, values, sink, sink * 0.0 + 1.0, values * 0.0)


@triton.jit
def whole(top, total, values, sinks, head, here, SINKS: tl.constexpr):
    """The result of a softmax sum over all keys."""
    if SINKS:
        top, total, values = with_sinks(top, total, values, sinks, head, here)
    return values / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def row_sums(weights, like, KEYS: tl.constexpr, EXACT: tl.constexpr):
    """The sums of `weights [rows, keys]` over keys. They are computed by a product, because the order of tl.sum depends
    on the tile's shape; all columns of the product are equal."""
    return tl.max(product(weights.to(like.dtype), tl.full([KEYS, 16], 1.0, tl.float32), EXACT), 1)


@triton.jit
def widened(x, FP8: tl.constexpr):
    if FP8:
        x = e4m3(x)
    return x


@triton.jit
def scaled(x, scales, block, slot, used, by_block, by_slot):
    """`x [rows, keys]` times the scale of each key's elements."""
    found = tl.load(scales + block * by_block + slot * by_slot, mask=used, other=0.0)
    return x * found.to(tl.float32)[None, :]


@triton.jit
def of_rows(x, token, head, here, at, by_token, by_head, DIM: tl.constexpr):
    """`[rows, d]`: elements `at` of each row's head."""
    place = token * by_token + head[:, None] * by_head + at[None, :]
    return tl.load(x + place, mask=here[:, None] & (at < DIM)[None, :], other=0.0)


@triton.jit
def store_rows(out, x, head, here, at, by_head, DIM: tl.constexpr):
    where = out + head[:, None] * by_head + at[None, :]
    tl.store(where, x.to(out.dtype.element_ty), mask=here[:, None] & (at < DIM)[None, :])


@triton.jit
def of_keys(pages, block, slot, first, used, at, by_block, by_slot, DIM: tl.constexpr):
    """`[keys, d]`: elements `at` of each key or value of a head."""
    place = block[:, None] * by_block + slot[:, None] * by_slot + first + at[None, :]
    return tl.load(pages + place, mask=used[:, None] & (at < DIM)[None, :], other=0.0)


@triton.jit
def of_keys_turned(pages, block, slot, first, at, by_block, by_slot, DIM: tl.constexpr):
    """`[d, keys]`. Those beyond the last key are of block 0, which is memory of ours; `hidden` hides their logits."""
    place = block[None, :] * by_block + slot[None, :] * by_slot + first + at[:, None]
    return tl.load(pages + place, mask=(at < DIM)[:, None], other=0.0)


@triton.jit
def of_tile(
    k_pages,
    v_pages,
    block,
    slot,
    k_first,
    v_first,
    used,
    k_at,
    v_at,
    k_block,
    k_slot,
    v_block,
    v_slot,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    LATENT: tl.constexpr,
):
    """The keys `[d, keys]` and values `[keys, d]` of a tile; latents are both."""
    if LATENT:
        taken = of_keys(k_pages, block, slot, k_first, used, k_at, k_block, k_slot, K_DIM)
        keys = tl.trans(taken)
    else:
        keys = of_keys_turned(k_pages, block, slot, k_first, k_at, k_block, k_slot, K_DIM)
        taken = of_keys(v_pages, block, slot, v_first, used, v_at, v_block, v_slot, V_DIM)
    return keys, taken


@triton.jit
def logits_of(
    q,
    keys,
    scales,
    block,
    slot,
    used,
    by_block,
    by_slot,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
    EXACT: tl.constexpr,
):
    """`q [rows, d]` times `keys [d, keys]`, as they are or quantised."""
    x = product(q, widened(keys, FP8), EXACT)
    if SCALED:
        x = scaled(x, scales, block, slot, used, by_block, by_slot)
    return x


@triton.jit
def weighed(logits, factor, top):
    """The new maximum of a softmax sum, the weights of these logits times `factor`, and that of what was summed
    before."""
    new = tl.maximum(top, tl.max(logits, 1) * factor)
    safe = tl.where(new == float("-inf"), 0.0, new)
    return new, tl.exp2(tl.fma(logits, factor, -safe[:, None])), tl.exp2(top - safe)


@triton.jit
def of_program(kept, row, at, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The place of a program's own values, `[ROWS, SIZE]`."""
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return kept + program * ROWS * SIZE + (row[:, None] * SIZE + at[None, :])


@triton.jit
def with_part(kept, there, top, total, part_top, part_total, part_values):
    """The sum of a row's earlier parts, whose values are `kept` if they are `there`, and of one more.

    Registers hold the values of one part. Between a store and the next load, which other threads may do, each round of
    `attend` has a barrier, because keys and values go through shared memory (`loadtest machine-code` looks for it). One
    that is written there would end Triton's pipelining."""
    earlier = tl.zeros_like(part_values)
    if there:
        earlier = tl.load(kept)
    return merged(top, total, earlier, part_top, part_total, part_values)


@triton.jit
def bent(x, softcap):
    """softcap * tanh(x / softcap)."""
    small = tl.exp2(tl.abs(x / softcap) * (-2.0 * LOG2_E))
    tanh = (1.0 - small) / (1.0 + small)  # of the absolute value
    return tl.where(x < 0, -tanh, tanh) * softcap


@triton.jit
def of_base_2(logits, scaling, softcap, SOFTCAP: tl.constexpr):
    """Logits, and the factor that makes them those of base 2."""
    factor = scaling * LOG2_E
    if SOFTCAP:
        logits, factor = bent(logits * scaling, softcap), scaling * 0.0 + LOG2_E
    return logits, factor


@triton.jit
def hidden(logits, key, position, first, used):
    """The logits of keys that a row does not see are -inf."""
    seen = (key[None, :] <= position[:, None]) & (key[None, :] >= first[:, None]) & used[None, :]
    return tl.where(seen, logits, float("-inf"))


@triton.jit(do_not_specialize=["table_row", "t_part"])  # they differ from step to step
def attend(
    query,
    turned,  # LATENT: the rotated parts of the queries; those in `query` are absorbed
    k_pages,
    v_pages,  # LATENT: the rotated keys; the values are the latents in `k_pages`
    k_scales,
    v_scales,
    out,  # PARALLEL: weighted values of each part, float32 [parts, tiles, heads, d]; otherwise [total, heads, d]
    tops,  # PARALLEL: maximum of each part's logits, [parts, tiles, heads]
    sums,  # likewise
    kept,  # not PARALLEL: weighted values of the parts so far, float32 [tiles, groups of heads, ROWS, V_PAD]
    sinks,
    starts,
    contexts,
    table,
    tile_sequence,
    tile_query,
    q_token,  # strides from here on
    q_head,
    r_token,
    r_head,
    k_block,
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    ks_block,
    ks_slot,
    ks_head,
    vs_block,
    vs_slot,
    vs_head,
    table_row,
    o_part,
    o_token,
    o_head,
    t_part,
    t_tile,
    scaling,
    softcap,
    span,
    HEADS: tl.constexpr,  # of a KV head
    GROUP: tl.constexpr,  # of a tile
    BLOCK: tl.constexpr,
    K_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    R_DIM: tl.constexpr,
    R_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    REACH: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,  # pages of bytes: not every architecture converts e4m3
    EXACT: tl.constexpr,
    LATENT: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
    PARALLEL: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(2)
    kv_head, group = tl.program_id(1) // tl.cdiv(HEADS, GROUP), tl.program_id(1) % tl.cdiv(HEADS, GROUP)
    sequence, first_query = tl.load(tile_sequence + tile), tl.load(tile_query + tile)
    start, after, context = tl.load(starts + sequence), tl.load(starts + sequence + 1), tl.load(contexts + sequence)
    row, k_at, v_at = tl.arange(0, ROWS), tl.arange(0, K_PAD), tl.arange(0, V_PAD)
    number, of_kv_head, count = first_query + row // GROUP, group * GROUP + row % GROUP, after - start
    head, here = kv_head * HEADS + of_kv_head, (number < count) & (of_kv_head < HEADS)
    position, token = context - count + number, (start + number)[:, None].to(tl.int64)
    q = of_rows(query, token, head, here, k_at, q_token, q_head, K_DIM)
    k_first, v_first = kv_head * k_head, kv_head * v_head  # added to each address: fewer registers
    k_scales, v_scales = k_scales + kv_head * ks_head, v_scales + kv_head * vs_head
    w_scales, ws_block, ws_slot = v_scales, vs_block, vs_slot  # of the values
    if LATENT:
        w_scales, ws_block, ws_slot, r_at = k_scales, ks_block, ks_slot, tl.arange(0, R_PAD)
        r = of_rows(turned, token, head, here, r_at, r_token, r_head, R_DIM)
    first, low = first_visible(position, span, REACH), first_visible(context - count + first_query, span, REACH)
    end = context - count + tl.minimum(first_query + ROWS // GROUP, count)
    all_first, all_last = first_visible(end - 1, span, REACH), context - count + first_query  # seen by all rows
    begin, stop = bounds(low // TILE * TILE, end, part, SPLIT, PARALLEL)
    second_part = (begin // SPLIT + 1) * SPLIT  # where it begins
    kept_at = of_program(kept, row, v_at, ROWS, V_PAD)
    top, total, own_values = nothing(ROWS, V_PAD)
    own_top, own_total = top, total
    for at in range(begin, stop, TILE):
        if not PARALLEL:  # noqa: SIM102 - decided when it is compiled
            if (at % SPLIT == 0) & (at > begin):  # a part has ended
                top, total, own_values = with_part(
                    kept_at, at > second_part, top, total, own_top, own_total, own_values
                )
                tl.store(kept_at, own_values)
                own_top, own_total, own_values = nothing(ROWS, V_PAD)
        key = at + tl.arange(0, TILE)
        used, slot = key < end, key % BLOCK
        block = tl.load(table + sequence * table_row + key // BLOCK, mask=used, other=0).to(tl.int64)
        if LATENT:
            rotated = of_keys_turned(v_pages, block, slot, v_first, r_at, v_block, v_slot, R_DIM)
        keys, taken = of_tile(
            k_pages, v_pages, block, slot, k_first, v_first, used, k_at, v_at, k_block, k_slot, v_block, v_slot,
            K_DIM, V_DIM, LATENT,
        )  # fmt: skip
        logits = logits_of(q, keys, k_scales, block, slot, used, ks_block, ks_slot, SCALED, FP8, EXACT)
        if LATENT:
            logits += logits_of(r, rotated, v_scales, block, slot, used, vs_block, vs_slot, SCALED, FP8, EXACT)
        logits, factor = of_base_2(logits, scaling, softcap, SOFTCAP)
        if (at < all_first) | (at + TILE - 1 > all_last):
            logits = hidden(logits, key, position, first, used)
        new, weights, before = weighed(logits, factor, own_top)
        own_total, own_top = own_total * before + row_sums(weights, q, TILE, EXACT), new
        if SCALED:
            weights = scaled(weights, w_scales, block, slot, used, ws_block, ws_slot)
        own_values = own_values * before[:, None] + product(weights.to(q.dtype), widened(taken, FP8), EXACT)
    if PARALLEL:
        place, of_part = part.to(tl.int64) * o_part + tile.to(tl.int64) * o_token, part * t_part + tile * t_tile + head
        tl.store(tops + of_part, own_top, mask=here)
        tl.store(sums + of_part, own_total, mask=here)
    else:
        place = token * o_token
        top, total, own_values = with_part(kept_at, stop > second_part, top, total, own_top, own_total, own_values)
        own_values = whole(top, total, own_values, sinks, head, here, SINKS)
    store_rows(out + place, own_values, head, here, v_at, o_head, V_DIM)


@triton.jit(do_not_specialize=["t_part"])
def merge(
    values,
    tops,
    sums,
    sinks,
    out,
    starts,
    contexts,
    tile_sequence,
    p_part,  # strides from here on
    p_tile,
    p_head,
    t_part,
    t_tile,
    o_token,
    o_head,
    span,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    REACH: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merges the parts of one row in their order into `out [total, heads, d]`."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequence + tile)
    context = tl.load(contexts + sequence)
    low = first_visible(context - 1, span, REACH)
    one, v_at = tl.arange(0, 1), tl.arange(0, V_PAD)
    there = (v_at < V_DIM)[None, :]
    top, total, row = nothing(1, V_PAD)
    for part in range(low // SPLIT, tl.cdiv(context, SPLIT)):
        kept = part * t_part + tile * t_tile + head + one
        place = tl.cast(part, tl.int64) * p_part + tl.cast(tile, tl.int64) * p_tile + head * p_head
        found = tl.load(values + place + one[:, None] + v_at[None, :], mask=there, other=0.0)
        top, total, row = merged(top, total, row, tl.load(tops + kept), tl.load(sums + kept), found)
    row = whole(top, total, row, sinks, head + one, one == 0, SINKS)
    token = tl.load(starts + sequence).to(tl.int64)
    where = out + token * o_token + head * o_head + one[:, None] + v_at[None, :]
    tl.store(where, row.to(out.dtype.element_ty), mask=there)
