"""The Triton kernel of engine/gpu/sampling.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_of(logits):
    """float32 as integers in the same order: both zeros are 0, minus infinity is above -2^31."""
    bits = logits.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -2147483648 - bits, bits)


@triton.jit
def count_above(logits, least, vocab, TILE: tl.constexpr):
    """How many tokens are above `least` in the order of their logits."""
    count = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        order = order_of(tl.load(logits + at, mask=at < vocab, other=0.0))
        count += ((order > least) & (at < vocab)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def mass_above(logits, weights, least, vocab, kept, TILE: tl.constexpr):
    """What the tokens weigh that are above `least` in the order of their logits; a weight below `kept` is none."""
    mass = tl.zeros([TILE], tl.float64)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        order = order_of(tl.load(logits + at, mask=at < vocab, other=0.0))
        weight = tl.load(weights + at, mask=at < vocab, other=0.0)
        mass += tl.where((order > least) & (weight >= kept), weight, 0.0)
    return tl.sum(mass, 0)


@triton.jit
def weight_of(logits, weights, least, vocab, TILE: tl.constexpr):
    """The smallest weight of a token that is not below `least`."""
    found = tl.full([TILE], 1.0, tl.float64)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        order = order_of(tl.load(logits + at, mask=at < vocab, other=0.0))
        weight = tl.load(weights + at, mask=at < vocab, other=1.0)
        found = tl.minimum(found, tl.where(order >= least, weight, 1.0))
    return tl.min(found, 0)


@triton.jit
def drawn(weights, kept, uniform, vocab, TILE: tl.constexpr):
    """The first token, in the order of ids, up to which the weights are more than the share `uniform` of all. A weight
    below `kept` is none."""
    sum_of_all = kept * 0.0
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        weight = tl.load(weights + at, mask=at < vocab, other=0.0)
        sum_of_all += tl.sum(tl.where(weight >= kept, weight, 0.0), 0)
    wanted = sum_of_all * uniform
    before = kept * 0.0
    first, last = tl.max(tl.full([1], 0, tl.int64) + vocab, 0), tl.max(tl.full([1], 0, tl.int64), 0)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        weight = tl.load(weights + at, mask=at < vocab, other=0.0)
        weight = tl.where(weight >= kept, weight, 0.0)
        up_to = before + tl.cumsum(weight, 0)
        passed = (up_to > wanted) & (weight > 0.0)
        first = tl.minimum(first, tl.min(tl.where(passed, at, vocab), 0).to(tl.int64))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0), 0).to(tl.int64))
        before += tl.sum(weight, 0)
    return tl.where(first < vocab, first, last)  # a number so near to 1 that its share rounds to all


@triton.jit
def choose_tokens(
    logits,  # float32 [rows, vocab]
    numbers,  # float64 [rows, 5]: temperature, top_k, top_p, min_p, uniform number
    weights,  # float64 [rows, vocab]: memory to work in
    chosen,  # int64 [rows]
    row_stride,
    vocab,
    TILE: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    weights += row * vocab
    numbers += row * 5
    temperature, top_k = tl.load(numbers), tl.load(numbers + 1)
    top_p, min_p, uniform = tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4)

    # the largest logit, its first place, and whether there is a NaN
    tops = tl.full([TILE], float("-inf"), tl.float32)
    wrong = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        found = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        wrong += (found != found).to(tl.int32)
        tops = tl.maximum(tops, tl.where(found == found, found, float("-inf")))
    top = tl.max(tops, 0)
    places = tl.full([TILE], 2147483647, tl.int32)
    for start in range(0, vocab, TILE):
        at = start + tl.arange(0, TILE)
        found = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        places = tl.minimum(places, tl.where((found == top) & (at < vocab), at, 2147483647))
    token = tl.min(places, 0).to(tl.int64)
    known = (tl.sum(wrong, 0) == 0) & (top != float("inf")) & (top != float("-inf"))

    if known & (temperature > 0.0):
        totals = tl.zeros([TILE], tl.float64)
        for start in range(0, vocab, TILE):
            at = start + tl.arange(0, TILE)
            found = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
            weight = tl.exp((found.to(tl.float64) - top.to(tl.float64)) / temperature)
            tl.store(weights + at, weight, mask=at < vocab)
            totals += weight
        total = tl.sum(totals, 0)
        tl.debug_barrier()  # other threads may read the weights than those that wrote them
        kept = temperature * 0.0  # tokens of less weight than this are not drawn
        lowest = row * 0 - 2147483648
        highest = tl.max(order_of(tl.full([1], 0.0, tl.float32) + top), 0)
        if (top_k > 0.0) & (top_k < vocab):
            # the lowest order above which there are fewer than top_k tokens: that of the last one which stays
            low, high = lowest, highest
            while low < high:
                middle = (low + high) >> 1
                fewer = count_above(logits, middle, vocab, TILE).to(tl.float64) < top_k
                low, high = tl.where(fewer, low, middle + 1), tl.where(fewer, middle, high)
            kept = weight_of(logits, weights, low, vocab, TILE)
            total = mass_above(logits, weights, lowest, vocab, kept, TILE)
        if top_p < 1.0:
            # the lowest order above which the tokens weigh less than the mass that is wanted: likewise
            low, high = lowest, highest
            while low < high:
                middle = (low + high) >> 1
                less = mass_above(logits, weights, middle, vocab, kept, TILE) < top_p * total
                low, high = tl.where(less, low, middle + 1), tl.where(less, middle, high)
            kept = tl.maximum(kept, weight_of(logits, weights, low, vocab, TILE))
        kept = tl.maximum(kept, min_p)

        token = drawn(weights, kept, uniform, vocab, TILE)
    tl.store(chosen + row, tl.where(known, token, -1))
