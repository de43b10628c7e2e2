"""Decode steps of models with recurrent layers, captured on CPU: logits, pages and states have the bits of the step
that is not captured."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import kernels
from engine.attention.forward_context import Batch
from engine.core.engine_config import EngineConfig
from engine.engine import Engine
from engine.kv.kv_cache import KvCache
from engine.kv.state_memory import StateMemory
from engine.loading.model_loader import load_model
from engine.runner.captured_steps import Decode, Uncapturable
from engine.runner.mixers import Mixer
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import HYBRID
from tests.support.engine_runs import asked_of, right, run

Checkpoint = Callable[[str], Path]
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
BLOCK_SIZE, BLOCKS, MOST = 4, 24, 4  # a sequence has six blocks
LATENT = {"kimi-linear"}

pytestmark = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> ModelRunner:
    return load_model(str(folder), dtype=dtype, device=CPU, max_model_len=64, block_size=BLOCK_SIZE, **options)


@pytest.fixture(scope="module")
def lfm2(checkpoint: Checkpoint) -> ModelRunner:
    return load(checkpoint("tiny-lfm2"))


def pages_of(model: ModelRunner) -> KvCache:
    return model.allocate(BLOCKS + 1, BLOCK_SIZE, MOST + 1)


def captured(model: ModelRunner, pages: KvCache) -> Decode:
    return Decode(model, pages, spare=BLOCKS, max_running=MOST, capture=None)


def batch_of(done: dict[int, int], which: Sequence[int], count: int, rng: random.Random) -> Batch:
    """The next `count` tokens of these sequences, after their `done` tokens. A sequence's number is also its slot."""
    batch = Batch(slots=list(which))
    for sequence in which:
        tokens = [rng.randrange(384) for _ in range(count)]
        batch.add(tokens, done[sequence], list(range(6 * sequence, 6 * sequence + 6)), [count - 1])
        done[sequence] += count
    return batch


def states(pages: KvCache) -> list[torch.Tensor]:
    assert pages.states is not None
    return [pages.states.row(slot) for slot in range(MOST)]


# One type in turn; in both, a convolution alone, a scan and a delta rule.
IN_TURN = {(family, DTYPES[place % 2]) for place, family in enumerate(sorted(HYBRID))}


@pytest.mark.parametrize(
    ("family", "dtype"), sorted(IN_TURN | set(itertools.product(("lfm2", "falcon-h1", "qwen3-5"), DTYPES)), key=str)
)
def test_every_hybrid_is_captured_with_the_same_bits(family: str, dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    """Steps of any sequences, in any order, some with states that a prompt has just begun or gone on with: logits, KV
    and states are those of the uncaptured step, and the states of the others stay. Latent pages are refused."""
    model = load(checkpoint(f"tiny-{family}"), dtype)
    pages, plain = pages_of(model), pages_of(model)
    if family in LATENT:
        with pytest.raises(Uncapturable, match="latent pages"):
            captured(model, pages)
        return
    decode, rng = captured(model, pages), random.Random(0)
    assert all((state == 0xFF).all() for state in states(pages)), "the capture leaves no state"
    done = dict.fromkeys(range(MOST), 0)
    for which, count in [([2, 0], 3), ([2], 1), ([0, 2], 1), ([1, 3], 2), ([3, 0, 1], 1), ([1], 4), ([0, 1, 2, 3], 1)]:
        batch = batch_of(done, which, count, rng)
        expected = model.forward(plain, batch)
        found = decode.logits(batch)
        assert (found is None) == (count > 1)
        found = model.forward(pages, batch) if found is None else found
        for each in (pages, plain):
            each.states.commit()  # type: ignore[union-attr]
        assert torch.equal(found, expected)
        assert torch.equal(pages.buffer[:BLOCKS], plain.buffer[:BLOCKS])
        assert all(map(torch.equal, states(pages), states(plain)))


def test_a_first_token_is_not_a_captured_step(lfm2: ModelRunner) -> None:
    """Its sequence has no state yet, and its slot may have another's."""
    decode = captured(lfm2, pages_of(lfm2))
    assert decode.logits(batch_of({0: 0, 1: 5}, [1, 0], 1, random.Random(0))) is None
    assert decode.logits(batch_of({0: 1, 1: 5}, [1, 0], 1, random.Random(0))) is not None


def test_the_same_step_again_gives_the_same_and_a_state_goes_on_when_it_has_succeeded(lfm2: ModelRunner) -> None:
    """As after a failure behind the forward: nothing has changed until the step is committed."""
    pages, rng = pages_of(lfm2), random.Random(1)
    decode, done = captured(lfm2, pages), dict.fromkeys(range(MOST), 0)
    lfm2.forward(pages, batch_of(done, [0, 1], 3, rng))
    pages.states.commit()  # type: ignore[union-attr]
    batch, before = batch_of(done, [0, 1], 1, rng), [state.clone() for state in states(pages)]
    first = decode.logits(batch).clone()  # type: ignore[union-attr]
    assert all(map(torch.equal, states(pages), before))
    assert torch.equal(decode.logits(batch), first)  # type: ignore[arg-type]
    pages.states.commit()  # type: ignore[union-attr]
    assert not torch.equal(states(pages)[0], before[0])
    assert not torch.equal(decode.logits(batch), first)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["lfm2", "falcon-h1"])
