"""What the ways through the cluster cost."""

from __future__ import annotations

import random

import pytest

from services.router.policy import Way
from services.router.ways import Ways


def test_a_way_is_learnt_from_those_who_took_it() -> None:
    """4 ms of messages; 10 ms for a move and 2 ms for each block of it, whatever the mix of lengths."""
    ways, some = Ways(), random.Random(1)
    ways.took("decode-0", "prefill-0", 9.0, 1, 9.0)  # the first one met something else
    for _ in range(500):
        blocks = some.randint(1, 128)
        ways.took("decode-0", "prefill-0", 0.004, blocks, 0.010 + 0.002 * blocks)
        ways.took("decode-0", "", 0.003)
    way = ways.known["decode-0", "prefill-0"]
    assert way.first_s == pytest.approx(0.004, rel=0.01)
    assert way.seconds(100) == pytest.approx(0.214, rel=0.05)
    assert ways.known["decode-0", ""] == Way(pytest.approx(0.003))


def test_ways_of_workers_that_are_gone_are_forgotten() -> None:
    """Else a router of a cluster that scales would grow."""
    ways = Ways()
    for decode, prefill in (("a", "b"), ("a", ""), ("c", "b"), ("c", "")):
        ways.took(decode, prefill, 0.001)
    ways.keep_only({"a", "b"})
    assert set(ways.known) == {("a", "b"), ("a", "")}
    ways.keep_only({"a"})
    assert set(ways.known) == {("a", "")}
