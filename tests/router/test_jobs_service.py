"""What a router keeps for the watchers of jobs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.state.job_journal import Entry, JobRecord
from cluster.state.job_journal import JobState as State
from cluster.state.redis_store import no_such
from services.router.frontend import jobs_service
from services.router.frontend.jobs_service import BYTES_PER_MESSAGE, EVENTS_PER_MESSAGE, JobService
from services.router.tenancy.api_keys import ANONYMOUS
from services.router.tenancy.rate_limits import RateLimits
from tandem.errors import NotFound, Unavailable
from tandem.tasks import end as ended
from tandem.telemetry.tracing import NO_SPAN, NO_TRACING
from tandem.v1 import generation_pb2, jobs_pb2

ASKED = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=range(1000)))


class Journal:
    """One job, whose stream has these pages."""

    def __init__(self, *pages: list[Entry]) -> None:
        self._pages = pages
        self.request = jobs_pb2.KeptJob(request=ASKED).SerializeToString()

    async def get(self, job_id: str) -> JobRecord:
        return JobRecord(job_id, self.request, State.OPEN, generation=1, tokens=0, error=None)

    async def status(self, job_id: str) -> JobRecord:
        return JobRecord(job_id, b"", State.OPEN, generation=1, tokens=0, error=None)

    async def watch(self, job_id: str, idle_s: float) -> AsyncIterator[list[Entry]]:
        for page in self._pages:
            yield page


def service_of(journal: Journal) -> JobService:
    models: Any = SimpleNamespace(named=lambda name: SimpleNamespace(names=("toy",)))
    nothing: Any = None
    return JobService(nothing, models, RateLimits(None), journal, nothing, NO_TRACING)  # type: ignore[arg-type]


def watched(service: JobService, from_token: int) -> AsyncGenerator[jobs_pb2.WatchJobResponse, None]:
    return service.WatchJob(jobs_pb2.WatchJobRequest(job_id="j", from_token=from_token), context_of())


def context_of() -> Any:
    return SimpleNamespace(invocation_metadata=tuple)


async def test_a_watcher_does_not_keep_the_request_of_its_job() -> None:
    """A thousand of one tenant may watch for hours, and each request may be a megabyte."""
    journal = Journal()
    before = sys.getrefcount(journal.request)
    async with aclosing(watched(service_of(journal), from_token=0)) as watch:
        first = await anext(watch)
        assert first.event.started.prompt_tokens == 1000
        kept = sys.getrefcount(journal.request)  # not within the assertion, which keeps it itself
    assert kept == before


async def test_who_asks_for_a_jobs_state_does_not_read_its_request() -> None:
    """It may be megabytes: neither a silent watcher, which asks again and again, nor GetJob reads it."""
    journal, reads, read = Journal([], [], []), list[str](), Journal.get

    async def get(job_id: str) -> JobRecord:
        reads.append(job_id)
        return await read(journal, job_id)

    journal.get = get  # type: ignore[method-assign]
    service = service_of(journal)
    assert len([event async for event in watched(service, from_token=0)]) == 1
    assert len(reads) == 1  # at the beginning, for the number of its prompt's tokens
    await service.GetJob(jobs_pb2.GetJobRequest(job_id="j"), context_of())
    assert len(reads) == 1


async def test_what_a_watcher_reads_counts_and_not_only_what_it_is_sent() -> None:
    """One that has all tokens is sent none, and reading them costs the event loop as much: fifty such watchers of long
    answers made every stream of the router stand still for half a second at a time."""
    delta = generation_pb2.GenerateResponse(delta=generation_pb2.Delta(index=0, token_ids=[1]))
    page = [Entry("1", delta.SerializeToString())] * 640
    counts: list[float] = []

    def count(tenant: str, count: float) -> float:
        counts.append(count)
        return 0.0

    service = service_of(Journal(page, page, [Entry("2", b"", State.FINISHED)]))
    service._messages.count = count  # type: ignore[method-assign]
    assert len([event async for event in watched(service, from_token=10**6)]) == 1  # that it has begun
    assert sum(counts) >= 2 * 640 / EVENTS_PER_MESSAGE


async def test_the_bytes_that_a_watcher_reads_count() -> None:
    """Of the job's request, which it reads when it begins, and of its events: both may be megabytes."""
    delta = generation_pb2.GenerateResponse(delta=generation_pb2.Delta(index=0, token_ids=[1], text="x" * 10**6))
    journal, counts = Journal([Entry("1", delta.SerializeToString())]), list[float]()
    journal.request = jobs_pb2.KeptJob(request=ASKED, trace={"long": "x" * 10**6}).SerializeToString()

    def count(tenant: str, count: float) -> float:
        counts.append(count)
        return 0.0

    service = service_of(journal)
    service._messages.count = count  # type: ignore[method-assign]
    assert len([event async for event in watched(service, from_token=0)]) == 2
    assert sum(counts) >= 2 * 10**6 / BYTES_PER_MESSAGE


