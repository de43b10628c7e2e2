"""Models with sparse indexers: each token attends to those that its indexer chooses among the tokens of its own
sequence, whatever else a step computes, however its prompt is cut, and wherever its blocks have come from.

The checkpoints choose 8 tokens, and prompts are longer: with fewer tokens, sparse attention is dense attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import builder
from engine.attention import paged
from engine.core.engine_config import EngineConfig
from engine.core.kv_layout import KvLayout
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.kv.kv_converter import KvConverter
from engine.loading import index_probe, model_loader, self_check
from engine.loading.model_loader import load_model
from engine.runner import captured_steps, indexers, traced_forward
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import SPARSE, make_checkpoint
from tandem.errors import CheckpointRefused, SettingsError
from tandem.settings import Settings
from tests.engine.test_speculative import Oracle, speculation
from tests.support import oracle
from tests.support.engine_runs import asked, asked_of, run

Checkpoint = Callable[[str], Path]
CPU = torch.device("cpu")
EXACT = 5e-5  # standard deviations of the logits
LENGTHS, NEW, SIZE = (5, 40, 1, 23), 12, 4


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> ModelRunner:
    return load_model(str(folder), dtype=dtype, device=CPU, max_model_len=256, block_size=SIZE, **options)


@pytest.fixture(scope="module")
def loaded(checkpoint: Checkpoint) -> Callable[[str], ModelRunner]:
    models: dict[str, ModelRunner] = {}

    def get(family: str) -> ModelRunner:
        if family not in models:
            models[family] = load(checkpoint(f"tiny-{family}"))
        return models[family]

    return get


@pytest.fixture
def model(loaded: Callable[[str], ModelRunner]) -> ModelRunner:
    return loaded("deepseek-v32")


@pytest.fixture
def folder(checkpoint: Checkpoint) -> Path:
    return checkpoint("tiny-deepseek-v32")


def right(folder: Path, sequence: Sequence) -> bool:
    """Whether its tokens are those of transformers, step by step: among tokens of equal scores its own indexer may
    choose others without a cache."""
    prompt, new = sequence.tokens[: sequence.prompt_len], sequence.max_len - sequence.prompt_len
    return sequence.tokens[sequence.prompt_len :] == oracle.generated(folder, prompt, new)


def engine_of(model: ModelRunner, *, blocks: int = 200, size: int = SIZE, **more: Any) -> Engine:
    return Engine(model, EngineConfig(num_blocks=blocks, block_size=size, token_budget=16, max_running=4), **more)


@pytest.mark.parametrize("family", SPARSE)
def test_tokens_equal_transformers(family: str, checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner]) -> None:
    """Four prompts in one engine, in chunks beside streams, over blocks that others had before; and the logits. Layers
    without an indexer of their own attend to what another layer's has chosen."""
    folder, model = checkpoint(f"tiny-{family}"), loaded(family)
    assert model.indexers is not None
    assert len(model.indexers.each) == (4 if family == "deepseek-v32" else 2)
    assert all(fact.indexed for fact in model.facts)
    engine = engine_of(model, blocks=40)
    for _ in range(2):
        run(engine, added := asked_of(folder, LENGTHS, NEW))
        assert all(right(folder, sequence) for sequence in added)
    assert self_check.run(model).gap < EXACT


