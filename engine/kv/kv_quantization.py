"""KV in one byte an element: int8 or fp8 (e4m3), with a scale for each token and head.

    scale = the largest absolute value of the token's head / the largest element, rounded up to bfloat16
    element = value / scale, rounded to the nearest element (ties to even)

The scale is rounded up, so that the largest value still fits; that makes a step at most 1/128 wider, for half the bytes
of a float32. It is a function of the one token and head: what a token's KV is does not depend on what else is in the
step, and a resumed stream finds the same bytes. An element times its scale is exact in float32.

fp8 has no subnormal elements here: what would become one (3e-5 of the largest value and less) is 0. So an element is
widened by shifts alone. A head that is not finite gets the scale NaN, and whatever reads it becomes NaN, as without
quantising.

This is plain PyTorch for any device. `tandem::write_quantised` gives the same bits.
"""

from __future__ import annotations

import torch

from engine.core.kv_layout import QUANTISED

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_FP8 = 2.0**-6  # normal element
NOTHING = 2.0**-100  # a head without a larger value is zero: no scale comes near the numbers that hardware flushes


def element_dtype(kv_dtype: str) -> torch.dtype | None:
    """The torch dtype of the elements for the setting `kv_dtype`; None for "auto"."""
    return getattr(torch, QUANTISED[kv_dtype]) if kv_dtype != "auto" else None


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x [..., d]` as elements `[..., d]` of `dtype` and bfloat16 scales `[...]`."""
    x = x.float()
    top = x.abs().amax(dim=-1)
    scale = round_up(torch.where(top < NOTHING, 0.0, top / LARGEST[dtype]))
    scale = torch.where(top < float("inf"), scale, float("nan"))  # false for NaN
    some = scale > 0
    y = torch.where(some.unsqueeze(-1), x / torch.where(some, scale, 1.0).unsqueeze(-1), 0.0)
    y = y.round() if dtype == torch.int8 else torch.where(y.abs() < SMALLEST_FP8, 0.0, y)
    return y.to(dtype), scale.bfloat16()


def dequantise(elements: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`elements [..., d]` times `scales [...]`, in `dtype`."""
    return (elements.float() * scales.float().unsqueeze(-1)).to(dtype)


def round_up(x: torch.Tensor) -> torch.Tensor:
    """Positive float32 to the next bfloat16 that is not smaller, still as float32."""
    return ((x.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def step_of(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """How far at most a value lay from `elements [..., d]`, by rounding alone: float32 `[..., d]`."""
    if elements.dtype == torch.int8:
        return (scales.float() / 2).unsqueeze(-1).expand(elements.shape)
    size = elements.float().abs()
    return torch.where(size == 0, SMALLEST_FP8, size / 16) * scales.float().unsqueeze(-1)
