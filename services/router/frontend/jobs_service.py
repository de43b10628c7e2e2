"""Jobs: requests whose tokens are stored, so that a client may disconnect and a router may die.

SubmitJobs   fix the request ─▶ store it ─▶ run it here                                    an owner, and its lease
             each event ─▶ journal, which refuses a router that is no longer the owner
             when a lease expires, the first router to claim the job continues after the last stored token
WatchJob     journal ─▶ client, from any router
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from time import time

import grpc

from cluster.state.job_journal import Asked, JobJournal, JobRecord
from cluster.state.job_journal import JobState as State
from services.router.execution.output_queue import next_merged
from services.router.frontend.grpc_service import authorization
from services.router.frontend.job_runner import JobRunner, choices
from services.router.models import Models
from services.router.preprocess.request import DEFAULT_MAX_TOKENS
from services.router.tenancy.api_keys import ApiKey
from services.router.tenancy.rate_limits import RateLimits, check_prompt
from services.router.tenancy.tenant_rate import TenantRate
from tandem.errors import (
    Busy,
    Cancelled,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from tandem.settings import Settings
from tandem.telemetry.tracing import NO_SPAN, Span, Tracing
from tandem.v1 import generation_pb2, jobs_pb2, jobs_pb2_grpc

MAX_SUBMITTED = 128  # in one call
MAX_WATCHERS = 1024  # of one tenant, at one router
# To the watchers of one tenant together, at one router. A message costs the event loop some 0.1 ms, so they take 5 % of
# it. Tokens that arrive while a watcher waits are merged into its next message.
WATCH_MESSAGES_PER_S = 500.0
EVENTS_PER_MESSAGE = 32  # stored events whose reading counts as a message: also those that a watcher has already
BYTES_PER_MESSAGE = 64 * 1024  # stored bytes whose reading counts as a message, in addition; also a job's request
WATCH_BURST_S = 0.1  # that they may be ahead of this rate
MAX_HELD_BYTES = 64 * 1024 * 1024  # of stored events that a tenant's watchers have read and its clients have not taken
SMALL_PAGE_BYTES = 64 * 1024  # that a watcher may always read: who follows new tokens need not wait for slow clients
IDLE_CHECK_S = 10.0  # without an event, after which a watcher checks that the job still exists

STATES = {
    State.OPEN: jobs_pb2.JOB_STATE_OPEN,
    State.FINISHED: jobs_pb2.JOB_STATE_FINISHED,
    State.FAILED: jobs_pb2.JOB_STATE_FAILED,
    State.CANCELLED: jobs_pb2.JOB_STATE_CANCELLED,
}


class JobService(jobs_pb2_grpc.JobServiceServicer):
    def __init__(
        self,
        settings: Settings,
        models: Models,
        rate_limits: RateLimits,
        journal: JobJournal,
        runner: JobRunner,
        tracing: Tracing,
    ) -> None:
        self._settings = settings
        self._models = models
        self._rate_limits = rate_limits
        self._journal = journal
        self._runner = runner
        self._tracing = tracing
        self._watchers: Counter[str] = Counter()  # by tenant
        self._held: Counter[str] = Counter()  # bytes, by tenant
        self._messages = TenantRate(WATCH_MESSAGES_PER_S, WATCH_BURST_S)
        self._leaving = False

    async def leave(self) -> None:
        """Hands its jobs and their watchers over to the other routers."""
        self._leaving = True
        self._journal.end_watches(_stopping())
        await self._runner.leave()

    # ---- the service

    async def SubmitJobs(
        self, request: jobs_pb2.SubmitJobsRequest, context: grpc.aio.ServicerContext
    ) -> jobs_pb2.SubmitJobsResponse:
        if not 1 <= len(request.requests) <= MAX_SUBMITTED:
            raise InvalidRequest(f"{len(request.requests)} requests", field="requests", bound=f"1 to {MAX_SUBMITTED}")
        self._check_stays()
        with self._tracing.serve("submit", context.invocation_metadata, {"tandem.jobs": len(request.requests)}) as span:
            key = self._rate_limits.who(authorization(context))
            return jobs_pb2.SubmitJobsResponse(jobs=await self.submit(request.requests, key, span))

    async def WatchJob(
        self, request: jobs_pb2.WatchJobRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[jobs_pb2.WatchJobResponse, None]:
        key = self._rate_limits.who(authorization(context))
        with self._watching(key):
            job_id = _scoped(key, request.job_id)
            # The request may be a megabyte, so no watcher keeps it. `history`: stored tokens that it has not read yet.
            first, history, size = await self._started(job_id, request.job_id)
            await self._messages.keep(key.name, size / BYTES_PER_MESSAGE)
            yield jobs_pb2.WatchJobResponse(event=first)
            async with aclosing(self._journal.watch(job_id, IDLE_CHECK_S)) as pages:
                async for entries in pages:
                    size = sum(len(entry.event) for entry in entries)
                    count = len(entries) / EVENTS_PER_MESSAGE + size / BYTES_PER_MESSAGE
                    ahead_s = self._messages.count(key.name, count)  # also if it is refused: its watcher comes again
                    with self._holding(key.name, size):
                        await asyncio.sleep(ahead_s)
                        ended = next((entry.ended for entry in entries if entry.ended is not None), None)
                        events = deque(generation_pb2.GenerateResponse.FromString(e.event) for e in entries if e.event)
                        # A reconnecting watcher may have more tokens of one completion than of another. If from_token
                        # is the position of the shortest one, no message may mix tokens that it has with others.
                        take = next_merged if first.started.choices == 1 or history <= 0 else deque.popleft
                        history -= sum(len(event.delta.token_ids) for event in events)
                        events = deque(event for event in events if not _known(event, request.from_token))
                        while events:
                            await self._messages.keep(key.name, 1)
                            yield jobs_pb2.WatchJobResponse(event=take(events))
                    if ended is not None:
                        await raise_end(self._journal, job_id, request.job_id, ended)
                        return
                    self._check_stays()
                    if not entries:
                        await self._journal.status(job_id)  # it may have been forgotten
                    del entries  # otherwise kept, and not counted, until the next ones come

    async def _started(self, job_id: str, name: str) -> tuple[generation_pb2.GenerateResponse, int, int]:
        """The first event of a job's answer, the number of its stored tokens, and the bytes of its request."""
        record = await self._journal.get(job_id)
        kept = jobs_pb2.KeptJob.FromString(record.request).request
        return started(kept, name, self._model_name(kept.model)), record.tokens, len(record.request)

    @contextmanager
    def _watching(self, key: ApiKey) -> Iterator[None]:
        if self._watchers[key.name] >= MAX_WATCHERS:
            raise Busy(
                f"{MAX_WATCHERS} watchers are open at this router, the maximum",
                reason="TENANT_WATCHERS",
                retry_after=1.0,
            )
        self._watchers[key.name] += 1
        try:
            yield
        finally:
            self._watchers[key.name] -= 1
            if not self._watchers[key.name]:
                del self._watchers[key.name]
                self._messages.forget()

    @contextmanager
    def _holding(self, tenant: str, size: int) -> Iterator[None]:
        """Counts bytes of stored events that a watcher has read. A tenant may always have one page of them, and small
        ones. Raises Unavailable, after which a watcher continues where it was."""
        held = self._held[tenant]
        if size > SMALL_PAGE_BYTES and held and held + size > MAX_HELD_BYTES:
            raise Unavailable(
                f"clients have not taken {held} bytes that their watchers read, and {MAX_HELD_BYTES} is the limit",
                reason="WATCHERS_BEHIND",
                retry_after=1.0,
            )
        self._held[tenant] += size
        try:
            yield
        finally:
            self._held[tenant] -= size
            self._held += Counter()  # drops tenants without any

    async def GetJob(
        self, request: jobs_pb2.GetJobRequest, context: grpc.aio.ServicerContext
    ) -> jobs_pb2.GetJobResponse:
        key = self._rate_limits.who(authorization(context))
        return jobs_pb2.GetJobResponse(job=await self._job(request.job_id, key))

    async def CancelJob(
        self, request: jobs_pb2.CancelJobRequest, context: grpc.aio.ServicerContext
    ) -> jobs_pb2.CancelJobResponse:
        key = self._rate_limits.who(authorization(context))
        await self._journal.cancel(_scoped(key, request.job_id))
        return jobs_pb2.CancelJobResponse(job=await self._job(request.job_id, key))

    # ---- accepting jobs

    async def submit(
        self,
        requests: Sequence[generation_pb2.GenerateRequest],
        key: ApiKey,
        span: Span = NO_SPAN,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> list[jobs_pb2.Job]:
        """Stores and runs all of them, or none. Raises what `Generation.fixed` and `JobJournal.submit` raise."""
        self._check_stays()
        fixed = [await self._fixed(request, key, default_max_tokens) for request in requests]
        return await self._submit(fixed, key, span)

    def _check_stays(self) -> None:
        if self._leaving:
            raise _stopping()

    async def _fixed(
        self, request: generation_pb2.GenerateRequest, key: ApiKey, default_max_tokens: int
    ) -> tuple[generation_pb2.GenerateRequest, str]:
        """The request to be stored, and a digest that is equal for equal requests."""
        digest = hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).hexdigest()
        generation = self._models.named(request.model).generation
        return await generation.fixed(request, key, default_max_tokens), digest

    async def _submit(
        self, fixed: Sequence[tuple[generation_pb2.GenerateRequest, str]], key: ApiKey, span: Span
    ) -> list[jobs_pb2.Job]:
        jobs = [self._to_keep(request, digest, key, span) for request, digest in fixed]
        self._check_stays()  # again: the prompts of many have taken seconds
        new = await self._journal.submit(jobs, key.name, self._settings.job_timeout_s)
        mine = [job for job, is_new in zip(jobs, new, strict=True) if is_new]
        if self._leaving:  # this router no longer renews leases
            await self._journal.release([(job.job_id, 1) for job in mine])
        else:
            for job in mine:
                record = JobRecord(job.job_id, job.request, State.OPEN, generation=1, tokens=0, error=None)
                self._runner.run_here(record)
        return [
            jobs_pb2.Job(job_id=request.request_id, state=STATES[State.OPEN])
            if is_new
            else await self._job(request.request_id, key)
            for (request, _), is_new in zip(fixed, new, strict=True)
        ]

    def _to_keep(self, request: generation_pb2.GenerateRequest, digest: str, key: ApiKey, span: Span) -> Asked:
        check_prompt(key, len(request.token_ids.ids))
        model = self._models.named(request.model)
        kept = jobs_pb2.KeptJob(
            request=request,
            tenant=key.name,
            deadline=time() + self._settings.job_timeout_s,
            trace=dict(span.headers),
            vocabulary_digest=model.tokenizer.vocabulary_digest,
            adapter_fingerprint=model.served.adapters.get(request.adapter, b""),
        )
        return Asked(_scoped(key, request.request_id), kept.SerializeToString(), digest)

    def _model_name(self, model: str) -> str:
        """The model's name in the answer. The cluster may have been restarted without the job's model."""
        try:
            return self._models.named(model).names[0]
        except (InvalidRequest, NotFound):
            return model

    async def _job(self, name: str, key: ApiKey) -> jobs_pb2.Job:
        record = await self._journal.status(_scoped(key, name))
        return jobs_pb2.Job(
            job_id=name,
            state=STATES[record.state],
            tokens=record.tokens,
            takeovers=record.generation - 1,
            error=record.error.message if record.error else "",
        )


def started(kept: generation_pb2.GenerateRequest, name: str, model: str) -> generation_pb2.GenerateResponse:
    """The first event of a job's answer."""
    about = generation_pb2.Started(
        request_id=name, model=model, prompt_tokens=len(kept.token_ids.ids), choices=choices(kept)
    )
    return generation_pb2.GenerateResponse(started=about)


async def raise_end(journal: JobJournal, job_id: str, name: str, ended: State | None) -> None:
    """Raises Cancelled, or the error of a failed job."""
    if ended is State.CANCELLED:
        raise Cancelled(f"the job {name} was cancelled", reason="JOB_CANCELLED")
    if ended is State.FAILED and (error := (await journal.status(job_id)).error):
        raise error


def _stopping() -> Unavailable:
    return Unavailable("the router is stopping; another one goes on", reason="DRAINING", retry_after=0.1)


def _known(event: generation_pb2.GenerateResponse, from_token: int) -> bool:
    """Whether a watcher that has `from_token` tokens has all of the event's."""
    return event.HasField("delta") and event.delta.index + len(event.delta.token_ids) <= from_token


def _scoped(key: ApiKey, name: str) -> str:
    """The job id in the journal: the same name under different tenants means different jobs."""
    return f"{key.name}/{name}"
