"""The Triton kernel of engine/gpu/attention/quantised_pages.py."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kv import kv_quantization

NOTHING, SMALLEST_FP8 = tl.constexpr(kv_quantization.NOTHING), tl.constexpr(kv_quantization.SMALLEST_FP8)
INTEGERS = tl.constexpr(1.5 * 2**23)  # float32 from here on have no fractions: adding this rounds, ties to even
NAN = tl.constexpr(0x7FC0)  # the bits of a bfloat16


@triton.jit
def write_heads(
    new,
    pages,
    scales,
    blocks,
    slots,
    heads,
    size,
    n_token,  # strides from here on
    n_head,
    p_block,
    p_slot,
    p_head,
    s_block,
    s_slot,
    s_head,
    MOST: tl.constexpr,  # the largest element
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Some heads of a token: their elements, and the bits of their scales."""
    token, head, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, SIZE)
    block, slot = tl.load(blocks + token).to(tl.int64), tl.load(slots + token).to(tl.int64)
    there, here = head < heads, (head < heads)[:, None] & (at < size)[None, :]
    x = tl.load(new + token * n_token + head[:, None] * n_head + at[None, :], mask=here, other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")  # not NaN either
    top, ill = tl.max(tl.where(finite, tl.abs(x), 0.0), 1), tl.max(tl.where(finite, 0, 1), 1)
    wanted = tl.where(top < NOTHING, 0.0, tl.div_rn(top, tl.zeros_like(top) + MOST))
    bits = (wanted.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000  # rounded up to bfloat16
    some = (bits > 0) & (ill == 0)
    by = tl.where(some, bits.to(tl.float32, bitcast=True), 1.0)
    y = tl.where(some[:, None], tl.div_rn(x, tl.zeros_like(x) + by[:, None]), 0.0)
    if FP8:  # by integers: not every architecture converts to e4m3
        whole = tl.abs(y).to(tl.int32, bitcast=True)
        code = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)  # 3 bits of the fraction, ties to even
        element = tl.where(tl.abs(y) < SMALLEST_FP8, 0, tl.where(y < 0.0, code | 0x80, code))
    else:
        element = ((y + INTEGERS) - INTEGERS).to(tl.int32)
    p_at = pages + block * p_block + slot * p_slot + head[:, None] * p_head + at[None, :]
    tl.store(p_at, element.to(pages.dtype.element_ty), mask=here)
    s_at = scales + block * s_block + slot * s_slot + head * s_head
    tl.store(s_at, tl.where(ill > 0, NAN, bits >> 16).to(tl.int16), mask=there)
