"""What a worker learns about its own speed from its steps."""

from __future__ import annotations

import pytest

from engine.pace import LEAST_TOKENS, Pace


def test_both_numbers_converge_on_a_machine_of_constant_speed() -> None:
    """Whatever the mix of steps: 1,000 prompt tokens a second, 20 ms for a step of streams."""
    pace = Pace(step_s=0.5, prompt_rate=10.0)
    for turn in range(100):
        pace.learn(0, 4, 0.020)
        pace.learn(100 + turn, 4, 0.020 + (100 + turn) / 1000)
        pace.learn(512, 0, 0.512)
    assert pace.step_s == pytest.approx(0.020)
    assert pace.prompt_rate == pytest.approx(1000)


def test_a_few_tokens_say_nothing_about_the_rate() -> None:
    """A step of a handful of prompt tokens is all overhead."""
    pace = Pace(step_s=0.020, prompt_rate=1000)
    pace.learn(LEAST_TOKENS - 1, 0, 1.0)
    pace.learn(64, 4, 0.001)  # shorter than a step of streams alone: noise
    assert (pace.step_s, pace.prompt_rate) == (0.020, 1000)


def test_a_prompt_beside_streams_is_bounded_by_the_stretch() -> None:
    """Three times a step of 20 ms leaves 40 ms: 40 tokens at 1,000 a second. Never less than makes progress."""
    assert Pace(0.020, 1000).prompt_tokens_within(3.0) == 40
    assert Pace().prompt_tokens_within(3.0) == LEAST_TOKENS
