"""Jobs: requests whose tokens are kept, so that a client or a router may be gone for a while.

SubmitJobs   fix what is asked ─▶ keep it ─▶ run it here                                  an owner, and its lease
             each piece of the answer ─▶ journal, which refuses who is no longer the owner
             a lease that ends: whoever claims first goes on at the last token that was kept
WatchJob     journal ─▶ client, from any router
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from random import uniform
from time import monotonic, time
from typing import TYPE_CHECKING

import grpc
import structlog

from cluster.journal import Asked, JobRecord, Journal, Kept
from cluster.journal import JobState as State
from services.router.admit import Past
from services.router.keys import Key
from services.router.turns import Turns
from tandem.errors import (
    Busy,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NoWorker,
    PreconditionFailed,
    ResumeFailed,
    TandemError,
    Unavailable,
)
from tandem.settings import Settings
from tandem.status import known_errors
from tandem.tasks import end, forever, once
from tandem.tracing import OFF, Span, Tracing
from tandem.v1 import generation_pb2, jobs_pb2, jobs_pb2_grpc

if TYPE_CHECKING:
    from services.router.servicer import GenerationServicer

log = structlog.get_logger(__name__)

MOST_AT_ONCE = 64  # jobs that one router runs; others wait for their turn
MOST_HELD = 1024  # jobs of which one router has the lease, where it takes over more than it can run
MOST_AT_ONCE_EACH = 48  # of them those of one tenant that has a name
MOST_SUBMITTED = 128  # in one call
MOST_WATCHERS = 1024  # of one tenant, at one router
MOST_INTERNAL = 3  # attempts that end with INTERNAL and without a new token, one after the other
LEASE_S = 6.0
IDLE_S = 10.0  # a watcher that heard nothing for so long looks whether the job is still known
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 30.0  # until a job is tried again
OTHER_MODEL_S = 600.0  # so long may no worker have the KV layout that a job began with
PASSING = (Busy, Unavailable, DataLoss, ResumeFailed, DeadlineExceeded)  # the same job may go well later

STATES = {
    State.OPEN: jobs_pb2.JOB_STATE_OPEN,
    State.FINISHED: jobs_pb2.JOB_STATE_FINISHED,
    State.FAILED: jobs_pb2.JOB_STATE_FAILED,
    State.CANCELLED: jobs_pb2.JOB_STATE_CANCELLED,
}


@dataclass(slots=True)
class _Running:
    """A job in this router's hands."""

    record: JobRecord
    kept: jobs_pb2.KeptJob
    delay_s: float = FIRST_DELAY_S
    charged: bool = False  # its prompt, to its tenant
    failures: int = 0  # attempts that ended with INTERNAL, since the last token
    homeless_since: float | None = None  # since when no worker has its layout

    @property
    def prompt_tokens(self) -> int:
        return len(self.kept.request.token_ids.ids)

    @property
    def tokens(self) -> int:
        """That it generates at most."""
        return int(self.kept.request.sampling.max_tokens) * _choices(self.kept.request)


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
            most_each=settings.max_tenant_jobs,
        )
        self._mine: dict[str, tuple[int, asyncio.Task[None]]] = {}  # job id -> its generation, who runs it
        self._ending: set[str] = set()  # ids of those that are being stopped here
        self._at_once = Turns(MOST_AT_ONCE, MOST_AT_ONCE_EACH)
        self._watchers: Counter[str] = Counter()  # by tenant
        self._keeping: asyncio.Task[None] | None = None
        self._leaving = False

    async def start(self) -> None:
        self._keeping = forever(self._keep, name="jobs")

    async def leave(self) -> None:
        """Leaves its jobs, and those who watch, to the other routers."""
        self._leaving = True
        self._journal.end_watches(_stopping())
        await end(self._keeping)
        mine = [(job_id, generation) for job_id, (generation, _) in self._mine.items()]
        await asyncio.gather(*(end(task) for _, task in list(self._mine.values())))
        try:
            await self._journal.release(mine)
        except Unavailable as error:
            log.warning("jobs.not_released", jobs=len(mine), error=error.message)  # their leases end by themselves

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
            return jobs_pb2.SubmitJobsResponse(jobs=await self._submit(asked, key, span))

    async def WatchJob(
        self, request: jobs_pb2.WatchJobRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[jobs_pb2.WatchJobResponse, None]:
        key = self._generation.who(context)
        with self._watching(key):
            job_id = _scoped(key, request.job_id)
            asked = jobs_pb2.KeptJob.FromString((await self._journal.get(job_id)).request).request
            started = generation_pb2.Started(
                request_id=request.job_id,
                model=self._settings.model,
                prompt_tokens=len(asked.token_ids.ids),
                choices=_choices(asked),
            )
            yield jobs_pb2.WatchJobResponse(event=generation_pb2.GenerateResponse(started=started))
            async with aclosing(self._journal.watch(job_id, IDLE_S)) as pages:
                async for entries in pages:
                    for entry in entries:
                        if entry.ended is not None:
                            await self._raise_end(job_id, request.job_id, entry.ended)
                            return
                        event = generation_pb2.GenerateResponse.FromString(entry.event)
                        delta = event.delta
                        if event.HasField("delta") and delta.index + len(delta.token_ids) <= request.from_token:
                            continue
                        yield jobs_pb2.WatchJobResponse(event=event)
                    self._check_stays()
                    if not entries:
                        await self._journal.get(job_id)  # it may have been forgotten

    async def _raise_end(self, job_id: str, name: str, ended: State) -> None:
        if ended is State.CANCELLED:
            raise Cancelled(f"the job {name} was cancelled", reason="JOB_CANCELLED")
        if error := (await self._journal.get(job_id)).error:
            raise error

    @contextmanager
    def _watching(self, key: Key) -> Iterator[None]:
        if self._watchers[key.name] >= MOST_WATCHERS:
            raise Busy(
                f"{MOST_WATCHERS} watchers are open at this router, and more are not served",
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
            raise _stopping()

    async def _fixed(
        self, request: generation_pb2.GenerateRequest, key: Key
    ) -> tuple[generation_pb2.GenerateRequest, str]:
        """What is kept, and what says whether two requests ask for the same."""
        asked = hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).hexdigest()
        return await self._generation.fixed(request, key), asked

    async def _submit(
        self, asked: Sequence[tuple[generation_pb2.GenerateRequest, str]], key: Key, span: Span
    ) -> list[jobs_pb2.Job]:
        jobs = [self._to_keep(request, digest, key, span) for request, digest in asked]
        new = await self._journal.submit(jobs, key.name)
        for job in (job for job, is_new in zip(jobs, new, strict=True) if is_new):
            self._run_here(JobRecord(job.job_id, job.request, State.OPEN, generation=1, tokens=0, error=None))
        return [
            jobs_pb2.Job(job_id=request.request_id, state=STATES[State.OPEN])
            if is_new
            else await self._job(request.request_id, key)
            for (request, _), is_new in zip(asked, new, strict=True)
        ]

    def _to_keep(self, request: generation_pb2.GenerateRequest, digest: str, key: Key, span: Span) -> Asked:
        self._generation.tenants.check_job(key, len(request.token_ids.ids))
        kept = jobs_pb2.KeptJob(
            request=request,
            tenant=key.name,
            layout_hash=self._generation.facts().layout_hash,
            deadline=time() + self._settings.job_timeout_s,
            trace=dict(span.headers),
        )
        return Asked(_scoped(key, request.request_id), kept.SerializeToString(), digest)

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
                await self._renew()
                until = monotonic() + LEASE_S / 3  # its own leases come first
                while self._takes_more() and monotonic() < until and (record := await self._journal.claim()):
                    log.info("job.taken_over", job=record.job_id, tokens=record.tokens)
                    self._run_here(record)
            except TandemError as error:
                log.warning("jobs.not_kept", error=error.message)
            await asyncio.sleep(LEASE_S / 3)

    def _takes_more(self) -> bool:
        """Also beside a backlog of one tenant, which may not have every place."""
        return len(self._mine) < MOST_AT_ONCE or (self._at_once.free > 0 and len(self._mine) < MOST_HELD)

    async def _renew(self) -> None:
        mine = dict(self._mine)
        owned = [(job_id, generation) for job_id, (generation, _) in mine.items()]
        for (job_id, generation), kept in zip(owned, await self._journal.renew(owned), strict=True):
            if kept is not Kept.KEPT and job_id not in self._ending:
                self._ending.add(job_id)
                # Beside this task: the leases of all others hang on it.
                once(self._end_here(job_id, generation, mine[job_id][1], kept), name=f"end of job {job_id}")

    async def _end_here(self, job_id: str, generation: int, task: asyncio.Task[None], why: Kept) -> None:
        try:
            await end(task)
            if why is Kept.CANCELLED:
                await self._journal.end(job_id, generation, State.CANCELLED)
        except Unavailable as error:  # its lease ends, and whoever claims it hears that it was cancelled
            log.warning("job.not_kept", job=job_id, why=error.message)
        finally:
            self._ending.discard(job_id)

    def _run_here(self, record: JobRecord) -> None:
        task = once(self._run(record), name=f"job {record.job_id}")
        self._mine[record.job_id] = record.generation, task
        task.add_done_callback(lambda _: self._done(record))

    def _done(self, record: JobRecord) -> None:
        if self._mine.get(record.job_id, (0,))[0] == record.generation:
            del self._mine[record.job_id]

    async def _run(self, record: JobRecord) -> None:
        """To its end, or until it is somebody else's."""
        job = _Running(record, jobs_pb2.KeptJob.FromString(record.request))
        try:
            while True:
                try:
                    async with self._at_once.turn(job.kept.tenant):
                        with known_errors("job"):
                            await self._attempt(job)
                    return
                except (*PASSING, InternalError) as error:
                    wait_s = self._pause(job, error)
                    log.info("job.waits", job=record.job_id, seconds=wait_s, reason=error.reason)
                await asyncio.sleep(wait_s)
        except TandemError as error:
            log.warning("job.broken", job=record.job_id, reason=error.reason, error=error.message)
            if error.reason != "REGISTRY_UNREACHABLE":
                await self._fail(record, error)
            # else nothing can be kept: whoever claims it goes on

    @staticmethod
    def _pause(job: _Running, error: TandemError) -> float:
        """Seconds until the next attempt. Raises what ends the job."""
        if error.reason == "REGISTRY_UNREACHABLE":
            raise error
        if isinstance(error, InternalError):
            job.failures += 1
            if error.reason != InternalError.default_reason or job.failures >= MOST_INTERNAL:
                raise error
        if error.reason == "TENANT_TOKENS":  # its tenant's bucket says when
            wait_s = min(max(error.retry_after or 0.0, FIRST_DELAY_S), LAST_DELAY_S) * uniform(1.0, 1.2)
        else:
            wait_s = max(job.delay_s, error.retry_after or 0.0)
            job.delay_s = min(2 * job.delay_s, LAST_DELAY_S)
        if time() + wait_s > job.kept.deadline:
            raise DeadlineExceeded(f"the job's time is up; the last reason: {error.message}") from error
        return wait_s

    async def _fail(self, record: JobRecord, error: TandemError) -> None:
        try:
            await self._journal.end(record.job_id, record.generation, State.FAILED, error=error)
        except Unavailable as lost:  # whoever claims it finds out again
            log.warning("job.not_kept", job=record.job_id, why=lost.message)

    async def _attempt(self, job: _Running) -> None:
        """Goes on behind what was kept. Raises what ends it too early."""
        self._check_layout(job)
        tenants = self._generation.tenants
        key = tenants.named(job.kept.tenant)
        prompt_tokens = 0 if job.charged else job.prompt_tokens
        with tenants.job(key, prompt_tokens, max(1, job.tokens - job.record.tokens)) as allowance:
            job.charged = True
            entries = await self._journal.all(job.record.job_id)
            past = [generation_pb2.GenerateResponse.FromString(entry.event) for entry in entries]
            events = self._generation.generate(
                job.kept.request, job.kept.deadline - time(), tenant=key, past=past, headers=job.kept.trace.items
            )
            left = _choices(job.kept.request) - len(Past(past).ended)  # one may be kept twice
            async with aclosing(events):
                async for event in events:
                    left -= event.HasField("finished")
                    if not await self._add(job, event, left):
                        return
                    if event.HasField("delta"):
                        job.failures, job.delay_s = 0, FIRST_DELAY_S
                        allowance.spend(len(event.delta.token_ids))
                        if not event.delta.last:  # else it has its last token, and waits for nothing
                            allowance.check()

    async def _add(self, job: _Running, event: generation_pb2.GenerateResponse, left: int) -> bool:
        """Keeps an event, `left` completions before the job's end. False: the job has ended, or is not ours."""
        job_id, generation, said = job.record.job_id, job.record.generation, event.SerializeToString()
        if event.HasField("delta"):
            choice, first, new = event.delta.choice, event.delta.index, len(event.delta.token_ids)
            found = await self._journal.append(job_id, generation, first, first + new, said, choice)
        elif event.HasField("finished") and left:
            choice, end_at = event.finished.choice, event.finished.receipt.completion_tokens
            found = await self._journal.append(job_id, generation, end_at, end_at, said, choice)
        elif event.HasField("finished"):
            found = await self._journal.end(job_id, generation, State.FINISHED, said)
        else:
            return True
        if found is Kept.CANCELLED:
            await self._journal.end(job_id, generation, State.CANCELLED)
        if found is not Kept.KEPT:
            log.warning("job.not_kept", job=job_id, why=found.value)
        return found is Kept.KEPT

    def _check_layout(self, job: _Running) -> None:
        """A job goes on only where all workers have the layout that it began with: others would give other tokens.
        While some have another one (an upgrade, perhaps one that is taken back) it waits."""
        mine = job.kept.layout_hash
        found = self._generation.layouts()
        if found == {mine}:
            job.homeless_since = None
            return
        if not found:
            raise NoWorker("no decode worker is known", retry_after=2.0)
        if mine not in found:
            job.homeless_since = job.homeless_since or monotonic()
            if monotonic() - job.homeless_since > OTHER_MODEL_S:
                raise PreconditionFailed(
                    "the job began with another checkpoint or dtype than any worker has: the tokens would differ",
                    reason="JOB_OF_OTHER_MODEL",
                )
        raise Unavailable(
            "some workers have another checkpoint or dtype than the job began with", reason="JOB_OF_OTHER_MODEL"
        )


def _stopping() -> Unavailable:
    return Unavailable("the router is stopping; another one goes on", reason="DRAINING", retry_after=0.1)


def _choices(request: generation_pb2.GenerateRequest) -> int:
    return int(request.sampling.n) if request.sampling.HasField("n") else 1


def _scoped(key: Key, name: str) -> str:
    """Ids of different tenants are different jobs."""
    return f"{key.name}/{name}"
