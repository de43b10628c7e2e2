"""Decode steps with the recurrences of a GPU, captured: by Triton's interpreter, over a stand-in for CUDA graphs that
runs a step's operators again and no Python between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine import kernels
from engine.attention.forward_context import Batch, on_device
from engine.core.engine_config import EngineConfig
from engine.engine import Engine
from engine.gpu import layers
from engine.gpu.attention.paged_attention import TritonAttention
from engine.gpu.operators import ops
from engine.gpu.recurrent import operators  # noqa: F401  (makes the operators known)
from engine.kv.kv_cache import KvCache
from engine.loading import self_check, state_probe
from engine.loading.model_loader import load_model
from engine.runner import capture_check, captured_steps, recurrences
from engine.runner.captured_steps import Decode, Uncapturable, by_modules
from engine.runner.model_runner import ModelRunner
from engine.runner.recurrences import SlotRows
from loadtest.harness.random_checkpoints import make_checkpoint
from tests.engine.conftest import two_layers
from tests.engine.stand_ins import recorded
from tests.support.engine_runs import asked_of, right, run

CPU = torch.device("cpu")
BLOCK_SIZE, BLOCKS, MOST = 4, 24, 4  # a sequence has six blocks
SMALL: dict[str, Any] = {"vocab_size": 40}  # the interpreter takes its time
FEW_HEADS: dict[str, dict[str, Any]] = {  # of a kernel's largest tile
    "mamba2": {"num_heads": 2, "head_dim": 64},
    "granite-hybrid": {"mamba_n_heads": 2, "mamba_d_head": 64},
    "qwen3-5": {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "intermediate_size": 32},
}
# Which sequences, and how many tokens of each: prompts, some after others have begun, and steps of any rows.
STEPS = [([2, 0], 2), ([2], 1), ([1, 3], 2), ([3, 0, 1], 1), ([1], 2), ([0, 1, 2, 3], 1)]
ROUNDING = 1e-4  # of the spread: torch's own functions round an element by its place in a vector
Checkpoint = Callable[[str], Path]

pytestmark = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is as one on CUDA. Trials are short."""
    monkeypatch.setattr(recurrences, "_operators", lambda like: ops)
    monkeypatch.setattr(state_probe, "PIECES", (2, 1, 2))
    monkeypatch.setattr(layers, "ROWS", (1, 5))
    monkeypatch.setattr(self_check, "PROMPT_LENGTHS", (7,))
    monkeypatch.setattr(self_check, "LONGEST", 5)


@pytest.fixture
def one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of MOST rows, so that most steps have padding."""
    monkeypatch.setattr(captured_steps, "buckets", lambda most: [most])


def load(folder: Path, whole: bool = False) -> ModelRunner:
    """With a GPU's kernels for recurrent layers, those of a CPU for the rest; with `whole`, a GPU's for all."""
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "max_model_len": 64, "block_size": BLOCK_SIZE}
    model = load_model(str(folder), kernels="reference" if whole else "auto", **options)
    if whole:
        model.use_eager_attention()
        model.mixers = state_probe.learn(model.module, compiled=True)
        model.cuda_kernel = TritonAttention(64)
        assert layers.adopt(model.module).startswith(layers.NAME)
        model.use_paged_attention()
    assert model.mixers is not None
    assert model.mixers.by_operators
    assert whole or model.mixers.exact  # with the products of a CPU
    return model


@pytest.fixture(scope="module")
def lfm2(checkpoint: Checkpoint) -> ModelRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrences, "_operators", lambda like: ops)
        return load(checkpoint("tiny-lfm2"))


def pages_of(model: ModelRunner) -> KvCache:
    return model.allocate(BLOCKS + 1, BLOCK_SIZE, MOST + 1)


def captured(model: ModelRunner, pages: KvCache) -> Decode:
    return Decode(model, pages, spare=BLOCKS, max_running=MOST, capture=by_modules(recorded))


def batch_of(done: dict[int, int], which: list[int], count: int, rng: random.Random) -> Batch:
    """The next `count` tokens of these sequences. A sequence's number is also its slot."""
    batch = Batch(slots=which)
    for sequence in which:
        tokens = [rng.randrange(SMALL["vocab_size"]) for _ in range(count)]
        batch.add(tokens, done[sequence], list(range(6 * sequence, 6 * sequence + 6)), [count - 1])
        done[sequence] += count
    return batch


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Also where a sequence has not begun: its states have no numbers."""
    if not found.isfinite().all():
        return torch.equal(found.isnan(), expected.isnan())
    return bool((found.float() - expected.float()).abs().max() <= ROUNDING * expected.float().std())


@pytest.mark.parametrize("family", ["qwen3-5", "granite-hybrid", "jamba", "mamba2"])
def test_a_captured_step_is_the_step(family: str, one_bucket: None, tmp_path: Path) -> None:
    """Of any sequences in any order, with padding: logits, KV and states are those of the uncaptured step, and the
    states of the others stay. One family has a GPU's kernels for all, one has no attention."""
    shape = f"tiny-{family}"
    folder = make_checkpoint(
        tmp_path, shape, dtype="float32", **SMALL, **FEW_HEADS.get(family, {}), **two_layers(shape)
    )
    model = load(folder, whole=family == "qwen3-5")
    pages, plain = pages_of(model), pages_of(model)
    decode, rng, done = captured(model, pages), random.Random(0), dict.fromkeys(range(MOST), 0)
    for which, count in STEPS:
        batch = batch_of(done, which, count, rng)
        expected = model.forward(plain, batch)
        found = decode.logits(batch)
        assert (found is None) == (count > 1)
        found = model.forward(pages, batch) if found is None else found
        for each in (pages, plain):
            each.states.commit()  # type: ignore[union-attr]
        assert same(found, expected)
        assert same(pages.buffer[:BLOCKS].view(model.dtype), plain.buffer[:BLOCKS].view(model.dtype))
        for slot in range(MOST):
            assert all(map(same, pages.states.values(slot), plain.states.values(slot)))  # type: ignore[union-attr]


