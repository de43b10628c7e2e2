"""Jobs: requests whose tokens are kept, so that a client or a router may be gone for a while.

SubmitJobs   fix what is asked ─▶ keep it ─▶ run it here                                  an owner, and its lease
             each piece of the answer ─▶ journal, which refuses who is no longer the owner
             a lease that ends: whoever claims first goes on at the last token that was kept
WatchJob     journal ─▶ client, from any router
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import time
from typing import TYPE_CHECKING

import grpc
import structlog

from cluster.journal import JobRecord, Journal, Kept
from cluster.journal import JobState as State
from services.router.keys import ANYBODY, Key
from tandem.errors import (
    Busy,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    InvalidRequest,
    PreconditionFailed,
    ResumeFailed,
    TandemError,
    Unavailable,
)
from tandem.settings import Settings
from tandem.status import known_errors
from tandem.tasks import end
from tandem.tracing import OFF, Span, Tracing
from tandem.v1 import generation_pb2, jobs_pb2, jobs_pb2_grpc

if TYPE_CHECKING:
    from services.router.servicer import GenerationServicer

log = structlog.get_logger(__name__)

MOST_AT_ONCE = 64  # jobs that one router runs; others wait for their turn
MOST_SUBMITTED = 128  # in one call
LEASE_S = 6.0
WATCH_S = 2.0  # of one question to the journal
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 30.0  # until a job is tried again
PASSING = (Busy, Unavailable, DataLoss, ResumeFailed, DeadlineExceeded)  # the same job may go well later

STATES = {
    State.OPEN: jobs_pb2.JOB_STATE_OPEN,
    State.FINISHED: jobs_pb2.JOB_STATE_FINISHED,
    State.FAILED: jobs_pb2.JOB_STATE_FAILED,
    State.CANCELLED: jobs_pb2.JOB_STATE_CANCELLED,
}


class Jobs(jobs_pb2_grpc.JobServiceServicer):
    def __init__(self, settings: Settings, generation: GenerationServicer, tracing: Tracing = OFF) -> None:
        self._settings = settings
        self._generation = generation
        self._tracing = tracing
        self._journal = Journal(
            settings.redis or "",
            settings.cluster,
            lease_s=LEASE_S,
            kept_s=settings.job_kept_s,
            most=settings.max_jobs,
        )
        self._mine: dict[str, tuple[int, asyncio.Task[None]]] = {}  # job id -> its generation, who runs it
        self._at_once = asyncio.Semaphore(MOST_AT_ONCE)
        self._keeping: asyncio.Task[None] | None = None
        self._leaving = False

    async def start(self) -> None:
        self._keeping = asyncio.create_task(self._keep(), name="jobs")

    async def leave(self) -> None:
        """Leaves its jobs, and those who watch, to the other routers."""
        self._leaving = True
        await end(self._keeping)
        for job_id, (generation, task) in list(self._mine.items()):
            await end(task)
            try:
                await self._journal.release(job_id, generation)
            except Unavailable as error:
                log.warning("job.not_released", job=job_id, error=error.message)  # its lease ends by itself

    async def close(self) -> None:
        await self._journal.close()

    # ---- the service

    async def SubmitJobs(
        self, request: jobs_pb2.SubmitJobsRequest, context: grpc.aio.ServicerContext
    ) -> jobs_pb2.SubmitJobsResponse:
        if not 1 <= len(request.requests) <= MOST_SUBMITTED:
            raise InvalidRequest(
                f"{len(request.requests)} requests", field="requests", bound=f"1 to {MOST_SUBMITTED} of them"
            )
        self._check_stays()
        with self._tracing.serve("submit", context.invocation_metadata, {"tandem.jobs": len(request.requests)}) as span:
            key = self._generation.who(context)
            asked = [await self._fixed(one, key) for one in request.requests]  # all are right, or none is kept
            return jobs_pb2.SubmitJobsResponse(jobs=[await self._submit(*one, key, span) for one in asked])

    async def WatchJob(
        self, request: jobs_pb2.WatchJobRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[jobs_pb2.WatchJobResponse, None]:
        job_id, at = _scoped(self._generation.who(context), request.job_id), "0"
        asked = jobs_pb2.KeptJob.FromString((await self._journal.get(job_id)).request).request
        started = generation_pb2.Started(
            request_id=request.job_id,
            model=self._settings.model,
            prompt_tokens=len(asked.token_ids.ids),
            choices=_choices(asked),
        )
        yield jobs_pb2.WatchJobResponse(event=generation_pb2.GenerateResponse(started=started))
        while True:
            entries = await self._journal.entries(job_id, at, WATCH_S)
            for entry in entries:
                at = entry.at
                if entry.ended is not None:
                    if entry.ended is State.CANCELLED:
                        raise Cancelled(f"the job {request.job_id} was cancelled", reason="JOB_CANCELLED")
                    if error := (await self._journal.get(job_id)).error:
                        raise error
                    return
                event = generation_pb2.GenerateResponse.FromString(entry.event)
                delta = event.delta
                if event.HasField("delta") and delta.index + len(delta.token_ids) <= request.from_token:
                    continue
                yield jobs_pb2.WatchJobResponse(event=event)
            self._check_stays()
            if not entries:
                await self._journal.get(job_id)  # it may have been forgotten

    async def GetJob(
        self, request: jobs_pb2.GetJobRequest, context: grpc.aio.ServicerContext
    ) -> jobs_pb2.GetJobResponse:
        key = self._generation.who(context)
        return jobs_pb2.GetJobResponse(job=await self._job(request.job_id, key))

    async def CancelJob(
        self, request: jobs_pb2.CancelJobRequest, context: grpc.aio.ServicerContext
    ) -> jobs_pb2.CancelJobResponse:
        key = self._generation.who(context)
        await self._journal.cancel(_scoped(key, request.job_id))
        return jobs_pb2.CancelJobResponse(job=await self._job(request.job_id, key))

    # ---- taking jobs

    def _check_stays(self) -> None:
        if self._leaving:
            raise Unavailable("the router is stopping; another one goes on", reason="DRAINING", retry_after=0.1)

    async def _fixed(
        self, request: generation_pb2.GenerateRequest, key: Key
    ) -> tuple[generation_pb2.GenerateRequest, str]:
        """What is kept, and what says whether two requests ask for the same."""
        asked = hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).hexdigest()
        return await self._generation.fixed(request, key), asked

    async def _submit(self, request: generation_pb2.GenerateRequest, digest: str, key: Key, span: Span) -> jobs_pb2.Job:
        kept = jobs_pb2.KeptJob(
            request=request,
            tenant=key.name,
            layout_hash=self._generation.facts().layout_hash,
            deadline=time() + self._settings.job_timeout_s,
            trace=dict(span.headers),
        )
        job_id = _scoped(key, request.request_id)
        if await self._journal.submit(job_id, kept.SerializeToString(), digest):
            self._run_here(await self._journal.get(job_id))
        return await self._job(request.request_id, key)

    async def _job(self, name: str, key: Key) -> jobs_pb2.Job:
        record = await self._journal.get(_scoped(key, name))
        return jobs_pb2.Job(
            job_id=name,
            state=STATES[record.state],
            tokens=record.tokens,
            takeovers=record.generation - 1,
            error=record.error.message if record.error else "",
        )

    # ---- running them

    async def _keep(self) -> None:
        """Renews the leases of its own, and takes over what others have left."""
        while True:
            try:
                for job_id, (generation, task) in list(self._mine.items()):
                    kept = await self._journal.renew(job_id, generation)
                    if kept is Kept.CANCELLED:
                        await end(task)
                        await self._journal.end(job_id, generation, State.CANCELLED)
                    elif kept is Kept.LOST:
                        await end(task)
                while len(self._mine) < MOST_AT_ONCE and (record := await self._journal.claim()) is not None:
                    log.info("job.taken_over", job=record.job_id, tokens=record.tokens)
                    self._run_here(record)
            except TandemError as error:
                log.warning("jobs.not_kept", error=error.message)
            await asyncio.sleep(LEASE_S / 3)

    def _run_here(self, record: JobRecord) -> None:
        task = asyncio.create_task(self._run(record), name=f"job {record.job_id}")
        self._mine[record.job_id] = record.generation, task
        task.add_done_callback(lambda _: self._done(record))

    def _done(self, record: JobRecord) -> None:
        if self._mine.get(record.job_id, (0,))[0] == record.generation:
            del self._mine[record.job_id]

    async def _run(self, record: JobRecord) -> None:
        """To its end, or until it is somebody else's."""
        kept, delay = jobs_pb2.KeptJob.FromString(record.request), FIRST_DELAY_S
        try:
            while True:
                try:
                    async with self._at_once:
                        with known_errors("job"):
                            await self._attempt(record, kept)
                    return
                except PASSING as error:
                    if error.reason == "REGISTRY_UNREACHABLE":
                        raise
                    wait_s = max(delay, error.retry_after or 0.0)
                    if time() + wait_s > kept.deadline:
                        raise DeadlineExceeded(f"the job's time is up; the last reason: {error.message}") from error
                    log.info("job.waits", job=record.job_id, seconds=wait_s, reason=error.reason)
                await asyncio.sleep(wait_s)
                delay = min(2 * delay, LAST_DELAY_S)
        except TandemError as error:
            log.warning("job.broken", job=record.job_id, reason=error.reason, error=error.message)
            if error.reason != "REGISTRY_UNREACHABLE":
                await self._fail(record, error)
            # else nothing can be kept: whoever claims it goes on

    async def _fail(self, record: JobRecord, error: TandemError) -> None:
        try:
            await self._journal.end(record.job_id, record.generation, State.FAILED, error=error)
        except Unavailable as lost:  # whoever claims it finds out again
            log.warning("job.not_kept", job=record.job_id, why=lost.message)

    async def _attempt(self, record: JobRecord, kept: jobs_pb2.KeptJob) -> None:
        """Goes on behind what was kept. Raises what ends it too early."""
        if kept.layout_hash != self._generation.facts().layout_hash:
            raise PreconditionFailed(
                "the job began with another checkpoint or dtype than is served now, and would go on in other tokens",
                reason="JOB_OF_OTHER_MODEL",
            )
        past = [
            generation_pb2.GenerateResponse.FromString(entry.event) for entry in await self._journal.all(record.job_id)
        ]
        left = _choices(kept.request) - sum(event.HasField("finished") for event in past)
        key = Key(kept.tenant) if kept.tenant else ANYBODY
        headers = kept.trace.items
        events = self._generation.generate(kept.request, kept.deadline - time(), tenant=key, past=past, headers=headers)
        async with aclosing(events):
            async for event in events:
                said = event.SerializeToString()
                if event.HasField("delta"):
                    choice, first, new = event.delta.choice, event.delta.index, len(event.delta.token_ids)
                    found = await self._journal.append(
                        record.job_id, record.generation, first, first + new, said, choice
                    )
                elif event.HasField("finished") and (left := left - 1):
                    choice, end_at = event.finished.choice, event.finished.receipt.completion_tokens
                    found = await self._journal.append(record.job_id, record.generation, end_at, end_at, said, choice)
                elif event.HasField("finished"):
                    found = await self._journal.end(record.job_id, record.generation, State.FINISHED, said)
                else:
                    continue
                if found is Kept.CANCELLED:
                    await self._journal.end(record.job_id, record.generation, State.CANCELLED)
                if found is not Kept.KEPT:
                    log.warning("job.not_kept", job=record.job_id, why=found.value)
                    return


def _choices(request: generation_pb2.GenerateRequest) -> int:
    return int(request.sampling.n) if request.sampling.HasField("n") else 1


def _scoped(key: Key, name: str) -> str:
    """Ids of different tenants are different jobs."""
    return f"{key.name}/{name}"
