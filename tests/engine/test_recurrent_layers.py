"""Models with recurrent layers: each sequence's state is its own, whatever else a step computes and however its prompt
is cut. Greedy tokens of tiny models may hide a wrong state, so logits are compared, too."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import builder, kernels
from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.kv.kv_cache import KvCache
from engine.kv.state_memory import StateMemory
from engine.loading import model_loader, self_check
from engine.loading.model_loader import load_model
from engine.runner import mixers, recurrences
from engine.runner.model_runner import ModelRunner
from engine.runner.sequence_states import SequenceStates
from loadtest.harness.random_checkpoints import HYBRID
from tandem.errors import Busy, CheckpointRefused, SettingsError, TooLarge
from tandem.settings import Settings
from tests.support import oracle
from tests.support.engine_runs import asked_of, right, run

Checkpoint = Callable[[str], Path]
CPU = torch.device("cpu")
EXACT = 1e-4  # standard deviations of the logits; float32 roundings: up to 5.2e-5, of Qwen3-Next on a Zen 4
LENGTHS, NEW, SIZE = (5, 40, 1, 23), 12, 4
ONE_OF_EACH = ("qwen3-next", "falcon-h1", "lfm2", "jamba")  # gated delta rule, Mamba-2, convolution, Mamba-1


def load(folder: Path, **options: Any) -> ModelRunner:
    return load_model(str(folder), dtype=torch.float32, device=CPU, max_model_len=256, block_size=SIZE, **options)


@pytest.fixture(scope="module")
def loaded(checkpoint: Checkpoint) -> Callable[[str], ModelRunner]:
    models: dict[str, ModelRunner] = {}

    def get(family: str) -> ModelRunner:
        if family not in models:
            models[family] = load(checkpoint(f"tiny-{family}"))
        return models[family]

    return get


def engine_of(model: ModelRunner, *, blocks: int = 200, budget: int = 16) -> Engine:
    return Engine(model, EngineConfig(num_blocks=blocks, block_size=SIZE, token_budget=budget, max_running=4))


@pytest.mark.parametrize("family", HYBRID)
def test_tokens_equal_transformers(
    family: str, checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts in one engine, in chunks beside streams, over slots that were used before; and the logits."""
    folder, model = checkpoint(f"tiny-{family}"), loaded(family)
    engine = engine_of(model)
    for _ in range(2):
        run(engine, added := asked_of(folder, LENGTHS, NEW))
        assert all(right(folder, sequence) for sequence in added)
    assert self_check.run(model).gap < EXACT
    alone = family == "jamba" and kernels.serving(CPU) == kernels.REFERENCE
    assert all(mixer.by_token == alone for mixer in model.mixers.each)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_preempted_sequences_begin_anew(
    family: str, checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner]
) -> None:
    """Blocks for two at a time: the youngest lose blocks and slot, and compute both again."""
    folder = checkpoint(f"tiny-{family}")
    model = loaded(family)
    engine = engine_of(model, blocks=max(21, 13 + model.layout(SIZE).state_blocks))
    run(engine, added := asked_of(folder, LENGTHS, NEW))
    assert engine.scheduler.preemptions > 0
    assert all(right(folder, sequence) for sequence in added)