def test_tokens_equal_transformers_with_slots_that_change_hands(
    checkpoint: Checkpoint, lfm2: ModelRunner, one_bucket: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that come and go, are preempted, fail behind the replay and begin with another one's snapshot."""
    folder = checkpoint("tiny-lfm2")
    blocks = 21 + lfm2.layout(BLOCK_SIZE).state_blocks
    config = EngineConfig(num_blocks=blocks, block_size=BLOCK_SIZE, token_budget=16, max_running=3, spare_block=True)
    engine = Engine(lfm2, config)
    assert engine.capture(by_modules(recorded)) == "captured for 3 sequences"
    assert engine.decode is not None
    real, load, failing = engine.decode.logits, engine.states.load, random.Random(0)  # type: ignore[union-attr]
    rate, replayed, loaded = 0.3, 0, 0

    def fails(batch: Batch) -> torch.Tensor | None:
        nonlocal replayed
        found = real(batch)
        replayed += found is not None
        if found is not None and failing.random() < rate:
            raise RuntimeError("injected, after the replay")
        return found

    def loads(*given: Any) -> None:
        nonlocal loaded
        loaded += 1
        load(*given)

    monkeypatch.setattr(engine.decode, "logits", fails)
    monkeypatch.setattr(engine.states, "load", loads)
    run(engine, added := asked_of(folder, (9, 33, 18), 14))
    ended = [sequence for sequence in added if len(sequence.tokens) == sequence.max_len]
    assert len(ended) > 1, "the others ended with StepFailed, alone at fault"
    assert engine.failures > 0
    assert engine.scheduler.preemptions > 0
    rate = 0.0
    for _ in range(2):
        run(engine, again := asked_of(folder, (9,), 12))
        ended += again
    assert loaded > 0, "the second one begins with a snapshot of the first"
    assert replayed > 20
    assert all(right(folder, sequence) for sequence in ended)


def test_control_rows_of_the_captured_step_are_noticed(
    lfm2: ModelRunner, one_bucket: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that the host has read, and put into another tensor: every replay would read and write these."""
    rows = SlotRows.rows

    def of_the_host(self: SlotRows) -> tuple[torch.Tensor, torch.Tensor]:
        view, numbers = rows(self)
        return view, on_device(numbers.tolist(), torch.int64, view.device)

    monkeypatch.setattr(SlotRows, "rows", of_the_host)
    with pytest.raises(Uncapturable, match="differs from the step itself"):
        captured(lfm2, pages_of(lfm2))


def test_what_a_graph_could_not_repeat_is_refused_before_the_capture() -> None:
    """A copy between host and device reads the host's memory again in each replay. Control: a number of the host is
    part of an operator's call."""

    def copied() -> torch.Tensor:
        return torch.ones(2).to("cuda:0", non_blocking=True)

    def number() -> torch.Tensor:
        return torch.empty(3, device="cuda:0") * torch.tensor(2.0)

    with FakeTensorMode(), torch.no_grad():
        with pytest.raises(Uncapturable, match="tensors of the host and of the device in aten"):
            by_modules(recorded)(copied)
        by_modules(recorded)(number)


def test_on_cuda_the_operators_of_all_recurrent_layers_are_needed(
    lfm2: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own code copies states on the host's orders. Those by operators are captured as CUDA graphs, after
    the modules have been watched."""
    graphs: list[Any] = []
    monkeypatch.setattr(lfm2, "device", torch.device("cuda"))
    monkeypatch.setattr(captured_steps, "cuda_graphs", lambda: graphs.append)
    captured_steps.capture_for(lfm2)(torch.ones(1).clone)
    assert len(graphs) == 1
    kept: list[torch.Tensor] = []
    with pytest.raises(Uncapturable, match="keeps 1 tensors of a step"):
        captured_steps.capture_for(lfm2)(lambda: kept.append(torch.ones(1).clone()) or torch.ones(1))  # type: ignore[func-returns-value]
    assert len(graphs) == 1
    mixer = lfm2.mixers.each[0]  # type: ignore[union-attr]
    monkeypatch.setattr(mixer, "forward", type(mixer.module).forward)
    with pytest.raises(Uncapturable, match="recurrent layers without operators"):
        captured_steps.capture_for(lfm2)


def test_a_state_may_differ_by_roundings_on_cuda_and_by_nothing_more() -> None:
    """There the uncaptured step has other numbers of rows. Another sequence's state and NaN are seen; on CPU every
    bit."""
    state, other = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    rounded = state.bfloat16().float()
    assert capture_check._same_state(rounded, state, exact=False)
    assert capture_check._same_state(torch.zeros(3), torch.zeros(3), exact=False)
    assert not capture_check._same_state(rounded, state, exact=True)
    assert not capture_check._same_state(other, state, exact=False)
    assert not capture_check._same_state(state * torch.nan, state, exact=False)
