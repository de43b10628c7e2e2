"""One completion: placed, decoded, turned into text, and placed again when a worker is lost.

    run   place ─▶ the decode worker's call, up to the first token ─▶ its lane of the feed ─▶ finished
            ▲          │ it, or the prefill worker behind it, died
            └──────────┘ with the tokens sent so far: same seed and positions, same tokens

Tokens after the first wake nobody here. Whoever reads the feed calls `_take`, which leaves what they say in the
request's outbox, so one task wakes for each: its client's.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import structlog

from services.router.admit import Job
from services.router.feeds import Feeds, Lane
from services.router.placer import Placer
from services.router.policy import Placement
from services.router.prefixes import Prefixes
from services.router.quarantine import Loss, Quarantine, identity
from services.router.reader import Reader
from services.router.receipt import Account, Receipts
from services.router.tenants import Tenants
from services.router.text import Text
from services.server import Channels
from services.view import ClusterView
from tandem.errors import (
    Busy,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    IncompatibleLayout,
    InternalError,
    ResumeFailed,
    StepFailed,
    TandemError,
    Unavailable,
    WorkerLost,
)
from tandem.metrics import RouterMetrics
from tandem.settings import Settings
from tandem.status import calling
from tandem.tracing import Span
from tandem.v1 import decode_pb2, decode_pb2_grpc, generation_pb2

log = structlog.get_logger(__name__)
TRANSFER, PREFILL_STEP = "TRANSFER_FAILED", "PREFILL_STEP_FAILED"  # reasons (services/decode/remote_prefill.py)
EXPIRY_BEATS = 4  # so many after the record of a dead worker has expired, its absence is certain


class Outbox:
    """What the completions of one request have said, and its client has not been told. Bounded by their max_tokens."""

    def __init__(self) -> None:
        self._events: deque[generation_pb2.GenerateResponse] = deque()
        self._wake = asyncio.Event()
        self._error: BaseException | None = None

    def put(self, event: generation_pb2.GenerateResponse) -> None:
        self._events.append(event)
        self._wake.set()

    def over(self, task: asyncio.Task[None]) -> None:
        """A completion has ended. What ended it too early comes after everything that was put."""
        self._error = self._error or (Cancelled("a completion was ended") if task.cancelled() else task.exception())
        if self._error:
            self._wake.set()

    async def take(self) -> generation_pb2.GenerateResponse:
        """The next one; for a client that is behind, all deltas of one completion that follow each other, as one."""
        while not self._events:
            if self._error:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        event = self._events.popleft()
        if self._events and event.HasField("delta"):
            delta = event.delta
            while self._events and _follows(self._events[0], delta):
                _join(delta, self._events.popleft().delta)
        return event


def _follows(event: generation_pb2.GenerateResponse, delta: generation_pb2.Delta) -> bool:
    return event.HasField("delta") and event.delta.choice == delta.choice


def _join(delta: generation_pb2.Delta, more: generation_pb2.Delta) -> None:
    first, text = delta.index, delta.text + more.text
    delta.MergeFrom(more)  # lists grow, the rest is as in the later one
    delta.index, delta.text = first, text


@dataclass(frozen=True)
class Shared:
    """What all completions of a router have in common."""

    settings: Settings
    view: ClusterView
    text: Text
    channels: Channels
    feeds: Feeds
    prefixes: Prefixes
    placer: Placer
    tenants: Tenants
    quarantine: Quarantine
    metrics: RouterMetrics
    receipts: Receipts


class Completion:
    def __init__(
        self,
        shared: Shared,
        job: Job,
        account: Account,
        deadline: float,
        outbox: Outbox,
        past: Sequence[generation_pb2.Delta] = (),
    ) -> None:
        """What is past is in the journal, and its text was shown."""
        self.job = job
        self.account = account
        self.begun = asyncio.Event()  # its decode worker has the prompt's KV, or it is over
        self._shared = shared
        self._deadline = deadline
        self._outbox = outbox
        self._adapter = b""  # fingerprint of the one that the attempt computes with
        self._text = Reader(shared.text.stream(), job)
        for delta in past:
            job.tokens.extend(delta.token_ids)
            self._text.read(decode_pb2.Tokens(token_ids=delta.token_ids))

    async def run(self) -> None:
        """Puts deltas into the outbox, then `finished`, across as many attempts as it takes."""
        try:
            while self.job.finish() is None:
                await self._place()
            self._finish()
        finally:
            self.begun.set()

    async def _place(self) -> None:
        """Waits for room and has an attempt made. Raises what another attempt would not mend."""
        shared, job, account = self._shared, self.job, self.account
        if shared.quarantine:
            await self._check_poison()
        waiting_since = monotonic()
        remaining = self._deadline - waiting_since
        if remaining <= 0:
            raise DeadlineExceeded(f"the deadline passed after {job.generated} tokens", field="deadline")
        near = job.near if account.attempts == 0 else ""
        prompt = await shared.prefixes.prompt(job.tokens, job.salt, job.adapter)
        async with shared.placer.placed(
            len(job.tokens),
            job.prompt_len + job.max_tokens,
            remaining,
            near,
            functools.partial(shared.prefixes.cached, prompt),
            functools.partial(shared.prefixes.holders, prompt),
            tenant=job.tenant,
            priority=job.priority,
            ttft_s=None if job.ttft_s is None else job.ttft_s - account.elapsed(),
            begun=bool(job.generated),
            follows=bool(near),
            sum_order=account.sum_order,
        ) as placement:
            before, began = job.generated, monotonic()
            account.placed(placement, waited=began - waiting_since)
            try:
                with _attempt_span(account, placement) as span:
                    await self._attempt(placement, span)
            except Busy:
                shared.placer.said_no(placement)
                account.refused()
            except (Unavailable, DataLoss, IncompatibleLayout) as error:
                self._blame(error, placement)
                account.failed(error)
                job.notes.append(f"attempt {account.attempts} at token {job.generated}: {error.message}")
                log.warning("attempt.failed", request=job.request_id, attempt=account.attempts, error=error.message)
                if job.generated - before < 2 and (loss := _loss(error, placement, began)):
                    shared.quarantine.lost(identity(job), loss)
                if account.attempts >= shared.settings.max_attempts:
                    raise _given_up(job, account, error) from error
            if shared.quarantine and job.generated - before >= 2:
                shared.quarantine.served(identity(job))

    async def _attempt(self, placement: Placement, span: Span) -> None:
        """One decode worker's stream, to its end or to the token after which nothing else is wanted."""
        shared, account, lost = self._shared, self.account, "DECODE_UNREACHABLE"
        worker = placement.decode.worker_id
        stub = decode_pb2_grpc.DecodeServiceStub(shared.channels.to(placement.decode.address))
        account.dispatched()
        try:
            with calling(worker):
                feed = await shared.feeds.of(placement.decode)
            with feed.lane() as lane, calling(worker):
                request = _decode_request(self.job, placement, account.attempts, lane)
                timeout = max(0.001, self._deadline - monotonic())
                call = stub.Decode(request, timeout=timeout, metadata=span.headers)
                try:
                    async for event in call:
                        if event.HasField("admitted"):
                            _check_adapter(self.job, event.admitted, worker)
                            lost, self._adapter = "DECODE_LOST", event.admitted.adapter_fingerprint
                            continue
                        over = self._take(event)
                        await shared.placer.prefilled(placement)
                        if not over:
                            await lane.read(self._take, call)
                        break
                    else:
                        raise WorkerLost(f"{worker} ended the stream early")
                finally:
                    call.cancel()  # and with it everything that is held for it
        except WorkerLost as error:
            raise WorkerLost(f"{worker}: {error.message}", reason=lost) from error
        shared.placer.took(placement, account.way())

    def _take(self, event: decode_pb2.DecodeResponse) -> bool:
        """What a decode worker says goes into the journal, then to the client. True when nothing else is wanted."""
        job, account, shared = self.job, self.account, self._shared
        if event.HasField("ended"):
            account.ended(event.ended)
            return True
        stretch, first = event.tokens, job.generated
        count = len(stretch.token_ids)
        _check_position(job, stretch, account.decode_worker)
        prompt_logprobs = None if first else _prompt_logprobs(job, stretch, account.decode_worker)
        job.adapter_fingerprint = self._adapter
        job.tokens.extend(stretch.token_ids)
        if stretch.HasField("first"):
            account.first_token(stretch.first)
        else:
            self.begun.set()  # it was computed from the prompt's KV, which is there
        account.told(stretch)
        shared.tenants.generated(job.tenant, count)
        shared.placer.generated(job.tenant, count)
        shown = self._text.read(stretch)
        said = generation_pb2.GenerateResponse()  # filled in place: half the time of building a delta and copying it
        delta = said.delta
        delta.index, delta.text, delta.choice, delta.last = first, shown, job.choice, job.finish() is not None
        delta.token_ids.extend(stretch.token_ids)
        if stretch.HasField("logprobs"):
            delta.logprobs.CopyFrom(stretch.logprobs)
        if prompt_logprobs:
            delta.prompt_logprobs.CopyFrom(prompt_logprobs)
        if first == 0:
            delta.adapter_fingerprint = self._adapter
        shared.metrics.sent(len(delta.token_ids), account.sent(len(delta.token_ids)))
        self._outbox.put(said)
        return job.stopped

    def _finish(self) -> None:
        job, account, shared = self.job, self.account, self._shared
        tail = self._text.finish()
        receipt = account.receipt(job, shared.settings.model)
        if account.attempts:  # else an earlier life of the job gave every token
            shared.receipts.keep(receipt)
            shared.metrics.finished(receipt)
        finished = generation_pb2.Finished(
            reason=job.finish(), text=tail, receipt=receipt, choice=job.choice, stop=self._text.stop
        )
        account.span.answered(finished)
        self._outbox.put(generation_pb2.GenerateResponse(finished=finished))

    async def _check_poison(self) -> None:
        """Raises InternalError when two workers ended with this request. Where the registry does not show yet if they
        did, waits until it does, no longer than a dead worker's record needs to expire."""
        shared, request, now = self._shared, identity(self.job), monotonic()
        limit_s = shared.settings.heartbeat_ttl_s + EXPIRY_BEATS * shared.settings.heartbeat_s
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(limit_s, self._deadline - now))):
                if shared.quarantine.undecided(request, monotonic()):
                    await shared.view.refresh()  # in full: beats that change nothing are not among the changes
                while shared.quarantine.undecided(request, monotonic()):
                    await shared.view.newer_than(shared.view.version)  # the view's own reads
        try:
            shared.quarantine.check(request, monotonic())
        except InternalError as error:
            log.error("request.kills_workers", request=self.job.request_id, error=error.message)
            raise

    def _blame(self, error: TandemError, placement: Placement) -> None:
        """Who should get nothing new for a while. A digest mismatch is nobody's death: the same pair may try again. KV
        that did not arrive is the pair's: either worker may be well with others."""
        placer, prefill = self._shared.placer, placement.prefill
        if isinstance(error, StepFailed):  # it lives, and may be the only one
            worker, role = (prefill, "prefill") if error.reason == PREFILL_STEP else (placement.decode, "decode")
            if worker and len(self._shared.view.of_role(role)) > 1:
                placer.suspect(worker)
        elif prefill and error.reason == TRANSFER:
            placer.avoid(placement.decode, prefill)
        elif error.reason in ("PREFILL_LOST", "PREFILL_REFUSED") or isinstance(error, IncompatibleLayout):
            if prefill:
                placer.suspect(prefill)
        elif isinstance(error, Unavailable):
            placer.suspect(placement.decode)


