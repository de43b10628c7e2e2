"""A block is announced only after the device has written it. On a stand-in: no GPU has run this yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import engine.engine
from engine.attention.forward_context import device_done
from engine.core.block_pool import BlockPool
from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from tandem.errors import StepFailed
from tests.engine.stand_ins import Late

PROMPT, CHUNK = 40, 16


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=torch.device("cpu"))


def unwritten(
    model: ModelRunner, device: Late, patch: pytest.MonkeyPatch, *, handoff: bool
) -> tuple[list[int], list[int]]:
    """How many forwards the device is behind each time a block is published, and each time that a prompt's progress is
    reported."""
    published: list[int] = []
    publish = BlockPool.publish
    patch.setattr(
        BlockPool, "publish", lambda *given, **named: (published.append(device.behind), publish(*given, **named))[1]
    )
    built = Engine(model, EngineConfig(num_blocks=32, block_size=4, token_budget=CHUNK, max_running=4))
    built.add(Sequence("prompt", list(range(PROMPT)), PROMPT, PROMPT + 1, handoff=handoff))
    behind = []
    while built.scheduler.has_work:
        [progress] = built.step()
        behind.append(device.behind)
        if progress.token is not None:
            break
    return published, behind


@pytest.mark.parametrize("handoff", [True, False])
def test_a_block_is_told_after_it_was_written(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch, handoff: bool
) -> None:
    """Another worker reads the blocks of a handoff as soon as they are announced, outside of the device's queue. The
    blocks of another prompt may be freed at once, and a transfer then writes to them, outside of the queue as well."""
    published, behind = unwritten(model, Late(monkeypatch), monkeypatch, handoff=handoff)
    assert published == [0] * 10
    assert behind == [0, 0, 0]


def test_control_without_waiting_unwritten_blocks_are_told(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in detects it, in both places."""
    device = Late(monkeypatch)
    monkeypatch.setattr(engine.engine, "device_done", lambda _: None)
    assert unwritten(model, device, monkeypatch, handoff=True) == ([1] * 4 + [2] * 4 + [0] * 2, [1, 2, 0])


def test_a_step_whose_device_fails_publishes_nothing(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's error shows where the host waits for it: no block of that step was told to be good."""
    built = Engine(model, EngineConfig(num_blocks=32, block_size=4, token_budget=CHUNK, max_running=4))
    built.add(Sequence("prompt", list(range(PROMPT)), PROMPT, PROMPT + 1))
    published: list[int] = []
    monkeypatch.setattr(BlockPool, "publish", lambda _self, _owner, index, _hash: published.append(index))

    def fails(_: torch.device) -> None:
        raise RuntimeError("an illegal instruction was encountered")

    monkeypatch.setattr(engine.engine, "device_done", fails)
    [ended] = built.step()
    assert isinstance(ended.error, StepFailed)
    assert published == []
    assert built.pool.available == 32


def test_the_host_waits_for_an_event_of_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the device that was asked for, behind the step, and then waited for; on CPU nothing is asked of CUDA."""
    asked: list[str] = []

    class Event:
        def record(self, stream: str) -> None:
            asked.append(f"record on {stream}")

        def synchronize(self) -> None:
            asked.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    device_done(torch.device("cpu"))
    assert asked == []
    device_done(torch.device("cuda", 1))
    assert asked == ["record on the stream of cuda:1", "synchronize"]
