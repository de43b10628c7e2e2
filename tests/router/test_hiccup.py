"""One bad moment of a healthy worker: two prefill workers on a simulated clock, with the router's own placing, policy
and estimates. One of the workers stands still for 2.4 s, once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cluster.state.registry import State, WorkerRecord
from services.router.routing import request_scheduler as placing
from services.router.routing import worker_selector, worker_table
from services.router.routing.placement import PathLatency, RoutingConfig, WorkerSnapshot
from services.router.routing.request_scheduler import RequestScheduler
from services.worker_liveness import WorkerLiveness
from tandem.linear_fit import NEWEST_WEIGHT, LinearFit
from tests.router.scheduling import request_place
from tests.support.policy import place

TICK_S = 0.05
TOKENS, RATE = 400, 1000.0  # a prompt takes 0.4 s, so that both workers together can do five in a second
STILL_S = 2.4
BLOCKS = TOKENS // 16
SILENT: Any = None
DECODE = WorkerRecord("decode-0", "decode", State.READY, 1, "a", "h:1", max_model_len=4096,
                      block_size=16, max_running=10_000, blocks_total=10**6, prompt_rate=RATE, step_s=0.01)  # fmt: skip
PREFILLS = [replace(DECODE, worker_id=f"prefill-{number}", role="prefill") for number in range(2)]


class Cluster:
    def __init__(self) -> None:
        self.now = 0.0
        self.got: list[str] = []  # who got each request, in the order of placing
        self.waited: list[float] = []  # seconds at the router
        self.idle_s = 0.0  # that a worker had nothing to do while somebody waited at the router
        self._work: dict[str, list[tuple[float, asyncio.Event]]] = {one.worker_id: [] for one in PREFILLS}
        self._still_until: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        view = WorkerLiveness(SILENT, 1.0)
        view.workers = {one.worker_id: one for one in (DECODE, *PREFILLS)}
        self.scheduler = RequestScheduler(view, 1e6, RoutingConfig("never"))

    async def run(self, seconds: float, per_second: float) -> None:
        until = self.now + seconds
        while self.now < until - 1e-9:
            before, self.now = self.now, self.now + TICK_S
            for _ in range(int(self.now * per_second + 1e-6) - int(before * per_second + 1e-6)):
                self._tasks.append(asyncio.create_task(self._request()))
            for name, work in self._work.items():
                if work and work[0][0] <= self.now and self._still_until.get(name, 0.0) <= self.now:
                    work.pop(0)[1].set()
            for _ in range(20):
                await asyncio.sleep(0)
            if self.scheduler.waiting():
                self.idle_s += TICK_S * sum(not work for work in self._work.values())

    def stands_still(self, name: str) -> None:
        """From now on, with all that it has to do."""
        self._still_until[name] = self.now + STILL_S
        self._work[name] = [(due + STILL_S, done) for due, done in self._work[name]]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _request(self) -> None:
        came, done = self.now, asyncio.Event()
        async with request_place(self.scheduler, TOKENS, TOKENS + 10, 1e6) as placement:
            assert placement.prefill
            name = placement.prefill.worker_id
            placed_at = self.now
            self.waited.append(self.now - came)
            self.got.append(name)
            work = self._work[name]
            begins = max(self.now, self._still_until.get(name, 0.0), work[-1][0] if work else 0.0)
            work.append((begins + TOKENS / RATE, done))
            await done.wait()
            self.scheduler.prefilled(placement)
            still_until = self._still_until.get(name, 0.0)
            late_s = max(0.0, min(self.now, still_until) - max(placed_at, still_until - STILL_S))
            self.scheduler.observe_path(placement, (0.004 + late_s, BLOCKS, 0.003 + late_s))


@asynccontextmanager
async def hiccup(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Ten seconds of load at 90 % of what both can do, the bad moment in the middle of it, and ten seconds more."""
    cluster = Cluster()
    for module in (placing, worker_table):
        monkeypatch.setattr(module, "monotonic", lambda: cluster.now)
    try:
        await cluster.run(10, 4.5)
        cluster.stands_still("prefill-0")
        await cluster.run(STILL_S + 10, 4.5)
        yield cluster
    finally:
        await cluster.end()


