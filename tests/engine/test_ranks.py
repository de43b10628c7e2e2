"""A worker of several ranks computes what one rank computes, refuses what it cannot, and ends when a rank does."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine import kernels
from engine.attention.forward_context import Batch
from engine.builder import build_engine
from engine.engine import Engine
from engine.kernels import modules, weight_quantization
from engine.kv.kv_cache import KvCache
from engine.loading import checkpoint, cut_check, module_loader, part_loader, self_check
from engine.loading.self_check import pack
from engine.parallel import leader, rank_memory, rank_messages, weight_cut
from engine.parallel.rank_group import RankGroup, group_memory
from engine.parallel.tp_plan import check_plan, check_settings
from engine.parallel.weight_cut import Part
from engine.runner import captured_steps
from loadtest.harness.random_checkpoints import SHAPES, TINY, make_checkpoint
from loadtest.microbench import families
from planner.capacity import read_shape
from planner.ranks import fits, of_one_rank, of_ranks
from tandem.errors import CheckpointRefused, SettingsError, TandemError, Unavailable
from tandem.settings import Settings
from tests.engine.conftest import TWO, two_layers
from tests.support import oracle
from tests.support.rank_copies import rank_copies
from tests.support.stopwatch import Stopwatch

pytestmark = pytest.mark.skipif(
    kernels.serving(kernels.CPU) == kernels.REFERENCE, reason="ranks need the compiled operators"
)
NEW, BLOCK = 10, 4
LOST_S = 2.0
PROMPTS = [[(7 * at + 11 * number) % 384 for at in range(length)] for number, length in enumerate((5, 21, 1, 34))]
# Name -> shape, changes, ranks: KV heads that are fewer than ranks, an odd number of ranks and a vocabulary that they
# cannot share, tied embeddings, gathered projections, experts, latents.
CUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("tiny-llama", {}, 2),
    "four ranks, two KV heads": ("tiny-llama", {}, 4),
    "three ranks": (
        "tiny-llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 385},
        3,
    ),
    "biases": ("tiny-llama", {"attention_bias": True, "mlp_bias": True}, 2),
    "tied": ("tiny-qwen3", {"tie_word_embeddings": True}, 2),
    "padding beyond a part": ("tiny-qwen2", {"pad_token_id": 300}, 2),
    "gemma2": ("tiny-gemma2", {}, 2),
    "qwen3-moe": ("tiny-qwen3-moe", {}, 2),
    "phi3": ("tiny-phi3", {}, 2),
    "llama4": ("tiny-llama4-text", {}, 2),
    "deepseek-v3": ("tiny-deepseek-v3", {}, 2),
}
# The other tiny families that have a plan, and other numbers of ranks.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen2-sliding": ("tiny-qwen2-sliding", {}, 2),
    "qwen3-sliding": ("tiny-qwen3-sliding", {}, 4),
    "mistral": ("tiny-mistral", {}, 2),
    "gemma3": ("tiny-gemma3-text", {}, 2),
    "mixtral": ("tiny-mixtral", {}, 2),
    "qwen2-moe": ("tiny-qwen2-moe", {}, 4),
    "qwen2-moe-sliding": ("tiny-qwen2-moe-sliding", {}, 2),
    "olmo2": ("tiny-olmo2", {}, 2),
    "four ranks and parts of heads side by side": ("tiny-olmo2", {}, 4),
    "deepseek-v2": ("tiny-deepseek-v2", {}, 2),
    "three ranks and experts": ("tiny-qwen3-moe", {"num_attention_heads": 6, "num_key_value_heads": 3}, 3),
}
UNCUT = {"tiny-gpt-oss", "tiny-gpt2", "tiny-opt"}  # transformers has no plan for them


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny-llama", dtype="float32", num_hidden_layers=TWO)


@contextmanager
def engine_of(
    folder: Path, ranks: int, say: Any = lambda line: None, copies: Any = rank_copies, **settings: Any
) -> Iterator[tuple[Engine, list[Any]]]:
    """An engine, and the processes of its other ranks."""
    given: dict[str, Any] = {"kv_blocks": 64, "block_size": BLOCK, "threads": 1, "weight_cache": "off"}
    given |= {"max_num_seqs": len(PROMPTS), **settings}  # each number of sequences costs a capture on each rank
    with copies() as processes:
        engine = build_engine(Settings(model=str(folder), device="cpu", **given), say, ranks=ranks)
        try:
            yield engine, processes
        finally:
            engine.model.close()


def table(number: int) -> list[int]:
    return list(range(15 * number, 15 * number + 15))


def greedy(engine: Engine) -> list[list[int]]:
    """What follows each prompt: all in one step at first, then token by token."""
    tokens = [list(prompt) for prompt in PROMPTS]
    done = [0] * len(PROMPTS)
    for _ in range(NEW):
        step = [(own, at, table(number)) for number, (own, at) in enumerate(zip(tokens, done, strict=True))]
        for number, row in enumerate(engine.model.forward(engine.pages, pack(step))):
            done[number] = len(tokens[number])
            tokens[number].append(int(row.argmax()))
    return [own[len(prompt) :] for own, prompt in zip(tokens, PROMPTS, strict=True)]


def follow(folder: Path, answers: list[list[int]]) -> bool:
    """Whether they are what transformers gives for the prompts."""
    return all(oracle.follows(folder, prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True))


def random_biases(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    biases = {name: torch.randn_like(each) for name, each in tensors.items() if name.endswith("bias")}
    assert biases
    save_file(tensors | biases, file, {"format": "pt"})


# ---- what they compute


@pytest.mark.parametrize("cut", [*CUTS, *FAMILIES])
def test_several_ranks_give_the_tokens_of_transformers(cut: str, tmp_path: Path) -> None:
    """In float32, whatever is cut and whatever stays whole; by the recorded forward where one rank has it. The planner
    knows the bytes of its weights. One of them captures all steps that a CPU captures, and finds them right."""
    shape, changes, ranks = (CUTS | FAMILIES)[cut]
    make_checkpoint(tmp_path, shape, dtype="float32", **two_layers(shape), **changes)
    if cut == "biases":
        random_biases(tmp_path)
    planned = of_ranks(read_shape(tmp_path), tmp_path, ranks)
    rows = captured_steps.LARGEST["cpu"] if cut == "llama" else 4
    with engine_of(tmp_path, ranks, max_num_seqs=rows) as (engine, _):
        answers = greedy(engine)
        assert len({tuple(tokens) for tokens in answers}) == len(PROMPTS)
        assert follow(tmp_path, answers)
        assert planned.weight_bytes("float32") == pytest.approx(engine.model.weight_bytes, rel=1e-3)
        kept = sum(view[0].nbytes for view in (*engine.pages.k, *engine.pages.v))
        assert of_one_rank(planned).block_bytes(BLOCK, "float32") == kept
        assert engine.model.recorded is not None or engine.model.latent
        assert engine.model.sum_order.endswith(f"x{ranks}")
        assert (engine.decode is None) == engine.model.latent  # as with one rank
        assert engine.decode is None or engine.decode.sizes[-1] == rows


def test_every_tiny_family_is_cut_or_refused() -> None:
    """None is forgotten here, and one for which a later transformers has a plan is noticed."""
    refused = set()
    for family, values in TINY.items():
        try:
            check_plan(AutoConfig.for_model(values["model_type"]), 2)
        except CheckpointRefused:
            refused.add(f"tiny-{family}")
    assert refused == UNCUT
    assert {shape for shape, _, _ in (CUTS | FAMILIES).values()} == {f"tiny-{family}" for family in TINY} - UNCUT


def test_each_layer_is_planned_with_its_own_kv_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layers differ, four ranks share the four heads of one layer and have copies of the two heads of another."""
    few = {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    monkeypatch.setitem(families.MORE, "gemma4_text", families.MORE.get("gemma4_text", {}) | few)
    families.make("gemma4_text", tmp_path)
    assert {heads for heads, _, _ in read_shape(tmp_path).calls} == {4, 2}
    planned = of_ranks(read_shape(tmp_path), tmp_path, 4)
    with engine_of(tmp_path, 4) as (engine, _):
        assert planned.weight_bytes("float32") == pytest.approx(engine.model.weight_bytes, rel=1e-3)
        kept = sum(view[0].nbytes for view in (*engine.pages.k, *engine.pages.v))
        assert of_one_rank(planned).block_bytes(BLOCK, "float32") == kept


def test_experts_that_files_and_model_name_unlike_are_planned(tmp_path: Path) -> None:
    """By the parameters that the engine makes of them."""
    families.make("granitemoe", tmp_path)
    planned = of_ranks(read_shape(tmp_path), tmp_path, 2)
    with engine_of(tmp_path, 2) as (engine, _):
        assert planned.weight_bytes("float32") == pytest.approx(engine.model.weight_bytes, rel=1e-3)


def other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes rank 1's columns of one product."""
    part_of = weight_cut._part

    def wrong(shape: torch.Size, dim: int, group: RankGroup, name: str, weights: int = 1) -> Part:
        part = part_of(shape, dim, group, name, weights)
        if name != "model.layers.1.self_attn.o_proj":
            return part
        return Part(dim, ((shape[dim] // 2, shape[dim] // 2),))

    monkeypatch.setattr(weight_cut, "_part", wrong)


def other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads the experts' up where gate belongs, and the reverse."""
    part = part_loader._Made.part

    def wrong(self: Any, own: Part) -> torch.Tensor:
        return torch.cat(part(self, own).chunk(2, 1)[::-1], 1) if len(self.stacks) == 2 else part(self, own)

    monkeypatch.setattr(part_loader._Made, "part", wrong)


def other_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 0, something else than the compiled operator reads a weight of which only the panels are left."""
    in_place = weight_quantization.pack_in_place

    def wrong(model: Any) -> int:
        dropped = in_place(model)
        del model.model.layers[1].self_attn.o_proj.__dict__[modules.REPLACEMENT]
        return dropped

    monkeypatch.setattr(weight_quantization, "pack_in_place", wrong)


@pytest.mark.parametrize(
    ("shape", "fault"), [("tiny-llama", other_columns), ("tiny-qwen3-moe", other_order), ("tiny-llama", other_reader)]
)
@pytest.mark.parametrize("checked", [True, False])
def test_a_wrong_part_is_refused_at_load(
    shape: str, fault: Any, checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights than the plan says, others than transformers would make of the files, or none. In the control,
    without the comparison with the whole model, they are served and give other tokens: self-checks see the path and
    not the cut, and run before the weights are packed."""
    make_checkpoint(tmp_path, shape, dtype="float32", **two_layers(shape))
    fault(monkeypatch)
    if checked:
        with pytest.raises(CheckpointRefused, match="differs from the whole model"), engine_of(tmp_path, 2):
            pass
        return
    monkeypatch.setattr(cut_check, "_gap", lambda *_: 0.0)
    with engine_of(tmp_path, 2) as (engine, _):
        assert not follow(tmp_path, greedy(engine))


@pytest.mark.parametrize("ranks", [2, 4])
def test_quantised_kv_has_the_elements_and_scales_of_one_rank(tiny: Path, ranks: int) -> None:
    """At their places in the block, up to the rounding of what was quantised; heads that two ranks have, too."""
    step = pack([(PROMPTS[3], 0, table(2))])
    with engine_of(tiny, 1, kv_dtype="int8") as (one, _):
        one.model.forward(one.pages, step)
        layout, whole = one.pages.layout, one.pages.all_heads()
        expected = [stored_kv_of(whole, call) for call in range(len(layout.calls))]
        assert min(each.abs().max() for each in expected) > 0.1
    with engine_of(tiny, ranks, kv_dtype="int8") as (engine, _):
        assert engine.decode is not None
        engine.model.forward(engine.pages, step)
        assert engine.pages.layout == layout
        whole = engine.pages.all_heads()
        for call, kv in enumerate(expected):
            assert torch.allclose(stored_kv_of(whole, call), kv, atol=0.02 * kv.abs().max().item())


def stored_kv_of(pages: KvCache, call: int) -> torch.Tensor:
    """K and V of the prompt in `table(2)`, as floats."""
    parts = ((pages.k, pages.k_scales), (pages.v, pages.v_scales))
    each = [view[call][table(2)].float() * scales[call][table(2)].float().unsqueeze(-1) for view, scales in parts]  # type: ignore[index]
    return torch.stack(each)


def test_the_cut_is_checked_in_bfloat16(tmp_path: Path) -> None:
    """Against what rounding does to the model."""
    make_checkpoint(tmp_path, "tiny-qwen3-moe", dtype="bfloat16", num_hidden_layers=TWO)
    with engine_of(tmp_path, 2, dtype="bfloat16") as (engine, _):
        assert engine.model.dtype == torch.bfloat16
        assert greedy(engine)


class Scales(nn.Module):
    """Calls its forward as a function, as gemma3n does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 1.1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.type_as(self.scale) * self.scale

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def test_a_rank_is_checked_in_float32_also_where_no_hook_runs() -> None:
    """A weight of 16 bits among those in float32 rounds what it meets, and the two paths may round it unlike."""
    module = Scales()
    model: Any = SimpleNamespace(module=module, dtype=torch.bfloat16)
    x, before = torch.rand(3), module.scale
    with self_check._float32_in_turn(model):
        assert torch.equal(module.scaled(x), x * before.float())
        assert torch.equal(module(x), module.scaled(x))
    assert module.scale is before
    assert module.scaled(x).dtype == model.dtype == torch.bfloat16


def test_a_tokens_bits_and_a_block_do_not_depend_on_company_nor_on_ranks(tiny: Path) -> None:
    """Logits of a prompt alone, in chunks and with others are equal to the bit; KV is that of one rank up to rounding,
    at the same places of the same layout."""
    prompt = PROMPTS[3]
    others = [(PROMPTS[number], 0, table(number)) for number in (0, 1)]
    with engine_of(tiny, 1) as (one, _):
        one.model.forward(one.pages, pack([(prompt, 0, table(2))]))
        layout, kv = one.pages.layout, one.pages.buffer[table(2)].view(torch.float32).clone()
    with engine_of(tiny, 2) as (engine, _):
        alone = engine.model.forward(engine.pages, pack([(prompt, 0, table(2))]))
        ours = engine.pages.buffer[table(2)].view(torch.float32).clone()
        engine.model.forward(engine.pages, pack([(prompt[:13], 0, table(2)), *others]))
        chunked = engine.model.forward(engine.pages, pack([*others, (prompt, 13, table(2))]))
        assert torch.equal(alone[0], chunked[2])
        assert torch.equal(ours, engine.pages.buffer[table(2)].view(torch.float32))
    assert engine.pages.layout == layout
    assert torch.allclose(ours, kv, atol=1e-4)
    assert kv.abs().max() > 0.1


def test_captured_steps_have_the_bits_of_others(tiny: Path) -> None:
    """Logits and KV of single tokens, in every bucket, full and not, as the same ranks compute them uncaptured."""
    with engine_of(tiny, 2, max_num_seqs=4) as (engine, _):
        assert engine.decode is not None
        assert engine.decode.sizes == (1, 2, 4)
        engine.model.forward(engine.pages, pack([(each, 0, table(at)) for at, each in enumerate(PROMPTS)]))
        for count in (1, 2, 3, 4):
            step = pack([([*PROMPTS[at], 7], len(PROMPTS[at]), table(at)) for at in range(count)])
            expected = engine.model.forward(engine.pages, step)
            kept = engine.pages.buffer[:-1].clone()
            got = engine.decode.logits(step)
            assert got is not None
            assert torch.equal(got, expected)
            assert torch.equal(engine.pages.buffer[:-1], kept)
            assert kept[table(0)].any()


def test_a_capture_that_differs_on_one_rank_serves_on_none(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks go on uncaptured, in step with each other."""
    right = captured_steps.operators

    def wrong(call: Any) -> Any:
        replay = right(call)
        return lambda: replay() + 1

    monkeypatch.setattr(captured_steps, "operators", wrong)
    with engine_of(tiny, 2) as (engine, _):
        assert engine.decode is None
        assert follow(tiny, greedy(engine))


def test_the_planner_says_which_numbers_of_ranks_fit(tmp_path: Path) -> None:
    """A device that one rank would overfill holds a part of the weights and KV of its heads; what cannot be cut says
    why not."""
    make_checkpoint(tmp_path, "tiny-llama", dtype="float32")
    shape = read_shape(tmp_path)
    memory = int(0.9 * shape.weight_bytes("float32"))
    answers = fits(shape, tmp_path, memory, utilization=0.5, dtype="float32", block_size=BLOCK, kv_dtype="auto")
    one, two, four, eight, _ = answers
    assert [fit.ranks for fit in answers] == [1, 2, 4, 8, 16]
    assert "the weights take" in one.why_not
    assert (two.why_not, four.why_not) == ("", "")
    assert 0 < four.weights < two.weights < memory
    each = of_one_rank(of_ranks(shape, tmp_path, 2)).block_bytes(BLOCK, "float32")
    assert two.kv == (memory - two.weights) // 2
    assert (two.blocks, two.tokens) == (two.kv // each, BLOCK * (two.kv // each))
    assert "4 attention heads cannot be shared by 8 ranks" in eight.why_not


# ---- memory

CONSTANT = 80 << 20  # bytes: a layer and the table of the whole model in turn, what a step needs, pieces of libraries
LARGE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "initializer_range": 0.02,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of some 200 MB."""
    return make_checkpoint(tmp_path_factory.mktemp("large"), "tiny-qwen3", dtype="float32", **LARGE)


def allowed(folder: Path, narrower: int = 1) -> int:
    """Bytes of a rank of two: a tenth more than its share of the files, whose weights take so many times what is
    served, and what does not grow with the model."""
    return int(1.1 * (folder / "model.safetensors").stat().st_size / 2 / narrower) + CONSTANT


def test_no_row_of_a_part_is_the_padding_of_the_whole(tmp_path: Path) -> None:
    """transformers fills the padding's row of a loaded youtu with zeros: of rank 1, another token has that place."""
    config = AutoConfig.for_model(
        "youtu", vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        head_dim=8, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
    auto.from_config(config).save_pretrained(tmp_path)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    shapes = module_loader._shapes(config, torch.float32)
    files = part_loader.WeightFiles(checkpoint.check_folder(tmp_path), shapes)
    group: Any = SimpleNamespace(rank=1, size=2)
    module: Any = part_loader.load(shapes, files, weight_cut.cut(shapes, group), torch.float32)[0]
    assert torch.equal(module.get_input_embeddings().weight, table[48:])


@pytest.mark.parametrize(
    ("by_parts", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)], ids=str
)
def test_loading_takes_the_memory_of_a_part(
    large: Path, by_parts: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its peak too, on the rank that computes what the whole model says, and of the type that is served. In the
    control, where the files are read as transformers reads them, the whole is in memory."""
    if not by_parts:
        monkeypatch.setattr(part_loader.WeightFiles, "strange", "a parameter")
    group: Any = SimpleNamespace(rank=0, size=2, in_turn=nullcontext)
    config = module_loader.read_config(large)
    module_loader.return_memory()
    with rank_memory.Loading() as loading:
        source = module_loader.Source(large, checkpoint.check_folder(large), config, dtype, None)
        module, _, expected, _ = module_loader.load_part(source, group, None, lambda line: None)
    memory = loading.memory()
    assert expected is not None
    narrower = 4 // dtype.itemsize
    whole = (large / "model.safetensors").stat().st_size / narrower
    assert sum(each.nbytes for each in module.parameters()) < 0.52 * whole
    assert (memory.peak - memory.before <= allowed(large, narrower)) == by_parts


def test_each_rank_of_a_worker_holds_its_part(large: Path) -> None:
    """Once, also while it loads. By a process of its own, as in a worker: a copy of this one has this one's heap. The
    log says that the weight cache keeps none of it."""
    lines: list[str] = []
    given: dict[str, Any] = {"dtype": "float32", "weight_cache": "auto"}
    with engine_of(large, 2, say=lines.append, copies=nullcontext, **given) as (engine, _):
        assert engine.model.ranks is not None
        (other,) = engine.model.ranks.memory
        assert other.after - other.before <= allowed(large)
        assert other.peak - other.before <= allowed(large)
        own = [each for each in engine.model.module.parameters() if not kernels.is_nothing(each)]
        kept = sum(each.nbytes for each in [*own, *modules.panels(engine.model.module)])
        assert kept <= allowed(large) - CONSTANT
        whole = (large / "model.safetensors").stat().st_size
        assert engine.model.weight_bytes == pytest.approx(whole, rel=0.01)
    assert any("MiB of each rank beyond" in line for line in lines)
    assert any(line.startswith("weight_cache: ") for line in lines)


# ---- the group


@contextmanager
def group_of(size: int) -> Iterator[list[RankGroup]]:
    """Groups of one process, whose ranks are threads."""
    memory = group_memory(size)
    groups = [RankGroup(rank, size, memory) for rank in range(size)]
    os.close(memory)
    yield groups
    for group in groups:
        group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_one_order_whatever_the_rows(size: int, dtype: torch.dtype) -> None:
    """All ranks get the same bits, those of a sum in the order of ranks in float32, for one row and for many, of which
    some lie in another piece of the shared memory; parts side by side are in the order of ranks."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(301, 640, generator=generator).to(dtype) for _ in range(size)]
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    with group_of(size) as groups, ThreadPoolExecutor(size) as pool:

        def each(what: Any) -> list[torch.Tensor]:
            return list(pool.map(what, groups, parts))

        for rows in (slice(0, 301), slice(299, 300), slice(0, 0)):
            for out in each(lambda group, part, rows=rows: group.all_reduce(part[rows], 1)):
                assert torch.equal(out, expected[rows].to(dtype))
        for out in each(lambda group, part: group.all_gather(part, 2)):
            assert torch.equal(out, torch.cat(parts, -1))


def test_ranks_that_have_lost_step_add_nothing() -> None:
    """One is at another call of the forward than the other: the call fails, and so does every later one, of both."""
    with group_of(2) as (first, second), ThreadPoolExecutor(2) as pool:
        x = torch.ones(4)
        calls = [pool.submit(first.all_reduce, x, 1), pool.submit(second.all_reduce, x, 2)]
        said = [str(call.exception()) for call in calls]
        assert any("lost step" in each for each in said), said  # whichever looks first
        assert all("lost step" in each or "is broken" in each for each in said), said
        later = [pool.submit(group.all_reduce, x, 3) for group in (first, second)]
        assert all(call.exception() is not None for call in later)


def test_a_step_is_the_same_after_its_way() -> None:
    """Batches of any shape: chunks, single tokens, wanted logits or none, adapters or none."""
    rng = random.Random(0)
    for _ in range(50):
        batch = Batch()
        for _ in range(rng.randint(1, 9)):
            done, new = rng.randint(0, 40), rng.randint(1, 9)
            blocks = [rng.randrange(1 << 40) for _ in range(-(-(done + new) // BLOCK) + rng.randint(0, 2))]
            batch.add([rng.randrange(1 << 20) for _ in range(new)], done, blocks, range(rng.randint(0, new)))
        captured, marks = rng.random() < 0.5, list[int]()
        if rng.random() < 0.5:
            batch.adapters = [rng.randrange(-1, 9) for _ in batch.query_lens]
            marks = [rng.randrange(-(1 << 63), 1 << 63) for _ in batch.query_lens]
        sent = rank_messages.of_step(7, batch, captured, marks)
        assert rank_messages.from_step(sent) == (7, batch, captured, marks)


# ---- their end


def shared_memory() -> list[str]:
    """Of this process, by its mappings and open files."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "tandem-ranks" in line]
    return maps + [str(file) for file in Path("/proc/self/fd").iterdir() if "tandem-ranks" in os.path.realpath(file)]


def test_an_orderly_end_leaves_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process and no memory, and ranks end by themselves."""
    monkeypatch.setattr(leader, "END_S", 60.0)  # until they are killed
    gc.collect()  # of earlier tests
    before = shared_memory()
    with engine_of(tiny, 2) as (engine, processes):
        greedy(engine)
        assert len(shared_memory()) > len(before)
        engine.model.close()
        assert [process.wait(0) for process in processes] == [0]
    del engine
    gc.collect()
    assert shared_memory() == before


def test_a_rank_does_not_outlive_rank_0_that_dies_before_it_knows() -> None:
    """Rank 0's process ends right after it has started a rank, whose connection somebody else still holds."""
    ours, its = socket.socketpair()
    rank = [sys.executable, "-m", leader.RANK_PROCESS, *map(str, (its.fileno(), its.fileno(), 1, 2))]
    code = f"import os, subprocess; subprocess.Popen([*{rank}, str(os.getpid())], pass_fds=[{its.fileno()}])"
    with ours:
        with its:
            subprocess.run(
                [sys.executable, "-c", code], cwd=leader.ROOT, pass_fds=[its.fileno()], timeout=60, check=True
            )
        ours.settimeout(60)
        assert ours.recv(1) == b""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("busy", [True, False])
def test_a_rank_that_dies_or_stops_ends_the_group(tiny: Path, number: signal.Signals, busy: bool) -> None:
    """Within two seconds, in a step and between steps; the next step raises, and nothing is left behind."""
    with engine_of(tiny, 2) as (engine, processes):
        assert engine.model.ranks is not None
        lost: Queue[TandemError] = Queue()
        engine.model.ranks.on_lost = lost.put
        step = pack([(PROMPTS[0], 0, table(0))])
        engine.model.forward(engine.pages, step)
        watch = Stopwatch()
        processes[0].send_signal(number)
        if busy:
            with pytest.raises(Unavailable, match="a rank of this worker is lost"):
                while watch.within(2 * LOST_S):
                    engine.model.forward(engine.pages, step)
        assert lost.get(timeout=10).reason == "RANK_LOST"
        assert watch.within(LOST_S)
        with pytest.raises(Unavailable):
            engine.model.forward(engine.pages, step)
        engine.model.close()
        assert processes[0].poll() == -signal.SIGKILL


def test_an_error_of_rank_0_in_a_step_ends_the_group(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in the middle of that step, so no smaller one can be tried."""
    with engine_of(tiny, 2) as (engine, _):
        monkeypatch.setattr(engine.model, "run", lambda *_: 1 / 0)
        step = pack([(PROMPTS[0], 0, table(0))])
        with pytest.raises(Unavailable, match="division by zero"):
            engine.model.forward(engine.pages, step)
        monkeypatch.undo()
        with pytest.raises(Unavailable):
            engine.model.forward(engine.pages, step)


# ---- refusals


@pytest.mark.parametrize(
    ("shape", "changes", "ranks", "why"),
    [
        ("tiny-opt", {}, 2, "no plan to cut opt"),
        ("tiny-llama", {}, 3, "4 attention heads cannot be shared by 3 ranks"),
        ("tiny-llama", {"hidden_size": 96, "num_attention_heads": 6}, 3, "2 KV heads"),
        ("tiny-llama", {"intermediate_size": 65}, 2, "mlp.* has 65 rows or columns, which 2 ranks cannot share"),
        ("tiny-deepseek-v32", {}, 2, "layers of type indexed_attention"),
        ("gpt_neox", {}, 2, "query_key_value, of whose rows Tandem does not know how they follow heads"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(
    shape: str, changes: dict[str, Any], ranks: int, why: str, tmp_path: Path
) -> None:
    """With the reason, by a worker and by the planner."""
    if shape in SHAPES:
        make_checkpoint(tmp_path, shape, dtype="float32", **changes)
    else:
        families.make(shape, tmp_path)
    with pytest.raises(CheckpointRefused, match=why):
        of_ranks(read_shape(tmp_path), tmp_path, ranks)
    with pytest.raises(CheckpointRefused, match=why), engine_of(tmp_path, ranks):
        pass


def test_layers_that_keep_other_state_are_refused() -> None:
    """Which is no part of the blocks that ranks share."""
    with pytest.raises(CheckpointRefused, match="layers of type linear_attention"):
        check_plan(AutoConfig.for_model("qwen3_next"), 2)


def test_a_model_without_a_plan_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config says enough."""
    make_checkpoint(tmp_path, "tiny-gpt2", dtype="float32")
    monkeypatch.setattr(leader, "start_rank", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(CheckpointRefused, match="no plan to cut gpt2"):
        build_engine(Settings(model=str(tmp_path), device="cpu"), lambda line: None, ranks=2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"speculation": "draft", "draft_model": "d"}, "draft_model is d"),
        ({"weight_cache": "/tmp"}, "weight_cache is /tmp"),
        ({"autoscale": "on", "prefill_max": 2, "decode_max": 2, "prefill_tp": 2}, "workers change pools"),
    ],
)
def test_what_ranks_do_not_serve_is_refused_by_name(
    tiny: Path, changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a process is started."""
    monkeypatch.setattr(leader, "start_rank", lambda *_: pytest.fail("a process was started"))
    settings = Settings(model=str(tiny), device="cpu", **changes)
    with pytest.raises(SettingsError, match=why):
        build_engine(settings, lambda line: None, ranks=2)
    with pytest.raises(SettingsError, match="on CPU only"):
        check_settings(Settings(model="m"), 2, "cuda")
    check_settings(Settings(model="m", prefill_tp=2, decode_tp=4), 2, "cpu")
