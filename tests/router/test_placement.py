"""Where a request goes: room first, then what costs everybody together the least time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import pace
from services.router.policy import CLEARLY, LEAST_TOKENS, Candidate, Placement, Rules, cost_here, cost_there, place

RULES = Rules(weigh=True, stretch=3.0)
DECODE = Candidate("decode-0", "a", "h:1", "L", running=0, max_running=16, free_blocks=1000, block_size=16,
                   max_model_len=8192, prompt_rate=1000.0, step_s=0.020, stream_s=0.001)  # fmt: skip
PREFILL = replace(DECODE, worker_id="prefill-0", address="h:2")

candidates = st.builds(
    Candidate,
    worker_id=st.sampled_from(["a", "b", "c", "d"]),
    incarnation=st.just("1"),
    address=st.just("h:1"),
    layout_hash=st.sampled_from(["L", "M"]),
    running=st.integers(0, 20),
    streams=st.integers(0, 20),
    max_running=st.integers(1, 16),
    free_blocks=st.integers(0, 200),
    block_size=st.just(16),
    max_model_len=st.integers(1, 4096),
    prompts=st.lists(st.integers(1, 10_000), max_size=8).map(tuple),
    prompt_rate=st.sampled_from([0.0, 1.0, 500.0, 1e6]),
    step_s=st.sampled_from([0.0, 0.001, 0.02]),
    stream_s=st.sampled_from([0.0, 0.001, 1.0]),
    usable=st.booleans(),
)


def placed(decode: Candidate, prefill: Candidate, tokens: int = 500, rules: Rules = RULES) -> Placement:
    found = place([decode], [prefill], tokens, 64, rules)
    assert found is not None
    return found


@given(st.lists(candidates), st.lists(candidates), st.integers(1, 4096), st.integers(0, 64), st.booleans())
def test_nothing_is_placed_where_it_cannot_run(
    decodes: list[Candidate], prefills: list[Candidate], tokens: int, ahead: int, weigh: bool
) -> None:
    """The decode worker has room and is usable, the prefill worker is usable and its blocks mean the same; without a
    prefill worker there is a reason. Nothing is placed only when no decode worker has room."""
    found = place(decodes, prefills, tokens, ahead, Rules(weigh, 3.0))
    roomy = [
        one
        for one in decodes
        if one.usable and one.running < one.max_running and one.free_blocks * 16 >= tokens + ahead
        and one.max_model_len > tokens
    ]  # fmt: skip
    if found is None:
        assert not roomy
        return
    assert found.decode in roomy
    if found.prefill is None:
        assert found.why_local
    else:
        assert found.prefill in prefills
        assert found.prefill.usable
        assert found.prefill.layout_hash == found.decode.layout_hash


@given(candidates, candidates, st.integers(1, 4096))
def test_never_weighing_uses_the_prefill_worker(decode: Candidate, prefill: Candidate, tokens: int) -> None:
    """With `local_prefill` never, only a missing or unfit prefill worker makes a decode worker compute prompts."""
    found = place([decode], [replace(prefill, usable=True, layout_hash=decode.layout_hash)], tokens, 0, Rules(False))
    assert found is None or found.prefill is not None


def test_an_idle_pair_disaggregates() -> None:
    """Equal rates and no queue: the decode worker stays free of prompts."""
    assert placed(DECODE, PREFILL).prefill is PREFILL


def test_a_queue_at_the_prefill_worker_sends_prompts_to_an_idle_decode_worker() -> None:
    """Two prompts before this one are 1.5 s there, and two that wait, against 0.5 s here: the receipt will say so."""
    found = placed(DECODE, replace(PREFILL, prompts=(500, 500)))
    assert found.prefill is None
    assert "0.50 s here" in found.why_local
    assert "2.50 s on prefill-0" in found.why_local


def test_streams_beside_it_count() -> None:
    """The same queue, but eight streams would lose half a second each: the prompt waits its turn."""
    assert placed(replace(DECODE, running=8, streams=8), replace(PREFILL, prompts=(500, 500))).prefill is not None


def test_a_prompt_beside_streams_takes_as_long_as_they_leave_it_time() -> None:
    """A step is bounded to 60 ms. One stream takes 20 of them, eleven take 30, sixty take 79 and all of them: there a
    step has the fewest tokens that one has. The router reckons as the engine does."""
    alone, beside = cost_here(DECODE, 300, 3.0), {}
    for streams in (1, 11, 60):
        one = replace(DECODE, streams=streams)
        tokens = pace.Pace(one.step_s, one.stream_s, one.prompt_rate).prompt_tokens_beside(streams, 3.0)
        beside[streams] = cost_here(one, 300, 3.0) - streams * alone
        step_s = 0.020 + 0.001 * (streams - 1) + tokens / 1000
        assert beside[streams] == pytest.approx(300 / tokens * step_s, rel=0.03)  # there are no parts of tokens
    assert alone == pytest.approx(0.3)
    assert beside[1] == pytest.approx(0.45, rel=0.03)
    assert beside[11] == pytest.approx(0.6, rel=0.03)
    assert LEAST_TOKENS == pace.LEAST_TOKENS


def test_unknown_rates_decide_nothing() -> None:
    """A worker that has not measured itself yet is not compared."""
    assert placed(replace(DECODE, prompt_rate=0.0), replace(PREFILL, prompts=(10**6,))).prefill is not None
    assert placed(DECODE, replace(PREFILL, prompts=(10**6,), prompt_rate=0.0)).prefill is not None


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """The worker computes it first, so it is worth going there, and eight streams are left in peace."""
    busy = replace(DECODE, running=8, streams=8)
    assert placed(busy, replace(PREFILL, prompts=(30_000,)), tokens=64).prefill is not None
    assert placed(busy, replace(PREFILL, prompts=(64,) * 8), tokens=64).prefill is None


queues = st.lists(st.integers(1, 10_000), max_size=8).map(tuple)


@given(st.integers(0, 15), st.integers(1, 4096), queues, queues)
def test_the_choice_is_monotone_in_load(
    running: int, tokens: int, queue: tuple[int, ...], more: tuple[int, ...]
) -> None:
    """More queue at the prefill worker never brings a prompt back to it; one more stream never sends one here."""
    decode, prefill = replace(DECODE, streams=running, free_blocks=10**6), replace(PREFILL, prompts=queue)
    here = placed(decode, prefill, tokens).prefill is None
    if here:
        assert placed(decode, replace(prefill, prompts=queue + more), tokens).prefill is None
    elif running < 15:
        assert placed(replace(decode, streams=running + 1), prefill, tokens).prefill is not None
    assert here == (cost_here(decode, tokens, 3.0) < CLEARLY * cost_there(prefill, tokens))


def test_the_prefill_worker_that_begins_soonest_gets_the_prompt() -> None:
    """By seconds of its queue, not by its number of prompts."""
    slow = replace(PREFILL, worker_id="prefill-1", prompts=(1000,), prompt_rate=500.0, running=1)
    fast = replace(PREFILL, worker_id="prefill-2", prompts=(3000,), prompt_rate=8000.0, running=3)
    found = place([replace(DECODE, running=15, streams=15)], [slow, fast], 1000, 0, RULES)
    assert found == Placement(replace(DECODE, running=15, streams=15), fast)


@pytest.mark.parametrize("prefills", [[], [replace(PREFILL, usable=False)], [replace(PREFILL, layout_hash="M")]])
def test_without_a_prefill_worker_the_reason_is_told(prefills: list[Candidate]) -> None:
    """None there, none ready, or none with the same layout."""
    found = place([DECODE], prefills, 10, 0, Rules(False))
    assert found is not None
    assert "no prefill worker" in found.why_local