def test_a_failed_step_leaves_every_state_as_it_was(
    checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps fail after some of their layers have new states, and are tried again."""
    folder, model = checkpoint("tiny-qwen3-next"), loaded("qwen3-next")
    forward, failing = ModelRunner.by_modules, random.Random(0)

    def fails(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        if failing.random() < 0.3:
            raise RuntimeError("injected, after the last layer")
        return logits

    monkeypatch.setattr(ModelRunner, "by_modules", fails)
    engine = engine_of(model)
    run(engine, added := asked_of(folder, LENGTHS, NEW))
    assert engine.failures >= 3
    done = [sequence for sequence in added if len(sequence.tokens) == sequence.max_len]
    assert len(done) > 1, "the others ended with StepFailed, alone at fault"
    assert all(right(folder, sequence) for sequence in done)


def test_control_states_that_are_kept_at_once_are_wrong_after_a_failed_step(
    checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with what a failed step has left as the slots' states."""
    monkeypatch.setattr(StateMemory, "begin", StateMemory.commit)
    with pytest.raises(AssertionError):
        test_a_failed_step_leaves_every_state_as_it_was(checkpoint, loaded, monkeypatch)


def harmed(model: ModelRunner, monkeypatch: pytest.MonkeyPatch, fault: str) -> float:
    """The gap of the self-check with a fault in the slots."""
    calls = mixers._calls

    def faulty(batch: Any, by_token: bool, device: torch.device) -> Any:
        for rows, slots, previous in calls(batch, by_token, device):
            if fault == "one slot for all":
                yield rows, [0 for _ in slots], previous
            elif fault == "a stale slot is continued":
                yield rows, slots, True
            elif fault == "the state is forgotten":
                yield rows, slots, False

    if fault == "one token early":
        commit, newest = StateMemory.commit, dict[tuple[int, int], torch.Tensor]()

        def late(self: StateMemory) -> None:
            commit(self)
            for slot in range(self.slots):
                state = self.row(slot).clone()
                self.row(slot).copy_(newest.get((id(self), slot), state))
                newest[id(self), slot] = state

        monkeypatch.setattr(StateMemory, "commit", late)
    else:
        monkeypatch.setattr(mixers, "_calls", faulty)
    return self_check.run(model).gap


FAULTS = ("one slot for all", "a stale slot is continued", "the state is forgotten", "one token early")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_control_a_wrong_state_shows_in_the_logits(
    family: str, fault: str, loaded: Callable[[str], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By far more than what is served as exact."""
    assert not harmed(loaded(family), monkeypatch, fault) < 100 * EXACT


def test_control_without_the_proof_mamba_1_in_chunks_is_wrong(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own code, which the proof gives one token at a time: in chunks the logits are a bit off."""
    monkeypatch.setattr(recurrences, "OPERATORS", {})
    model = load(checkpoint("tiny-jamba"))
    assert model.mixers is not None
    assert all(mixer.by_token for mixer in model.mixers.each)
    assert self_check.run(model).gap < EXACT
    for mixer in model.mixers.each:
        mixer.by_token = False
    assert self_check.run(model).gap > 100 * EXACT


def test_what_is_not_served_beside_recurrent_layers_is_refused(checkpoint: Checkpoint) -> None:
    """Adapters and several ranks, by a sentence that says why. The control: a GPU is not refused."""
    with pytest.raises(SettingsError, match="recurrent layers, with which adapters"):
        load(checkpoint("tiny-lfm2"), later_rank=4)
    group: Any = object()
    module: Any = load(checkpoint("tiny-lfm2")).module
    with pytest.raises(SettingsError, match="recurrent layers, with which several ranks"):
        model_loader._check_settings(module, False, torch.device("cpu"), "auto", group, False)
    model_loader._check_settings(module, False, torch.device("cuda"), "auto", None, False)


def test_an_order_of_sums_that_recurrent_layers_do_not_have_is_refused(
    checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner]
) -> None:
    """One that the products have, and not the other layers: by name, with what to do. Without the setting the model is
    served, and one whose layers give the same bits in any step is served with it."""
    if (order := kernels.sum_order(CPU, torch.float32)) == kernels.PLAIN:
        pytest.skip("the compiled operators are not built, so there is no order to ask for")
    asked: dict[str, Any] = {"model": str(checkpoint("tiny-nemotron-h")), "device": "cpu", "dtype": "float32"}
    with pytest.raises(SettingsError, match=f"sum_order is {order}, and .* has recurrent layers.*leave") as refused:
        builder.build_engine(Settings(**asked, sum_order=order), lambda _: None)
    assert (refused.value.field, refused.value.bound) == ("sum_order", "fastest")
    builder._check_order(Settings(**asked), loaded("nemotron-h"))
    builder._check_order(Settings(**asked, sum_order=order), loaded("lfm2"))
    # In float32 the orders of bfloat16 are one, which has a name of its own; several ranks add theirs.
    other: Any = SimpleNamespace(mixers=None, indexers=None, sum_order="chain16x2")
    builder._check_order(Settings(**asked, sum_order="tile32"), other)


def test_quantised_kv_beside_states(checkpoint: Checkpoint) -> None:
    """K and V of the attention layers in int8: the paged path still equals eager attention over the stored values."""
    model = load(checkpoint("tiny-qwen3-5"), kv_dtype="int8")
    report = self_check.run(model)
    assert report.gap < EXACT
    assert report.kept_gap < EXACT


def test_a_mixer_that_never_continues_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name: a state that it never reads back."""
    kept = mixers.SlotStates.__init__
    monkeypatch.setattr(mixers.SlotStates, "__init__", lambda self, memory, slots, *_: kept(self, memory, slots, False))
    with pytest.raises(CheckpointRefused, match=r"model\.layers\.0\.conv \(Lfm2ShortConv\) does not continue from its"):
        load(checkpoint("tiny-lfm2"))


def again(engine: Engine, folder: Path, shared: int, more: int) -> Sequence:
    """Runs a prompt of 61 tokens, then one with `shared` of them and `more` others; returns that."""
    first, other = oracle.prompts(folder, [61, more])
    run(engine, [Sequence(id="first", tokens=list(first), prompt_len=61, max_len=61 + NEW)])
    prompt = first[:shared] + other
    second = Sequence(id="second", tokens=prompt, prompt_len=len(prompt), max_len=len(prompt) + NEW)
    run(engine, [second])
    return second


@pytest.mark.parametrize("family", ONE_OF_EACH)
@pytest.mark.parametrize("shared", [61, 60, 35])
def test_a_cached_beginning_is_reused_up_to_its_deepest_snapshot(
    family: str, shared: int, checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner]
) -> None:
    """At the end of the last full block of the earlier prompt, or at a regular place before; the tokens are those
    without a cache, also when the snapshot is used again after its sequence went on from a copy."""
    folder, model = checkpoint(f"tiny-{family}"), loaded(family)
    engine = engine_of(model, blocks=400)
    second = again(engine, folder, shared, 9)
    interval = 4 * model.layout(SIZE).state_blocks * SIZE
    assert second.cached == (60 if shared >= 60 else shared // SIZE * SIZE // interval * interval)
    assert right(folder, second)
    third = Sequence(id="third", tokens=second.tokens[:-NEW], prompt_len=shared + 9, max_len=shared + 9 + NEW)
    run(engine, [third])
    assert third.cached == (shared + 8) // SIZE * SIZE
    assert right(folder, third)


def test_control_kv_that_is_reused_beyond_the_snapshot_gives_wrong_logits(
    checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks that match, with the state of fewer tokens: what others' prefix caches do to hybrid models."""
    folder = checkpoint("tiny-qwen3-next")
    resume = SequenceStates.resume

    def deeper(self: SequenceStates, sequence: Sequence, blocks: int) -> list[bytes] | None:
        found = resume(self, sequence, blocks)
        return sequence.reusable(SIZE)[: self._pool.match(sequence.reusable(SIZE))] if found else found

    monkeypatch.setattr(SequenceStates, "resume", deeper)
    assert not right(folder, again(engine_of(loaded("qwen3-next"), blocks=400), folder, 55, 5))


def test_snapshots_stay_within_their_share_and_the_ledger_balances(
    checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner]
) -> None:
    """Of a small pool, over many prompts; those that were used least recently go first."""
    folder, model = checkpoint("tiny-qwen3-next"), loaded("qwen3-next")
    engine = engine_of(model, blocks=48)
    states = engine.states
    assert states is not None
    for number, prompt in enumerate(oracle.prompts(folder, [30] * 12)):
        run(engine, [Sequence(id=f"s{number}", tokens=list(prompt), prompt_len=30, max_len=32)])
        assert 0 < len(states._snapshots) <= 48 // 4 // states.blocks
    assert engine.pool.free + engine.pool.cached == 48


def served_between(engine: Engine, folder: Path, others: int) -> int:
    """The least cached tokens of a prompt that comes again after each of so many others."""
    cached: list[int] = []
    kept, *rest = oracle.prompts(folder, [29] * (1 + others))
    for number, prompt in enumerate(rest):
        run(engine, [Sequence(id=f"s{number}", tokens=list(prompt), prompt_len=29, max_len=30)])
        one = Sequence(id=f"k{number}", tokens=list(kept), prompt_len=29, max_len=30)
        run(engine, [one])
        cached.append(one.cached)
    return min(cached[1:])


def test_a_snapshot_that_is_used_is_not_evicted_before_others(
    checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the pool is full of other prompts' blocks; in the control, where reading one is no use of it, it is."""
    folder, model = checkpoint("tiny-qwen3-next"), loaded("qwen3-next")
    engine = engine_of(model, blocks=36)
    assert served_between(engine, folder, 12) == 28
    assert engine.states is not None
    assert engine.states.evictions > 0

    def only_read(self: SequenceStates, digest: bytes, sequence: Sequence) -> None:
        self.load(sequence.id, self._pool.find(self._snapshots[digest]) or ())

    monkeypatch.setattr(SequenceStates, "_begin_with", only_read)
    assert served_between(engine_of(model, blocks=36), folder, 12) < 28


@pytest.mark.parametrize("reserves", [False, True])
def test_one_that_waits_for_blocks_copies_its_snapshot_when_it_gets_them(
    reserves: bool, checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and not in each step or attempt in which the pool has no room for it; its tokens are right."""
    folder, model = checkpoint("tiny-qwen3-next"), loaded("qwen3-next")
    engine = engine_of(model)
    (prompt,) = oracle.prompts(folder, [150])
    run(engine, [Sequence(id="before", tokens=prompt[:29], prompt_len=29, max_len=30)])
    engine.pool.take("another", [], engine.pool.free)
    copies: list[int] = []
    load_state = KvCache.load_state
    monkeypatch.setattr(KvCache, "load_state", lambda self, *to: copies.append(1) or load_state(self, *to))
    one = Sequence(id="one", tokens=list(prompt), prompt_len=150, max_len=150 + NEW)
    if not reserves:
        engine.add(one)
    for _ in range(5):
        if reserves:
            with pytest.raises(Busy):
                engine.reserve(one, ahead=NEW, arrives=False)
        engine.step()
    assert copies == []
    engine.pool.drop("another")
    if reserves:
        engine.reserve(one, ahead=NEW, arrives=False)
        engine.join(one, None)
    run(engine, [])
    assert copies == [1]
    assert one.cached == 28
    assert right(folder, one)


def test_a_state_in_doubt_is_forgotten(checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner]) -> None:
    """With the KV of its sequence: whoever comes with the same prompt begins at the first token."""
    folder, model = checkpoint("tiny-qwen3-next"), loaded("qwen3-next")
    engine = engine_of(model)
    (prompt,) = oracle.prompts(folder, [30])
    one = Sequence(id="one", tokens=list(prompt), prompt_len=30, max_len=30 + NEW)
    engine.add(one)
    while one.num_computed < 29:
        engine.step()
    engine._distrust(one)
    engine.drop("one")
    two = Sequence(id="two", tokens=list(prompt), prompt_len=30, max_len=30 + NEW)
    run(engine, [two])
    assert two.cached == 0
    assert right(folder, two)


def test_a_pool_that_does_not_hold_one_state_is_refused(
    checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner]
) -> None:
    """When the engine is made, with the number of blocks that it needs at least."""
    model = loaded("falcon-h1")
    needed = model.layout(SIZE).state_blocks
    with pytest.raises(TooLarge, match=f"needs {needed} blocks"):
        engine_of(model, blocks=needed)
