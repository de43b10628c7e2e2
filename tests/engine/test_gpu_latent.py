"""Attention over pages of latents on CUDA, by Triton's interpreter: the numbers of the expanded context without
expanding it, and bits that follow from a row's own sequence alone. The machine code is in test_gpu_machine_code.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.attention import mla, paged
from engine.attention.forward_context import Batch, Step
from engine.attention.mla import Expanded
from engine.gpu import layers, products
from engine.gpu.attention import kernel_choice, latent, paged_attention
from engine.gpu.attention.paged_attention import TritonAttention
from engine.kernels import REFERENCE
from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec, Reach, SlidingWindowSpec
from engine.loading.model_loader import load_model
from engine.runner import captured_steps, traced_forward
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import make_checkpoint

CPU = torch.device("cpu")
SIZES = Expanded(16, 12)
KERNEL = TritonAttention(1024, SIZES)  # parts of 64 keys, here
LENGTHS = [(0, 21), (82, 4), (72, 1), (20, 1), (0, 1)]  # (done, new) of each sequence
EVERY = range(len(LENGTHS))
MIXED = Batch([3, *range(9), 4], [20, *range(9), 5], [1, 9, 1], [21, 9, 6], [[4, 1], [2], [0]], [0, 9, 10])


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Short sequences have several parts, and trials are of few rows; the interpreter takes its time."""
    batches = traced_forward._batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "LEAST_SPLIT", 64)
        patch.setattr(kernel_choice, "LONGEST", 90)
        patch.setattr(layers, "ROWS", (1, 5, 65))
        patch.setattr(traced_forward, "_batches", lambda model: [batches(model)[0], batches(model)[3]])
        yield


def call(heads: int = 4, rank: int = 24, rope: int = 8, reach: Reach | None = None, **more: Any) -> CallFacts:
    own = {"softcap": None, "sinks": False, "scaling": (SIZES.plain + rope) ** -0.5, "latent": True} | more
    return CallFacts(1, heads, rank, rope, reach or FullAttentionSpec(), **own)


