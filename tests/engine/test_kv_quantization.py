"""KV in int8 and fp8: every family computes what a decoder with the same rounding computes, with the same bits in
any batch, and a load refuses other rounding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import kernels
from engine.attention import paged, stored_kv
from engine.attention.forward_context import Batch, Step
from engine.kv import kv_quantization
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import (
    CallFacts,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    Reach,
    SlidingWindowSpec,
    first_visible,
)
from engine.loading import self_check
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner.model_runner import ModelRunner
from tandem.errors import CheckpointRefused
from tests.engine.test_exactness import differing
from tests.support import rounding

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
KINDS = ("int8", "fp8")
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
BLOCK_SIZE, NEW = 4, 16
LATENT = {"deepseek-v2", "deepseek-v3"}

built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


def load(folder: Path, kv: str, dtype: torch.dtype = torch.float32, **options: Any) -> ModelRunner:
    return load_model(str(folder), dtype=dtype, device=CPU, kv_dtype=kv, **options)  # type: ignore[arg-type]


# ---- rounding


def rows() -> torch.Tensor:
    """Rows of all magnitudes, including ties, and of one, two and no nonzero values."""
    torch.manual_seed(0)
    found = torch.randn(400, 24) * torch.logspace(-20, 20, 400).unsqueeze(1)
    found[:100] *= torch.randn(100, 24).exp() ** 2
    found[100:140] = torch.randint(-254, 255, (40, 24)) / 2  # halves: ties of int8, where the largest is 127
    found[100:140, 0] = 127.0
    found[140:180] = torch.randint(-448, 449, (40, 24)) / 16  # ties of fp8, where the largest is 448
    found[140:180, 0] = 448.0
    found[180:190] = 0.0
    found[185, 3] = -7.0
    found[190:200, 1:] = 0.0
    return found


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding(kv: str, dtype: torch.dtype) -> None:
    """The nearest element of the type, ties to even, under the least bfloat16 scale that lets the largest value fit."""
    x = rows().to(dtype)
    elements, scales = kv_quantization.quantise(x, DTYPES[kv])
    assert torch.equal(scales, rounding.scales(x, kv))
    assert torch.equal(kv_quantization.dequantise(elements, scales, torch.float32), rounding.rounded(x, kv))
    off = (x.float() - kv_quantization.dequantise(elements, scales, torch.float32)).abs()
    assert (off <= kv_quantization.step_of(elements, scales) * (1 + 1e-5)).all()


def odd_rows() -> torch.Tensor:
    odd = torch.randn(7, 24)
    odd[0, 5], odd[1, 0], odd[2, 23] = float("nan"), float("inf"), -float("inf")
    odd[3], odd[4], odd[5, 7] = 1e-38, 1e-40, 3.3e38
    odd[6, 0], odd[6, 1] = float("inf"), float("nan")
    return odd


@pytest.mark.parametrize("kv", KINDS)
def test_what_is_not_finite_stays_visible(kv: str) -> None:
    """A NaN or an infinity makes its whole head NaN; tiny values become zero; the largest number survives."""
    back = kv_quantization.dequantise(*kv_quantization.quantise(odd_rows(), DTYPES[kv]), torch.float32)
    assert back[[0, 1, 2, 6]].isnan().all()
    assert not back[3:5].any()
    assert back[5].isfinite().all()
    assert back[5, 7] == pytest.approx(3.3e38, rel=0.04)


def pages_of(kv: str, facts: list[CallFacts], size: int, blocks: int, dtype: torch.dtype) -> KvCache:
    return KvCache(layout_of(facts, size, dtype, "", DTYPES[kv]), blocks, CPU)


@built
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_writes_the_same_bytes(kv: str, dtype: torch.dtype) -> None:
    """Elements and scales of the compiled writer are those of plain PyTorch, in their slots and nowhere else."""
    fact = CallFacts(3, 3, 24, 7, FullAttentionSpec(), None, False, 1.0)
    x = torch.cat([rows(), odd_rows(), torch.randn(1, 24)]).to(dtype).view(-1, 3, 24)
    count = len(x)
    order = random.Random(0).sample(range(count + 20), count)
    batch = Batch([0] * count, list(range(count)), [count], [count], [list(range((count + 3) // 4))], [])
    left = []
    for compiled in (True, False):
        pages = pages_of(kv, [fact] * 2, 4, (count + 23) // 4, dtype)
        step = Step(batch, pages, (fact,) * 2, CPU, compiled=compiled)
        step.slot_block, step.slot_offset = torch.tensor(order) // 4, torch.tensor(order) % 4
        paged.write(pages.k[1], pages.k_scales[1], x, step)
        paged.write(pages.v[1], pages.v_scales[1], x[..., :7], step)
        left.append(pages)
    elements, scales = kv_quantization.quantise(x, DTYPES[kv])
    for pages in left:
        assert torch.equal(pages.k[1].view(torch.uint8).flatten(0, 1)[order], elements.view(torch.uint8))
        found = pages.k_scales[1]
        assert found is not None
        assert torch.equal(found.flatten(0, 1)[order].nan_to_num(-1.0), scales.nan_to_num(-1.0))
        found.nan_to_num_(-1.0)  # there are many NaNs
        assert not pages.k[0].view(torch.uint8).any()
    v_scales = [pages.v_scales[1] for pages in left]
    for each in v_scales:
        assert each is not None
        each.nan_to_num_(-1.0)
    assert torch.equal(left[0].buffer, left[1].buffer)


# ---- attention over quantised pages


class Case:
    """Pages full of NaN but for the tokens of some sequences, and queries for the last of these."""

    def __init__(self, kv: str, dtype: torch.dtype, shape: dict[str, int], lengths: list[int], queries: list[int]):
        size, kv_heads, k_dim, v_dim = (shape[name] for name in ("size", "kv_heads", "k_dim", "v_dim"))
        heads = kv_heads * shape["groups"]
        fact = CallFacts(kv_heads, heads, k_dim, v_dim, FullAttentionSpec(), None, False, 1.0)
        counts = [-(-length // size) for length in lengths]
        self.pages = pages_of(kv, [fact] * 2, size, sum(counts) + 2, dtype)
        self.pages.buffer.fill_(255)  # every scale is NaN
        ids = random.sample(range(sum(counts) + 2), sum(counts))
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.lengths, self.queries = lengths, queries
        self.query = [torch.randn(count, heads, k_dim).to(dtype) for count in queries]
        each = range(len(lengths))
        self.k = [self._fill(self.pages.k[1], self.pages.k_scales[1], index, kv_heads, k_dim) for index in each]
        self.v = [self._fill(self.pages.v[1], self.pages.v_scales[1], index, kv_heads, v_dim) for index in each]

    def _fill(self, pages: torch.Tensor, scales: Any, index: int, heads: int, dim: int) -> torch.Tensor:
        length, size = self.lengths[index], pages.shape[1]
        new = torch.randn(length, heads, dim) * torch.randn(length, heads, 1).exp()
        elements, own = kv_quantization.quantise(new, pages.dtype)
        for at in range(length):
            slot = self.tables[index][at // size], at % size
            pages.view(torch.uint8)[slot] = elements[at].view(torch.uint8)
            scales[slot] = own[at]
        return kv_quantization.dequantise(elements, own, torch.float64)

    def run(self, which: list[int], reach: Reach, softcap: float | None, sinks: torch.Tensor | None) -> Any:
        width = max(len(self.tables[index]) for index in which)
        tables = [self.tables[index] + [10**9] * (width - len(self.tables[index])) for index in which]
        counts = [self.queries[index] for index in which]
        columns = ([0, *accumulate(counts)], [self.lengths[i] for i in which], tables)
        query = torch.cat([self.query[index] for index in which])
        out = query.new_full((len(query), query.shape[1], self.pages.v[1].shape[3]), float("nan"))
        window = reach.window if isinstance(reach, SlidingWindowSpec) else 0
        chunk = reach.size if isinstance(reach, ChunkedLocalAttentionSpec) else 0
        tensors = (torch.tensor(list(each), dtype=torch.int32) for each in columns)
        torch.ops.tandem.attend(
            *(out, query, self.pages.k[1], self.pages.v[1], *tensors, window, chunk, 0.3, softcap, sinks),
            *(self.pages.k_scales[1], self.pages.v_scales[1]),
        )
        return list(out.split(counts))

    def exact(self, index: int, reach: Reach, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
        length, count = self.lengths[index], self.queries[index]
        groups = self.query[index].shape[1] // self.k[index].shape[1]
        k, v = (each[index].repeat_interleave(groups, dim=1) for each in (self.k, self.v))
        logits = torch.einsum("qhd,thd->qht", self.query[index].double(), k) * 0.3
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        key, position = torch.arange(length), torch.arange(length - count, length).view(-1, 1, 1)
        logits = logits.masked_fill((key > position) | (key < first_visible(reach, position)), float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.double().view(1, -1, 1).expand(count, -1, 1)], dim=2)
        return torch.einsum("qht,thd->qhd", logits.softmax(dim=2)[..., :length], v)


SHAPES = [
    {"size": 4, "kv_heads": 1, "groups": 1, "k_dim": 8, "v_dim": 8},
    {"size": 16, "kv_heads": 3, "groups": 3, "k_dim": 64, "v_dim": 64},
    {"size": 5, "kv_heads": 2, "groups": 7, "k_dim": 24, "v_dim": 20},
    {"size": 1, "kv_heads": 2, "groups": 16, "k_dim": 33, "v_dim": 1},
]
LENGTHS = [1, 2, 3, 4, 15, 16, 17, 33, 64, 70, 300]
QUERIES = [1, 2, 1, 3, 15, 1, 5, 33, 1, 41, 1]
ERROR = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}  # of the values, whose largest are about 10


@built
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reach", [FullAttentionSpec(), SlidingWindowSpec(19), ChunkedLocalAttentionSpec(12)], ids=str)
@pytest.mark.parametrize("more", [(None, False), (2.0, True)], ids=["plain", "softcap and sinks"])
def test_attend(kv: str, dtype: torch.dtype, shape: dict[str, int], reach: Reach, more: tuple[Any, bool]) -> None:
    """Any heads, dims, block size, start and length, against float64 over the elements times their scales; slots
    outside of a context are NaN here and never read. The same bits alone and in other batches."""
    torch.manual_seed(0)
    case = Case(kv, dtype, shape, LENGTHS, QUERIES)
    sinks = torch.randn(case.query[0].shape[1]) * 3 if more[1] else None
    got = case.run(list(range(len(LENGTHS))), reach, more[0], sinks)
    for index, ours in enumerate(got):
        exact = case.exact(index, reach, more[0], sinks)
        largest = case.v[index].abs().max()
        assert (ours.double() - exact).abs().max() <= ERROR[dtype] * largest
    for which in ([6], [10, 2], [9, 7, 0]):
        assert all(map(torch.equal, case.run(which, reach, more[0], sinks), [got[index] for index in which]))


@built
def test_attend_refuses_pages_without_their_scales() -> None:
    """Elements without scales, scales of another shape or order, elements of another type: an error, never a result."""
    case = Case("int8", torch.float32, SHAPES[1], [5], [1])
    k, v, query = case.pages.k[1], case.pages.v[1], case.query[0]
    scales = case.pages.k_scales[1]
    assert scales is not None
    tensors = [torch.tensor(values, dtype=torch.int32) for values in ([0, 1], [5], [case.tables[0]])]
    for ks, vs in ((None, None), (scales, None), (scales[:, :8], scales), (scales.contiguous(), scales)):
        with pytest.raises(RuntimeError, match="scales"):
            torch.ops.tandem.attend(torch.empty_like(query), query, k, v, *tensors, 0, 0, 0.3, None, None, ks, vs)


# ---- whole models


def drive(model: ModelRunner, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens and their logits: prompts in chunks of 7, packed with others, then one token at a time."""
    rng = random.Random(1)
    tokens, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    ids = rng.sample(range(120), 120)
    tables = [[ids.pop() for _ in range(-(-(len(prompt) + NEW) // BLOCK_SIZE))] for prompt in prompts]
    pages = model.allocate(120, BLOCK_SIZE)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    while active := [index for index, got in enumerate(rows) if len(got) < NEW]:
        ends = {index: min(len(tokens[index]), done[index] + 7) for index in active}
        batch = pack([(tokens[index][: ends[index]], done[index], tables[index]) for index in active])
        for index, row in zip(active, model.forward(pages, batch), strict=True):
            done[index] = ends[index]
            if done[index] == len(tokens[index]):
                rows[index].append(row)
                tokens[index].append(int(row.argmax()))
    return [each[len(prompt) :] for each, prompt in zip(tokens, prompts, strict=True)], [torch.stack(r) for r in rows]


def random_prompts(vocab: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(vocab) for _ in range(length)] for length in (5, 21, 1, 34)]


# In turn, since the self-check compares every pair at every load. What reads and writes quantised pages depends on the
# heads, window, softcap, sinks, chunk or latent of a call and on nothing else of its family.
PAIRS = [("fp8", "reference"), ("fp8", "auto"), ("int8", "reference"), ("int8", "auto")]
MECHANISMS = ("deepseek-v3", "gemma2", "gpt-oss", "gpt2", "llama", "llama4-text", "mistral", "qwen3-moe")


@pytest.mark.parametrize(
    ("family", "kv", "serving"), [(family, *PAIRS[place % 4]) for place, family in enumerate(MECHANISMS)]
)
def test_greedy_tokens_are_those_of_a_decoder_that_rounds(
    family: str, kv: str, serving: Any, checkpoint: Callable[[str], Path]
) -> None:
    """Windows, sinks, softcaps, chunks, experts and latents; compiled, where that is built, and in plain PyTorch.

    The logits are those of the decoder that rounds, except where the last bit of a sum changes the nearest element;
    they are not those of a decoder that does not round.
    """
    folder = checkpoint(f"tiny-{family}")
    model = load(folder, kv, kernels=serving)
    prompts = random_prompts(model.vocab_size)
    tokens, logits = drive(model, prompts)
    assert rounding.follow(folder, prompts, tokens, kv)
    assert not rounding.follow(folder, prompts, tokens[1:] + tokens[:1], kv)
    far, without = [], []
    for prompt, new, ours in zip(prompts, tokens, logits, strict=True):
        for kind, gaps in ((kv, far), ("auto", without)):
            theirs = rounding.logits(folder, prompt + new[:-1], kind)[len(prompt) - 1 :]
            gaps.append(((ours - theirs).abs().amax(dim=-1) / theirs.std(dim=-1)).median().item())
    print(f"{family} {kv}: {max(far):.1e} from the decoder that rounds, {max(without):.1e} from the other")
    assert max(far) < 0.1 * max(without)


@built
@pytest.mark.parametrize(
    ("name", "kv"),
    [*(("demo", kv) for kv in KINDS), *((name, KINDS[place % 2]) for place, name in enumerate(MECHANISMS))],
)
def test_logits_do_not_depend_on_the_step(name: str, kv: str, checkpoint: Callable[[str], Path]) -> None:
    """Alone or together, prefilled, decoded or cut anyhow, over any blocks: the same bits. fp8 in float32, int8 in
    bfloat16, a family of each kind of attention in turn, and the demo model in both."""
    folder = ROOT / "demo/model" if name == "demo" else checkpoint(f"tiny-{name}")
    both = [torch.float32, torch.bfloat16] if name == "demo" else [{"int8": torch.bfloat16, "fp8": torch.float32}[kv]]
    for dtype in both:
        assert differing(load(folder, kv, dtype)) == []


@built
def test_the_same_comparison_catches_scales_of_a_whole_step(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scale for all that a step writes, as in some systems, would make a token depend on its batch."""
    model = load(checkpoint("tiny-llama"), "int8")
    model.recorded = None
    real = paged.write

    def write(pages: torch.Tensor, scales: Any, new: torch.Tensor, step: Step, facts: CallFacts) -> None:
        shared = new.abs().amax().expand(*new.shape[:2], 1)
        real(pages, scales, torch.cat([new[..., :-1], shared], dim=-1), step, facts)

    monkeypatch.setattr(paged, "write", write)
    assert differing(model)


@built
@pytest.mark.parametrize("kv", KINDS)
def test_the_step_is_recorded(kv: str, checkpoint: Callable[[str], Path]) -> None:
    """Quantised pages, here with softcaps and windows, do not prevent it; only latent ones have a loop in Python."""
    assert load(checkpoint("tiny-gemma2"), kv, torch.bfloat16).recorded is not None


def test_handed_over_blocks_continue_exactly(checkpoint: Callable[[str], Path]) -> None:
    """Decode continues from nothing but the bytes of the blocks, under other ids, after the source is overwritten."""
    for kv in KINDS:
        model = load(checkpoint("tiny-qwen3"), kv)
        prompt = random_prompts(model.vocab_size)[3]
        count = -(-(len(prompt) + NEW) // BLOCK_SIZE)
        there, here = list(range(count))[::-1], random.Random(5).sample(range(count + 9), count)
        source, target = model.allocate(count, BLOCK_SIZE), model.allocate(count + 9, BLOCK_SIZE)
        tokens = [*prompt, int(model.forward(source, pack([(prompt, 0, there)])).argmax())]
        for ours, theirs in zip(here, there, strict=True):
            target.block_view(ours)[:] = source.block_view(theirs)
        source.buffer.fill_(255)
        while len(tokens) < len(prompt) + NEW:
            tokens.append(int(model.forward(target, pack([(tokens, len(tokens) - 1, here)])).argmax()))
        assert tokens[len(prompt) :] == drive(model, [prompt])[0][0]


@pytest.mark.parametrize("kv", KINDS)
def test_slots_of_wrong_drafts_are_written_again(kv: str, checkpoint: Callable[[str], Path]) -> None:
    """Elements and scales of rejected tokens are overwritten."""
    model = load(checkpoint("tiny-qwen3-sliding"), kv)
    prompt, table = random_prompts(model.vocab_size)[1], list(range(9))[::-1]
    found = []
    for drafts in ([], [3, 1, 4, 1, 5]):
        pages = model.allocate(9, BLOCK_SIZE)
        model.forward(pages, pack([(prompt + drafts, 0, table)]))
        found.append([model.forward(pages, pack([([*prompt, 7, 9, 8], at, table)])) for at in (len(prompt),)])
    assert all(map(torch.equal, *found))


# ---- the self-check still detects errors


def truncated(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    _, scales = kv_quantization.quantise(x, dtype)
    cut = (x.float() / scales.float().unsqueeze(-1).clamp(min=1e-30)).trunc()
    return cut.to(dtype), scales


def coarser(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    elements, scales = kv_quantization.quantise(x, dtype)
    return elements, (scales.float() * 1.01).bfloat16()


def neighbours_scale(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    elements, scales = kv_quantization.quantise(x, dtype)
    return elements, scales.roll(1, dims=-1)


def ks_scales(pages: KvCache) -> list[torch.Tensor | None]:
    return pages.k_scales if pages.block_size == BLOCK_SIZE else [None] * len(pages.k)


WRONG: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "elements cut off": lambda patch: patch.setattr(paged, "quantise", truncated),
    "scales one per cent too large": lambda patch: patch.setattr(paged, "quantise", coarser),
    "a neighbour's scale": lambda patch: patch.setattr(paged, "quantise", neighbours_scale),
    "read without scales": lambda patch: patch.setattr(paged, "dequantise", lambda e, s, d: e.to(d) * 0.02),
    "read with K's scales for V": lambda patch: patch.setattr(
        KvCache, "v_scales", property(ks_scales, lambda self, scales: None), raising=False
    ),
}


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def plain(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load(checkpoint(f"tiny-{request.param}"), "int8", kernels="reference")


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rounding_is_refused_at_load(wrong: str, plain: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same threshold as any other wrong path: rounding itself does not use it up."""
    model = plain
    report = self_check.check(model)
    assert report.gap < 1e-4 > report.kept_gap
    assert report.threshold == 1e-3
    WRONG[wrong](monkeypatch)
    with pytest.raises(CheckpointRefused, match="self-check"):
        self_check.check(model)


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-gpt-oss"])
def test_16_bit_models_pass_without_a_float32_copy(
    shape: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model too large for a float32 copy: right passes, a forgotten past and a neighbour's scale do not."""
    monkeypatch.setattr("engine.loading.self_check.COPY_LIMIT", 0)
    model = load(checkpoint(shape), "int8", torch.bfloat16, kernels="reference")
    assert self_check.check(model).dtype == "bfloat16"

    class Forgetful(Step):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.facts = tuple(replace(fact, reach=SlidingWindowSpec(1)) for fact in self.facts)

    with monkeypatch.context() as patch:
        patch.setattr("engine.runner.model_runner.Step", Forgetful)
        with pytest.raises(CheckpointRefused, match="self-check"):
            self_check.check(model)
    WRONG["a neighbour's scale"](monkeypatch)
    with pytest.raises(CheckpointRefused, match="self-check"):
        self_check.check(model)


def test_what_cannot_be_checked_is_refused(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model file without its own eager attention function gives no oracle and is refused for that reason."""
    monkeypatch.setattr(stored_kv, "EAGER", "attention_by_another_name")
    with pytest.raises(CheckpointRefused, match="kv_dtype auto"):
        load(checkpoint("tiny-qwen2"), "int8")


def test_nothing_is_left_of_the_check(checkpoint: Callable[[str], Path]) -> None:
    """Afterwards the module's own expansion of latents is restored."""
    model = load(checkpoint("tiny-deepseek-v3"), "fp8")
    assert not stored_kv._running
    for module in model.module.modules():
        if "expand_kv" in module.__dict__:
            assert module.__dict__["expand_kv"].__name__ == "expand_kv"


# ---- layout


def test_half_the_bytes_with_scales_counted() -> None:
    """64 elements and a scale of two bytes: 0.516 of bfloat16."""
    facts = [CallFacts(3, 9, 64, 64, FullAttentionSpec(), None, False, 1.0)] * 30
    for kv in KINDS:
        ratio = layout_of(facts, 16, torch.bfloat16, "", DTYPES[kv]).block_bytes / (30 * 16 * 3 * 128 * 2)
        assert ratio == pytest.approx((64 + 2) / 128)


def test_layouts_of_other_kv_dtypes_differ() -> None:
    """int8, fp8 and unquantised blocks, and int8 of another model dtype, have different hashes and say why."""
    facts = [CallFacts(2, 4, 16, 16, FullAttentionSpec(), None, False, 1.0)]
    layouts = [
        layout_of(facts, 4, torch.bfloat16, "m"),
        layout_of(facts, 4, torch.bfloat16, "m", torch.int8),
        layout_of(facts, 4, torch.bfloat16, "m", torch.float8_e4m3fn),
        layout_of(facts, 4, torch.float32, "m", torch.int8),
    ]
    assert len({layout.hash() for layout in layouts}) == 4
    assert layouts[1].block_bytes == layouts[2].block_bytes == layouts[3].block_bytes
    assert layouts[1].differences(layouts[2]) == ["dtype differs: int8 here, float8_e4m3fn there"]
    assert layouts[1].differences(layouts[3]) == ["model_dtype differs: bfloat16 here, float32 there"]


def test_regions_do_not_overlap() -> None:
    """Every byte of elements and scales has one place, and a block's are all inside it."""
    facts = [
        CallFacts(3, 3, 5, 9, FullAttentionSpec(), None, False, 1.0),
        CallFacts(1, 1, 24, 7, FullAttentionSpec(), None, False, 1.0),
    ]
    pages = pages_of("int8", facts, 5, 4, torch.float32)
    for call in range(2):
        for values, scales in ((pages.k, pages.k_scales), (pages.v, pages.v_scales)):
            found = scales[call]
            assert found is not None
            values[call][2] += 1
            found.view(torch.int16)[2] += 0x0101
    written = sum(5 * fact.kv_heads * (fact.k_dim + fact.v_dim + 4) for fact in facts)
    assert bytes(pages.block_view(2)).count(1) == written
    assert all(not any(pages.block_view(block)) for block in (0, 1, 3))
