"""A receipt adds up, whatever happened on the way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.execution import request_timeline
from services.router.execution.request_timeline import RequestTimeline
from services.router.preprocess.request import build_request
from services.router.preprocess.served_model import ModelFacts
from services.router.preprocess.tokenizer import Tokenizer
from services.router.routing.placement import Placement, WorkerSnapshot
from tandem.v1 import common_pb2, decode_pb2, generation_pb2

DECODE = WorkerSnapshot("decode-0", "a", "h:1", "L", 0, 4, 64, 16, 1024)
PREFILL = WorkerSnapshot("prefill-0", "b", "h:2", "L", 0, 4, 64, 16, 1024)
MODEL = ModelFacts(context=64, vocab_size=100, eos_token_ids=())
SPANS = st.floats(0, 10)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(tokenize=SPANS, waits=st.lists(st.tuples(SPANS, SPANS), max_size=4), total=SPANS, hop=SPANS, deliver=SPANS)
def test_the_phases_add_up_to_the_time_to_first_token(
    tokenize: float, waits: list[tuple[float, float]], total: float, hop: float, deliver: float
) -> None:
    """For any number of failed attempts before the first token; their time is in `retries` and nowhere else."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_timeline, "monotonic", clock)
        account = RequestTimeline(clock.now)
        clock.now += tokenize
        account.admitted()
        for waited, lost in [*waits, (0.5, None)]:
            clock.now += waited
            account.placed(Placement(DECODE, PREFILL))
            account.dispatched()
            if lost is not None:
                clock.now += lost
                account.failed()
        clock.now += total + hop
        timing = common_pb2.PrefillTiming(queue_seconds=total / 4, compute_seconds=total / 4)
        account.first_token(
            decode_pb2.FirstTokenTiming(
                total_seconds=total, admit_seconds=total / 4, prefill=timing, path=common_pb2.PATH_DISAGGREGATED
            )
        )
        clock.now += deliver
        account.sent(1)
        job = build_request(
            generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2])), Tokenizer(None, None), MODEL
        )
        job.tokens.append(3)
        made = account.receipt(job, "toy")
    phases = {phase.name: phase.seconds for phase in made.phases}
    assert math.isclose(sum(phases.values()), made.ttft_seconds, abs_tol=1e-6)
    assert all(seconds >= -1e-6 for seconds in phases.values()), phases
    assert math.isclose(phases.get("retries", 0.0), sum(lost for _, lost in waits), abs_tol=1e-6)
    assert math.isclose(phases["queue"], 0.5 + sum(waited for waited, _ in waits), abs_tol=1e-6)
    assert math.isclose(phases["dispatch"], hop, abs_tol=1e-6)
    assert (made.attempts, made.completion_tokens) == (len(waits) + 1, 1)


@pytest.mark.parametrize("queued", [0.0, 3.0], ids=["idle", "full"])
def test_who_follows_the_first_answer_has_queued_as_long_as_that_one(queued: float) -> None:
    """Then it waits for the prompt's KV, which no larger pool makes shorter. The phases still add up."""
    clock = Clock()
    first, own = RequestTimeline(clock.now), RequestTimeline(clock.now)
    placement = Placement(DECODE, PREFILL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_timeline, "monotonic", clock)
        first.admitted()
        clock.now += queued
        first.placed(placement)
        first.dispatched()
        clock.now += 2.0
        first.first_token(decode_pb2.FirstTokenTiming(total_seconds=2.0))
        first.sent(1)
        own.admitted(first)
        clock.now += 0.5
        own.placed(placement)
        own.dispatched()
        own.first_token(decode_pb2.FirstTokenTiming())
        own.sent(1)
    assert own.first
    phases = dict(own.first[2])
    assert phases["queue"] == pytest.approx(queued + 0.5)
    assert phases["first_answer"] == pytest.approx(2.0)
    assert sum(phases.values()) == pytest.approx(own.ttft)
    assert first.first
    assert "first_answer" not in dict(first.first[2])


def test_what_workers_prepare_is_no_part_of_a_path() -> None:
    """A worker that loads an adapter or compiles a grammar for seconds would do so on any path: the decode worker
    before it admits the request, the prefill worker before it queues the prompt."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_timeline, "monotonic", clock)
        account = RequestTimeline(clock.now)
        account.placed(Placement(DECODE, PREFILL))
        account.dispatched()
        clock.now += 6.0
        timing = common_pb2.PrefillTiming(queue_seconds=0.25, compute_seconds=0.5, prepare_seconds=2.0)
        account.first_token(decode_pb2.FirstTokenTiming(total_seconds=5.9, admit_seconds=3.0, prefill=timing))
        account.ended(decode_pb2.Ended())
    assert account.path_latency() == (pytest.approx(0.25), 0, 0.0)


def test_the_time_per_token_is_that_of_the_tokens_that_came_here() -> None:
    """A job that goes on has tokens of earlier attempts, which took no time in this one. The last token alone has no
    time per token."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_timeline, "monotonic", clock)
        account = RequestTimeline(clock.now)
        account.placed(Placement(DECODE, PREFILL))
        account.dispatched()
        account.first_token(decode_pb2.FirstTokenTiming())
        asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2]))
        job = build_request(asked, Tokenizer(None, None), MODEL)
        job.tokens.extend([3] * 10)
        found = []
        for _ in range(3):
            clock.now += 0.5
            job.tokens.append(4)
            account.sent(1)
            found.append(account.receipt(job, "toy").tpot_seconds)
    assert found == [0.0, pytest.approx(0.5), pytest.approx(0.5)]


def test_a_refusal_for_want_of_room_is_no_attempt() -> None:
    """ "Not now" costs time and counts for nothing else."""
    account = RequestTimeline(0.0)
    account.dispatched()
    account.refused()
    account.dispatched()
    assert account.attempts == 1


@pytest.mark.parametrize(
    ("attempts", "note"),
    [
        ([("tile32", "tile32", True)], ""),
        ([("", "tile32", True)], ""),
        ([("pairs", "tile32", True)], "prefill-0 pairs, decode-0 tile32"),
        ([("tile32", "tile32", True), ("tile32", "pairs", True)], "prefill-0 tile32, decode-0 tile32, decode-1 pairs"),
        ([("tile32", "pairs", False), ("tile32", "tile32", True)], ""),
        ([("tile32", "tile32", True), ("tile32", "tile32", True)], ""),
    ],
)
def test_a_stream_whose_workers_sum_in_unlike_orders_says_so(attempts: list[tuple[str, str, bool]], note: str) -> None:
    """Of the attempts that gave tokens: their decode workers, and their prefill workers. One whose order is not known,
    as of an earlier version, is not accused."""
    account = RequestTimeline(0.0)
    for number, (prefills, decodes, gave) in enumerate(attempts):
        decode = replace(DECODE, worker_id=f"decode-{number}", sum_order=decodes)
        account.placed(Placement(decode, replace(PREFILL, sum_order=prefills)))
        account.dispatched()
        if gave:
            account.first_token(decode_pb2.FirstTokenTiming())
            account.sent(1)
    assert account.begun_with is not None
    assert account.begun_with.sum_order == attempts[-1][1]
    job = build_request(
        generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1])), Tokenizer(None, None), MODEL
    )
    job.tokens.append(3)
    notes = list(account.receipt(job, "toy").notes)
    assert len(notes) == bool(note)
    assert not note or (f"({note})" in notes[0] and "sum_order" in notes[0])
