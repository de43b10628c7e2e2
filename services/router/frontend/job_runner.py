"""Runs the jobs whose lease this router holds, and takes over jobs whose lease has expired.

claim or submit ─▶ run: each event goes into the journal, which refuses a router that has lost the lease
                   after a transient failure: wait, and continue after the last token in the journal
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import uniform
from time import monotonic, time

import structlog

from cluster.state.job_journal import JobJournal, JobRecord, Kept
from cluster.state.job_journal import JobState as State
from cluster.state.registry import WorkerRecord
from services.router.models import Model, Models
from services.router.preprocess.request import PromptCount, ResumeState
from services.router.preprocess.served_model import ModelFacts
from services.router.tenancy.rate_limits import RateLimits
from tandem.errors import (
    Busy,
    DataLoss,
    DeadlineExceeded,
    InternalError,
    NotFound,
    NoWorker,
    PreconditionFailed,
    ResumeFailed,
    TandemError,
    Unavailable,
)
from tandem.grpc_errors import known_errors
from tandem.settings import Settings
from tandem.tasks import end, forever, once
from tandem.tenancy.tenant_slots import TenantSlots
from tandem.v1 import generation_pb2, jobs_pb2

log = structlog.get_logger(__name__)

MAX_RUNNING = 64  # jobs of one model that a router runs; others wait for a slot
MAX_LEASED = 1024  # leases that one router holds when it takes over more jobs than it can run
MAX_RUNNING_PER_TENANT = 48  # slots of one named tenant
MAX_INTERNAL_ERRORS = 3  # consecutive attempts that end with INTERNAL and without a new token
LEASE_S = 6.0
MIN_RETRY_S, MAX_RETRY_S = 0.5, 30.0  # between two attempts of a job
MAX_HOMELESS_S = 600.0  # after which a job fails if its model is unknown, of another vocabulary, or has other tokens
TRANSIENT_ERRORS = (Busy, Unavailable, DataLoss, ResumeFailed, DeadlineExceeded)  # a later attempt may succeed


@dataclass(slots=True)
class _Running:
    """A job that this router runs."""

    record: JobRecord
    kept: jobs_pb2.KeptJob
    delay_s: float = MIN_RETRY_S
    charged: bool = False  # whether its prompt was charged to its tenant
    prompt_count: PromptCount = field(default_factory=PromptCount)
    failures: int = 0  # attempts that ended with INTERNAL, since the last token
    homeless_since: float | None = None  # since when its model is unknown or another one, see MAX_HOMELESS_S

    @property
    def prompt_tokens(self) -> int:
        return len(self.kept.request.token_ids.ids)

    @property
    def tokens(self) -> int:
        """The maximum number of tokens that it generates."""
        return int(self.kept.request.sampling.max_tokens) * choices(self.kept.request)


class JobRunner:
    def __init__(self, models: Models, rate_limits: RateLimits, journal: JobJournal) -> None:
        self._models = models
        self._rate_limits = rate_limits
        self._journal = journal
        self._running: dict[str, tuple[int, asyncio.Task[None]]] = {}  # job id -> its generation, its task
        self._ending: set[str] = set()  # ids of jobs that are being stopped here
        # By model, so that jobs that wait for one model's workers do not occupy the slots of another model.
        self._slots: dict[str, TenantSlots] = defaultdict(lambda: TenantSlots(MAX_RUNNING, MAX_RUNNING_PER_TENANT))
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._keeping = forever(self._keep, name="jobs")

    async def leave(self) -> None:
        """Stops its jobs and releases their leases, so that other routers continue them at once."""
        await end(self._keeping)
        leases = [(job_id, generation) for job_id, (generation, _) in self._running.items()]
        await asyncio.gather(*(end(task) for _, task in list(self._running.values())))
        try:
            await self._journal.release(leases)
        except Unavailable as error:
            log.warning("jobs.not_released", jobs=len(leases), error=error.message)  # their leases expire

    async def _keep(self) -> None:
        """Renews its leases, and claims jobs whose lease has expired."""
        while True:
            try:
                await self._renew()
                until = monotonic() + LEASE_S / 3  # its own leases come first
                while self._takes_more() and monotonic() < until and (record := await self._journal.claim()):
                    log.info("job.taken_over", job=record.job_id, tokens=record.tokens)
                    self.run_here(record)
            except TandemError as error:
                log.warning("jobs.not_kept", error=error.message)
            await asyncio.sleep(LEASE_S / 3)

    def _takes_more(self) -> bool:
        """Whether to claim more jobs, even during a backlog of one tenant or model, which cannot occupy the slots of
        others."""
        if len(self._running) < MAX_RUNNING:
            return True
        full = all(self._slots[model.key].free == 0 for model in self._models)
        return len(self._running) < MAX_LEASED and not full

    async def _renew(self) -> None:
        running = dict(self._running)
        owned = [(job_id, generation) for job_id, (generation, _) in running.items()]
        for (job_id, generation), kept in zip(owned, await self._journal.renew(owned), strict=True):
            if kept is not Kept.KEPT and job_id not in self._ending:
                self._ending.add(job_id)
                # In another task, because this one must continue to renew leases.
                once(self._end_here(job_id, generation, running[job_id][1], kept), name=f"end of job {job_id}")

    async def _end_here(self, job_id: str, generation: int, task: asyncio.Task[None], why: Kept) -> None:
        try:
            await end(task)
            if why is Kept.CANCELLED:
                await self._journal.end(job_id, generation, State.CANCELLED)
        except Unavailable as error:  # its lease expires, and the next owner sees that it was cancelled
            log.warning("job.not_kept", job=job_id, why=error.message)
        finally:
            self._ending.discard(job_id)

    def run_here(self, record: JobRecord) -> None:
        """Starts a job whose lease this router holds."""
        task = once(self._run(record), name=f"job {record.job_id}")
        self._running[record.job_id] = record.generation, task
        task.add_done_callback(lambda _: self._done(record))

    def _done(self, record: JobRecord) -> None:
        if self._running.get(record.job_id, (0,))[0] == record.generation:
            del self._running[record.job_id]

    async def _run(self, record: JobRecord) -> None:
        """Runs the job until it ends or another router owns it."""
        job = _Running(record, jobs_pb2.KeptJob.FromString(record.request))
        try:
            while True:
                try:
                    async with self._slots[self._models.key_of(job.kept.request.model)].slot(job.kept.tenant):
                        with known_errors("job"):
                            await self._attempt(job)
                    return
                except (*TRANSIENT_ERRORS, InternalError) as error:
                    wait_s = self._pause(job, error)
                    log.info("job.waits", job=record.job_id, seconds=wait_s, reason=error.reason)
                await asyncio.sleep(wait_s)
        except TandemError as error:
            log.warning("job.broken", job=record.job_id, reason=error.reason, error=error.message)
            if error.reason != "REGISTRY_UNREACHABLE":
                await self._fail(record, error)
            # otherwise nothing can be stored: the next owner continues the job

    @staticmethod
    def _pause(job: _Running, error: TandemError) -> float:
        """Seconds until the next attempt. Raises an error that ends the job."""
        if error.reason == "REGISTRY_UNREACHABLE":
            raise error
        if isinstance(error, InternalError):
            job.failures += 1
            if error.reason != InternalError.default_reason or job.failures >= MAX_INTERNAL_ERRORS:
                raise error
        if error.reason == "TENANT_TOKENS":  # the tenant's bucket determines the time
            wait_s = min(max(error.retry_after or 0.0, MIN_RETRY_S), MAX_RETRY_S) * uniform(1.0, 1.2)
        else:
            wait_s = max(job.delay_s, error.retry_after or 0.0)
            job.delay_s = min(2 * job.delay_s, MAX_RETRY_S)
        if time() + wait_s > job.kept.deadline:
            raise DeadlineExceeded(f"job_timeout_s has passed; the last reason: {error.message}") from error
        return wait_s

    async def _fail(self, record: JobRecord, error: TandemError) -> None:
        try:
            await self._journal.end(record.job_id, record.generation, State.FAILED, error=error)
        except Unavailable as lost:  # the next owner will get the same error
            log.warning("job.not_kept", job=record.job_id, why=lost.message)

    async def _attempt(self, job: _Running) -> None:
        """Continues after the stored tokens. Raises an error that ends the attempt early."""
        try:
            model = self._models.named(job.kept.request.model)
        except NotFound as error:  # of a model that an upgrade adds: routers with it will run the job
            raise _homeless(job, error.message) from error
        key = self._rate_limits.named(job.kept.tenant)
        stored = ResumeState(prompt_count=job.prompt_count)
        async for page in self._journal.pages(job.record.job_id):
            stored.add(generation_pb2.GenerateResponse.FromString(entry.event) for entry in page)
        stored.adapter_fingerprint = stored.adapter_fingerprint or job.kept.adapter_fingerprint
        self._check_model(job, model, stored)
        _check_accepted(job, model.served.facts())  # nothing is awaited until `generate` checks the same facts
        prompt_tokens = 0 if job.charged else job.prompt_tokens
        with self._rate_limits.job(key, prompt_tokens, max(1, job.tokens - job.record.tokens)) as allowance:
            job.charged = True
            events = model.generation.generate(
                job.kept.request, job.kept.deadline - time(), tenant=key, resume=stored, headers=job.kept.trace.items
            )
            unfinished = choices(job.kept.request) - len(stored.ended)  # an end may be stored twice
            async with aclosing(events):
                async for event in events:
                    unfinished -= event.HasField("finished")
                    if not await self._add(job, event, unfinished):
                        return
                    if event.HasField("delta"):
                        job.failures, job.delay_s = 0, MIN_RETRY_S
                        allowance.spend(len(event.delta.token_ids))
                        if not event.delta.last:  # the last token needs no further allowance
                            allowance.check()

    async def _add(self, job: _Running, event: generation_pb2.GenerateResponse, unfinished: int) -> bool:
        """Stores an event; `unfinished` completions are left after it. False: the job has ended, or has another
        owner."""
        job_id, generation, data = job.record.job_id, job.record.generation, event.SerializeToString()
        if event.HasField("delta"):
            choice, first, new = event.delta.choice, event.delta.index, len(event.delta.token_ids)
            outcome = await self._journal.append(job_id, generation, first, first + new, data, choice)
        elif event.HasField("finished") and unfinished:
            choice, end_at = event.finished.choice, event.finished.receipt.completion_tokens
            outcome = await self._journal.append(job_id, generation, end_at, end_at, data, choice)
        elif event.HasField("finished"):
            outcome = await self._journal.end(job_id, generation, State.FINISHED, data)
        else:
            return True
        if outcome is Kept.CANCELLED:
            await self._journal.end(job_id, generation, State.CANCELLED)
        if outcome is not Kept.KEPT:
            log.warning("job.not_kept", job=job_id, why=outcome.value)
        return outcome is Kept.KEPT

    @staticmethod
    def _check_model(job: _Running, model: Model, stored: ResumeState) -> None:
        """Raises Unavailable while the model has another vocabulary than the job, or no decode worker computes the same
        remaining tokens (during an upgrade, which may be reverted), and PreconditionFailed after some time."""
        workers = model.served.decode_workers()
        if not workers:
            raise NoWorker("no decode worker is known", retry_after=2.0)
        if job.kept.vocabulary_digest not in ("", model.tokenizer.vocabulary_digest):
            what = "the job's prompt is token ids of another vocabulary than the model has: the text would differ"
        elif not goes_on(stored, workers):
            what = "the job began with another checkpoint or type of KV than any worker has: the tokens would differ"
        else:
            job.homeless_since = None
            return
        raise _homeless(job, what)


def _homeless(job: _Running, why: str) -> TandemError:
    """The error with which a job waits for workers or a router that can run it, and after some time the one that ends
    it."""
    job.homeless_since = job.homeless_since or monotonic()
    kind = Unavailable if monotonic() - job.homeless_since <= MAX_HOMELESS_S else PreconditionFailed
    return kind(why, reason="JOB_OF_OTHER_MODEL")


def _check_accepted(job: _Running, facts: ModelFacts) -> None:
    """Raises Unavailable while the model lacks the adapter of a job, or a worker with a context that is long enough. It
    had both when the job was accepted, and may have them again."""
    request = job.kept.request
    if request.adapter and request.adapter not in facts.adapters:
        raise Unavailable(f"there is no adapter {request.adapter!r:.140} now", reason="NO_ADAPTER")
    tokens = job.prompt_tokens + request.sampling.max_tokens
    if tokens > facts.context:
        raise NoWorker(f"no decode worker takes {tokens} tokens now")


def goes_on(stored: ResumeState, workers: Sequence[WorkerRecord]) -> bool:
    """Whether each open completion with tokens has a decode worker that computes the same remaining ones."""
    begun = stored.deltas.keys() - stored.ended
    return {stored.computes_with.get(choice) for choice in begun} <= {worker.computes_with for worker in workers}


def open_journal(settings: Settings) -> JobJournal:
    return JobJournal(
        settings.redis or "",
        settings.cluster,
        lease_s=LEASE_S,
        kept_s=settings.job_kept_s,
        most=settings.max_jobs,
        most_bytes=settings.max_tenant_job_mib * 1024 * 1024,
        most_each=settings.max_tenant_jobs,
    )


def choices(request: generation_pb2.GenerateRequest) -> int:
    """The number of the job's completions."""
    return int(request.sampling.n) if request.sampling.HasField("n") else 1
