"""Goodput counts what kept the objective, out of everything that was asked; the search finds the highest rate."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.harness.goodput import Load, Objective, Outcome, State, highest, interval, next_rate

OBJECTIVE = Objective(ttft=1.0, tpot=0.1)


def outcome(
    at: float = 0.0, *, first: float = 0.5, gap: float = 0.05, tokens: int = 5, state: State = "done"
) -> Outcome:
    times = [at + first + gap * number for number in range(tokens)]
    ended = times[-1] if times else at + first
    return Outcome(at, 8, 5, sent=at, times=times, counts=[1] * tokens, ended=ended, state=state)


@pytest.mark.parametrize(
    ("one", "kept"),
    [
        (outcome(), True),
        (outcome(first=1.01), False),
        (outcome(gap=0.11), False),
        (outcome(first=1.0, gap=0.1), True),
        (outcome(state="rejected", tokens=0), False),
        (outcome(state="failed"), False),
        (outcome(state="unfinished"), False),
        (outcome(state="unfinished", tokens=0), False),
    ],
)
def test_only_what_is_whole_and_in_time_keeps_the_objective(one: Outcome, kept: bool) -> None:
    """The first token, the pace after it, and the end; all three."""
    assert one.kept(dataclasses.replace(OBJECTIVE, tpot=0.1 + 1e-9, ttft=1.0 + 1e-9)) is kept


def test_rejected_and_failed_requests_missed() -> None:
    """Whoever sends half of its callers away has not served them: attainment is of all, goodput of those that kept.

    A control that leaves them out would say 100 %.
    """
    outcomes = [outcome(at / 2) for at in range(10)]
    for one in outcomes[::2]:
        one.state = "rejected"
    load = Load("", 2.0, 0.0, 5.0, outcomes)
    assert load.attainment(OBJECTIVE) == 0.5
    assert load.goodput(OBJECTIVE) == 1.0
    answered = [one for one in load.counted if one.state == "done"]
    assert all(one.kept(OBJECTIVE) for one in answered)


states = st.sampled_from(get_args(State))


@given(st.lists(st.tuples(st.floats(0, 20), states, st.floats(0, 3), st.floats(0, 0.3)), max_size=30))
def test_the_books_balance(rows: list[tuple[float, State, float, float]]) -> None:
    """Every counted request is in exactly one state; goodput is never over what was offered; nothing becomes better
    when somebody is sent away."""
    load = Load("", 1.0, 5.0, 10.0, [outcome(at, state=state, first=a, gap=b) for at, state, a, b in rows])
    assert sum(load.count(state) for state in get_args(State)) == len(load.counted)
    assert all(5.0 <= one.at < 15.0 for one in load.counted)
    assert 0 <= load.goodput(OBJECTIVE) <= load.offered
    before = load.attainment(OBJECTIVE)
    for one in load.outcomes:
        one.state = "rejected"
        assert load.attainment(OBJECTIVE) <= before
    assert load.attainment(OBJECTIVE) == 0.0


def test_who_was_given_up_has_waited_and_who_was_sent_away_has_no_latency() -> None:
    """Leaving out those that still wait would make the slowest server look best."""
    waiting = Outcome(1.0, 8, 5, sent=1.0, ended=31.0)
    away = Outcome(1.0, 8, 5, sent=1.0, ended=1.1, state="rejected")
    load = Load("", 1.0, 0.0, 5.0, [waiting, away, outcome(2.0)])
    assert load.values("ttft") == [30.0, 0.5]
    assert len(load.values("e2e")) == 1


def test_a_stream_that_hangs_has_a_long_gap() -> None:
    """Until it is given up: a server that stops all streams would look as fast as before. The control ended there."""
    hangs = Outcome(0.0, 8, 9, sent=0.0, times=[1.0, 1.1], counts=[1, 1], ended=31.1)
    ended = dataclasses.replace(hangs, state="done")
    for one, longest, tpot in ((hangs, 30.0, 30.1), (ended, 0.1, 0.1)):
        load = Load("", 1.0, 0.0, 10.0, [one])
        assert max(load.values("itl")) == pytest.approx(longest)
        assert load.values("tpot") == [pytest.approx(tpot)]


def test_a_message_with_several_tokens_is_one_gap_and_several_tokens() -> None:
    """TPOT is over tokens, ITL over messages, throughput over what came within the counted seconds."""
    one = Outcome(0.0, 8, 9, sent=0.0, times=[1.0, 2.0, 12.0], counts=[1, 4, 4], ended=12.0, state="done")
    load = Load("", 1.0, 0.0, 10.0, [one])
    assert one.tpot == pytest.approx(11 / 8)
    assert load.values("itl") == [1.0, 10.0]  # the second one ends after the counted seconds
    assert load.throughput == 0.5


def test_what_only_disturbs_is_counted_nowhere() -> None:
    """Long prompts beside steady streams are the load, not what is measured."""
    long = dataclasses.replace(outcome(1.0), beside=True)
    load = Load("", 0.0, 0.0, 5.0, [outcome(), long])
    assert len(load.counted) == 1
    assert len(load.gaps()) == 4
    assert load.throughput == 1.0


@given(st.integers(0, 200), st.integers(1, 200))
def test_an_interval_holds_its_share_and_shrinks(kept: int, more: int) -> None:
    """Ten times the requests say more than once."""
    of = kept + more
    low, high = interval(kept, of)
    assert 0.0 <= low <= kept / of <= high <= 1.0
    again = interval(10 * kept, 10 * of)
    assert again[1] - again[0] < high - low


def search(limit: float, start: float, precision: float = 0.1, most: int = 40) -> list[tuple[float, bool]]:
    tried: list[tuple[float, bool]] = []
    while (rate := next_rate(tried, start, precision, most)) is not None:
        tried.append((rate, rate <= limit))
    return tried


@given(st.floats(0.05, 2000), st.floats(0.1, 100), st.floats(0.02, 0.5))
def test_the_search_finds_the_highest_rate_that_is_kept(limit: float, start: float, precision: float) -> None:
    """Within its precision, from any start, in few tries; a system that keeps nothing is told soon."""
    tried = search(limit, start, precision)
    found = highest(tried)
    if limit < start / 64:
        assert found is None
        assert len(tried) <= 8
    else:
        assert found is not None
        assert found <= limit <= found * (1 + precision) * (1 + 1e-9)
        assert len(tried) <= 3 + abs(math.log2(limit / start)) + math.log2(math.log(2) / math.log(1 + precision)) + 2


@given(st.data())
def test_the_search_ends_whatever_chance_does(data: st.DataObject) -> None:
    """Answers that contradict one another lead to no endless search, and to no rate above one that was not kept."""
    tried: list[tuple[float, bool]] = []
    while (rate := next_rate(tried, 1.0, 0.1, 25)) is not None:
        assert rate not in [one for one, _ in tried]
        tried.append((rate, data.draw(st.booleans())))
    assert len(tried) <= 25
    found = highest(tried)
    assert found is None or all(rate > found for rate, kept in tried if not kept)
