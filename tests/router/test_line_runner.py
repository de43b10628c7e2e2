"""The jobs of one line of a batch, on a journal from which ended jobs are removed while the line needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.state.batch_store import BatchRecord, LineResult
from cluster.state.job_journal import Entry, JobRecord
from cluster.state.job_journal import JobState as State
from cluster.state.redis_store import no_such
from services.router.frontend.batches.batch_lines import Line
from services.router.frontend.batches.line_runner import MAX_REMOVED, LineRunner
from tandem.errors import TooLarge
from tandem.v1 import generation_pb2, jobs_pb2

RECORD = BatchRecord("ann", "batch_1", {"endpoint": "/v1/completions"})
LINE = Line(0, "custom", b"{}")
FIRST, SECOND = "ann/batch_1-0-0", "ann/batch_1-0-1"
FAILURE = TooLarge("too long")


class Journal:
    """Jobs that end when they are submitted. After the end of one in `takes` is read, that job is removed so often."""

    def __init__(self, end: State, takes: dict[str, tuple[str, int]]) -> None:
        self._end, self._takes = end, takes
        self._kept: set[str] = set()
        self.computed: Counter[str] = Counter()
        self.cancelled: list[str] = []

    async def submit(self, requests: Sequence[generation_pb2.GenerateRequest], *_: Any, **__: Any) -> None:
        new = {f"ann/{request.request_id}" for request in requests} - self._kept
        self._kept |= new
        self.computed.update(new)

    async def open_with(self, prefix: str) -> list[str]:
        return ["ann/removed", *sorted(job_id for job_id in self._kept if job_id.startswith(prefix))]

    async def cancel(self, job_id: str) -> None:
        if job_id not in self._kept:
            raise no_such("job", job_id, "")
        self.cancelled.append(job_id)

    async def get(self, job_id: str) -> JobRecord:
        if job_id not in self._kept:
            raise no_such("job", job_id, "")
        error = FAILURE if self._end is State.FAILED else None
        return JobRecord(job_id, jobs_pb2.KeptJob().SerializeToString(), self._end, 1, 1, error)

    status = get

    async def watch(self, job_id: str, idle_s: float) -> AsyncIterator[list[Entry]]:
        taken, times = self._takes.get(job_id, ("", 0))
        if times:
            self._takes[job_id] = (taken, times - 1)
            self._kept.discard(taken)
        yield [Entry("1", b"", self._end)]


async def result_of(journal: Journal) -> LineResult:
    """Of a line with two prompts."""

    async def collect(events: AsyncIterator[Any]) -> bytes:
        return b"%d" % len([event async for event in events])

    async def prepared(tenant: str, size: int, parsed: object, *about: object) -> Any:
        requests = [generation_pb2.GenerateRequest(request_id=f"batch_1-0-{number}") for number in range(2)]
        encoder = given(collect=collect, named=lambda error: error)
        return given(requests=requests, encoder=encoder, default_max_tokens=16)

    given: Any = SimpleNamespace
    limits = given(named=lambda tenant: None)
    return await LineRunner(given(submit=journal.submit), journal, limits, given(run=prepared), {}).run(RECORD, LINE)  # type: ignore[arg-type]


@pytest.mark.parametrize(("times", "status"), [(MAX_REMOVED, 200), (MAX_REMOVED + 1, 404)])
async def test_a_job_that_is_removed_before_it_is_read_is_computed_again(times: int, status: int) -> None:
    """Newer jobs of the tenant may need its room while an earlier prompt of the line runs: that is no answer to the
    line. A line whose own jobs leave no room for each other ends."""
    journal = Journal(State.FINISHED, {FIRST: (SECOND, times)})
    result = await result_of(journal)
    assert b'"status_code":%d' % status in result.text
    assert result.completed is (status == 200)
    assert journal.computed == {FIRST: 1, SECOND: 1 + MAX_REMOVED}


async def test_a_job_whose_end_was_read_is_needed_no_more() -> None:
    """It may be removed then, and is not computed again. The control: the error of a failed job is read after its
    end."""
    journal = Journal(State.FINISHED, {SECOND: (SECOND, 9)})
    assert (await result_of(journal)).completed
    assert journal.computed == {FIRST: 1, SECOND: 1}
    assert b"too long" in (await result_of(Journal(State.FAILED, {}))).text
    assert b"no job" in (await result_of(Journal(State.FAILED, {FIRST: (FIRST, 9)}))).text


async def test_all_open_jobs_of_a_batch_are_cancelled() -> None:
    """Also those behind prompts and lines whose jobs were removed, and no job of another batch."""
    journal = Journal(State.OPEN, {})
    names = ("batch_1-7-1", "batch_1-90", "batch_10-7-1")
    await journal.submit([generation_pb2.GenerateRequest(request_id=name) for name in names])
    nothing: Any = None
    await LineRunner(nothing, journal, nothing, nothing, {}).cancel(RECORD)  # type: ignore[arg-type]
    assert journal.cancelled == ["ann/batch_1-7-1", "ann/batch_1-90"]
