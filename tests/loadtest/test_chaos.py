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
from loadtest.chaos import Answer, Tally, book
from tandem.answers import Piece
from tandem.errors import InternalError, ResumeFailed, TandemError, WorkerLost
from tests.loadtest.test_bench import left_behind, start

REQUEST: dict[str, Any] = {"prompt": "Return the"}
LOST = WorkerLost("decode-0 is gone")
CPU = torch.device("cpu")


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


def test_what_came_before_an_error_must_be_the_beginning() -> None:
    """A wrong token is none the better for an error behind it."""
    assert judged(answer(1, 3), LOST)
    assert judged(answer(1, 2, 3, 4, text="abc"), LOST)
    assert judged(answer(1, text="b"), LOST)


def test_no_job_fails_and_no_stream_for_another_reason_than_a_loss() -> None:
    """But for what two workers died with."""
    assert judged(Answer(), LOST, how="job")
    assert judged(Answer(), InternalError("bug"))
    assert judged(Answer(), InternalError("two died with it", reason="KILLS_WORKERS"), how="job") == []


def test_a_book_is_made_of_its_seed_alone() -> None:
    """So that a run can be asked for again."""
    assert book(random.Random(3), 24) == book(random.Random(3), 24) != book(random.Random(4), 24)


@pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE,
    reason="in plain PyTorch the last bits of a log probability depend on the batch",
)
@pytest.mark.timeout(240)
def test_a_short_run_finds_every_answer_right_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """With some real faults in it."""
    report_file = tmp_path / "report.json"
    process = start(folder, "--json", str(report_file), module="loadtest.chaos")
    output, _ = process.communicate(timeout=230)
    assert process.returncode == 0, output
    report = json.loads(report_file.read_text())
    assert report["wrong"] == []
    assert sum(report["outcomes"].values()) > 0
    assert sum(report["faults"].values()) > 1
    assert left_behind(folder) == []