def _loss(error: TandemError, placement: Placement, began: float) -> Loss | None:
    """The worker that may have ended, or has failed, because of the request, which was sent there at `began`."""
    if error.reason not in ("DECODE_LOST", "PREFILL_LOST") and not isinstance(error, StepFailed):
        return None
    worker = placement.prefill if error.reason in ("PREFILL_LOST", PREFILL_STEP) else placement.decode
    if worker is None:
        return None
    return Loss(worker.worker_id, worker.incarnation, began, monotonic(), isinstance(error, StepFailed))


def _decode_request(job: Job, placement: Placement, attempt: int, lane: Lane) -> decode_pb2.DecodeRequest:
    request = decode_pb2.DecodeRequest(
        request_id=job.internal_id,
        attempt=attempt,
        token_ids=job.tokens,
        prompt_tokens=job.prompt_len,
        max_tokens=job.max_tokens,
        sampling=job.sampling,
        stop_token_ids=job.stop_ids,
        cache_salt=job.salt,
        feed_id=lane.feed_id,
        lane=lane.number,
    )
    if job.generated:
        request.sampling.ClearField("prompt_logprobs")  # they went out with the first token
    if job.adapter:
        request.adapter.name, request.adapter.fingerprint = job.adapter, job.adapter_fingerprint
    if placement.prefill:
        request.prefill.worker_id = placement.prefill.worker_id
        request.prefill.incarnation = placement.prefill.incarnation
        request.prefill.address = placement.prefill.address
    return request


