"""What the ways through the cluster cost, and for how long one bad moment counts."""

from __future__ import annotations

import random

import pytest

from services.router.routing import path_latency as module
from services.router.routing.path_latency import FORGET_AFTER_S, HALF_LIFE_S, PathLatencyTracker
from services.router.routing.placement import PathLatency
from tandem.linear_fit import NEWEST_WEIGHT

ELSEWHERE = ("decode-0", "prefill-0")


def used(
    latencies: PathLatencyTracker, until: float, *prefills: str, seconds: float = 0.004, since: float = 0.0
) -> None:
    """Ten requests a second take each of these ways, without moving anything."""
    for step in range(int(since * 10), int(until * 10)):
        for prefill in prefills:
            latencies.observe("decode-0", prefill, seconds, now=step / 10)


def test_a_way_is_learnt_from_those_who_took_it() -> None:
    """4 ms of messages; 10 ms for a move and 2 ms for each block of it, whatever the mix of lengths."""
    latencies, some = PathLatencyTracker(), random.Random(1)
    latencies.observe(*ELSEWHERE, 9.0, 1, 9.0, now=0.0)  # the first one met something else
    for number in range(500):
        blocks, now = some.randint(1, 128), number / 10
        latencies.observe(*ELSEWHERE, 0.004, blocks, 0.010 + 0.002 * blocks, now=now)
        latencies.observe("decode-0", "", 0.003, now=now)
    way = latencies.at(50.0)[ELSEWHERE]
    assert way.first_s == pytest.approx(0.004, rel=0.01)
    assert way.seconds(100) == pytest.approx(0.214, rel=0.05)
    assert latencies.at(50.0)["decode-0", ""] == PathLatency(pytest.approx(0.003))


def test_the_first_move_counts_as_it_was() -> None:
    """Nothing was known that could be doubled."""
    latencies = PathLatencyTracker()
    latencies.observe(*ELSEWHERE, 0.004, 8, 0.5, now=0.0)
    assert latencies.at(0.0)[ELSEWHERE].seconds(8) == pytest.approx(0.504)


def test_what_is_known_does_not_grow_towards_the_past() -> None:
    """Whoever asks as of a moment before the last request gets what is known since then."""
    latencies = PathLatencyTracker()
    used(latencies, 10.0, "prefill-0")
    used(latencies, 20.0, "prefill-1", since=10.0, seconds=0.1)
    used(latencies, 22.0, "prefill-0", since=20.0)
    last = latencies.at(19.9)["decode-0", "prefill-1"]
    assert latencies.at(18.0)["decode-0", "prefill-1"] == last
    assert latencies.at(30.0)["decode-0", "prefill-1"] != last


def test_a_way_that_really_is_longer_is_known_to_be() -> None:
    """200 ms among ways of 4 ms: 50 requests later that is what it is thought to cost."""
    latencies = PathLatencyTracker()
    for number in range(80):
        used(latencies, number / 5 + 0.2, "prefill-0", "prefill-1", since=number / 5)
        latencies.observe("decode-0", "far", 0.2, now=number / 5)
    at = latencies.at(16.0)
    assert at["decode-0", "far"].first_s == pytest.approx(0.2, rel=0.2)
    assert at["decode-0", "prefill-0"].first_s < 0.05


def test_one_bad_moment_at_most_doubles_a_way_however_many_requests_met_it() -> None:
    """Eight requests were with a worker that stood still for 2.4 s, and their KV came late as well."""
    latencies = PathLatencyTracker()
    for number in range(40):
        for prefill in ("prefill-0", "prefill-1"):
            latencies.observe("decode-0", prefill, 0.004, 8, 0.002, now=number / 4)
    before = latencies.at(10.0)[ELSEWHERE].seconds(8)
    for _ in range(8):
        latencies.observe(*ELSEWHERE, 2.4, 8, 2.4, now=10.0)
    assert before < latencies.at(10.0)[ELSEWHERE].seconds(8) <= 2.2 * before


