"""Writes K or V into quantised pages on CUDA, by one kernel for each (tests/engine/test_gpu_quantised_pages.py).

The bytes are those of `engine.kv.kv_quantization.quantise` on a CPU. (On CUDA itself plain PyTorch divides by a number
as it multiplies by the reciprocal, so a scale may differ there by its last bit.) Not run on a GPU yet.
"""

from __future__ import annotations

import torch

from engine.gpu.attention import page_kernel
from engine.gpu.operators import operator, ops, power_of_two
from engine.kv.kv_quantization import LARGEST, quantise

ELEMENTS = 1024  # of a program, at least


@operator("write_quantised(Tensor(a!) pages, Tensor(b!) scales, Tensor fresh, Tensor blocks, Tensor slots) -> ()")
def write_quantised(
    pages: torch.Tensor, scales: torch.Tensor, fresh: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor
) -> None:
    """`fresh [tokens, kv_heads, d]` into the slots of `pages [blocks, block_size, kv_heads, d]` and their `scales`."""
    fresh = fresh if fresh.stride(2) == 1 else fresh.contiguous()
    tokens, heads, size = fresh.shape
    fp8, wide = pages.dtype == torch.float8_e4m3fn, power_of_two(size)
    tile = min(max(1, ELEMENTS // wide), power_of_two(heads))
    if tokens:
        page_kernel.write_heads[(tokens, -(-heads // tile))](
            fresh, pages.view(torch.uint8) if fp8 else pages, scales.view(torch.int16), blocks, slots, heads, size,
            *fresh.stride()[:2], *pages.stride()[:3], *scales.stride(), MOST=LARGEST[pages.dtype], FP8=fp8,
            HEADS=tile, SIZE=wide, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def differs(pages: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with the bytes that the kernel writes into slots of a few blocks, compared with the host's; None if
    nothing is. K and V are given as attention gives them, heads first in memory. One head, of the first token or a
    later one, is zero, one too small for a scale, one is not finite, and one has a scale that needs no rounding."""
    blocks = torch.arange(min(4, len(pages)))
    fresh = torch.randn(len(blocks), *pages.shape[2:], generator=torch.Generator().manual_seed(0))
    heads = fresh.flatten(0, 1)  # [tokens * kv_heads, d], a view
    heads[:2] *= torch.tensor([[0.0], [1e-36]])
    heads[2, 0], heads[3, 0] = torch.nan, LARGEST[pages.dtype] / 8
    fresh, at, slots = fresh.to(dtype), blocks.to(pages.device), ((3 * blocks + 1) % pages.shape[1]).to(pages.device)
    given = fresh.to(pages.device).transpose(0, 1).contiguous().transpose(0, 1)
    ops.write_quantised.default(pages, scales, given, at, slots)
    elements, own = quantise(fresh, pages.dtype)
    same = torch.equal(pages.view(torch.uint8)[at, slots].cpu(), elements.view(torch.uint8))
    same = same and torch.allclose(scales[at, slots].cpu(), own, rtol=0, atol=0, equal_nan=True)
    return None if same else f"writes other {str(pages.dtype).removeprefix('torch.')} pages than the host"
