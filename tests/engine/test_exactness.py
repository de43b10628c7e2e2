"""A token's logits have the same bits whatever else is in the step, however its prompt was cut, prefilled or decoded.

So an answer does not depend on a resume, a cached prefix or the rest of the batch. It holds on CPU with the
compiled operators, in float32 and in bfloat16, for every family, with recurrent layers, too; but for those of whose
layers transformers computes a chunk by another formula than a token.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine import kernels
from engine.kernels import modules
from engine.loading import lora_loader, state_probe
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner import recurrences
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import HYBRID, TINY, make_adapter

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = (5, 33, 1, 17, 131)  # past the angle of 125, where vector sines take another code path
SINGLE = 16  # of a prompt's last tokens; those of 131 begin at position 115
BLOCK_SIZE = 4

built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)

Cut = Callable[[random.Random, int], int]  # how many of the missing tokens the next step takes


def tail(_rng: random.Random, left: int) -> int:
    """A beginning, then the last tokens one by one."""
    return max(1, left - SINGLE)


def whole(_rng: random.Random, left: int) -> int:
    return left


def ragged(rng: random.Random, left: int) -> int:
    return min(left, rng.choice([1, 1, 1, 2, 3, 7, 16, 40]))


def all_logits(
    model: ModelRunner, sequences: list[list[int]], cut: Cut, *, together: bool, seed: int
) -> list[torch.Tensor]:
    """Every position's logits, `[tokens, vocab]` for each sequence; steps in random order over random blocks. If the
    model has adapters, sequences use them and the base in turn; states are in slots that were used before."""
    rng = random.Random(seed)
    counts = [-(-len(tokens) // BLOCK_SIZE) for tokens in sequences]
    ids = rng.sample(range(sum(counts) + 5), sum(counts))
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    pages = model.allocate(sum(counts) + 5, BLOCK_SIZE, slots=len(sequences) + 1)
    pages.buffer.fill_(255)  # NaN
    slots = rng.sample(range(len(sequences) + 1), len(sequences))
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while active := [index for index, tokens in enumerate(sequences) if done[index] < len(tokens)]:
        active = rng.sample(active, len(active) if together else 1)
        ends = {index: done[index] + cut(rng, len(sequences[index]) - done[index]) for index in active}
        batch = pack([(sequences[index][: ends[index]], done[index], tables[index]) for index in active])
        batch.logits_at = list(range(len(batch.token_ids)))
        if pages.states is not None:
            batch.slots = [slots[index] for index in active]
        if model.lora is not None:
            batch.adapters = [index % (len(model.lora.slots) + 1) - 1 for index in active]
        for index, part in zip(active, model.forward(pages, batch).split(batch.query_lens), strict=True):
            rows[index].append(part)
            done[index] = ends[index]
        if pages.states is not None:
            pages.states.commit()
    return [torch.cat(parts) for parts in rows]


def prompts(model: ModelRunner) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(model.vocab_size) for _ in range(length)] for length in LENGTHS]


def differing(model: ModelRunner) -> list[str]:
    """The ways of running the same tokens that give other bits than each prompt in one step of its own."""
    sequences = prompts(model)
    alone = all_logits(model, sequences, whole, together=False, seed=0)
    ways = {
        "prefilled together": (whole, True),
        "decoded alone": (tail, False),
        "decoded together": (tail, True),
        "cut anyhow, alone": (ragged, False),
        "cut anyhow, together": (ragged, True),
    }
    return [
        name
        for seed, (name, (cut, together)) in enumerate(ways.items(), 1)
        if not all(map(torch.equal, all_logits(model, sequences, cut, together=together, seed=seed), alone))
    ]


# Products and attention have kernels of their own for each type. Families have one type in turn; these have both:
# grouped heads of the demo model, latents, softcaps, transposed weights, sinks, chunks, and experts by transformers.
BOTH = ("demo", "deepseek-v3", "gemma2", "gpt2", "gpt-oss", "llama4-text", "qwen3-moe")
IN_TURN = [(name, DTYPES[place % 2]) for place, name in enumerate(sorted(TINY)) if name not in BOTH]


@built
@pytest.mark.parametrize(("name", "dtype"), [*IN_TURN, *itertools.product(BOTH, DTYPES)])
def test_logits_do_not_depend_on_the_step(
    name: str, dtype: torch.dtype, checkpoint: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    """Alone or together, prefilled, decoded or cut anyhow, over any blocks: the same bits, in every family."""
    folder = ROOT / "demo/model" if name == "demo" else checkpoint(f"tiny-{name}")
    model = load_model(str(folder), dtype=dtype, device=CPU)
    assert differing(model) == []


# Each recurrence in both types, by one family or by two: in turn they are Mamba-2 (twice), Mamba, Kimi's delta rule,
# convolutions, Mamba-2 (twice) and the gated delta rule (twice). Whatever the type, the delta rules compute in float32.
@built
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, DTYPES[place % 2]) for place, name in enumerate(sorted(HYBRID))), ("jamba", torch.bfloat16)],
)
def test_nor_do_those_of_recurrent_layers_where_the_proof_says_so(
    name: str, dtype: torch.dtype, checkpoint: Callable[[str], Path]
) -> None:
    """A worker's order of sums is that of its products then; otherwise it promises none. Nemotron-H's chunks clamp the
    time steps, its single tokens do not."""
    model = load_model(str(checkpoint(f"tiny-{name}")), dtype=dtype, device=CPU, max_model_len=256)
    assert model.mixers is not None
    assert model.mixers.exact is (name != "nemotron-h")
    assert all(mixer.same_bits for mixer in model.mixers.each)  # of the operators, which are the same for all
    assert model.sum_order == (kernels.sum_order(CPU, dtype) if model.mixers.exact else kernels.PLAIN)
    assert model.mixers.exact is False or differing(model) == []


@built
def test_limits_of_time_steps_are_told_from_bits(checkpoint: Callable[[str], Path]) -> None:
    """Where Nemotron-H's limits change the chunks of a layer, its operators still give the same bits, by the formula
    without limits. Control: the bits by transformers' two formulas. The layer keeps its limits."""
    model = load_model(str(checkpoint("tiny-nemotron-h")), dtype=torch.float32, device=CPU, max_model_len=256)
    mixers = model.mixers
    assert mixers is not None
    model.use_eager_attention()
    mixer, module = mixers.each[0], cast(Any, mixers.each[0].module)
    limits = module.time_step_limit
    assert (mixer.same_bits, mixer.one_function, limits[0]) == (True, False, 0.001)
    given = state_probe._arguments(model.module, mixers, sum(state_probe.PIECES))[mixer.name]
    module.dt_bias.data.fill_(-8.0)  # a time step of about 0.0003

    def same() -> bool:
        return state_probe._same_bits(mixer, given, mixers.facts_of(mixer), torch.float32)

    assert same()
    assert module.time_step_limit == limits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_probe, "one_formula", lambda module: nullcontext())
        assert not same()


