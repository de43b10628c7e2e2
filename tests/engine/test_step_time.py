"""What a worker learns about its own speed from its steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.core.step_time import LEAST_TOKENS, StepTime
from engine.engine import Engine
from engine.loading.model_loader import load_model


def test_all_numbers_converge_on_a_machine_of_constant_speed() -> None:
    """Whatever the mix: 1,000 prompt tokens a second, 20 ms for a step of one stream, 1 ms for each further one."""
    pace, some = StepTime(step_s=0.5, stream_s=0.0, prompt_rate=10.0), random.Random(1)
    for turn in range(500):
        streams = some.randint(1, 16)
        streams_s = 0.020 + 0.001 * (streams - 1)
        pace.learn(0, streams, streams_s)
        pace.learn(100 + turn, streams, streams_s + (100 + turn) / 1000)
        pace.learn(512, 0, 0.020 + 0.512)
    assert pace.step_s == pytest.approx(0.020, rel=0.01)
    assert pace.stream_s == pytest.approx(0.001, rel=0.01)
    assert pace.prompt_rate == pytest.approx(1000, rel=0.01)


def test_with_one_number_of_streams_what_is_said_of_it_is_right() -> None:
    """How the seconds are shared out cannot be known then, and does not matter."""
    pace = StepTime()
    for _ in range(100):
        pace.learn(0, 9, 0.030)
    assert pace.without_prompts(9) == pytest.approx(0.030, rel=0.01)


def test_strange_steps_leave_numbers_that_mean_something() -> None:
    """Steps of zero seconds, a step that hung: seconds stay positive, and recover."""
    pace = StepTime(0.020, 0.001, 1000)
    for seconds in (0.0, 0.0, 30.0, 0.0):
        pace.learn(0, 16, seconds)
        assert pace.step_s > 0
        assert pace.stream_s >= 0
    for _ in range(200):
        pace.learn(0, 1, 0.020)
        pace.learn(0, 16, 0.035)
    assert pace.without_prompts(16) == pytest.approx(0.035, rel=0.05)


def test_a_step_in_which_the_process_stood_still_says_little() -> None:
    """2.4 s instead of 20 ms, and half a second of prompts that took three, or nothing: no number changes by more than
    the least that a learner needs to follow a real change."""
    for seconds in (0.032, 2.4):  # a control: what is not strange counts as it is
        pace = StepTime(0.020, 0.001, 1000)
        pace.learn(0, 1, seconds)
        assert pace.step_s == pytest.approx(0.020 + 0.2 * (min(seconds, 0.080) - 0.020))
    for seconds in (3.0, 0.0201):
        pace = StepTime(0.020, 0.001, 1000)
        pace.learn(512, 0, seconds)
        assert 800 < pace.prompt_rate < 1600


def test_nothing_is_known_at_first() -> None:
    """A step may take any time then, and no prompt counts as cheap or expensive."""
    pace = StepTime()
    assert (pace.step_s, pace.stream_s, pace.prompt_rate) == (0.0, 0.0, 0.0)
    assert pace.seconds(512, 3) == 0.0


def test_a_step_is_expected_to_take_what_its_streams_and_its_prompt_tokens_take() -> None:
    """One without streams reads the weights, too."""
    pace = StepTime(0.020, 0.001, 1000)
    assert pace.seconds(250, 5) == pytest.approx(0.020 + 0.004 + 0.250)
    assert pace.seconds(250, 0) == pytest.approx(0.020 + 0.250)
    assert pace.seconds(0, 1) == pytest.approx(0.020)
    assert pace.without_prompts(0) == 0.0, "nobody advances"


def test_a_rate_below_one_token_a_second_is_learnt() -> None:
    """A large model on a small machine: 100 tokens in 250 s."""
    pace = StepTime(0.020, 0.0)
    pace.learn(100, 0, 250.02)
    assert pace.prompt_rate == pytest.approx(0.4)


def test_a_few_tokens_say_nothing_about_the_rate() -> None:
    """A step of a handful of prompt tokens is all overhead."""
    pace = StepTime(0.020, 0.0, 1000)
    pace.learn(LEAST_TOKENS - 1, 0, 1.0)
    pace.learn(64, 4, 0.001)  # shorter than a step of streams alone: noise
    assert (pace.step_s, pace.prompt_rate) == (0.020, 1000)


def test_a_step_with_a_prompt_is_as_long_however_many_streams_it_has() -> None:
    """Twice a step of 20 ms: the streams' own time first, and prompts get the rest. Never less than makes progress."""
    pace = StepTime(0.020, 0.001, 1000)
    assert [pace.prompt_tokens_beside(streams, 2.0) for streams in (1, 5, 9)] == [20, 16, 12]
    assert pace.prompt_tokens_beside(30, 2.0) == LEAST_TOKENS
    assert StepTime().prompt_tokens_beside(1, 3.0) == LEAST_TOKENS


