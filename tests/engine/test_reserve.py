"""Blocks that a decode worker reserves for newcomers, beside the streams that it has."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.core.engine_config import EngineConfig
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from tandem.errors import Busy, TooLarge

SIZE = 4


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=torch.device("cpu"), block_size=SIZE)


@pytest.mark.parametrize("kept", [True, False])
def test_newcomers_leave_a_preempted_stream_the_blocks_that_it_waits_for(
    kept: bool, model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is always another one, and each takes the few blocks that the one before it has given up. In the control
    the long stream never runs again."""
    if not kept:
        monkeypatch.setattr(Scheduler, "may_reserve", lambda self, blocks: True)
    engine = Engine(model, EngineConfig(num_blocks=60, block_size=SIZE, token_budget=64, max_running=8))
    rng, newcomers = random.Random(1), 0

    def begin(name: str, prompt: int, new: int, ahead: int) -> Sequence:
        sequence = Sequence(name, rng.choices(range(5, 380), k=prompt), prompt, prompt + new)
        engine.reserve(sequence, ahead, arrives=False)
        engine.join(sequence, None)
        return sequence

    begin("old", 60, 60, 8)
    engine.step()
    long = begin("long", 120, 100, 8)
    for _ in range(600):
        engine.step()
        try:
            while True:
                begin(f"new{newcomers}", 20, 30, 30)
                newcomers += 1
        except Busy:
            assert engine.check(live=engine.sequences) == []
    assert long.preemptions > 0
    assert (len(long.tokens) == long.max_len) == kept
    assert newcomers > 20


@pytest.mark.parametrize("way", ["add", "reserve"])
@pytest.mark.parametrize("blocks", [400, 6], ids=["as the setting says", "as the pool holds"])
def test_a_sequence_is_no_longer_than_the_worker_takes(
    checkpoint: Callable[[str], Path], way: str, blocks: int
) -> None:
    """What was measured, tried and captured is up to `max_model_len`, whatever the pool would hold; other workers of a
    cluster may have more. The control: one token less is served."""
    path, cpu = str(checkpoint("tiny-llama")), torch.device("cpu")
    short = load_model(path, dtype=torch.float32, device=cpu, block_size=SIZE, max_model_len=64)
    engine = Engine(short, EngineConfig(num_blocks=blocks, block_size=SIZE, token_budget=64, max_running=8))
    most = min(64, blocks * SIZE)

    def begin(name: str, length: int) -> None:
        sequence = Sequence(name, [5] * 9, 9, length)
        engine.add(sequence) if way == "add" else engine.reserve(sequence, 4, arrives=False)

    with pytest.raises(TooLarge, match=f"this worker takes {most}") as caught:
        begin("long", most + 1)
    assert (caught.value.reason, caught.value.bound) == ("TOO_LARGE", f"prompt + max_tokens <= {most}")
    assert engine.sequences == {}
    begin("short", most)
    assert engine.sequences.keys() == {"short"}
