"""The last hours of a cluster, for the dashboard: a point every SAMPLE_S seconds, of all routers together.

    EndedRequests, load ─▶ sample ─▶ registry ─▶ the samples of all routers ─▶ growth since the last ones ─▶ one point
                                     (RouterSamples)

Samples are totals since a router's start, so a sample that is late or read twice is not counted twice. The points are
in this router's memory: they begin with its start. While the registry does not answer, they are of this router alone.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate
from time import monotonic, time
from typing import Any

from services.router.execution.request_account import EndedRequests
from tandem.errors import Unavailable
from tandem.telemetry.metrics import TTFT_BUCKETS

SAMPLE_S = 10.0
KEPT_POINTS = 2160  # six hours
LEAST_S = 0.001  # between two points
SHARED_FAILURES = 20  # of each router, in its sample
SHOWN_FAILURES = 50
OUTCOMES = ("ok", "refused", "failed", "cancelled")
COLUMNS = ("at", "running", "queued", *OUTCOMES, "tokens", "ttft_p50", "ttft_p95")
"""Of a point. `at` is in unix seconds; outcomes and tokens are per second."""

Exchange = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class History:
    """`exchange` is RouterSamples.exchange; `load` returns how many requests run and how many wait, here."""

    def __init__(
        self,
        router: str,
        incarnation: str,
        ended: EndedRequests,
        load: Callable[[], tuple[int, int]],
        exchange: Exchange,
    ) -> None:
        self._router = router
        self._incarnation = incarnation
        self._ended = ended
        self._load = load
        self._exchange = exchange
        self._before: dict[str, dict[str, Any]] = {}  # the previous sample of each router
        self._read_at = monotonic()
        self.points: deque[list[float | None]] = deque(maxlen=KEPT_POINTS)
        self.taken = 0  # points since the start
        self.routers: dict[str, dict[str, float]] = {}  # each router's activity per second

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            await self.take()

    async def take(self) -> None:
        """Adds a point."""
        mine = self._sample()
        try:
            samples = await self._exchange(self._router, mine)
        except Unavailable:  # the view has logged it
            samples = {}
        samples[self._router] = mine
        now = monotonic()
        self._add({router: one for router, one in samples.items() if _readable(one)}, max(now - self._read_at, LEAST_S))
        self._read_at = now

    def since(self, taken: int) -> dict[str, Any]:
        """The points after the first `taken`, and their field names."""
        new = min(self.taken - taken, len(self.points))
        points = list(self.points)[len(self.points) - new :]
        return {"every": SAMPLE_S, "columns": COLUMNS, "points": points}

    def failures(self) -> list[dict[str, Any]]:
        """The latest requests that failed or were refused, of all routers, the newest first."""
        found = [one._asdict() | {"router": self._router} for one in self._ended.failures]
        for router, sample in self._before.items():
            if router != self._router:
                found += [{**one, "router": router} for one in sample["failures"]]
        return sorted(found, key=lambda one: -float(one["at"]))[:SHOWN_FAILURES]

    def _sample(self) -> dict[str, Any]:
        ended, (running, queued) = self._ended, self._load()
        return {
            "incarnation": self._incarnation,
            "running": running,
            "queued": queued,
            **{outcome: ended.outcomes[outcome] for outcome in OUTCOMES},
            "tokens": ended.tokens,
            "ttft": list(ended.ttft),
            "failures": [one._asdict() for one in list(ended.failures)[-SHARED_FAILURES:]],
        }

    def _add(self, samples: Mapping[str, dict[str, Any]], seconds: float) -> None:
        counted = (*OUTCOMES, "tokens")
        first_tokens = [0] * (len(TTFT_BUCKETS) + 1)
        self.routers = {}
        for router, sample in samples.items():
            before = self._before.get(router)
            if before is not None and before["incarnation"] != sample["incarnation"]:
                before = None
            # A router's counts before its first sample here have unknown times.
            grown = {name: (sample[name] - before[name]) / seconds if before else 0.0 for name in counted}
            self.routers[router] = {"running": sample["running"], "queued": sample["queued"], **grown}
            if before:
                pairs = zip(first_tokens, sample["ttft"], before["ttft"], strict=True)
                first_tokens = [total + now - then for total, now, then in pairs]
        self._before = dict(samples)
        sums = [sum(router[name] for router in self.routers.values()) for name in ("running", "queued", *counted)]
        self.points.append([round(time(), 1), *(round(value, 3) for value in sums), *_percentiles(first_tokens)])
        self.taken += 1


def _readable(sample: Any) -> bool:
    """Whether a sample can be read: another version may have written it."""
    numbers = ("running", "queued", *OUTCOMES, "tokens")
    return (
        isinstance(sample, dict)
        and isinstance(sample.get("incarnation"), str)
        and all(isinstance(sample.get(name), int) for name in numbers)
        and isinstance(sample.get("ttft"), list)
        and len(sample["ttft"]) == len(TTFT_BUCKETS) + 1
        and all(isinstance(count, int) for count in sample["ttft"])
        and isinstance(sample.get("failures"), list)
        and all(isinstance(one, dict) and isinstance(one.get("at"), int | float) for one in sample["failures"])
    )


def _percentiles(counts: Sequence[int]) -> list[float | None]:
    """50th and 95th percentile, interpolated within a bucket; above all edges the last edge."""
    edges, total = (0.0, *TTFT_BUCKETS, TTFT_BUCKETS[-1]), sum(counts)
    if total <= 0:
        return [None, None]
    sums = list(accumulate(counts))
    found: list[float | None] = []
    for share in (0.5, 0.95):
        place = bisect_left(sums, share * total)
        below = sums[place] - counts[place]
        part = (share * total - below) / counts[place]
        found.append(round(edges[place] + part * (edges[place + 1] - edges[place]), 6))
    return found