def test_control_without_the_bound_it_is_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: nobody would take this way again."""
    monkeypatch.setattr(module, "MAX_GROWTH", 1e9)
    latencies = PathLatencyTracker()
    used(latencies, 10.0, "prefill-0", "prefill-1")
    for _ in range(8):
        latencies.observe(*ELSEWHERE, 2.4, now=10.0)
    assert latencies.at(10.0)[ELSEWHERE].first_s > 1.0


def test_a_way_that_nobody_takes_comes_near_to_what_is_usual() -> None:
    """By half in each half-life, and then it is tried again."""
    latencies = PathLatencyTracker()
    used(latencies, 10.0, "prefill-0", "prefill-1")
    used(latencies, 30.0, "prefill-0", since=10.0, seconds=0.1)
    used(latencies, 60.0, "prefill-1", since=20.0)  # meanwhile, so that this is what is usual
    usual, last = latencies.at(60.0)["decode-0", "unknown"].first_s, 29.9
    excess = [latencies.at(last + times * HALF_LIFE_S)[ELSEWHERE].first_s - usual for times in range(4)]
    assert excess[0] > 0.05
    assert [later / excess[0] for later in excess] == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8])


def test_an_unknown_way_is_a_usual_one() -> None:
    """It is neither preferred nor avoided. Before anybody came any way, nothing is known."""
    latencies = PathLatencyTracker()
    assert latencies.at(0.0).get(ELSEWHERE) is None
    used(latencies, 10.0, "prefill-0", "prefill-1")
    assert latencies.at(10.0)["decode-7", "prefill-7"].first_s == pytest.approx(0.004)
    assert latencies.at(10.0).get(("decode-7", "")) is None


@pytest.mark.parametrize("unused_s", [30.0, 10**9], ids=["as it is", "control"])
@pytest.mark.parametrize("prefill", ["prefill-0", ""], ids=["remote", "local"])
def test_a_first_bad_moment_keeps_nobody_away_for_good(
    monkeypatch: pytest.MonkeyPatch, prefill: str, unused_s: float
) -> None:
    """Of the only way of its kind, so that it is what is usual, and nobody takes it to learn better. What is learnt
    then is learnt as if nothing had been known. The control lets it stay."""
    monkeypatch.setattr(module, "UNUSED_S", unused_s)
    latencies = PathLatencyTracker()
    latencies.observe("decode-0", prefill, 3.0, now=0.0)
    assert latencies.at(30.0)["decode-0", prefill].first_s == 3.0
    later = latencies.at(600.0)["decode-0", prefill].first_s
    if unused_s > 30.0:
        assert later == 3.0
        return
    assert later < 0.001
    latencies.observe("decode-0", prefill, 0.3, now=600.0)
    assert latencies.at(600.0)["decode-0", prefill].first_s == pytest.approx(0.3)
    assert latencies.at(600.0)["decode-0", prefill and "unknown"].first_s == pytest.approx(0.3)


def test_a_kind_that_is_used_now_and_then_stays_known() -> None:
    """Ways shorter than what may be doubled, too: one bad moment counts no more than others."""
    latencies = PathLatencyTracker()
    for minute in range(10):
        latencies.observe(*ELSEWHERE, 0.0005, now=minute * 25.0)
    latencies.observe(*ELSEWHERE, 3.0, now=250.0)
    assert latencies.at(250.0)[ELSEWHERE].first_s == pytest.approx(0.0005 + NEWEST_WEIGHT * 0.0015)


def test_ways_that_nobody_takes_any_more_are_forgotten() -> None:
    """Else a router of a large cluster, or of one that scales, would grow. A few at a time: no request waits for it."""
    latencies = PathLatencyTracker()
    for decode in range(100):
        latencies.observe(f"decode-{decode}", "prefill-0", 0.004, now=0.0)
    latencies.observe(*ELSEWHERE, 0.004, now=FORGET_AFTER_S + 1)
    assert len(latencies._known) == 100 - module.FORGET_BATCH
    for _ in range(30):
        latencies.observe(*ELSEWHERE, 0.004, now=FORGET_AFTER_S + 1)
    assert len(latencies._known) == 1
