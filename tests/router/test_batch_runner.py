"""Which lines of a batch run at once, on a store that only notes its results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.state.batch_store import BatchRecord, BatchStatus, LineResult, Stored
from cluster.state.job_journal import Kept
from services.router.frontend.batches import batch_runner
from services.router.frontend.batches.batch_lines import Line
from services.router.frontend.batches.batch_runner import WINDOW, BatchRunner, _Running
from tests.support.waiting import until

RECORD = BatchRecord("ann", "batch_1", {"expires_at": str(int(time.time()) + 86_400), "generation": "1"})
LINES = [Line(number, str(number), b"") for number in range(3 * WINDOW)]


class Lines:
    """Each line takes a few turns of the event loop; those to a model in `stuck` have no end."""

    def __init__(self, stuck: str = "") -> None:
        self.stuck = stuck
        self.running = self.most = 0
        self.begun: list[Line] = []

    async def forget(self, record: BatchRecord, line: Line) -> None:
        pass

    async def run(self, record: BatchRecord, line: Line) -> LineResult:
        self.begun.append(line)
        if self.stuck and line.model == self.stuck:
            await asyncio.Event().wait()
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
        self.wanted: set[int] = set()
        self.has_wanted = asyncio.Event()  # results of all those lines

    async def answered(self, record: BatchRecord) -> set[int]:
        return self.of_before

    async def add(self, record: BatchRecord, results: list[LineResult]) -> Stored:
        if results[0].line == self.full and results[0].completed:
            return Stored.FULL
        self.added += results
        if self.wanted and self.wanted <= {result.line for result in self.added}:
            self.has_wanted.set()
        return Stored.KEPT


def runner(
    store: Store,
    lines: Lines,
    waiting: Callable[[str], int] = lambda model: 0,
    key_of: Callable[[str], str] = lambda name: name,
) -> BatchRunner:
    given: Any = SimpleNamespace
    return BatchRunner(
        given(answered=store.answered, add=store.add),
        given(run=lines.run, forget=lines.forget),
        given(),
        given(waiting=waiting, key_of=key_of),
    )


async def test_a_batch_has_a_window_of_lines_in_progress() -> None:
    """And no more; lines that have a result do not run again."""
    store, lines = Store({0, 5}), Lines()
    assert await runner(store, lines)._run_lines(_Running(RECORD, False), LINES) is BatchStatus.COMPLETED
    assert lines.most == WINDOW
    assert sorted(result.line for result in store.added) == [line.number for line in LINES if line.number not in (0, 5)]


async def test_while_requests_wait_a_batch_has_one_line_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither stops nor competes with them, and has its whole window when none waits any more."""
    monkeypatch.setattr(batch_runner, "SATURATED_CHECK_S", 0.0)
    store, lines = Store(set()), Lines()
    most_while_waiting: list[int] = []

    def waiting(model: str) -> int:
        if len(store.added) < WINDOW:
            return 1
        most_while_waiting[:] = most_while_waiting or [lines.most]
        return 0

    running = runner(store, lines, waiting)
    assert await running._run_lines(_Running(RECORD, False), LINES) is BatchStatus.COMPLETED
    assert (most_while_waiting, lines.most) == ([1], WINDOW)
    assert len(store.added) == len(LINES)


async def test_an_answer_without_room_becomes_an_error_of_its_line() -> None:
    """The batch goes on, and the line has one result."""
    store = Store(set(), full=3)
    assert await runner(store, Lines())._run_lines(_Running(RECORD, False), LINES) is BatchStatus.COMPLETED
    found = {result.line: result for result in store.added}
    assert len(store.added) == len(found) == len(LINES)
    assert [number for number, result in found.items() if not result.completed] == [3]
    assert b"batch_output_too_large" in found[3].text


MIXED = [Line(number, str(number), b"", "ab"[number % 2]) for number in range(6 * WINDOW)]
OF_B = [line.number for line in MIXED if line.model == "b"]


async def until_b_is_done(store: Store, lines: Lines, within_s: float = 10.0, **about: Any) -> None:
    """Runs MIXED. Raises TimeoutError if what is to the model b does not get its results."""
    store.wanted = {*OF_B}
    running = asyncio.create_task(runner(store, lines, **about)._run_lines(_Running(RECORD, False), MIXED))
    try:
        async with asyncio.timeout(within_s):
            await store.has_wanted.wait()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_lines_that_wait_for_one_model_delay_none_to_another() -> None:
    """A whole window of lines to the model a has no end; all that are to b get their results meanwhile. The control:
    taken for one model, they do not."""
    store, lines = Store(set()), Lines(stuck="a")
    await until_b_is_done(store, lines)
    assert len([line for line in lines.begun if line.model == "a"]) == WINDOW
    with pytest.raises(TimeoutError):
        await until_b_is_done(Store(set()), Lines(stuck="a"), within_s=0.1, key_of=lambda name: "")


