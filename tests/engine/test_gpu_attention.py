"""Attention over pages in Triton, by Triton's interpreter: the numbers of every reach, head size and KV dtype, and bits
that follow from a row's own sequence alone. The machine code is in test_gpu_machine_code.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.attention import paged
from engine.attention.forward_context import Batch, Step
from engine.gpu.attention import kernel_choice, paged_attention
from engine.gpu.attention import kernels as attention_kernels
from engine.gpu.attention.paged_attention import TritonAttention
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import (
    CallFacts,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    Reach,
    SlidingWindowSpec,
)
from engine.kv.kv_quantization import quantise
from engine.loading.model_loader import load_model
from engine.runner import captured_steps

CPU = torch.device("cpu")
KERNEL = TritonAttention(1024)  # parts of 64 keys, here
LENGTHS = [(0, 21), (82, 4), (72, 1), (20, 1), (0, 1)]  # (done, new) of each sequence


@pytest.fixture(autouse=True, scope="module")
def short_parts() -> Iterator[None]:
    """So that short sequences have several; the interpreter takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "LEAST_SPLIT", 64)
        yield


def call(
    heads: int = 4,
    kv_heads: int = 2,
    k_dim: int = 16,
    v_dim: int = 16,
    reach: Reach | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> CallFacts:
    return CallFacts(kv_heads, heads, k_dim, v_dim, reach or FullAttentionSpec(), softcap, sinks, k_dim**-0.5)


class Case:
    """Random pages of one attention call, and the attention of any of their sequences."""

    def __init__(
        self,
        facts: CallFacts,
        kept: torch.dtype | None = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.facts, self.block_size = facts, block_size
        generator = torch.Generator().manual_seed(1)
        counts = [-(-(done + new) // block_size) for done, new in LENGTHS]
        ids = torch.randperm(sum(counts), generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.pages = KvCache(layout_of([facts], block_size, dtype, "", kept), sum(counts), CPU)
        for elements, scales in (
            (self.pages.k[0], self.pages.k_scales[0]),
            (self.pages.v[0], self.pages.v_scales[0]),
        ):
            random = torch.randn(elements.shape, generator=generator)
            if scales is None:
                elements.copy_(random)
            else:
                own, factors = quantise(random, elements.dtype)
                elements.view(torch.uint8).copy_(own.view(torch.uint8))
                scales.copy_(factors)
        total = sum(new for _, new in LENGTHS)
        self.query = torch.randn(total, facts.heads, facts.k_dim, generator=generator).to(dtype)
        self.sinks = torch.randn(facts.heads, generator=generator) if facts.sinks else None

    def attend(self, *which: int, kernel: Any = KERNEL.attend, last: int | None = None) -> torch.Tensor:
        """Of these sequences in one step; `last`: only that many of each one's last queries."""
        batch, rows = Batch(), []
        for index in which:
            done, new = LENGTHS[index]
            skip = 0 if last is None else max(0, new - last)
            start = sum(new for _, new in LENGTHS[:index])
            batch.add([0] * (new - skip), done + skip, self.tables[index])
            rows += range(start + skip, start + new)
        step = Step(batch, self.pages, (self.facts,), CPU)
        scales = self.pages.k_scales[0], self.pages.v_scales[0]
        out: torch.Tensor = kernel(
            self.query[rows], self.pages.k[0], self.pages.v[0], scales, step, self.facts, sinks=self.sinks
        )
        return out


EVERY = range(len(LENGTHS))


@pytest.mark.parametrize(
    "facts",
    [
        call(),
        call(heads=8, kv_heads=1, k_dim=64, v_dim=64, sinks=True),
        call(heads=6, kv_heads=2, k_dim=80, v_dim=80, softcap=30.0),
        call(heads=2, kv_heads=2, k_dim=96, v_dim=96, reach=SlidingWindowSpec(33)),
        call(heads=2, kv_heads=1, k_dim=128, v_dim=128, reach=SlidingWindowSpec(1)),
        call(heads=4, kv_heads=2, k_dim=24, v_dim=20, reach=ChunkedLocalAttentionSpec(64), softcap=5.0, sinks=True),
        call(heads=2, kv_heads=1, k_dim=256, v_dim=256),
    ],
    ids=str,
)
def test_it_computes_what_the_reference_computes(facts: CallFacts) -> None:
    """Fresh prompts, chunks behind others, and single tokens in one step, over scattered blocks."""
    case = Case(facts)
    assert (case.attend(*EVERY) - case.attend(*EVERY, kernel=paged.attend)).abs().max() < 1e-5


@pytest.mark.parametrize("block_size", [5, 64])
def test_blocks_may_be_of_any_size(block_size: int) -> None:
    """Smaller than a tile of keys or larger, and no power of two."""
    case = Case(call(), block_size=block_size)
    assert (case.attend(*EVERY) - case.attend(*EVERY, kernel=paged.attend)).abs().max() < 1e-5


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_pages_are_read_with_their_scales(kept: torch.dtype) -> None:
    """Of keys and of values."""
    case = Case(call(), kept)
    assert (case.attend(*EVERY) - case.attend(*EVERY, kernel=paged.attend)).abs().max() < 1e-5


def test_sixteen_bits_round_and_no_more() -> None:
    """As a kernel of bfloat16 may."""
    case = Case(call(), dtype=torch.bfloat16)
    exact = case.attend(*EVERY, kernel=paged.attend).float()
    assert (case.attend(*EVERY).float() - exact).abs().max() < 0.03


@pytest.mark.parametrize("reach", [FullAttentionSpec(), SlidingWindowSpec(50)], ids=str)
def test_a_rows_bits_follow_from_its_own_sequence(reach: Reach) -> None:
    """Alone or with others, in a chunk or as a single query, whose parts of keys run apart and are merged: bit for bit.
    So a stream that is resumed by computing its tokens as a prompt finds the same numbers."""
    case = Case(call(reach=reach, sinks=True))
    together = case.attend(*EVERY)
    ends = [sum(new for _, new in LENGTHS[: index + 1]) for index in EVERY]
    for index in EVERY:
        start = ends[index] - LENGTHS[index][1]
        assert torch.equal(case.attend(index), together[start : ends[index]]), index
        assert torch.equal(case.attend(index, last=1), together[ends[index] - 1 : ends[index]]), index
    assert torch.equal(case.attend(1, 2, 3, last=1), together[[ends[1] - 1, ends[2] - 1, ends[3] - 1]])


def test_control_with_parts_that_follow_from_the_step_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fixed parts are for: half as long, and a long row is summed in another order."""
    case = Case(call())
    expected = case.attend(2)
    monkeypatch.setattr(TritonAttention, "split_keys", 32)
    assert not torch.equal(case.attend(2), expected)


@pytest.mark.parametrize("twist", ["_plus", "_minus"])
def test_control_one_key_too_many_or_too_few_is_noticed(twist: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At load, where a kernel that differs from the reference serves nothing."""
    facts = call(reach=SlidingWindowSpec(40))
    kind = kernel_choice.__dict__  # the trial uses the kernel as it serves
    monkeypatch.setitem(kind, "candidate", lambda *_: KERNEL)
    assert KERNEL.split_keys == 64
    chosen, line = kernel_choice.choose((facts,), torch.float32, 16, CPU, 4096)
    assert (chosen, line) == (KERNEL, "cuda (triton)")
    by = 1 if twist == "_plus" else -1
    monkeypatch.setattr(paged_attention, "kind", lambda reach: (attention_kernels.WINDOW, reach.window + by))
    chosen, line = kernel_choice.choose((facts,), torch.float32, 16, CPU, 4096)
    assert chosen is None
    assert "triton differs from it" in line


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "llama4-text"])
def test_a_model_attends_by_it_in_every_call(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Softcaps, sinks, windows and chunks included: the reference is not asked, and a step can be captured."""
    model = load_model(str(checkpoint(f"tiny-{family}")), dtype=torch.float32, device=CPU, kernels="reference")
    tokens = [index * 7 % 384 for index in range(40)]
    batch = Batch(tokens, [*range(39), 9], [39, 1], [39, 10], [[4, 1, 2], [0]], [38, 39])
    expected = model.forward(model.allocate(6), batch)
    model.cuda_kernel = TritonAttention(model.max_model_len)
    monkeypatch.setattr(paged, "attend_plan", lambda *_: pytest.fail("the reference was asked"))
    pages = model.allocate(6)
    found = model.forward(pages, batch)
    assert ((found - expected).abs().amax(-1) / expected.std(-1)).max() < 1e-4
    assert captured_steps.unfit(model, pages) is None
