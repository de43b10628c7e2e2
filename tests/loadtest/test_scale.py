"""The benchmark of a large cluster's router: it measures what it says, and a number that is missed is no success."""

from __future__ import annotations

import pytest

from loadtest.commands import main
from loadtest.scenarios import scale


def test_a_few_of_everything_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row with what is wanted; the exit code says whether one was missed."""
    code = main(["scale", "--quick"])
    shown = capsys.readouterr().out
    for row in ("placing a request, p99", "refresh, all workers new", "enqueueing 50 that wait", "longest blocking"):
        assert row in shown
    assert code == int("missed" in shown)


def test_a_number_that_is_missed_is_marked() -> None:
    """And one that is just as wanted is not."""
    rows = [scale.Row("kept", 1.0, 1.0), scale.Row("too slow", 1.01, 1.0)]
    assert [line.endswith("missed") for line in scale.table(rows).splitlines()] == [False, False, True]