def test_a_step_with_a_prompt_may_be_as_long_as_the_objective_allows() -> None:
    """However short one stream's is, and not shorter than without."""
    pace = StepTime(0.020, 0.001, 1000)
    assert [pace.prompt_tokens_beside(5, 2.0, seconds) for seconds in (0.0, 0.03, 0.08)] == [16, 16, 56]


def test_a_step_without_streams_ends_soon_for_whoever_may_come() -> None:
    """A quarter of a second of prompts, or less if configured; never so few that reading the weights dominates."""
    pace = StepTime(0.020, 0.001, 1000)
    assert [pace.prompt_tokens_alone(*given) for given in ((), (0.1,), (0.01,))] == [250, 100, 64]
    assert StepTime().prompt_tokens_alone(0.1) is None


def test_an_engine_keeps_its_steps_without_streams_as_short_as_it_is_told(checkpoint: Callable[[str], Path]) -> None:
    """At 1,000 prompt tokens a second, a tenth of a second is 100 tokens."""
    model = load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=torch.device("cpu"))
    for seconds, tokens in ((0.1, 100), (0.2, 200)):
        pace = StepTime(0.020, 0.001, 1000)
        engine = Engine(model, EngineConfig(num_blocks=100, block_size=4, token_budget=512, max_running=2), pace=pace)
        engine.alone_s = seconds
        engine.add(Sequence(id="long", tokens=[7] * 300, prompt_len=300, max_len=310))
        engine.step()
        assert engine.prompt_tokens == tokens


def test_an_engine_computes_prompts_beside_streams_for_as_long_as_it_is_told(checkpoint: Callable[[str], Path]) -> None:
    """A step of one stream takes 20 ms. In twice that there is room for 20 tokens of a prompt, in 80 ms for 60."""
    model = load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=torch.device("cpu"))
    for beside_s, tokens in ((0.0, 20), (0.08, 60)):
        limits = {"num_blocks": 100, "block_size": 4, "token_budget": 512, "max_running": 2}
        config = EngineConfig(**limits, stretch=2.0, beside_s=beside_s)
        engine = Engine(model, config, pace=StepTime(0.020, 0.001, 1000))
        engine.add(Sequence(id="stream", tokens=[7] * 4, prompt_len=4, max_len=40))
        engine.step()
        engine.add(Sequence(id="long", tokens=[7] * 200, prompt_len=200, max_len=210))
        engine.step()
        assert (engine.streams, engine.prompt_tokens) == (1, tokens)


@pytest.mark.parametrize("known", [True, False], ids=["as it is", "control: no fixed part"])
def test_prompts_beside_streams_advance_where_each_such_step_has_a_fixed_price(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step takes 3 ms; one with prompts is not captured and takes 22 ms more, and 30,000 tokens a second.
    Charged to the tokens, the 22 ms made each next step smaller, down to 8 tokens: 8,000 took half a minute."""
    if not known:
        monkeypatch.setattr(StepTime, "prompts_s", property(lambda pace: 0.0))
    pace, tokens, seconds = StepTime(0.022, 0.0001, 28_000), 0, 0.0
    pace.captured(0.003)
    for _ in range(600):
        pace.learn(0, 4, 0.003)
        count = pace.prompt_tokens_beside(4, 8.0)
        took = 0.003 + 0.022 + count / 30_000
        pace.learn(count, 4, took)
        tokens, seconds = tokens + count, seconds + took
    assert (tokens / seconds > 0.4 * 30_000) == known
    assert took < 0.003 + 3.5 * 0.022  # and the streams do not wait for longer than that


def test_a_machine_that_is_slower_than_at_its_start_comes_out_of_small_steps() -> None:
    """The fixed part is twice what was measured at load, and steps of streams had not been captured yet."""
    pace = StepTime(0.022, 0.0001, 28_000)
    for _ in range(1500):
        pace.learn(0, 4, 0.003)
        count = pace.prompt_tokens_beside(4, 8.0)
        pace.learn(count, 4, 0.003 + 0.044 + count / 30_000)
    assert pace.prompts_s == pytest.approx(0.044, rel=0.4)
    assert pace.prompt_rate > 15_000


def test_a_fixed_price_that_is_not_there_is_not_learnt() -> None:
    """On a CPU a step with prompts costs what its tokens cost, and as many fit beside streams as before."""
    pace, some = StepTime(0.020, 0.001, 900), random.Random(2)
    for _ in range(500):
        count = some.randint(8, 512)
        pace.learn(count, 4, 0.023 + count / 1000 * some.uniform(0.9, 1.1))
    assert pace.prompts_s < 0.002
    assert pace.prompt_rate == pytest.approx(1000, rel=0.05)
