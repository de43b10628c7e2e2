"""Every family is served from pages exactly as transformers generates it, and broken pages are noticed.

The driver below is a small engine: four prompts over scrambled block ids, 13 tokens a step, so that prompts are
cut into chunks and mixed with decoding. The reference is `generate` of a second copy of the model, with the library's
own cache and eager attention.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention import mla, paged
from engine.attention.forward_context import Step
from engine.kernels import REFERENCE
from engine.kv.kv_cache_spec import FullAttentionSpec, Reach, SlidingWindowSpec, smallest_reach
from engine.loading import attention_probe, self_check
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import TINY, WINDOW
from loadtest.microbench import families
from tandem.errors import CheckpointRefused

BLOCK_SIZE, BUDGET, NEW = 4, 13, 16
PROMPT_LENGTHS = (5, 21, 1, 34)
FAMILIES = sorted(TINY)
LATENT = {"deepseek-v2", "deepseek-v3"}  # their context is expanded sequence by sequence, in Python
REPETITIVE = {"opt", "gpt2"}  # random weights of these families hardly react to their input
CPU = torch.device("cpu")


@dataclass
class Family:
    name: str
    model: ModelRunner
    prompts: list[list[int]]
    tokens: list[list[int]]  # what generate appends to each prompt
    logits: list[torch.Tensor]  # [NEW, vocab] for each prompt


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Family:
    folder = checkpoint(f"tiny-{request.param}")
    model = load_model(str(folder), dtype=torch.float32, device=CPU)
    rng = random.Random(7)
    prompts = [[rng.randrange(model.vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens, logits = zip(*(generate(reference, prompt) for prompt in prompts), strict=True)
    return Family(request.param, model, prompts, list(tokens), list(logits))


@torch.inference_mode()
def generate(reference: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their logits `[NEW, vocab]` by transformers itself, with its own cache."""
    ids, cache, tokens, logits = torch.tensor([prompt]), None, list[int](), []
    for _ in range(NEW):  # as `generate` does, which takes five times as long
        out = reference(ids, past_key_values=cache, use_cache=True)
        cache, row = out.past_key_values, out.logits[:, -1]
        logits.append(row)
        tokens.append(int(row.argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens, torch.cat(logits)


def drive(model: ModelRunner, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy tokens and their logits through pages: decoding sequences first, then prompts, up to the budget."""
    tokens = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    tables: list[list[int]] = [[] for _ in prompts]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    free = list(range(80))
    random.Random(3).shuffle(free)
    pages = model.allocate(len(free), BLOCK_SIZE)
    while active := [index for index, got in enumerate(rows) if len(got) < NEW]:
        budget, stretch = BUDGET, {}
        for index in sorted(active, key=lambda index: len(tokens[index]) - done[index]):
            if taken := min(len(tokens[index]) - done[index], budget):
                stretch[index] = taken
                budget -= taken
        order = random.Random(len(tokens[0]) + budget).sample(sorted(stretch), len(stretch))
        for index in order:
            while len(tables[index]) * BLOCK_SIZE < done[index] + stretch[index]:
                tables[index].append(free.pop())
        batch = pack([(tokens[index][: done[index] + stretch[index]], done[index], tables[index]) for index in order])
        for index, logits in zip(order, model.forward(pages, batch), strict=True):
            done[index] += stretch[index]
            if done[index] == len(tokens[index]):
                rows[index].append(logits)
                tokens[index].append(int(logits.argmax()))
    return [each[len(prompt) :] for each, prompt in zip(tokens, prompts, strict=True)], [torch.stack(r) for r in rows]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_paged_greedy_equals_generate(family: Family, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked, packed and over scrambled blocks, every family gives the tokens and the logits of `generate`.

    With the compiled operators, where they are built, and without them.
    """
    if kernels == "reference":
        if family.model.kernels == REFERENCE:
            pytest.skip("the compiled operators are not built, the reference has run already")
        monkeypatch.setattr(family.model, "kernels", REFERENCE)
    family.model.use_paged_attention()
    tokens, logits = drive(family.model, family.prompts)
    monkeypatch.undo()
    family.model.use_paged_attention()
    assert tokens == family.tokens
    gaps = [
        ((ours - theirs).abs().amax(dim=-1) / theirs.std(dim=-1)).max().item()
        for ours, theirs in zip(logits, family.logits, strict=True)
    ]
    print(f"{family.name}: gap {max(gaps):.1e}")
    assert max(gaps) < 3e-4


def test_handed_over_blocks_continue_exactly(family: Family) -> None:
    """Decode continues from nothing but the bytes of the blocks, under other ids, after the source is overwritten."""
    prompt, expected = family.prompts[3], family.tokens[3]
    count = -(-(len(prompt) + NEW) // BLOCK_SIZE)
    there, here = list(range(count))[::-1], random.Random(5).sample(range(count + 9), count)
    source, target = family.model.allocate(count, BLOCK_SIZE), family.model.allocate(count + 9, BLOCK_SIZE)
    tokens = [*prompt, int(family.model.forward(source, pack([(prompt, 0, there)])).argmax())]
    for ours, theirs in zip(here, there, strict=True):
        target.block_view(ours)[:] = source.block_view(theirs)
    source.buffer.fill_(255)  # NaN in every float format
    while len(tokens) < len(prompt) + NEW:
        tokens.append(int(family.model.forward(target, pack([(tokens, len(tokens) - 1, here)])).argmax()))
    assert tokens[len(prompt) :] == expected


def test_references_vary(family: Family) -> None:
    """The references have many distinct tokens and differ between prompts, so that equality means something."""
    assert len({tuple(tokens) for tokens in family.tokens}) == len(PROMPT_LENGTHS)
    distinct = [len(set(tokens)) for tokens in family.tokens]
    assert max(distinct) >= (4 if family.name in REPETITIVE else 10), distinct


def read_through(step: Step, change: Callable[[list[int]], list[int]]) -> None:
    """Makes attention read through changed block tables; writes go to the right slots."""
    size = step.pages.block_size
    tables = [
        change(table[: -(-context // size)])
        for table, context in zip(step.batch.block_tables, step.batch.context_lens, strict=True)
    ]
    step.batch = dataclasses.replace(step.batch, block_tables=tables)
    width = max(map(len, tables))
    step.block_table = step.int_tensor([table + [0] * (width - len(table)) for table in tables])


def see(step: Step, reach: Reach) -> None:
    step.facts = tuple(dataclasses.replace(fact, reach=reach) for fact in step.facts)


CONTROLS: dict[str, Callable[[Step], None]] = {
    "wrong block order": lambda step: read_through(step, lambda table: table[::-1]),
    "a skipped block": lambda step: read_through(step, lambda table: table[1:] + table[-1:]),
    "a forgotten past": lambda step: see(step, SlidingWindowSpec(1)),
    "an ignored window": lambda step: see(step, FullAttentionSpec()),
}


def broken(control: str) -> type[Step]:
    class Broken(Step):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            CONTROLS[control](self)

    return Broken


@pytest.mark.parametrize("control", CONTROLS)
def test_broken_paths_are_noticed(family: Family, control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of breaking the paged path changes the tokens, and the self-check refuses the model for it."""
    if control == "an ignored window" and smallest_reach(family.model.facts) is None:
        pytest.skip("the family has no window")
    monkeypatch.setattr("engine.runner.model_runner.Step", broken(control))
    tokens, _ = drive(family.model, family.prompts)
    assert tokens != family.tokens
    with pytest.raises(CheckpointRefused, match=r"self-check .* failed"):
        self_check.check(family.model)


def test_windows_are_learnt(family: Family) -> None:
    """The probe finds the window of every family that has one, and none in the others."""
    values = TINY[family.name]
    expected = WINDOW if WINDOW in (values.get("sliding_window"), values.get("attention_chunk_size")) else None
    assert smallest_reach(family.model.facts) == expected
    if "layer_types" in values:
        kinds = ["full" if isinstance(fact.reach, FullAttentionSpec) else "local" for fact in family.model.facts]
        assert kinds == ["local", "full"] * (len(kinds) // 2)


def test_all_but_latent_pages_are_recorded(family: Family) -> None:
    """Where the compiled operators are built."""
    by_modules = family.model.kernels == REFERENCE or family.name in LATENT
    assert (family.model.recorded is None) == by_modules


def test_logits_may_be_empty(family: Family) -> None:
    """A chunk in the middle of a prompt needs no logits: it gets an empty tensor of the right width, and the head,
    which reads its whole weight even for one row, runs on none. The KV is the same as with logits."""
    model, batch = family.model, pack([([1, 2, 3], 0, [2])])
    with_logits, without = model.allocate(4, BLOCK_SIZE), model.allocate(4, BLOCK_SIZE)
    model.forward(with_logits, batch)
    batch.logits_at = []
    assert model.forward(without, batch).shape == (0, model.vocab_size)
    assert torch.equal(with_logits.buffer, without.buffer)
    rows: list[int] = []
    head: Any = model.module.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[-2]))
    step = model.step(without, batch)
    with torch.inference_mode(), model.exact():
        model.by_modules(step, step.tensor(batch.logits_at))
    hook.remove()
    assert rows == [0]


def test_latent_pages_know_our_names() -> None:
    """The pass-through of the latent is enabled under exactly the names that Tandem registers."""
    assert {paged.NAME, attention_probe.PROBE, attention_probe.ISOLATION} == mla.OURS


@pytest.mark.parametrize("shape", ["tiny-deepseek-v2", "tiny-deepseek-v3"])
def test_latent_pages(shape: str, checkpoint: Callable[[str], Path]) -> None:
    """MLA families keep the latent and the rotated key in pages, not the expanded heads."""
    model = load_model(str(checkpoint(shape)), dtype=torch.float32, device=CPU)
    for fact in model.facts:
        assert (fact.latent, fact.kv_heads, fact.k_dim, fact.v_dim) == (True, 1, 24, 8)


def test_garbage_in_free_slots_is_harmless(checkpoint: Callable[[str], Path]) -> None:
    """NaN in slots outside of a sequence's context, as a recycled block may hold, never reaches its logits."""
    model = load_model(str(checkpoint("tiny-qwen3-sliding")), dtype=torch.float32, device=CPU)
    sequences = [(list(range(1, 22)), 20, [5, 3, 8, 1, 9, 7]), ([4, 5], 1, [2])]
    results = []
    for garbage in (0.0, float("nan")):
        pages = model.allocate(12, BLOCK_SIZE)
        for call in range(len(model.facts)):
            pages.k[call].fill_(garbage)
            pages.v[call].fill_(garbage)
        model.forward(pages, pack([(tokens[:done], 0, table) for tokens, done, table in sequences]))
        results.append(model.forward(pages, pack(sequences)))
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-mixtral", "tiny-gpt-oss", "tiny-deepseek-v3"])
def test_16_bit_models_pass_without_a_float32_copy(
    shape: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model too large for a float32 copy is compared with its own rounding noise: right passes, wrong does not."""
    monkeypatch.setattr("engine.loading.self_check.COPY_LIMIT", 0)
    model = load_model(str(checkpoint(shape)), dtype=torch.bfloat16, device=CPU)
    assert self_check.check(model).dtype == "bfloat16"
    monkeypatch.setattr("engine.runner.model_runner.Step", broken("a forgotten past"))
    with pytest.raises(CheckpointRefused, match="self-check"):
        self_check.check(model)


def test_float32_copy_leaves_weights_untouched(checkpoint: Callable[[str], Path]) -> None:
    """The self-check on a float32 copy restores a bfloat16 model's weights and buffers, bit for bit."""
    model = load_model(str(checkpoint("tiny-llama")), dtype=torch.bfloat16, device=CPU)
    before = {
        name: tensor.clone() for name, tensor in [*model.module.named_parameters(), *model.module.named_buffers()]
    }
    report = self_check.check(model)
    assert report.dtype == "float32"
    assert model.dtype == torch.bfloat16
    for name, tensor in [*model.module.named_parameters(), *model.module.named_buffers()]:
        assert tensor.dtype == before[name].dtype, name
        assert torch.equal(tensor, before[name]), name


def test_a_forward_may_exchange_its_buffers(tmp_path: Path) -> None:
    """CTRL, whose forward puts another tensor into a buffer, is served in 16 bits and keeps its own buffer."""
    torch.manual_seed(0)
    values: dict[str, Any] = {"n_positions": 64, "n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 2, "vocab_size": 64}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("ctrl", **values)).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.bfloat16, device=CPU)
    assert {each.dtype for each in model.module.buffers()} == {torch.bfloat16}


def test_a_model_whose_last_layers_share_kv_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 slices the mask of such a layer for the last 0 logits, which is the whole mask. The tokens are those of
    transformers."""
    shared = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    monkeypatch.setitem(families.MORE, "gemma4_text", shared)
    found = families.examine("gemma4_text")
    assert found.result == "served", found
