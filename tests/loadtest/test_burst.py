"""What the autoscaler's measurement counts, and the slow devices that it is made on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.harness.goodput import Load, Objective, Outcome
from loadtest.loadgen.workload import Request
from loadtest.scenarios.burst import kept, peak
from loadtest.scenarios.pool_bench import Run
from loadtest.scenarios.slow_device import Device, slow_down


def test_worker_seconds_are_those_of_every_process_until_the_load_is_over() -> None:
    """Two for 4 s, three for 6 s; what was counted after the load is none of it."""
    run = Run("x", Load("x", 1.0, 0.0, 10.0), sizes=[(0.0, 2), (4.0, 3), (9.0, 3), (12.0, 5)])
    assert run.worker_seconds == 26.0


def test_who_was_ended_early_did_not_keep_the_objective() -> None:
    """However many of those that were sent until then did."""
    good = Outcome(1.0, 10, 1, sent=1.0, times=[1.5], counts=[1], ended=1.5, state="done")
    run = Run("x", Load("x", 1.0, 0.0, 10.0, outcomes=[good]))
    assert kept(run, Objective())
    run.ended_early = True
    assert not kept(run, Objective())


def test_the_peak_is_that_of_the_fullest_ten_seconds() -> None:
    """30 requests within 9 s among lonely ones: 3 a second."""
    times = [0.0, 50.0, *(100.0 + 0.3 * number for number in range(30)), 150.0]
    assert peak([Request(at, 1, 1) for at in times]) == 3.0


def test_a_slow_device_takes_its_time_and_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 20 prompt tokens and 2 streams takes at least what the device needs for it; its result is the engine's,
    and a step that ran nothing does not wait."""
    slept: list[float] = []
    monkeypatch.setattr("loadtest.scenarios.slow_device.sleep", slept.append)
    monkeypatch.setattr("loadtest.scenarios.slow_device.monotonic", lambda: 7.0)  # the engine itself takes no time
    found: list[Any] = ["a token"]
    engine: Any = SimpleNamespace(step=lambda: found, prompt_tokens=20, streams=2, pace=None)
    slow_down(engine, Device(step_s=0.02, stream_s=0.01, prompt_rate=1000.0))
    assert engine.step() == ["a token"]
    assert slept == [pytest.approx(0.05)]
    assert engine.pace.prompt_rate == 1000.0
    found.clear()
    assert engine.step() == []
    assert len(slept) == 1
