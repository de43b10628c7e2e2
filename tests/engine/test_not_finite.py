"""A sequence whose KV or logits become non-finite ends, is not handed off, and affects no other sequence."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.core.block_pool import BlockPool
from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from tandem.errors import InternalError, TandemError
from tandem.sampling import Sampling

SIZE, NEW = 4, 12
FULL = 5  # blocks of a prompt


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=torch.device("cpu"))


def build(model: ModelRunner) -> Engine:
    return Engine(model, EngineConfig(num_blocks=64, block_size=SIZE, token_budget=64, max_running=8))


def sequence(name: str, seed: int, how: Sampling) -> Sequence:
    tokens = random.Random(seed).choices(range(384), k=FULL * SIZE + 1)
    return Sequence(name, tokens, len(tokens), len(tokens) + NEW, sampling=how)


def finish(engine: Engine) -> dict[str, TandemError]:
    """Runs to the end. The errors by sequence."""
    failed: dict[str, TandemError] = {}
    while engine.scheduler.has_work:
        failed |= {item.sequence.id: item.error for item in engine.step() if item.error}
    assert engine.pool.check(live=[]) == []
    return failed


def check_one_that_falls_ill(model: ModelRunner, how: Sampling, steps: int) -> None:
    engine = build(model)
    alone = [sequence(name, seed, how) for seed, name in enumerate(("ill", "well"))]
    for one in alone:
        engine.add(one)
        assert finish(engine) == {}
    expected = [one.tokens for one in alone]

    engine = build(model)
    ill, well = (sequence(name, seed, how) for seed, name in enumerate(("ill", "well")))
    engine.add(ill)
    engine.add(well)
    for _ in range(steps):
        engine.step()
    hashes = ill.hashes(SIZE)[:FULL]
    assert engine.pool.match(hashes) == FULL
    block = engine.pool.table("ill")[1]
    for of_call in (engine.pages.k[0], engine.pages.v[0]):  # [blocks, heads, tokens, dim]
        of_call[block] = math.nan
    failed = finish(engine)
    assert failed.keys() == {"ill"}
    assert isinstance(failed["ill"], InternalError)
    assert failed["ill"].reason == "LOGITS_NOT_FINITE"
    assert ill.tokens == expected[0][: len(ill.tokens)]
    assert well.tokens == expected[1]
    assert engine.pool.match(hashes) == 0
    again = sequence("again", 0, how)
    engine.add(again)
    assert finish(engine) == {}
    assert again.tokens == expected[0]


@pytest.mark.parametrize("how", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=4, logprobs=2)])
@pytest.mark.parametrize("steps", [1, 4])
def test_kv_that_is_no_number_ends_its_sequence_and_is_not_reused(
    model: ModelRunner, how: Sampling, steps: int
) -> None:
    """With its status; sequences in the same steps get the tokens they get alone, as does its prompt if sent again."""
    check_one_that_falls_ill(model, how, steps)


def test_control_ill_blocks_that_are_kept_are_found(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the protection the check above fails."""
    monkeypatch.setattr(BlockPool, "distrust", lambda pool, owner: None)
    with pytest.raises(AssertionError):
        check_one_that_falls_ill(model, Sampling(), 1)


def test_distrusted_blocks_are_not_published_by_a_sequence_that_joins_later(model: ModelRunner) -> None:
    """It reserved them while they were in the prefix cache, and its own KV arrives after they were distrusted."""
    engine = build(model)
    ill = sequence("ill", 0, Sampling())
    engine.add(ill)
    engine.step()
    hashes = ill.hashes(SIZE)[:FULL]
    late = sequence("late", 0, Sampling())
    engine.reserve(late, NEW)
    assert late.cached == FULL * SIZE
    block = engine.pool.table("ill")[1]
    for of_call in (engine.pages.k[0], engine.pages.v[0]):
        of_call[block] = math.nan
    while engine.scheduler.has_work:
        engine.step()
    assert engine.pool.match(hashes) == 0
    engine.join(late, 9)
    assert engine.pool.match(hashes) == 0
