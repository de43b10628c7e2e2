"""What the ways through the cluster cost, and for how long one bad moment counts."""

from __future__ import annotations

import random

import pytest

from services.router import ways as module
from services.router.policy import Way
from services.router.ways import FORGOTTEN_S, HALF_LIFE_S, Ways

ELSEWHERE = ("decode-0", "prefill-0")


def used(ways: Ways, until: float, *prefills: str, seconds: float = 0.004, since: float = 0.0) -> None:
    """Ten requests a second take each of these ways, without moving anything."""
    for step in range(int(since * 10), int(until * 10)):
        for prefill in prefills:
            ways.took("decode-0", prefill, seconds, now=step / 10)


def test_a_way_is_learnt_from_those_who_took_it() -> None:
    """4 ms of messages; 10 ms for a move and 2 ms for each block of it, whatever the mix of lengths."""
    ways, some = Ways(), random.Random(1)
    ways.took(*ELSEWHERE, 9.0, 1, 9.0, now=0.0)  # the first one met something else
    for number in range(500):
        blocks, now = some.randint(1, 128), number / 10
        ways.took(*ELSEWHERE, 0.004, blocks, 0.010 + 0.002 * blocks, now=now)
        ways.took("decode-0", "", 0.003, now=now)
    way = ways.at(50.0)[ELSEWHERE]
    assert way.first_s == pytest.approx(0.004, rel=0.01)
    assert way.seconds(100) == pytest.approx(0.214, rel=0.05)
    assert ways.at(50.0)["decode-0", ""] == Way(pytest.approx(0.003))


def test_a_way_that_really_is_longer_is_known_to_be() -> None:
    """200 ms among ways of 4 ms: 50 requests later that is what it is thought to cost."""
    ways = Ways()
    for number in range(80):
        used(ways, number / 5 + 0.2, "prefill-0", "prefill-1", since=number / 5)
        ways.took("decode-0", "far", 0.2, now=number / 5)
    at = ways.at(16.0)
    assert at["decode-0", "far"].first_s == pytest.approx(0.2, rel=0.2)
    assert at["decode-0", "prefill-0"].first_s < 0.05


def test_one_bad_moment_at_most_doubles_a_way_however_many_requests_met_it() -> None:
    """Eight requests were with a worker that stood still for 2.4 s, and their KV came late as well."""
    ways = Ways()
    for number in range(40):
        for prefill in ("prefill-0", "prefill-1"):
            ways.took("decode-0", prefill, 0.004, 8, 0.002, now=number / 4)
    before = ways.at(10.0)[ELSEWHERE].seconds(8)
    for _ in range(8):
        ways.took(*ELSEWHERE, 2.4, 8, 2.4, now=10.0)
    assert before < ways.at(10.0)[ELSEWHERE].seconds(8) <= 2.2 * before


def test_control_without_the_bound_it_is_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: nobody would take this way again."""
    monkeypatch.setattr(module, "GROWTH", 1e9)
    ways = Ways()
    used(ways, 10.0, "prefill-0", "prefill-1")
    for _ in range(8):
        ways.took(*ELSEWHERE, 2.4, now=10.0)
    assert ways.at(10.0)[ELSEWHERE].first_s > 1.0


def test_a_way_that_nobody_takes_comes_near_to_what_is_usual() -> None:
    """By half in each half-life, and then it is tried again."""
    ways = Ways()
    used(ways, 10.0, "prefill-0", "prefill-1")
    used(ways, 30.0, "prefill-0", since=10.0, seconds=0.1)
    used(ways, 60.0, "prefill-1", since=20.0)  # meanwhile, so that this is what is usual
    usual, last = ways.at(60.0)["decode-0", "unknown"].first_s, 29.9
    excess = [ways.at(last + times * HALF_LIFE_S)[ELSEWHERE].first_s - usual for times in range(4)]
    assert excess[0] > 0.05
    assert [later / excess[0] for later in excess] == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8])


def test_an_unknown_way_is_a_usual_one() -> None:
    """It is neither preferred nor avoided. Before anybody came any way, nothing is known."""
    ways = Ways()
    assert ways.at(0.0).get(ELSEWHERE) is None
    used(ways, 10.0, "prefill-0", "prefill-1")
    assert ways.at(10.0)["decode-7", "prefill-7"].first_s == pytest.approx(0.004)
    assert ways.at(10.0).get(("decode-7", "")) is None


def test_ways_that_nobody_takes_any_more_are_forgotten() -> None:
    """Else a router of a large cluster, or of one that scales, would grow. A few at a time: no request waits for it."""
    ways = Ways()
    for decode in range(100):
        ways.took(f"decode-{decode}", "prefill-0", 0.004, now=0.0)
    ways.took(*ELSEWHERE, 0.004, now=FORGOTTEN_S + 1)
    assert len(ways) == 100 - module.AT_ONCE
    for _ in range(30):
        ways.took(*ELSEWHERE, 0.004, now=FORGOTTEN_S + 1)
    assert len(ways) == 1