class Case:
    """Random pages of one attention call, and the attention of any of their sequences."""

    def __init__(
        self, facts: CallFacts, kept: torch.dtype | None = None, dtype: torch.dtype = torch.float32, size: int = 16
    ) -> None:
        self.facts, generator = facts, torch.Generator().manual_seed(1)
        counts = [-(-(done + new) // size) for done, new in LENGTHS]
        ids = torch.randperm(sum(counts), generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.pages, _ = kernel_choice.random_pages(facts, sum(counts), (dtype, kept), size, generator, Batch())
        total, width = sum(new for _, new in LENGTHS), SIZES.plain + facts.v_dim
        self.query = torch.randn(total, facts.heads, width, generator=generator).to(dtype)
        self.sinks = torch.randn(facts.heads, generator=generator) if facts.sinks else None
        self.weight = latent.random_weight(facts, SIZES, dtype, generator)

    def attend(self, *which: int, exact: bool = False, last: int | None = None) -> torch.Tensor:
        """Of these sequences in one step, `exact`: by the reference; `last`: only that many of each one's queries."""
        batch, rows = Batch(), []
        for index in which:
            done, new = LENGTHS[index]
            skip = 0 if last is None else max(0, new - last)
            start = sum(new for _, new in LENGTHS[:index])
            batch.add([0] * (new - skip), done + skip, self.tables[index])
            rows += range(start + skip, start + new)
        step = Step(batch, self.pages, (self.facts,), CPU)
        scales = self.pages.k_scales[0], self.pages.v_scales[0]
        given = (self.query[rows], self.pages.k[0], self.pages.v[0], scales, step, self.facts)
        if not exact:
            return KERNEL.attend(*given, self.sinks, self.weight)
        expand = mla.expander_of(self.weight, self.facts.heads, SIZES.plain)
        return paged.attend(*given, sinks=self.sinks, expand=expand)


@pytest.mark.parametrize(
    "facts",
    [
        call(),
        call(heads=5, reach=SlidingWindowSpec(33), softcap=5.0),
        call(heads=72, rank=16, rope=24, sinks=True),
        call(heads=20, rank=512, rope=64),
    ],
    ids=str,
)
def test_it_computes_what_the_expanded_context_gives(facts: CallFacts) -> None:
    """Fresh prompts, chunks behind others, and single tokens in one step; more heads than a tile has rows, too."""
    case = Case(facts)
    assert (case.attend(*EVERY) - case.attend(*EVERY, exact=True)).abs().max() < 1e-5


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_latents_are_read_with_their_scales(kept: torch.dtype) -> None:
    """The latent's as key and as value, and the rotated key's. Control: with each other's scales they are not read."""
    case = Case(call(), kept)
    expected = case.attend(*EVERY, exact=True)
    assert (case.attend(*EVERY) - expected).abs().max() < 1e-5
    case.pages.k_scales[0].mul_(1.1)
    assert (case.attend(*EVERY) - expected).abs().max() > 1e-2


def test_blocks_may_be_of_any_size_and_sixteen_bits_round_and_no_more() -> None:
    """As other attention does."""
    case = Case(call(), size=5)
    assert (case.attend(*EVERY) - case.attend(*EVERY, exact=True)).abs().max() < 1e-5
    case = Case(call(), dtype=torch.bfloat16)
    assert (case.attend(*EVERY).float() - case.attend(*EVERY, exact=True).float()).abs().max() < 0.06


@pytest.mark.parametrize("facts", [call(), call(heads=20, reach=SlidingWindowSpec(50), sinks=True)], ids=str)
def test_a_rows_bits_follow_from_its_own_sequence(facts: CallFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone or with others, in a chunk or as a single query, in tiles with all heads or with some: bit for bit."""
    monkeypatch.setattr(paged_attention, "rows_of", lambda *_: 16)  # as latents of 512 have it
    case = Case(facts)
    together = case.attend(*EVERY)
    ends = [sum(new for _, new in LENGTHS[: index + 1]) for index in EVERY]
    for index in EVERY:
        start = ends[index] - LENGTHS[index][1]
        assert torch.equal(case.attend(index), together[start : ends[index]]), index
        assert torch.equal(case.attend(index, last=1), together[ends[index] - 1 : ends[index]]), index
    assert torch.equal(case.attend(1, 2, 3, last=1), together[[ends[1] - 1, ends[2] - 1, ends[3] - 1]])


def test_control_with_parts_that_follow_from_the_step_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fixed parts are for."""
    case = Case(call())
    expected = case.attend(2)
    monkeypatch.setattr(TritonAttention, "split_keys", 32)
    assert not torch.equal(case.attend(2), expected)


def chosen(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """At load, on a machine with this kernel."""
    monkeypatch.setattr(kernel_choice, "candidate", lambda *_: KERNEL)
    return kernel_choice.choose((call(),), torch.float32, 16, CPU, 1024, None, SIZES)


def test_the_trial_takes_latents_and_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is right serves."""
    assert chosen(monkeypatch) == (KERNEL, "cuda (triton)")


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda x, weight: latent.each_head(x, weight) * 1.1, "product of latents' queries differs from torch's by"),
        (
            lambda x, weight: latent.each_head(x, weight) + len(x) * 1e-7,
            "product of latents' queries gives a row other",
        ),
    ],
    ids=["numbers", "bits"],
)
def test_control_a_wrong_product_serves_nothing(wrong: Any, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that is wrong, nor one whose bits follow from the number of rows."""
    monkeypatch.setattr(latent, "absorbed", lambda plain, weight: wrong(plain, keys_of(plain, weight)))
    kernel, found = chosen(monkeypatch)
    assert kernel is None
    assert line in found


def keys_of(plain: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    heads, d = plain.shape[1:]
    return weight.view(heads, -1, weight.shape[1])[:, :d].transpose(1, 2)


def test_control_attention_without_the_rotated_part_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between the products is compared, too."""
    constants = paged_attention.constants
    monkeypatch.setattr(paged_attention, "constants", lambda *given: constants(*given) | {"R_DIM": 4})
    kernel, line = chosen(monkeypatch)
    assert kernel is None
    assert "triton differs from it by" in line


class Expanding(nn.Module):
    """As transformers' MLA modules, with something more done to latents."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], bias: bool = False) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(24, 4 * sum(SIZES), bias=bias)
        self.other = nn.Linear(24, 4 * sum(SIZES), bias=False)
        self.change = change

    def expand_kv(self, latents: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        each = self.kv_b_proj(self.change(latents)).view(1, -1, 4, sum(SIZES)).transpose(1, 2)
        keys, values = each.split(SIZES, -1)
        return torch.cat((keys, k_rot.expand(-1, 4, -1, -1)), -1), values


def test_only_an_expansion_by_one_product_is_absorbed() -> None:
    """The weight is found by what the module computes; a norm, a bias or a factor within it goes to the reference."""
    for change, bias, found in (
        (lambda x: x, False, SIZES),
        (lambda x: x, True, None),
        (lambda x: x * 3, False, None),
        (lambda x: nn.functional.normalize(x, dim=-1), False, None),
        (lambda x: x.roll(1, -1), False, None),
    ):
        module = Expanding(change, bias)
        assert mla.use_latent_pages(module) == 1
        assert mla.find_products(module, (call(),)) == found
        weight = mla.expansion(module)
        assert (weight is module.kv_b_proj.weight) if found else weight is None
    refused = TritonAttention(1024).refusal(call(), torch.float32)
    assert refused == "latent pages that no single product expands"
    assert KERNEL.refusal(call(), torch.float32) is None


def on_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, family: str, **changes: Any) -> ModelRunner:
    """A small model with attention and products as on CUDA."""
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 40}
    made = make_checkpoint(folder / family, f"tiny-{family}", dtype="float32", **small, **changes)
    model = load_model(str(made), dtype=torch.float32, device=CPU, kernels="reference")
    with monkeypatch.context() as patch:
        patch.setattr(kernel_choice, "candidate", lambda _, longest, absorbed: TritonAttention(longest, absorbed))
        assert model.choose_attention() == "cuda (triton)"
    assert layers.adopt(model.module).startswith(layers.NAME)
    model.cuda_products = True
    model.use_paged_attention()
    return model


def test_a_model_expands_nothing_and_its_step_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the reference nor an expansion is asked, a decode step can be captured, and a row has the same bits alone
    and beside others, as a single token and in a chunk."""
    model = on_gpu(tmp_path, monkeypatch, "deepseek-v3", first_k_dense_replace=2)
    pages, kernel = model.allocate(6), model.cuda_kernel
    for view in (*pages.k, *pages.v):
        view.normal_(generator=torch.Generator().manual_seed(1))
    before = pages.buffer.clone()
    model.cuda_kernel = None
    expected = model.forward(pages, MIXED)
    model.cuda_kernel = kernel
    monkeypatch.setattr(paged, "attend_plan", lambda *_: pytest.fail("the reference was asked"))
    assert traced_forward.install(model) == "recorded"
    assert captured_steps.unfit(model, pages) is None
    pages.buffer.copy_(before)
    found = model.forward(pages, MIXED)
    assert ((found - expected).abs().amax(-1) / expected.std(-1)).max() < 1e-4
    pages.buffer.copy_(before)
    assert torch.equal(model.forward(pages, Batch([3], [20], [1], [21], [[4, 1]], [0])), found[:1])
    for count in (8, 1):  # the rest of the prompt of nine, as two chunks
        done = 0 if count == 8 else 8
        logits = model.forward(pages, Batch([*range(done, done + count)], [*range(done, done + count)], [count],
                                            [done + count], [[2]], [count - 1]))  # fmt: skip
    assert torch.equal(logits, found[1:2])


def test_a_model_without_attention_calls_says_so() -> None:
    """Nothing is tried for it, and nothing prevents its steps from being captured for attention's sake."""
    line = "reference, because the model has no attention"
    assert kernel_choice.choose((), torch.bfloat16, 16, CPU, 1024) == (None, line)
    without: Any = SimpleNamespace(lora=None, kernels=REFERENCE, cuda_kernel=None, facts=())
    assert captured_steps.unfit(without, without) is None


@pytest.mark.parametrize("capability", sorted(products.SHARED))
@pytest.mark.parametrize("tokens", [1, products.FEW])
def test_a_heads_product_in_a_small_step_fits_into_shared_memory(capability: int, tokens: int) -> None:
    """On Ada, too, which has less of it than Ampere and Hopper."""
    tiling = latent.tiling_of(tokens, 512, torch.bfloat16, capability)
    taken = (tiling.rows + tiling.columns) * tiling.depth * torch.bfloat16.itemsize * tiling.stages
    assert taken <= products.SHARED[capability]
