"""What a report says of its own certainty."""

from __future__ import annotations

import math
import random

import pytest

from loadtest.harness.stats import paced, percentile, sure


@pytest.mark.parametrize("count", [20, 80, 300])
def test_the_true_median_lies_within_the_interval_19_times_in_20(count: int) -> None:
    """Of a crooked distribution, whose median is ln 2. Half the interval would do so two times in three."""
    chance, runs = random.Random(7), 2000
    found = [sure([chance.expovariate(1.0) for _ in range(count)]) for _ in range(runs)]
    held = sum(low <= math.log(2) <= high for low, high in found) / runs
    assert 0.94 <= held <= 0.985
    narrow = sum(low <= math.log(2) <= high for low, high in (_half(*one) for one in found)) / runs
    assert narrow < 0.8


def _half(low: float, high: float) -> tuple[float, float]:
    middle = (low + high) / 2
    return (low + middle) / 2, (middle + high) / 2


def test_of_few_values_it_is_the_least_and_the_greatest() -> None:
    """Nobody can be surer of so few."""
    assert sure([3.0, 1.0]) == (1.0, 3.0)
    assert sure([2.0]) == (2.0, 2.0)


def test_a_stall_is_no_single_slow_request() -> None:
    """Half of the time stood still. The control: over the requests that were sent, the 99th percentile does not say
    so, because nothing was sent meanwhile; without a stall the two are the same."""
    usual, stalls = [0.03] * 500, [5.0] * 3
    assert percentile(paced([*usual, *stalls], 0.03), 0.99) > 4.0
    assert percentile([*usual, *stalls], 0.99) == 0.03
    assert paced(usual, 0.03) == usual
