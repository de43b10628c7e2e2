"""How many lines of a batch run at once, on a store that only notes its results."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.state.batch_store import BatchRecord, BatchStatus, LineResult, Stored
from services.router.frontend.batches import batch_runner
from services.router.frontend.batches.batch_lines import Line
from services.router.frontend.batches.batch_runner import WINDOW, BatchRunner, _Running

RECORD = BatchRecord("ann", "batch_1", {"expires_at": str(int(time.time()) + 86_400), "generation": "1"})
LINES = [Line(number, str(number), b"") for number in range(3 * WINDOW)]


class Lines:
    """Each line takes a few turns of the event loop."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def forget(self, record: BatchRecord, line: Line) -> None:
        pass

    async def run(self, record: BatchRecord, line: Line) -> LineResult:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(5):
            await asyncio.sleep(0)
        self.running -= 1
        return LineResult(line.number, b"x", completed=True)


class Store:
    def __init__(self, answered: set[int], full: int | None = None) -> None:
        self.of_before, self.full = answered, full
        self.added: list[LineResult] = []

    async def answered(self, record: BatchRecord) -> set[int]:
        return self.of_before

    async def add(self, record: BatchRecord, results: list[LineResult]) -> Stored:
        if results[0].line == self.full and results[0].completed:
            return Stored.FULL
        self.added += results
        return Stored.KEPT


def runner(store: Store, lines: Lines, waiting: int) -> BatchRunner:
    given: Any = SimpleNamespace
    return BatchRunner(
        given(answered=store.answered, add=store.add),
        given(run=lines.run, forget=lines.forget),
        given(),
        lambda: waiting,
    )


async def test_a_batch_has_a_window_of_lines_in_progress() -> None:
    """And no more; lines that have a result do not run again."""
    store, lines = Store({0, 5}), Lines()
    assert await runner(store, lines, 0)._run_lines(_Running(RECORD, False), LINES) is BatchStatus.COMPLETED
    assert lines.most == WINDOW
    assert sorted(result.line for result in store.added) == [line.number for line in LINES if line.number not in (0, 5)]


async def test_while_requests_wait_a_batch_has_one_line_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither stops nor competes with them, and has its whole window when none waits any more."""
    monkeypatch.setattr(batch_runner, "SATURATED_CHECK_S", 0.0)
    store, lines = Store(set()), Lines()
    most_while_waiting: list[int] = []

    def waiting() -> int:
        if len(store.added) < WINDOW:
            return 1
        most_while_waiting[:] = most_while_waiting or [lines.most]
        return 0

    running = runner(store, lines, 0)
    running._waiting = waiting
    assert await running._run_lines(_Running(RECORD, False), LINES) is BatchStatus.COMPLETED
    assert (most_while_waiting, lines.most) == ([1], WINDOW)
    assert len(store.added) == len(LINES)


async def test_an_answer_without_room_becomes_an_error_of_its_line() -> None:
    """The batch goes on, and the line has one result."""
    store = Store(set(), full=3)
    assert await runner(store, Lines(), 0)._run_lines(_Running(RECORD, False), LINES) is BatchStatus.COMPLETED
    found = {result.line: result for result in store.added}
    assert len(store.added) == len(found) == len(LINES)
    assert [number for number, result in found.items() if not result.completed] == [3]
    assert b"batch_output_too_large" in found[3].text