def test_a_long_prompt_is_scored_in_parts(folder: Path, model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the scores of a chunk take bounded memory: one to five rows at a time here."""
    monkeypatch.setattr(indexers, "SCORES", 40)
    run(engine_of(model), added := asked_of(folder, LENGTHS, NEW))
    assert all(right(folder, sequence) for sequence in added)
    assert self_check.run(model).gap < EXACT


def test_latents_are_expanded_for_one_sequence_at_a_time(
    folder: Path, model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of many long streams together would take more memory than the start has measured."""
    sizes, attend_dense = list[int](), paged.attend_dense

    def counted(q: torch.Tensor, k: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(len(k))
        return attend_dense(q, k, *others)

    monkeypatch.setattr(paged, "attend_dense", counted)
    run(engine_of(model), added := asked_of(folder, LENGTHS, NEW))
    assert all(right(folder, sequence) for sequence in added)
    assert set(sizes) == {1}


def test_preempted_sequences_compute_their_keys_again(folder: Path, model: ModelRunner) -> None:
    """Blocks for two at a time."""
    engine = engine_of(model, blocks=19)
    run(engine, added := asked_of(folder, LENGTHS, NEW))
    assert engine.scheduler.preemptions > 0
    assert all(right(folder, sequence) for sequence in added)


@pytest.mark.parametrize("family", SPARSE)
def test_a_cached_beginning_brings_its_keys(
    family: str, checkpoint: Checkpoint, loaded: Callable[[str], ModelRunner]
) -> None:
    """All full blocks of a prompt that begins like an earlier one."""
    folder, engine = checkpoint(f"tiny-{family}"), engine_of(loaded(family))
    first, other = oracle.prompts(folder, [61, 9])
    run(engine, [asked("first", first, NEW)])
    run(engine, [second := asked("second", first[:45] + other, NEW)])
    assert second.cached == 44
    assert right(folder, second)


def test_drafts_that_are_rejected_leave_no_key(folder: Path, model: ModelRunner) -> None:
    """Of four that are verified in a step, a third is wrong: the keys after it are written again."""
    prompts = oracle.prompts(folder, list(LENGTHS))
    drafts = Oracle([prompt + oracle.generated(folder, prompt, NEW) for prompt in prompts], wrong=0.3)
    engine = engine_of(model, speculation=speculation(drafts))
    run(engine, added := asked_of(folder, LENGTHS, NEW))
    assert all(right(folder, sequence) for sequence in added)
    drafted, accepted = (sum(getattr(each, name) for each in added) for name in ("drafted", "accepted"))
    assert drafted > accepted > 0


def harmed(model: ModelRunner, monkeypatch: pytest.MonkeyPatch, fault: str) -> float:
    """The gap of the self-check with a fault in what an indexer sees, or in what attention makes of it."""
    update = indexers.IndexKeys.update_indexer

    def faulty(self: Any, keys: torch.Tensor, layer: int) -> torch.Tensor:
        batch, place = self._step.batch, self._sequence
        if fault == "another sequence's keys" and len(batch.block_tables) > 1:
            own = batch.block_tables
            batch.block_tables = own[1:] + own[:1]
            short = min(len(batch.block_tables[place]), len(own[place]))
            batch.block_tables[place] = batch.block_tables[place][:short] + own[place][short:]
            try:
                return update(self, keys, layer)
            finally:
                batch.block_tables = own
        found = update(self, keys, layer)
        if fault == "keys one token late":
            return found.roll(1, dims=1)
        if fault == "earlier keys are forgotten":
            found[:, : -keys.shape[1]] = 0
        return found

    if fault == "the top-k is ignored":
        monkeypatch.setattr("engine.attention.paged.chosen", lambda *args: dense(*args))
    else:
        monkeypatch.setattr(indexers.IndexKeys, "update_indexer", faulty)
    return self_check.run(model).gap


def dense(
    _indices: torch.Tensor, rows: torch.Tensor, keys: int, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    seen = torch.ones(*rows.shape, keys, dtype=torch.bool).unsqueeze(1)
    return seen & mask if mask is not None else seen.tril() if causal else seen


FAULTS = ("another sequence's keys", "keys one token late", "earlier keys are forgotten", "the top-k is ignored")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", SPARSE)
def test_control_a_wrong_choice_shows_in_the_logits(
    family: str, fault: str, loaded: Callable[[str], ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By far more than what is served as exact."""
    assert not harmed(loaded(family), monkeypatch, fault) < 1000 * EXACT


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_at_load_reaches_beyond_a_top_k_that_no_prompt_of_it_has(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2,048 tokens, as models have it, the same faults are noticed, because the check lowers it; afterwards it is
    what it was. In the control, without that, none of them is."""
    model = load(make_checkpoint(tmp_path, "tiny-deepseek-v32", dtype="float32", index_topk=2048))
    assert model.indexers is not None
    assert not harmed(model, monkeypatch, fault) < 1000 * EXACT
    assert all(getattr(each.module, indexers.TOP_K) == 2048 for each in model.indexers.each)
    monkeypatch.setattr(self_check, "CHOSEN", 2048)
    assert self_check.run(model).gap < EXACT


def test_a_wrong_choice_refuses_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of its indexer, before the self-check: alone, in pieces, it chooses other tokens than at once."""
    update = indexers.IndexKeys.update_indexer
    monkeypatch.setattr(indexers.IndexKeys, "update_indexer", lambda *given: update(*given).roll(1, dims=1))
    with pytest.raises(CheckpointRefused, match=r"layers\.0\.self_attn\.indexer .* chooses other tokens in pieces"):
        load(folder)


def test_scores_that_are_equal_refuse_the_model(tmp_path: Path) -> None:
    """With two heads, both of them give many tokens the score 0. Which of these are chosen is left to `topk`, and
    transformers itself gives other logits with a cache than without."""
    folder = make_checkpoint(tmp_path, "tiny-deepseek-v32", dtype="float32", index_n_heads=2)
    with pytest.raises(CheckpointRefused, match=r"(?s)self-check .* may give several tokens the same score"):
        load(folder)
    theirs = oracle._model(str(folder))
    (tokens,) = oracle.prompts(folder, [40])
    with torch.inference_mode():
        first: Any = theirs(torch.tensor([tokens[:24]]), use_cache=True)
        rest: Any = theirs(torch.tensor([tokens[24:]]), past_key_values=first.past_key_values)
    whole = oracle.logits(folder, tokens)[24:]
    assert ((rest.logits[0] - whole).abs().amax(-1) / whole.std(-1)).max() > 1000 * EXACT


def test_an_indexer_whose_top_k_is_not_known_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No check at load could reach beyond it."""
    monkeypatch.setattr(index_probe, "TOP_K", "another_name")
    with pytest.raises(CheckpointRefused, match="has no another_name, so no check can show"):
        load(folder)


def test_what_is_not_served_with_indexers_is_refused(
    folder: Path, model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised KV, adapters, several ranks, a GPU, an order of sums: each by the name of the setting."""
    with pytest.raises(SettingsError, match="sparse indexers, with which KV in int8 cannot be served yet") as refused:
        load(folder, kv_dtype="int8")
    assert (refused.value.field, refused.value.bound) == ("kv_dtype", "auto for this model")
    with pytest.raises(SettingsError, match="with which adapters cannot"):
        load(folder, later_rank=4)
    group: Any = object()
    with pytest.raises(SettingsError, match="with which several ranks cannot"):
        model_loader._check_settings(model.module, True, CPU, "auto", group, False)
    with pytest.raises(SettingsError, match="with which a device of type cuda cannot"):
        model_loader._check_settings(model.module, True, torch.device("cuda"), "auto", None, False)
    wanted: dict[str, Any] = {"model": str(folder), "device": "cpu", "dtype": "float32"}
    with pytest.raises(SettingsError, match="has sparse indexers, whose sums no setting orders"):
        builder._check_order(Settings(**wanted, sum_order="tile32"), model)


def test_a_forward_with_indexers_is_neither_recorded_nor_captured(model: ModelRunner) -> None:
    """It takes the sequences of a step apart, by lists that a recording does not have."""
    assert model.recorded is None
    assert traced_forward.install(model) == "by modules, because sparse indexers take the sequences of a step apart"
    with pytest.raises(captured_steps.Uncapturable, match="sparse indexers"):
        captured_steps.capture_for(model)


def test_in_bfloat16_the_check_runs_on_a_float32_copy(folder: Path) -> None:
    """And the keys lie in pages of the model's type."""
    model = load(folder, torch.bfloat16)
    assert {keys.dtype for keys in model.allocate(3).index_keys} == {torch.bfloat16}
    assert self_check.run(model).gap < EXACT


def test_keys_are_part_of_the_block_and_of_the_layout(model: ModelRunner) -> None:
    """Four regions of one key a token, behind all K and V, in the bytes of a block and in the hash."""
    pages = model.allocate(3)
    layout = pages.layout
    assert [tuple(keys.shape) for keys in pages.index_keys] == [(3, SIZE, 1, 16)] * 4
    assert len(layout.calls) == len(model.facts) + 4
    before = pages.buffer.clone()
    for keys in pages.index_keys:
        keys[1].view(torch.uint8).fill_(255)
    changed = (pages.buffer != before).nonzero()
    assert set(changed[:, 0].tolist()) == {1}
    assert len(changed) == 4 * SIZE * 16 * 4
    last = layout.calls[len(model.facts) - 1]
    assert changed[:, 1].min() >= last.v_offset + SIZE * last.v_dim * 4
    assert KvLayout.from_json(layout.to_json()) == layout
    indexed, model.indexers = model.indexers, None
    try:
        dense_layout = model.layout()
    finally:
        model.indexers = indexed
    assert dense_layout.block_bytes == layout.block_bytes - 4 * SIZE * 16 * 4
    assert dense_layout.hash() != layout.hash()
    assert layout.differences(dense_layout)


@pytest.mark.parametrize(("theirs", "ours"), [(4, 4), (8, 4), (3, 7)])
def test_tokens_go_on_from_blocks_of_another_worker(folder: Path, model: ModelRunner, theirs: int, ours: int) -> None:
    """Copied as a handoff copies them, or converted to blocks of another size; the keys go with K and V."""
    assert follows(folder, model, theirs, ours, keys=True)


def test_control_keys_that_do_not_arrive_give_other_tokens(folder: Path, model: ModelRunner) -> None:
    """With K and V alone, tokens attend to others."""
    assert not follows(folder, model, 4, 4, keys=False)


def follows(folder: Path, model: ModelRunner, theirs: int, ours: int, *, keys: bool) -> bool:
    """Whether the tokens after a prompt are right, of which another worker has computed all but the last token."""
    (prompt,) = oracle.prompts(folder, [50])
    done, blocks = len(prompt) - 1, -(-60 // min(theirs, ours))
    source, target = model.allocate(blocks, theirs), model.allocate(blocks, ours)
    tables = [list(range(blocks))[::-1], [(7 * at + 3) % blocks for at in range(blocks)]]
    assert len(set(tables[1])) == blocks
    model.forward(source, self_check.pack([(prompt[:done], 0, tables[0])]))
    used = -(-done // theirs)
    converter = KvConverter(source.layout, used, target)
    converter.staging.buffer.copy_(source.buffer[tables[0][:used]])
    if theirs == ours:
        target.buffer[tables[1][:used]] = converter.staging.buffer
    else:
        converter.convert([(at, at) for at in range(used)], tables[1], range(done))
    if not keys:
        for view in target.index_keys:
            view.zero_()
    tokens = list(prompt)
    while len(tokens) < len(prompt) + 8:
        logits = model.forward(target, self_check.pack([(tokens, len(tokens) - 1, tables[1])]))
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :] == oracle.generated(folder, prompt, 8)


def test_a_block_that_is_used_again_shows_nothing_of_its_last_keys(folder: Path, model: ModelRunner) -> None:
    """NaN in every byte that is not the sequence's own."""
    (prompt,) = oracle.prompts(folder, [26])
    pages, table = model.allocate(12), [9, 2, 7, 4, 0, 5, 8]
    clean = model.forward(pages, self_check.pack([(prompt, 0, table)]))
    for views in (pages.k, pages.v):
        for view in views:
            view.fill_(float("nan"))
    assert torch.equal(model.forward(pages, self_check.pack([(prompt, 0, table)])), clean)
