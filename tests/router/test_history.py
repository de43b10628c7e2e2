"""The last hours as the dashboard shows them: of all routers, from totals, and bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.router.execution.request_account import EndedRequests, Failure
from services.router.frontend import history
from services.router.frontend.history import COLUMNS, KEPT_POINTS, SHARED_FAILURES, History
from tandem.errors import Unavailable
from tandem.telemetry.metrics import TTFT_BUCKETS


class Wire:
    """The registry's samples, through JSON as in the registry; each router's latest."""

    def __init__(self) -> None:
        self.samples: dict[str, Any] = {}
        self.lost = False

    async def exchange(self, router: str, sample: dict[str, Any]) -> dict[str, Any]:
        if self.lost:
            raise Unavailable("the registry does not answer")
        self.samples[router] = json.loads(json.dumps(sample))
        return dict(self.samples)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(history, "monotonic", lambda: now[0])
    return now


def made(wire: Wire, name: str, incarnation: str = "i1") -> History:
    return History(name, incarnation, EndedRequests(), lambda: (3, 1), wire.exchange)


def last(one: History) -> dict[str, Any]:
    return dict(zip(COLUMNS, one.points[-1], strict=True))


def ends(one: History, count: int, outcome: str = "ok", ttft: float | None = 0.15) -> None:
    one._ended.outcomes[outcome] += count
    if ttft is not None:
        one._ended.tokens += 10 * count
        one._ended.ttft[TTFT_BUCKETS.index(0.2)] += count


async def test_a_point_is_what_all_routers_did_since_the_last_one(clock: list[float]) -> None:
    """Per second; load is the sum; what was before the first sample of a router is at an unknown time, and in none."""
    wire = Wire()
    one, other = made(wire, "router-0"), made(wire, "router-1")
    ends(one, 1000)
    await other.take()
    await one.take()
    assert (last(one)["ok"], last(one)["running"], last(one)["queued"]) == (0, 6, 2)
    for _ in range(2):  # a sample of the other that is read twice is counted once
        ends(one, 20)
        ends(other, 30, "refused", None)
        await other.take()
        clock[0] += 10.0
        await one.take()
        assert (last(one)["ok"], last(one)["refused"], last(one)["failed"]) == (2.0, 3.0, 0.0)
        assert last(one)["tokens"] == 20.0
        assert last(one)["ttft_p50"] == pytest.approx(0.15)
        assert one.routers["router-1"]["refused"] == 3.0
    clock[0] += 10.0
    await one.take()
    assert (last(one)["ok"], last(one)["refused"], last(one)["ttft_p50"], last(one)["ttft_p95"]) == (0, 0, None, None)


async def test_a_router_that_began_again_takes_nothing_away(clock: list[float]) -> None:
    """Its totals are smaller than before, which is another incarnation and no negative rate."""
    wire = Wire()
    one, other = made(wire, "router-0"), made(wire, "router-1")
    ends(other, 500)
    await other.take()
    await one.take()
    await made(wire, "router-1", "i2").take()
    clock[0] += 10.0
    await one.take()
    assert last(one)["ok"] == 0


async def test_without_the_registry_a_router_has_its_own_history(clock: list[float]) -> None:
    """And one that left no readable sample, such as another version, is left out."""
    wire = Wire()
    one = made(wire, "router-0")
    await one.take()
    wire.lost = True
    clock[0] += 10.0
    ends(one, 50)
    await one.take()
    assert (last(one)["ok"], last(one)["running"]) == (5.0, 3)
    wire.lost = False
    wire.samples |= {"router-1": {"incarnation": "i1"}, "router-2": 7, "router-3": {**one._sample(), "ttft": [1]}}
    clock[0] += 10.0
    await one.take()
    assert one.routers.keys() == {"router-0"}


async def test_failures_of_all_routers_are_listed_the_newest_first() -> None:
    """Our own at once, the others' with their sample, and no more than a bounded number of each."""
    wire = Wire()
    one, other = made(wire, "router-0"), made(wire, "router-1")
    for number in range(100):
        other._ended.failures.append(Failure(float(number), f"r{number}", "anna", "refused", "OVERLOADED", 0.1, 0, ""))
    await other.take()
    await one.take()
    one._ended.failures.append(Failure(98.5, "mine", "", "failed", "INTERNAL", 0.1, 4, ""))
    found = one.failures()
    assert [(item["router"], item["request_id"]) for item in found[:3]] == [
        *(("router-1", "r99"), ("router-0", "mine"), ("router-1", "r98")),
    ]
    assert len(found) == SHARED_FAILURES + 1


async def test_the_page_gets_all_points_once_and_then_the_new_ones() -> None:
    """Of a history that has a bound."""
    one = made(Wire(), "router-0")
    for _ in range(KEPT_POINTS + 5):
        await one.take()
    assert len(one.since(0)["points"]) == len(one.points) == KEPT_POINTS
    taken = one.taken
    assert one.since(taken)["points"] == []
    await one.take()
    assert one.since(taken)["points"] == [one.points[-1]]


@pytest.mark.parametrize(
    ("counts", "p50", "p95"),
    [({0: 4}, 0.0005, 0.00095), ({len(TTFT_BUCKETS): 1}, 50.0, 50.0), ({5: 90, 10: 10}, None, None)],
)
def test_percentiles_lie_within_their_bucket(counts: dict[int, int], p50: float | None, p95: float | None) -> None:
    """Above all edges they are the last edge: more is not known."""
    full = [counts.get(number, 0) for number in range(len(TTFT_BUCKETS) + 1)]
    found = history._percentiles(full)
    if p50 is not None:
        assert found == [pytest.approx(p50), pytest.approx(p95)]
    else:
        assert found[0] is not None
        assert found[1] is not None
        assert TTFT_BUCKETS[4] < found[0] <= TTFT_BUCKETS[5]
        assert TTFT_BUCKETS[9] < found[1] <= TTFT_BUCKETS[10]