async def test_a_full_queue_holds_back_the_lines_of_its_own_model_only() -> None:
    """While requests to a wait, its lines are begun one at a time, and a window of those to b."""
    lines = Lines(stuck="a")
    await until_b_is_done(Store(set()), lines, waiting={"a": 1, "b": 0}.__getitem__)
    assert len([line for line in lines.begun if line.model == "a"]) == 1
    assert lines.most == WINDOW


# ---- more batches than places


class Waiting:
    """Batches without an owner, in the order in which they are claimed. None of them has an end."""

    def __init__(self, *tenants: str) -> None:
        self.records = [BatchRecord(tenant, f"batch_{at}", {"generation": "1"}) for at, tenant in enumerate(tenants)]
        self.running: list[str] = []  # their tenants
        self.most = 0
        self.seen: set[str] = set()  # ids of those that ran
        self.given_up = 0

    async def claim(self) -> BatchRecord | None:
        return self.records.pop(0) if self.records else None

    async def renew(self, owned: list[BatchRecord]) -> list[Kept]:
        return [Kept.KEPT for _ in owned]

    async def release(self, owned: list[BatchRecord]) -> None:
        self.records += owned
        self.given_up += len(owned)

    async def run(self, one: _Running) -> None:
        self.running.append(one.record.tenant)
        self.most = max(self.most, len(self.running))
        self.seen.add(one.record.batch_id)
        try:
            await asyncio.Event().wait()
        finally:
            self.running.remove(one.record.tenant)


@asynccontextmanager
async def running(waiting: Waiting, monkeypatch: pytest.MonkeyPatch, turn_s: float) -> AsyncIterator[None]:
    """A router with four places runs them, and looks again and again for one that waits."""
    monkeypatch.setattr(batch_runner, "MAX_RUNNING", 4)
    monkeypatch.setattr(batch_runner, "LEASE_S", 0.003)
    monkeypatch.setattr(batch_runner, "TURN_S", turn_s)
    given: Any = SimpleNamespace
    store = given(claim=waiting.claim, renew=waiting.renew, release=waiting.release)
    one = BatchRunner(store, given(), given(), given())
    monkeypatch.setattr(one, "_work", waiting.run)
    await one.start()
    try:
        yield
    finally:
        await one.leave()


async def test_the_long_batches_of_one_tenant_leave_a_place_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once their turn is over; the other's one batch keeps its place while they take turns. The control: without turns
    it waits for one of them to end."""
    waiting = Waiting("ann", "ann", "ann", "ann", "ann", "bob")
    async with running(waiting, monkeypatch, turn_s=0.02):
        await until(lambda: len(waiting.seen) == 6, 10, lambda: waiting.seen)
        had = waiting.given_up
        await until(lambda: waiting.given_up > had + 8 or waiting.running.count("bob") != 1, 10)
        assert waiting.running.count("bob") == 1
    assert waiting.most == 4
    waiting = Waiting("ann", "ann", "ann", "ann", "bob")
    async with running(waiting, monkeypatch, turn_s=1e6):
        with pytest.raises(AssertionError):
            await until(lambda: "bob" in waiting.running, 0.2)


async def test_its_own_leases_come_before_further_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry so slow that the lease of the first batch is over before there is none to claim any more."""
    waiting = Waiting("ann", "bob")
    due, renewed = list(waiting.records), list[int]()

    async def claim() -> BatchRecord:
        await asyncio.sleep(0.01)
        due.append(due.pop(0))
        return due[-1]

    async def renew(owned: list[BatchRecord]) -> list[Kept]:
        renewed.append(len(owned))
        return [Kept.KEPT for _ in owned]

    monkeypatch.setattr(waiting, "claim", claim)
    monkeypatch.setattr(waiting, "renew", renew)
    async with running(waiting, monkeypatch, turn_s=1e6):
        await until(lambda: renewed[-1:] == [2], 10, lambda: renewed)


async def test_more_tenants_than_places_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them, again and again; and where none waits, none gives up its place."""
    waiting = Waiting(*"abcdefg")
    async with running(waiting, monkeypatch, turn_s=0.01):
        for _ in range(2):
            waiting.seen.clear()
            await until(lambda: len(waiting.seen) == 7, 10, lambda: waiting.seen)
    waiting = Waiting(*"abcd")
    async with running(waiting, monkeypatch, turn_s=0.0):
        await until(lambda: len(waiting.running) == 4, 10)
        with pytest.raises(AssertionError):
            await until(lambda: waiting.given_up > 0, 0.1)
