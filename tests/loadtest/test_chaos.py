"""What the chaos run takes for right and for wrong, and a short one against a real `tandem up`."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import kernels
from loadtest.scenarios.chaos.answer_book import Answer, book, violation, weights
from loadtest.scenarios.chaos.tally import HUNG, UNKEPT, Detection, Happened, Tally, even_after
from tandem.errors import DeadlineExceeded, InternalError, ResumeFailed, TandemError, Unavailable, WorkerLost
from tandem.results import Piece, TokenLogprob
from tests.loadtest.test_bench import left_behind, start

REQUEST: dict[str, Any] = {"prompt": "Return the"}
LOST = WorkerLost("decode-0 is gone")
CPU = torch.device("cpu")
QUICK = ("kill", "pool", "freeze", "hiccup", "registry", "supervisor", "drain", "scale")


def answer(*token_ids: int, text: str = "", reason: Any = None, choice: int = 0) -> Answer:
    said = Answer()
    said.add(Piece(text, list(token_ids), reason, choice=choice))
    return said


def judged(said: Answer, error: TandemError | None = None, how: str = "stream") -> list[str]:
    tally = Tally()
    tally.judge(how, REQUEST, said, answer(1, 2, 3, text="abc", reason="length"), error)
    return tally.wrong


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, because a socket's path must be."""
    with tempfile.TemporaryDirectory(prefix="tdm-", dir="/tmp") as path:
        yield Path(path)


def test_the_whole_answer_and_the_beginning_of_one_that_was_lost_are_right() -> None:
    """Also of one that had not begun."""
    assert judged(answer(1, 2, 3, text="abc", reason="length")) == []
    assert judged(answer(1, 2, text="ab"), LOST) == []
    assert judged(Answer(), LOST) == []
    assert judged(answer(1, text="a"), ResumeFailed("given up")) == []


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (answer(1, 2, 4, text="abc", reason="length"), "token_ids: [1, 2, 4] instead of [1, 2, 3]"),
        (answer(1, 2, text="abc", reason="length"), "token_ids"),
        (answer(1, 2, 3, text="abd", reason="length"), "text"),
        (answer(1, 2, 3, text="abc", reason="stop"), "finish_reason"),
        (answer(1, 2, 3, text="abc", reason="length", choice=1), "choice 0"),
    ],
)
def test_anything_else_with_status_ok_is_wrong(said: Answer, what: str) -> None:
    """And it is told what differs."""
    (wrong,) = judged(said)
    assert what in wrong
    assert "status OK" in wrong


@pytest.mark.parametrize(
    ("of_token", "of_other", "right"), [(1e-6, 1e-6, True), (0.01, 0.0, False), (0.0, 0.01, False)]
)
def test_where_sums_have_no_order_log_probabilities_may_differ_a_little(
    of_token: float, of_other: float, right: bool
) -> None:
    """Within the reference's tolerance, in whole answers and beginnings, of answers and prompts; tokens never. Without
    a tolerance nothing may differ."""

    def said(first: Answer, token: int = 1, of_token: float = 0.0, of_other: float = 0.0) -> Answer:
        found = TokenLogprob(token, -0.5 + of_token, {token: -0.5 + of_token, 7: -2.0 + of_other})
        first.add(Piece("a", [token], "length", logprobs=[found], prompt_logprobs=[found]))
        return first

    reference, strict = said(Answer(1e-3)), said(Answer())
    received = said(Answer(), 1, of_token, of_other)
    assert (received.same(reference), received.begins(reference)) == (right, right)
    assert not received.same(strict)
    assert not said(Answer(), 2).same(reference)
    assert strict.same(strict)


@pytest.mark.parametrize(
    ("tokens", "what"),
    [([1, 2], "lost"), ([1, 2, 3, 3], "duplicated"), ([1, 1, 2, 3], "duplicated"), ([1, 9, 3], "corrupt")],
)
def test_what_is_wrong_has_one_of_the_five_names(tokens: list[int], what: str) -> None:
    """A missing end, tokens that came twice, and tokens that nobody chose are three different faults."""
    assert violation(answer(*tokens), answer(1, 2, 3)) == what


@pytest.mark.parametrize("error", [InternalError("no end", reason=HUNG), DeadlineExceeded("its own deadline")])
def test_a_request_without_an_end_is_hung(error: TandemError) -> None:
    """Also one that its own deadline ended: nothing that a chaos run does takes so long."""
    tally = Tally()
    tally.judge("stream", REQUEST, Answer(), answer(1), error)
    assert tally.violations["hung"] == 1


def test_what_came_before_an_error_must_be_the_beginning() -> None:
    """A wrong token is none the better for an error behind it."""
    assert judged(answer(1, 3), LOST)
    assert judged(answer(1, 2, 3, 4, text="abc"), LOST)
    assert judged(answer(1, text="b"), LOST)


