"""Outcomes of the requests of a load, and how many kept the objective. Arithmetic only, no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal, get_args

from typer import Option

from loadtest.harness.options import Tpot, Ttft, positive
from loadtest.harness.stats import percentile

State = Literal["done", "rejected", "failed", "unfinished"]
Metric = Literal["ttft", "tpot", "itl", "e2e"]
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Objective:
    """A request keeps it when its first token came within `ttft` seconds and the others within `tpot` each, on average.
    A rate is kept when at least the share `attainment` of all requests keeps it."""

    ttft: Ttft = 2.0
    tpot: Tpot = 0.1
    attainment: Annotated[
        float, Option(metavar="SHARE", help="Objective: share of all requests.", callback=positive)
    ] = 0.9


@dataclass
class Outcome:
    """One request and what became of it. Times are seconds since the load began."""

    at: float
    """When it was to be sent."""
    input: int
    output: int
    """Tokens that were asked for."""
    beside: bool = False
    """Sent only to disturb the others: counted nowhere."""
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each message with tokens came."""
    counts: list[int] = field(default_factory=list)
    """How many tokens each of them had."""
    ended: float = 0.0
    """When it was over, or given up."""
    state: State = "unfinished"
    why: str = ""
    retry_after: float | None = None
    """Of a rejected one: when to come back, if that was said."""
    cached: int | None = None
    """Of the prompt, by Tandem's receipt."""
    path: str = ""

    @property
    def late(self) -> float:
        return self.sent - self.at

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def waited(self) -> float | None:
        """Seconds to the first token, from when it was sent. One that was given up has waited until then; one that was
        rejected or failed before its first token has no such time."""
        if self.times:
            return self.times[0] - self.sent
        return self.ended - self.sent if self.state == "unfinished" else None

    @property
    def heard(self) -> list[float]:
        """When each message with tokens came, and when a stream with some was given up: it was silent until then."""
        return [*self.times, self.ended] if self.times and self.state == "unfinished" else self.times

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None without a second token."""
        return (self.heard[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def kept(self, objective: Objective) -> bool:
        """Whether the objective was kept; only complete answers can keep one."""
        if self.state != "done" or self.waited is None:
            return False
        return self.waited <= objective.ttft and (self.tpot or 0.0) <= objective.tpot


@dataclass
class Load:
    """One rate offered to one server. The first `warmup` seconds are sent and not counted; then come `seconds`."""

    name: str
    rate: float
    """Requests a second that were wanted; 0 where the load is not of a rate."""
    warmup: float
    seconds: float
    outcomes: list[Outcome] = field(default_factory=list)
    """All of them, those of the warm-up included."""
    lag: float = 0.0
    """The 99th percentile of the time by which this client's own event loop was late for a tick."""
    cores: float = 0.0
    """That this client used itself."""

    @property
    def until(self) -> float:
        return self.warmup + self.seconds

    @property
    def counted(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if self.warmup <= outcome.at < self.until and not outcome.beside]

    @property
    def offered(self) -> float:
        """Requests a second that there really were to be sent."""
        return len(self.counted) / self.seconds

    def kept(self, objective: Objective) -> int:
        return sum(outcome.kept(objective) for outcome in self.counted)

    def attainment(self, objective: Objective) -> float:
        """The share of all requests that kept the objective: rejected, failed and unfinished ones did not. 0 of none
        is 0: what was not asked was not kept."""
        return self.kept(objective) / len(self.counted) if self.counted else 0.0

    def goodput(self, objective: Objective) -> float:
        """Requests a second that kept the objective."""
        return self.kept(objective) / self.seconds

    def count(self, state: State) -> int:
        return sum(outcome.state == state for outcome in self.counted)

    @property
    def throughput(self) -> float:
        """Tokens that came within the counted seconds, a second, whenever they had been asked for."""
        return sum(self._tokens()) / self.seconds

    def _tokens(self) -> Iterable[int]:
        for outcome in (outcome for outcome in self.outcomes if not outcome.beside):
            for at, count in zip(outcome.times, outcome.counts, strict=True):
                if self.warmup <= at < self.until:
                    yield count

    @property
    def late(self) -> float:
        """The 99th percentile of the time by which a request was sent, or a tick was, too late."""
        return max(self.lag, percentile([outcome.late for outcome in self.counted] or [0.0], 0.99))

    def gaps(self) -> list[float]:
        """Seconds between two messages of one stream, where they began within the counted seconds, however long they
        lasted."""
        return [
            later - sooner
            for outcome in self.outcomes
            if not outcome.beside
            for sooner, later in pairwise(outcome.heard)
            if self.warmup <= sooner < self.until
        ]

    def values(self, metric: Metric) -> list[float]:
        """The available values in seconds: "ttft", "tpot" and "e2e" of counted requests, "itl" of gaps."""
        if metric == "itl":
            return self.gaps()
        seconds = (METRICS[metric](outcome) for outcome in self.counted)
        return [value for value in seconds if value is not None]

    def latencies(self) -> dict[Metric, dict[str, float]]:
        """Percentiles in seconds; a metric without values is left out."""
        by_metric = {metric: self.values(metric) for metric in get_args(Metric)}
        return {
            metric: {share: percentile(values, at) for share, at in SHARES.items()} | {"max": max(values)}
            for metric, values in by_metric.items()
            if values
        }


METRICS: dict[str, Callable[[Outcome], float | None]] = {
    "ttft": lambda outcome: outcome.waited,
    "tpot": lambda outcome: outcome.tpot,
    "e2e": lambda outcome: outcome.ended - outcome.sent if outcome.state == "done" else None,
}


Say = Callable[[Load, float], None]  # called now and then with the load so far, and seconds since its beginning


@dataclass
class Side:
    """One system and its loads. `bests`: the highest rate that kept the objective, once for each search."""

    name: str
    target: str
    model: str
    loads: list[Load] = field(default_factory=list)
    bests: list[float] = field(default_factory=list)


def interval(kept: int, of: int) -> tuple[float, float]:
    """Where a share lies that was seen as `kept` of `of`, with 95 % confidence (Wilson)."""
    if not of:
        return 0.0, 1.0
    z, share = 1.96, kept / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    # At 0 and 1 the bound is the share itself, which rounding would miss.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def next_rate(tried: Sequence[tuple[float, bool]], start: float, precision: float, most: int) -> float | None:
    """The rate to try next in the search for the highest one that is kept; None when it is known to `precision` (0.1:
    within a tenth), after `most` tries, or when 1/64 of `start` is not kept either. `tried` are rates and whether they
    were kept.

    Doubles while it is kept, halves while it is not, then takes the geometric middle. A kept rate above one that was
    not kept is ignored as luck.
    """
    if len(tried) >= most:
        return None
    broken = [rate for rate, kept in tried if not kept]
    held = highest(tried)
    if not tried:
        return start
    if not broken:
        return 2 * max(rate for rate, _ in tried)
    if held is None:
        return min(broken) / 2 if min(broken) > start / 64 else None
    return math.sqrt(held * min(broken)) if min(broken) > held * (1 + precision) else None


def highest(tried: Sequence[tuple[float, bool]]) -> float | None:
    """The highest rate that was kept, below all that were not."""
    lowest_missed = min((rate for rate, kept in tried if not kept), default=math.inf)
    return max((rate for rate, kept in tried if kept and rate < lowest_missed), default=None)
