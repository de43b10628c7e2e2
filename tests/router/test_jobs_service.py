"""What a router keeps for the watchers of jobs."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from cluster.state.job_journal import Entry, JobRecord
from cluster.state.job_journal import JobState as State
from services.router.frontend.jobs_service import JobService
from services.router.tenancy.rate_limits import RateLimits
from tandem.telemetry.tracing import NO_TRACING
from tandem.v1 import generation_pb2, jobs_pb2

ASKED = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=range(1000)))


class Journal:
    """One job, whose stream has nothing yet."""

    def __init__(self) -> None:
        self.request = jobs_pb2.KeptJob(request=ASKED).SerializeToString()

    async def get(self, job_id: str) -> JobRecord:
        return JobRecord(job_id, self.request, State.OPEN, generation=1, tokens=0, error=None)

    async def watch(self, job_id: str, idle_s: float) -> AsyncIterator[list[Entry]]:
        yield []


async def test_a_watcher_does_not_keep_the_request_of_its_job() -> None:
    """A thousand of one tenant may watch for hours, and each request may be a megabyte."""
    journal, some = Journal(), SimpleNamespace
    models: Any = some(named=lambda name: some(names=("toy",)))
    nothing: Any = None
    service = JobService(nothing, models, RateLimits(None), journal, nothing, NO_TRACING)  # type: ignore[arg-type]
    before = sys.getrefcount(journal.request)
    context: Any = some(invocation_metadata=tuple)
    async with aclosing(service.WatchJob(jobs_pb2.WatchJobRequest(job_id="j"), context)) as watch:
        first = await anext(watch)
        assert first.event.started.prompt_tokens == 1000
        kept = sys.getrefcount(journal.request)  # not within the assertion, which keeps it itself
    assert kept == before
