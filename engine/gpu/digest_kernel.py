"""The Triton kernel of engine/gpu/block_digest.py, which has the formula."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_words(
    words,  # int32 [blocks, count]
    ids,  # int64 [grid]: the blocks
    sums,  # int64 [grid, parts, 2]
    count,
    SPREAD: tl.constexpr,
    MIX: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Program (n, part) sums its part of block `ids[n]`."""
    here, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start = words + tl.load(ids + here) * count
    first = tl.zeros([TILE], tl.uint64)
    second = tl.zeros([TILE], tl.uint64)
    for tile in range(TILES):
        at = (part * TILES + tile) * TILE + tl.arange(0, TILE)
        word = tl.load(start + at, mask=at < count, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        mixed = (at + 1).to(tl.uint64) * SPREAD
        mixed ^= mixed >> 32
        mixed *= MIX
        mixed ^= mixed >> 32
        again = mixed * MIX
        again ^= again >> 32
        first += word * (mixed | 1)
        second += word * (again | 1)
    place = sums + (here * parts + part) * 2
    tl.store(place, tl.sum(first, 0).to(tl.int64, bitcast=True))
    tl.store(place + 1, tl.sum(second, 0).to(tl.int64, bitcast=True))
