"""A block is announced only after the device has written it. On a stand-in: no GPU has run this yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import engine.engine
from engine.core.sequence import Sequence
from engine.engine import Engine, EngineConfig
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from tests.engine.stand_ins import Late

PROMPT, CHUNK = 40, 16


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=torch.device("cpu"))


def unwritten(model: ModelRunner, device: Late, *, handoff: bool) -> list[int]:
    """How many forwards the device is behind each time a prompt's progress is reported."""
    built = Engine(model, EngineConfig(num_blocks=32, block_size=4, token_budget=CHUNK, max_running=4))
    built.add(Sequence("prompt", list(range(PROMPT)), PROMPT, PROMPT + 1, handoff=handoff))
    behind = []
    while built.scheduler.has_work:
        [progress] = built.step()
        behind.append(device.behind)
        if progress.token is not None:
            break
    return behind


def test_a_chunk_of_a_handoff_is_told_after_it_was_written(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker reads its blocks as soon as they are announced, outside of the device's queue."""
    assert unwritten(model, Late(monkeypatch), handoff=True) == [0, 0, 0]


def test_a_chunk_that_stays_here_waits_for_nothing(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later steps follow it in the device's queue."""
    assert unwritten(model, Late(monkeypatch), handoff=False) == [1, 2, 0]


def test_control_without_waiting_unwritten_blocks_are_told(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in detects it."""
    device = Late(monkeypatch)
    monkeypatch.setattr(engine.engine, "device_done", lambda _: None)
    assert unwritten(model, device, handoff=True) == [1, 2, 0]
