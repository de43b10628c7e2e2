"""Compares the router's estimates with actual durations, by path."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.results import Path, Receipt, _Dict


@dataclass(frozen=True, slots=True)
class Calibrated(_Dict):
    """How actual durations compare with the estimates, over the requests of one path."""

    path: Path
    requests: int
    compute: tuple[float, float, float]
    """Seconds of computing, was / expected: first quartile, median, third."""
    wait: tuple[float, float, float]
    """Seconds of waiting at the worker, was - expected: likewise."""


def calibration(items: Iterable[Receipt]) -> list[Calibrated]:
    """Uses receipts of single answers with an estimate and a successful first attempt; a row for each path."""
    by_path: dict[Path, list[tuple[float, float]]] = {}
    for item in items:
        guess = item.estimate
        if guess is None or guess.compute <= 0 or item.attempts > 1 or item.choice:
            continue
        was = item.phases.get("prefill_compute", 0.0), item.phases.get("prefill_queue", 0.0)
        by_path.setdefault(item.path, []).append((was[0] / guess.compute, was[1] - guess.wait))
    return [
        Calibrated(path, len(pairs), _quartiles([a for a, _ in pairs]), _quartiles([b for _, b in pairs]))
        for path, pairs in sorted(by_path.items())
    ]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
