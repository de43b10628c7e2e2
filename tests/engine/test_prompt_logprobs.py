"""Promises of prompt_logprobs in the engine: each prompt token but the first is scored once, however the prompt was
computed, with no more rows of logits in a step than reserved."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.engine
from engine.core.engine_config import EngineConfig
from engine.core.scheduler import EXTRA_LOGITS
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner.model_runner import ModelRunner
from tandem.errors import InternalError, TandemError
from tandem.sampling import Sampling

SIZE, TOP = 4, 2
ASKS = Sampling(prompt_logprobs=TOP)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=torch.device("cpu"))


def build(model: ModelRunner, budget: int = 512) -> Engine:
    return Engine(model, EngineConfig(num_blocks=400, block_size=SIZE, token_budget=budget, max_running=8))


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(384), k=length)


def finish(engine: Engine) -> None:
    while engine.scheduler.has_work:
        engine.step()
    assert engine.pool.check(live=[]) == []


def check(model: ModelRunner, one: Sequence) -> None:
    """Against one forward over the whole prompt."""
    tokens = one.tokens[: one.prompt_len]
    batch = pack([(tokens, 0, list(range(-(-len(tokens) // SIZE))))])
    batch.logits_at = list(range(len(tokens) - 1))
    expected = model.forward(model.allocate(400, SIZE), batch).log_softmax(-1)
    assert len(one.prompt_logprobs) == len(tokens) - 1
    for place, found in enumerate(one.prompt_logprobs):
        assert found.chosen == pytest.approx(float(expected[place, tokens[place + 1]]), abs=1e-4)
        assert found.top == pytest.approx(expected[place].topk(TOP).values.tolist(), abs=1e-4)
        assert found.top == pytest.approx(expected[place, found.top_ids].tolist(), abs=1e-4)


def test_long_prompts_are_scored_in_bounded_steps(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at once, in chunks, with streams that go on meanwhile: a step never needs more rows of logits than one
    for each sequence and the reserved ones."""
    rows: list[int] = []
    forward = model.forward

    def counted(pages: Any, batch: Any) -> torch.Tensor:
        rows.append(len(batch.logits_at))
        return forward(pages, batch)

    monkeypatch.setattr(model, "forward", counted)
    engine = build(model)
    stream = Sequence("stream", prompt(9), 9, 9 + 30)
    engine.add(stream)
    engine.step()
    work = [Sequence(f"s{n}", prompt(n, n), n, n + 3, sampling=ASKS) for n in (300, 7, 129, 128)]
    for one in work:
        engine.add(one)
    while any(one.generated == 0 for one in work):
        before = len(stream.tokens)
        engine.step()
        assert len(stream.tokens) == before + 1, "the stream advances in every step"
    finish(engine)
    assert max(rows) <= EXTRA_LOGITS + 8
    assert max(rows) > 100, "the limit must have mattered"
    for one in work:
        check(model, one)


def test_a_cached_prompt_is_computed_again(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block from the prefix cache has no logits, so none is used; a request without scores still uses it. With
    this check off, tokens go unscored."""
    engine = build(model)
    tokens = prompt(41)

    def ask(name: str, how: Sampling) -> Sequence:
        engine.add(one := Sequence(name, list(tokens), 41, 44, sampling=how))
        finish(engine)
        return one

    ask("first", Sampling())
    again = ask("again", ASKS)
    assert again.cached == 0
    check(model, again)
    assert ask("plain", Sampling()).cached == 40
    monkeypatch.setattr(Sequence, "reusable", lambda one, size: one.hashes(size)[: (len(one.tokens) - 1) // size])
    assert len(ask("unprotected", ASKS).prompt_logprobs) < 40


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_a_prompt_that_is_preempted_half_way_is_scored_once(model: ModelRunner, steps: int) -> None:
    """What was scored before is not scored again, and may come from the cache; the rest is."""
    engine = build(model, budget=11)
    engine.add(one := Sequence("s", prompt(70), 70, 78, sampling=ASKS))
    for _ in range(steps):
        engine.step()
    engine.scheduler.preempt(one)
    finish(engine)
    assert one.preemptions == 1
    check(model, one)


def scored_with(model: ModelRunner, monkeypatch: pytest.MonkeyPatch, bad: float, place: int, top: int) -> list[Any]:
    """The errors (or None) of two scored prompts in the same steps, when the logits after one's `place` have `bad`."""
    forward = model.forward

    def spoiled(pages: Any, batch: Any) -> torch.Tensor:
        logits = forward(pages, batch).clone()
        for row, at in enumerate(batch.logits_at):
            if batch.token_ids[at] == 383 and batch.positions[at] == place:
                logits[row, 9] = bad
        return logits

    monkeypatch.setattr(model, "forward", spoiled)
    engine = build(model, budget=48)
    how = Sampling(prompt_logprobs=top)
    ill, well = (Sequence(name, prompt(60, seed), 60, 63, sampling=how) for seed, name in enumerate(("ill", "well")))
    ill.tokens = [min(token, 382) for token in ill.tokens]
    well.tokens = [min(token, 382) for token in well.tokens]
    ill.tokens[place] = 383
    errors: dict[str, TandemError | None] = {"ill": None, "well": None}
    for one in (ill, well):
        engine.add(one)
    while engine.scheduler.has_work:
        errors |= {item.sequence.id: item.error for item in engine.step() if item.error}
    assert engine.pool.check(live=[]) == []
    monkeypatch.setattr(model, "forward", forward)
    assert len(well.prompt_logprobs) == 59
    assert all(math.isfinite(one.chosen) for one in well.prompt_logprobs)
    assert ill.generated == 0 or errors["ill"] is None
    return [errors["ill"], errors["well"]]


@pytest.mark.parametrize("place", [3, 58], ids=["in an early chunk", "in the last chunk"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("top", [0, 2])
def test_a_prompt_whose_scores_are_no_numbers_has_none(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch, bad: float, place: int, top: int
) -> None:
    """The request ends with a status, because JSON has no NaN, and its neighbour gets its scores. The control: without
    the test of the scores it ends well."""
    error, other = scored_with(model, monkeypatch, bad, place, top)
    assert isinstance(error, InternalError)
    assert error.reason == "LOGITS_NOT_FINITE"
    assert f"after {place + 1} tokens" in error.message
    assert other is None
    score = engine.engine.score_prompt
    monkeypatch.setattr(engine.engine, "score_prompt", lambda *given: [score(*given), None][1])
    assert scored_with(model, monkeypatch, bad, place, top) == [None, None]
