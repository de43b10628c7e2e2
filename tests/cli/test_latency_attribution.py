"""A slow request is blamed on what it lost its time to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cli import latency_attribution
from tandem.results import Receipt, Transfer
from tests.cli.test_rendering import RECEIPT

QUICK = {
    "tokenize": 0.001, "queue": 0.001, "dispatch": 0.001, "reserve": 0.001, "handoff": 0.001, "prefill_queue": 0.001,
    "prefill_compute": 0.02, "deliver": 0.001,
}  # fmt: skip
MOVED = Transfer("nixl:ucx:tcp", 4096, 1, 0.001, 0.001)


def receipt(
    tpot: float = 0.01, preemptions: int = 0, exposed: float = 0.001, attempts: int = 1, **phases: float
) -> Receipt:
    """100 tokens after a quick prefill elsewhere, but for what is given."""
    parts = {**QUICK, **phases}
    more: dict[str, Any] = {"phases": parts, "ttft": sum(parts.values()), "tpot": tpot, "preemptions": preemptions}
    more |= {"attempts": attempts, "total": sum(parts.values()) + 99 * tpot}
    moved = dataclasses.replace(MOVED, exposed=exposed)
    return dataclasses.replace(RECEIPT, **more, transfer=moved, completion_tokens=100, notes=["decode-1: died"])


CASES = [
    (receipt(queue=2.0), "queueing", "waited in the router"),
    (receipt(prefill_queue=2.0), "queueing", "computed other prompts first"),
    (receipt(retries=2.0, attempts=2), "failures", "decode-1: died"),
    (receipt(tpot=0.05, attempts=2), "failures", "decode-1: died"),
    (receipt(retries=2.0), "queueing", "waited in the router"),
    (receipt(prefill_compute=2.0), "prefill", "prompt tokens were computed"),
    (receipt(first_answer=2.0), "prefill", "the first answer of its request"),
    (
        dataclasses.replace(receipt(prefill_compute=2.0), prompt_tokens=1000, cached_tokens=16, unresumed_tokens=900),
        "prefill",
        "no copy of the recurrent states",
    ),
    (receipt(exposed=2.0, tpot=0.01 + 2.0 / 99), "transfer", "nixl:ucx:tcp"),
    (receipt(tpot=0.05), "decoding", "5.0 times as long"),
    (receipt(tpot=0.05, preemptions=2), "memory", "2 times"),
    (receipt(dispatch=2.0), "processes", "busy"),
]


@pytest.mark.parametrize(("slow", "cause", "says"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_largest_part_has_the_blame(slow: Receipt, cause: str, says: str) -> None:
    """And the advice is about that."""
    found = latency_attribution.of(slow, usual_tpot=0.01)
    assert found.cause == cause
    assert says in found.advice
    assert found.parts[cause] == pytest.approx(2.0, rel=1.0)


def test_the_parts_add_up_to_what_was_lost() -> None:
    """The time to first token, once, and what decoding took beyond the usual."""
    found = latency_attribution.of(receipt(tpot=0.03, exposed=0.5), usual_tpot=0.01)
    assert found.lost == sum(found.parts.values())
    assert found.lost == pytest.approx(sum(QUICK.values()) + 99 * 0.02)


def test_a_long_answer_is_not_slow() -> None:
    """Of two requests with the same pace, the one that waited comes first, however long the other one's answer is."""
    long = dataclasses.replace(receipt(), completion_tokens=100_000, total=1000.0)
    waited = receipt(queue=0.5)
    found = latency_attribution.slowest([long, waited, receipt()], most=2)
    assert [one.receipt for one in found] == [waited, long]


def test_each_model_has_its_own_usual_pace() -> None:
    """A large model is not slow because a small one is fast."""
    small = [dataclasses.replace(receipt(tpot=0.005), model="small") for _ in range(5)]
    large = dataclasses.replace(receipt(tpot=0.04), model="large")
    found = {one.receipt.model: one for one in latency_attribution.slowest([*small, large], most=10)}
    assert found["large"].parts["decoding"] == 0.0


def test_a_job_that_went_on_lost_no_time_with_its_earlier_tokens() -> None:
    """Its pace is that of the tokens since it went on, which lost no more time than they took."""
    went_on = dataclasses.replace(receipt(tpot=0.05), completion_tokens=10_000)
    assert latency_attribution.of(went_on, usual_tpot=0.01).parts["decoding"] == pytest.approx(99 * 0.04, rel=0.01)


def test_one_token_has_no_pace() -> None:
    """Nothing is divided by what is not there."""
    [found] = latency_attribution.slowest([dataclasses.replace(receipt(), completion_tokens=1, tpot=0.0)], most=5)
    assert found.cause == "prefill"
    assert latency_attribution.slowest([], most=5) == []
