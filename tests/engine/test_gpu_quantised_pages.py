"""The kernel that writes quantised pages on a GPU, by Triton's interpreter: the bytes that the host would write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.attention import paged
from engine.gpu.attention import kernel_choice, page_kernel, quantised_pages
from engine.gpu.attention.paged_attention import TritonAttention
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec
from engine.kv.kv_quantization import LARGEST

CPU = torch.device("cpu")
KERNEL = TritonAttention(1024)
KEPT = pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)


def pages_of(kept: torch.dtype, dtype: torch.dtype, heads: int, dims: tuple[int, int]) -> KvCache:
    facts = CallFacts(heads, heads, *dims, FullAttentionSpec(), None, False, 1.0)
    return KvCache(layout_of([facts], 4, dtype, "", kept), 8, CPU)


def values(tokens: int, heads: int, d: int) -> torch.Tensor:
    """Heads of every size, with elements halfway between two; some zero, and some not finite."""
    generator = torch.Generator().manual_seed(d)
    sizes = 2.0 ** torch.randint(-8, 8, (tokens, heads, 1), generator=generator)
    x = torch.randn(tokens, heads, d, generator=generator) * sizes
    x[0] = torch.arange(d) / 2 - 20.0  # a scale of a power of two makes ties of these
    x[0, :, 0] = 127.0
    x[1, 0], x[2, 0] = 0.0, 1e-35
    x[3, 0, 1], x[4, 0, 2], x[5, 0, 3] = torch.nan, torch.inf, -torch.inf
    x[6, 0] = 2.0 ** torch.arange(d).clamp(max=40) * 1e-3  # many elements far below the largest
    x[7, 0], x[7, 0, 0] = torch.linspace(-1, 1, d) * 448 / 16, 448.0
    return x


@KEPT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bytes_are_those_of_the_host(kept: torch.dtype, dtype: torch.dtype) -> None:
    """Elements and scales: of heads of all sizes, also zero and not finite, of 1 to 9 heads of any number of elements,
    in scattered slots, as columns of a larger tensor."""
    for heads, dims in ((1, (64, 20)), (9, (80, 128)), (2, (576, 16))):
        ours, theirs = (pages_of(kept, dtype, heads, dims) for _ in range(2))
        for each in (ours, theirs):
            each.buffer.zero_()
        slots = torch.randperm(32, generator=torch.Generator().manual_seed(1))[:12]
        where: Any = SimpleNamespace(compiled=False, cuda_kernel=None, slot_block=slots // 4, slot_offset=slots % 4)
        for name in ("k", "v"):
            views = [(getattr(each, name)[0], getattr(each, f"{name}_scales")[0]) for each in (ours, theirs)]
            both = values(12, 2 * heads, views[0][0].shape[3]).to(dtype)
            for new in (both[:, :heads], both.transpose(1, 2).contiguous().transpose(1, 2)[:, :heads]):
                KERNEL.write_quantised(*views[0], new, where)
                paged.write(*views[1], new, where)
                elements, scales = zip(*views, strict=True)
                assert torch.equal(*(each.view(torch.uint8) for each in elements)), (heads, dims, name)
                assert torch.allclose(*scales, rtol=0, atol=0, equal_nan=True), (heads, dims, name)
                assert scales[0].isnan().any()
                for each in (ours, theirs):
                    each.buffer.zero_()


@KEPT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_that_writes_other_bytes_does_not_serve(
    kept: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial at load compares it with the host, also of one head, and of latents. Control: other scales, and a
    kernel that fails."""
    for heads, dims in ((1, (512, 64)), (2, (16, 16))):
        pages = pages_of(kept, dtype, heads, dims)
        assert kernel_choice._writes_differ(pages, dtype) is None
    with monkeypatch.context() as patch:
        patch.setattr(quantised_pages, "LARGEST", {key: most - 1 for key, most in LARGEST.items()})
        assert "pages than the host" in str(kernel_choice._writes_differ(pages, dtype))
    monkeypatch.setattr(page_kernel, "write_heads", None)
    facts = [CallFacts(2, 2, 16, 16, FullAttentionSpec(), None, False, 0.25)]
    assert str(kernel_choice.differs(KERNEL, facts, dtype, 16, CPU, kept)).startswith("fails")