@built
@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1"])
def test_control_transformers_recurrences_depend_on_the_step(
    name: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a worker over them promises no order."""
    monkeypatch.setattr(recurrences, "OPERATORS", {})
    model = load_model(str(checkpoint(f"tiny-{name}")), dtype=torch.float32, device=CPU, max_model_len=256)
    assert model.mixers is not None
    assert (model.mixers.exact, model.sum_order) == (False, kernels.PLAIN)
    assert differing(model)


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt2"])
def test_logits_do_not_depend_on_the_adapters_beside_them(
    name: str, dtype: torch.dtype, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """With adapters of several ranks and the base in one step, too; the base has the bits of a model without any."""
    folder = checkpoint(f"tiny-{name}")
    made = {str(rank): make_adapter(tmp_path / str(rank), folder, seed=rank, rank=rank) for rank in (3, 16, 37)}
    model = load_model(str(folder), dtype=dtype, device=CPU, adapters=made)
    assert model.lora is not None
    for slot, key in enumerate(made):
        model.lora.put(slot, lora_loader.read_again(model.lora.known[key]))
    assert differing(model) == []
    plain = load_model(str(folder), dtype=dtype, device=CPU)
    ours, theirs = (all_logits(one, prompts(model), ragged, together=True, seed=1) for one in (model, plain))
    assert [torch.equal(*pair) for pair in zip(ours, theirs, strict=True)] == [True, False, False, False, True]


@built
def test_logits_do_not_depend_on_the_threads(checkpoint: Callable[[str], Path]) -> None:
    """One thread and three give the same bits."""
    model = load_model(str(checkpoint("tiny-qwen2")), dtype=torch.bfloat16, device=CPU)
    sequences, before = prompts(model), torch.get_num_threads()
    alone = all_logits(model, sequences, whole, together=True, seed=1)
    torch.set_num_threads(3)
    try:
        parallel = all_logits(model, sequences, whole, together=True, seed=1)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, parallel, alone))


@contextmanager
def torchs_own(_device: torch.device) -> Iterator[None]:
    yield


@built
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_reference_depends_on_the_step(name: str, checkpoint: Callable[[str], Path]) -> None:
    """The same comparison catches plain PyTorch, which does not promise it."""
    model = load_model(str(checkpoint(f"tiny-{name}")), dtype=torch.float32, device=CPU, kernels="reference")
    assert differing(model)


@built
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_torchs_own_operators_do(name: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's operators restored, those that a model still uses are caught."""
    model = load_model(str(checkpoint(f"tiny-{name}")), dtype=torch.float32, device=CPU)
    assert differing(model) == []
    monkeypatch.setattr("engine.runner.model_runner.exact", torchs_own)
    assert differing(model)


@built
def test_torchs_linear_layer_does(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's product in the linear layers the bits depend on the step again."""
    model = load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU)
    monkeypatch.setattr("engine.runner.model_runner.exact", torchs_own)
    monkeypatch.setattr(modules.Linear, "forward", torch.nn.Linear.forward)
    model.recorded = None
    assert differing(model)