def share(got: Sequence[str]) -> float:
    return Counter(got)["prefill-0"] / len(got)


async def test_a_worker_that_stood_still_once_has_its_share_again_within_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between 40 and 60 % of the next requests, and nobody waits at the router for long, nor while a worker idles."""
    async with hiccup(monkeypatch) as cluster:
        seen = len(cluster.got)
        cluster.idle_s = 0.0
        await cluster.run(15, 4.5)
        assert 0.4 <= share(cluster.got[seen:]) <= 0.6
        assert max(cluster.waited[seen:]) < 1.0
        assert cluster.idle_s <= 2 * TICK_S


class Former:
    """What ways were taken to cost: an average that nothing but another request on the same way changes."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], PathLatency] = {}
        self._moves: dict[tuple[str, str], LinearFit] = {}

    def observe(self, decode: str, prefill: str, first_s: float, blocks: int, exposed_s: float, *, now: float) -> None:
        way = decode, prefill
        before = self.known[way].first_s if way in self.known else first_s
        move = self._moves.setdefault(way, LinearFit(scale=32))
        move.learn(blocks, exposed_s)
        self.known[way] = PathLatency(before + NEWEST_WEIGHT * (first_s - before), move.base, move.each)

    def at(self, now: float) -> Former:
        return self

    def get(self, key: tuple[str, str], default: PathLatency) -> PathLatency:
        return self.known.get(key, default)

    def usual(self, *, remote: bool) -> None:
        return None


def soonest_with_its_way(
    able: Sequence[WorkerSnapshot], decode: WorkerSnapshot, tokens: int, ways: Any
) -> WorkerSnapshot:
    """The former rule: it may choose a worker for which the prompt is kept back while another one idles."""
    way_s = {one.worker_id: worker_selector.path_latency(ways, decode, one).seconds(BLOCKS) for one in able}
    far_s = worker_selector.LONG_PATH_RATIO * min(way_s.values())

    def late(one: WorkerSnapshot) -> float:
        return worker_selector.queued_seconds(one, tokens) + (
            way_s[one.worker_id] if way_s[one.worker_id] > far_s else 0.0
        )

    return min(able, key=lambda one: (late(one), one.running, *worker_selector._last_used(one)))


async def test_control_with_the_former_rules_it_gets_nothing_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """And requests wait at the router while it idles."""
    monkeypatch.setattr(placing, "PathLatencyTracker", Former)
    monkeypatch.setattr(worker_selector, "_best_prefill", soonest_with_its_way)
    async with hiccup(monkeypatch) as cluster:
        seen = len(cluster.got)
        await cluster.run(15, 4.5)
        assert share(cluster.got[seen:]) == 0.0
        assert max(cluster.waited[seen:]) > 5.0
        assert cluster.idle_s > 10.0


async def test_either_rule_alone_gives_work_to_whoever_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle worker beats keeping a prompt back, even where its way is taken to be long for ever."""
    monkeypatch.setattr(placing, "PathLatencyTracker", Former)
    monkeypatch.setattr(Former, "__getitem__", lambda self, key: self.known[key], raising=False)
    async with hiccup(monkeypatch) as cluster:
        seen = len(cluster.got)
        await cluster.run(15, 4.5)
        assert share(cluster.got[seen:]) > 0.3
        assert max(cluster.waited[seen:]) < 2.0


def test_computing_again_what_is_cached_elsewhere_may_take_longer_than_to_wait() -> None:
    """The exception: 4 s of computing on the idle worker, 1.2 s of waiting for the one that has nearly all of it."""
    one = WorkerSnapshot("prefill-0", "a", "h:1", "L", 2, 16, 1000, 16, 8192, prompts=(600, 600), prompt_rate=RATE,
                    step_s=0.01, cached=3900)  # fmt: skip
    idle = replace(one, worker_id="prefill-1", prompts=(), running=0, cached=0)
    decode = replace(idle, worker_id="decode-0")
    for tokens, expected in ((4000, "prefill-0"), (700, "prefill-1")):
        some = [one if tokens == 4000 else replace(one, cached=100), idle]
        found = place([decode], some, tokens, 0, RoutingConfig("never"))
        assert found
        assert found.prefill
        assert found.prefill.worker_id == expected