def test_no_job_fails_and_no_stream_for_another_reason_than_a_loss() -> None:
    """But one that was kept by a registry that was killed."""
    assert judged(Answer(), LOST, how="job")
    assert judged(Answer(), InternalError("bug"))
    assert judged(Answer(), Unavailable("not kept", reason=UNKEPT), how="job") == []


def test_no_request_but_poison_may_be_taken_for_it() -> None:
    """However many workers ended beside it."""
    tally = Tally()
    tally.judge("stream", REQUEST, Answer(), answer(1), InternalError("lost", reason="KILLS_WORKERS"))
    tally.internal["poison"] += 1
    assert tally.wrong
    assert "INTERNAL 1 " in tally.lines()[0]


def test_the_largest_gap_belongs_to_the_fault_that_struck_when_it_began() -> None:
    """A fault that lasts explains a silence until its end; a short silence is not noted."""
    tally = Tally(happened=[Happened("kv-silent", 10.0, 20.0), Happened("kill", 25.0)])
    for began, ended in ((11.0, 15.0), (24.5, 27.0), (29.0, 29.1), (50.0, 50.5)):
        tally.gap(began, ended)
    assert tally.largest_gaps() == {"kill": 2.5, "kv-silent": 4.0, "no fault": 0.5}


def test_a_gap_does_not_count_the_time_in_which_a_pool_had_no_worker_in_order() -> None:
    """It is said apart. What remains is what the cluster could have done better."""
    tally = Tally(happened=[Happened("pool", 10.0)])
    tally.gap(10.0, 18.0)
    for began in (9.0, 10.0, 11.0, 12.0):
        tally.look(began, began + 1.0, in_order=began == 12.0)
    assert tally.largest_gaps() == {"pool": 6.0}
    assert "largest gap in all 8.0 s; a pool had no worker in order for 3 s" in tally.lines()


def test_detection_is_from_the_fault_until_somebody_knows() -> None:
    """One that nobody noticed is counted, too."""
    tally = Tally(detections=[Detection("hang", "freeze", "decode-0", "life", 10.0, 12.5)])
    tally.detections.append(Detection("hang", "freeze", "decode-1", "life", 20.0))
    assert "detection of hang: 1 of 2, median 2.50 s, most 2.50 s, 0 later than 3 s" in tally.lines()


def served(*of: tuple[float, float, str, float]) -> list[tuple[float, str]]:
    """Each: from, until, worker, requests in a second."""
    return [(a + number / rate, name) for a, b, name, rate in of for number in range(int((b - a) * rate))]


def test_load_is_even_again_when_no_worker_has_less_than_half_of_another() -> None:
    """In every window of ten seconds from then on; a pool that never gets there never was."""
    decode = [(0.0, 40.0, "decode-0", 10.0), (0.0, 40.0, "decode-1", 10.0), (0.0, 40.0, "prefill-0", 10.0)]
    seconds, shares = even_after(served(*decode, (8.0, 40.0, "prefill-1", 10.0)), since=0.0, until=40.0)
    assert seconds == 3.0  # from 3 s to 13 s one has 50 requests, and the other 100
    assert shares == "in 10 s: prefill 33% to 67% of 150, decode 50% to 50% of 200"
    seconds, _ = even_after(served(*decode, (0.0, 40.0, "prefill-1", 2.0)), since=0.0, until=40.0)
    assert seconds is None


def test_a_book_is_made_of_its_seed_alone() -> None:
    """So that a run can be asked for again."""
    assert book(random.Random(3), 24) == book(random.Random(3), 24) != book(random.Random(4), 24)


def test_short_requests_are_asked_for_more_often() -> None:
    """So that many requests fit into a run, and long ones are still there to be hurt."""
    short, long, three = weights([{"max_tokens": 4}, {"max_tokens": 120}, {"max_tokens": 4, "n": 3}])
    assert short > three > long > 0


@pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE,
    reason="in plain PyTorch the last bits of a log probability depend on the batch",
)
@pytest.mark.timeout(620)
def test_a_short_run_finds_every_answer_right_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """With some real faults in it."""
    report_file = tmp_path / "report.json"
    process = start(folder, "--only", ",".join(QUICK), "--json", str(report_file), name="chaos")
    output, _ = process.communicate(timeout=610)
    assert process.returncode == 0, output
    report = json.loads(report_file.read_text())
    assert report["wrong"] == []
    assert "lost 0 duplicated 0 corrupt 0 leaked 0 hung 0 INTERNAL 0" in output
    assert sum(report["outcomes"].values()) > 0
    assert sum(report["faults"].values()) > 1
    assert left_behind(folder) == []