def test_tokens_equal_transformers_over_captured_steps(family: str, checkpoint: Checkpoint) -> None:
    """Prompts in chunks, streams that come and go, preempted ones, and steps that fail behind the forward."""
    folder = checkpoint(f"tiny-{family}")
    model = load(folder)
    blocks = max(21, 13 + model.layout(BLOCK_SIZE).state_blocks)
    config = EngineConfig(num_blocks=blocks, block_size=BLOCK_SIZE, token_budget=16, max_running=MOST, spare_block=True)
    engine = Engine(model, config)
    assert engine.capture() == "captured for 1, 2, 4 sequences"
    assert engine.decode is not None
    real, replayed, failing = engine.decode.logits, 0, random.Random(0)

    def fails(batch: Batch) -> torch.Tensor | None:
        nonlocal replayed
        found = real(batch)
        replayed += found is not None
        if found is not None and failing.random() < 0.3:
            raise RuntimeError("injected, after the replay")
        return found

    engine.decode.logits = fails  # type: ignore[method-assign]
    run(engine, added := asked_of(folder, (5, 40, 1, 23), 12))
    assert replayed > 10
    assert engine.failures > 0
    assert engine.scheduler.preemptions > 0
    done = [sequence for sequence in added if len(sequence.tokens) == sequence.max_len]
    assert len(done) > 1, "the others ended with StepFailed, alone at fault"
    assert all(right(folder, sequence) for sequence in done)


def rows_of_another(self: StateMemory, slots: Sequence[int], padding: int) -> tuple[list[int], list[int]]:
    having, into = TRUE_ROWS(self, slots, padding)
    return having[1:] + having[:1], into


def never_kept(self: StateMemory, slots: Sequence[int], padding: int) -> tuple[list[int], list[int]]:
    rows = TRUE_ROWS(self, slots, padding)
    self.begin()
    return rows


TRUE_ROWS = StateMemory.step_rows


@pytest.mark.parametrize("fault", [rows_of_another, never_kept])
def test_control_a_capture_with_wrong_states_does_not_serve(
    fault: Callable[..., Any], lfm2: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared with the uncaptured step, in its logits and in the states that it leaves."""
    monkeypatch.setattr(StateMemory, "step_rows", fault)
    with pytest.raises(Uncapturable, match="differs from the step itself"):
        captured(lfm2, pages_of(lfm2))


def test_a_layer_whose_states_no_operator_takes_is_not_captured(
    lfm2: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a state would be that of the captured step's sequences in every replay."""
    mixer: Mixer = lfm2.mixers.each[0]  # type: ignore[union-attr]
    monkeypatch.setattr(mixer, "takes", frozenset())
    with pytest.raises(Uncapturable, match="no operator reads the conv state of layer"):
        captured(lfm2, pages_of(lfm2))


def test_a_forward_that_keeps_a_tensor_of_a_step_is_not_captured(
    lfm2: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replay would change it. The control: one that it makes in its first step, and keeps, is no part of a later
    one."""
    kept: list[torch.Tensor] = []
    hook = lfm2.module.get_input_embeddings().register_forward_hook(  # type: ignore[operator]
        lambda _module, _ids, out: kept.append(out * 2) if always or not kept else None
    )
    try:
        always = False
        captured(lfm2, pages_of(lfm2))
        always = True
        with pytest.raises(Uncapturable, match="the forward keeps 1 tensors of a step"):
            captured(lfm2, pages_of(lfm2))
    finally:
        hook.remove()


def test_what_another_thread_makes_during_a_step_is_not_kept_by_the_forward(lfm2: ModelRunner) -> None:
    """Workers of one process load at the same time."""
    others: list[torch.Tensor] = []

    def beside(*_: Any) -> None:
        thread = threading.Thread(target=lambda: others.append(torch.ones(2) * 2))
        thread.start()
        thread.join()

    hook = lfm2.module.get_input_embeddings().register_forward_hook(beside)  # type: ignore[operator]
    try:
        captured(lfm2, pages_of(lfm2))
    finally:
        hook.remove()
    assert len(others) > 3