def _attempt_span(account: Account, placement: Placement) -> Span:
    if not account.span:
        return account.span
    about: dict[str, Any] = {"tandem.attempt": account.attempts + 1, "tandem.decode_worker": placement.decode.worker_id}
    if placement.prefill:
        about["tandem.prefill_worker"] = placement.prefill.worker_id
    return account.span.begin("attempt", about)


def _check_adapter(job: Job, admitted: decode_pb2.Admitted, worker_id: str) -> None:
    """A worker that knows nothing of adapters would answer with the base model."""
    said, began = admitted.adapter_fingerprint, job.adapter_fingerprint
    if bool(said) != bool(job.adapter) or (began and said != began):
        raise InternalError(f"{worker_id} did not admit the request with adapter {job.adapter!r}; it was stopped")


def _check_position(job: Job, tokens: decode_pb2.Tokens, worker_id: str) -> None:
    """Nothing was lost, and nothing came twice."""
    if tokens.position != len(job.tokens):
        raise InternalError(
            f"{worker_id} sent position {tokens.position}, expected {len(job.tokens)};"
            " the stream was stopped to keep it exact"
        )


def _prompt_logprobs(job: Job, tokens: decode_pb2.Tokens, worker_id: str) -> generation_pb2.PromptLogprobs | None:
    """Before the first token enters the journal: the log probabilities that were asked for are there, each of them."""
    if not job.sampling.HasField("prompt_logprobs"):
        return None
    said = len(tokens.prompt_logprobs.chosen)
    if not tokens.HasField("prompt_logprobs") or said != job.prompt_len - 1:
        raise InternalError(f"{worker_id} sent {said} prompt log probabilities for {job.prompt_len} tokens")
    return generation_pb2.PromptLogprobs(token_ids=job.tokens[: job.prompt_len], logprobs=tokens.prompt_logprobs)


def _given_up(job: Job, account: Account, error: TandemError) -> TandemError:
    """After the first token a client must not take the failure for "nothing happened"."""
    message = f"given up after {account.attempts} attempts: {error.message}"
    if job.generated:
        return ResumeFailed(f"{message}; {job.generated} tokens had been sent")
    return type(error)(message, reason=error.reason, retry_after=1.0)
