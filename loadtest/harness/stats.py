"""Results of a measurement: a median with its spread, and a row of the report with the ratio of two of them."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from rich.console import Console

Tick = Callable[[str], None]  # called with a description before each piece of work, `ticks` times in all

CELLS = "▁▂▃▄▅▆▇█"
FILE_WIDTH = 150  # columns, where the output is not a terminal


@dataclass(frozen=True)
class Spread:
    """The median, and the middle half (first to third quartile) of `count` values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError without a value."""
        if not values:
            raise ValueError("nothing was measured")
        ordered = sorted(values)
        low, high = (ordered[0], ordered[-1])
        if len(ordered) >= 4:
            low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(statistics.median(ordered), low, high, len(ordered))


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The spread of the ratios of neighbours: the two sides were measured in turn, so their noise is shared."""
    return Spread.of([value / other for value, other in zip(over, under, strict=True)])


def sure(values: Sequence[float]) -> tuple[float, float]:
    """Between which the median of everything that could have been measured lies, 19 times in 20, whatever the
    distribution: by ranks, from the binomial distribution (Conover, Practical Nonparametric Statistics, 3.2). Of fewer
    than six values that is not sure, and these are the least and the greatest."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))  # 1.96 standard deviations of sqrt(n) / 2
    rank = max(0, math.floor(len(ordered) / 2 - half))
    return ordered[rank], ordered[-1 - rank]


@dataclass(frozen=True)
class Row:
    """`ratio` is the result. `beside` has absolute values for orientation: name -> (value, unit)
    in s, B/s, FLOP/s or 1."""

    what: str
    ratio: Spread
    beside: dict[str, tuple[Spread, str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        what: str,
        over: Sequence[float],
        under: Sequence[float],
        values: Mapping[str, Sequence[float]],
        unit: str = "s",
    ) -> Row:
        """The ratios of neighbours, and `values` beside them in `unit`."""
        return cls(what, ratios(over, under), {name: (Spread.of(each), unit) for name, each in values.items()})


@dataclass(frozen=True)
class Section:
    """One part of the report. `read` explains the ratios; `details` are only in the JSON."""

    title: str
    read: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def taken(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = perf_counter()
    work()
    return perf_counter() - start


def in_turn(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Every side once per round, the order turned round each time, after one round that does not count."""
    for side in sides.values():
        side()
    seconds_of: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(repeats):
        for name in list(sides) if round_ % 2 == 0 else reversed(list(sides)):
            seconds_of[name].append(sides[name]())
    return seconds_of


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; `share` is 0 to 1. Raises ValueError without a value."""
    if not values:
        raise ValueError("nothing was measured")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def paced(seconds: Sequence[float], every_s: float) -> list[float]:
    """The durations of a client that sends a request when the last one was answered, and of those that it would have
    sent meanwhile at one in `every_s` seconds. Without these, a stall of any length is one slow request."""
    return [one - missed * every_s for one in seconds for missed in range(max(1, int(one / every_s)))]


def sparkline(values: Sequence[float]) -> str:
    """A line of bars from the least to the most; one that varies by less than a MiB is drawn flat."""
    low, span = min(values), max(1.0, max(values) - min(values))
    return "".join(CELLS[int((value - low) / span * (len(CELLS) - 1))] for value in values)


def console(width: int = FILE_WIDTH) -> Console:
    """stdout. `width`: columns where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else width)