async def test_what_the_clients_of_watchers_do_not_take_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each tenant, in bytes: a thousand streams that read nothing could each hold a page of megabytes. The control:
    a client that takes what it is sent leaves room for the next one. A refused page was read, so it counts for the
    rate; a small one is never refused, so that who follows new tokens need not wait for others' clients."""
    monkeypatch.setattr(jobs_service, "MAX_HELD_BYTES", 5000)
    monkeypatch.setattr(jobs_service, "SMALL_PAGE_BYTES", 0)
    delta = generation_pb2.GenerateResponse(delta=generation_pb2.Delta(index=0, token_ids=[1], text="x" * 2000))
    service = service_of(Journal([Entry("1", delta.SerializeToString())]))
    for _ in range(3):
        assert len([event async for event in watched(service, from_token=0)]) == 2
    async with AsyncExitStack() as held:
        watches = [await held.enter_async_context(aclosing(watched(service, from_token=0))) for _ in range(3)]
        for watch in watches[:2]:
            await anext(watch)
            await anext(watch)  # the page, of which it takes no more
        await anext(watches[2])
        before = service._messages._paid_at[""]
        with pytest.raises(Unavailable) as refused:
            await anext(watches[2])
        assert refused.value.reason == "WATCHERS_BEHIND"
        assert service._messages._paid_at[""] > before
        monkeypatch.setattr(jobs_service, "SMALL_PAGE_BYTES", 5000)
        assert len([event async for event in watched(service, from_token=0)]) == 2
    assert not service._held


async def test_a_watcher_does_not_keep_what_its_client_has_taken() -> None:
    """While it waits for more."""
    page, waits = [Entry("1", b"")], asyncio.Event()

    class Waiting(Journal):
        async def watch(self, job_id: str, idle_s: float) -> AsyncIterator[list[Entry]]:
            yield page
            waits.set()
            await asyncio.Event().wait()

    async with aclosing(watched(service_of(Waiting()), from_token=0)) as watch:
        await anext(watch)
        before = sys.getrefcount(page)
        more = asyncio.ensure_future(anext(watch))
        await waits.wait()
        kept = sys.getrefcount(page)  # not within the assertion, which keeps it itself
        await ended(more)
    assert kept == before


@pytest.mark.parametrize(("end", "fails"), [(State.FINISHED, False), (State.FAILED, True)])
async def test_an_answer_that_was_read_to_its_end_may_be_gone(end: State, fails: bool) -> None:
    """Newer jobs may need its room while a slow client reads. The control: a failed job's error is read after its
    end, and whoever watched it gets an error anyway."""
    journal = Journal([Entry("1", b"", end)])
    events = watched(service_of(journal), from_token=0)
    await anext(events)

    async def gone(job_id: str) -> JobRecord:
        raise no_such("job", job_id, "")

    journal.get = journal.status = gone  # type: ignore[method-assign]
    with pytest.raises(NotFound) if fails else nullcontext():
        assert [event async for event in events] == []


@pytest.mark.parametrize("leaves_in", ["preparing", "storing", "neither"])
async def test_a_router_that_leaves_runs_no_job_that_comes_meanwhile(leaves_in: str) -> None:
    """The router no longer renews leases. While the prompts are prepared it is refused; once stored it is left to the
    other routers at once. The control runs it."""
    run: list[str] = []
    released: list[tuple[str, int]] = []

    async def leave() -> None: ...

    async def fixed(request: Any, *_: object) -> Any:
        if leaves_in == "preparing":
            await service.leave()
        return request

    async def submit(jobs: Any, *_: object) -> list[bool]:
        if leaves_in == "storing":
            await service.leave()
        return [True for _ in jobs]

    async def release(leases: Any) -> None:
        released.extend(leases)

    model = SimpleNamespace(
        tokenizer=SimpleNamespace(vocabulary_digest="A"),
        served=SimpleNamespace(adapters={}),
        generation=SimpleNamespace(fixed=fixed),
    )
    service: Any = service_of(Journal())
    service._models = SimpleNamespace(named=lambda name: model)
    service._settings = SimpleNamespace(job_timeout_s=60.0)
    service._journal = SimpleNamespace(submit=submit, release=release, end_watches=lambda error: None)
    service._runner = SimpleNamespace(leave=leave, run_here=lambda record: run.append(record.job_id))
    asked = [generation_pb2.GenerateRequest(request_id="j")]
    if leaves_in == "preparing":
        with pytest.raises(Unavailable):
            await service.submit(asked, ANONYMOUS)
        assert not run
    else:
        (job,) = await service.submit(asked, ANONYMOUS)
        assert job.state == jobs_pb2.JOB_STATE_OPEN
        wanted = ([], [("/j", 1)]) if leaves_in == "storing" else (["/j"], [])
        assert (run, released) == wanted


def test_a_stored_job_says_what_its_ids_and_its_adapter_mean() -> None:
    """Another tokenizer or another adapter may have the same name when the job runs."""
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(vocabulary_digest="A"), served=SimpleNamespace(adapters={"red": b"first"})
    )
    service: Any = service_of(Journal())
    service._models = SimpleNamespace(named=lambda name: model)
    service._settings = SimpleNamespace(job_timeout_s=60.0)
    for adapter, meant in (("red", b"first"), ("", b"")):
        request = generation_pb2.GenerateRequest(request_id="j", adapter=adapter)
        kept = jobs_pb2.KeptJob.FromString(service._to_keep(request, "digest", ANONYMOUS, NO_SPAN).request)
        assert (kept.vocabulary_digest, kept.adapter_fingerprint) == ("A", meant)
