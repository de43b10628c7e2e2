"""Runs a completion to its end, on as many decode workers as it takes.

run   place ─▶ the decode worker's call, up to the first token ─▶ its substream of the feed ─▶ finished
        ▲          │ the decode worker, or its prefill worker, was lost
        └──────────┘ with the tokens sent so far: same seed and positions, same tokens
"""

from __future__ import annotations

import functools
from time import monotonic
from typing import Any

import structlog

from services.router.execution.completion import Completion
from services.router.execution.poison_check import DECODE_UNREACHABLE, PoisonCheck
from services.router.execution.request_timeline import RequestTimeline
from services.router.execution.stream_mux import NOT_SENT, StreamMuxes
from services.router.preprocess.request import Request
from services.router.routing.placement import Placement
from services.router.routing.prefix_index import PrefixIndex
from services.router.routing.request_scheduler import RequestScheduler
from services.router.routing.waiting_request import WaitingRequest
from tandem.errors import (
    Busy,
    DataLoss,
    DeadlineExceeded,
    IncompatibleLayout,
    NoWorker,
    ResumeFailed,
    StepFailed,
    TandemError,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from tandem.settings import RESERVED_OUTPUT_TOKENS, Settings
from tandem.telemetry.tracing import Span
from tandem.v1 import decode_pb2

log = structlog.get_logger(__name__)

TRANSFER_FAILED = "TRANSFER_FAILED"  # reason of an error (services/decode/prefill_stream.py)
OTHER_ADAPTER = "OTHER_ADAPTER"  # likewise: the worker lacks the adapter, which it says at once
# Likewise, of a worker that serves others and not this request: it has not its adapter, cannot load it or has no slot
# for it, compiles no grammar now, or is too small.
UNSUITED = (
    *(OTHER_ADAPTER, "RANK_WITHOUT_ADAPTER", "GRAMMARS_STUCK"),
    *("PREFILL_GRAMMARS_STUCK", "PREFILL_TOO_LARGE", "PREFILL_NO_ADAPTER_SLOT"),
    *("PREFILL_CHECKPOINT_REFUSED", "PREFILL_RANK_WITHOUT_ADAPTER"),
)
NO_ADAPTER_SLOT = "NO_ADAPTER_SLOT"  # likewise, of a decode worker, which has room for requests that need no slot


class CompletionRunner:
    def __init__(
        self,
        settings: Settings,
        scheduler: RequestScheduler,
        prefixes: PrefixIndex,
        muxes: StreamMuxes,
        poison: PoisonCheck,
    ) -> None:
        self._settings = settings
        self._model = settings.model_names[0]
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._muxes = muxes
        self._poison = poison

    async def run(self, completion: Completion, deadline: float) -> None:
        """Makes attempts until the completion has finished. Raises errors that another attempt cannot fix."""
        request = completion.request
        try:
            while request.finish() is None:
                try:
                    await self._place(completion, deadline)
                except (Busy, NoWorker) as error:
                    if completion.timeline.ttft is None and not completion.follows:
                        raise
                    if monotonic() >= deadline:
                        raise DeadlineExceeded(error.message, field="deadline") from error
                    raise ResumeFailed(f"{error.message}; {request.generated} tokens had been generated") from error
            completion.finish(self._model)
        finally:
            completion.over()

    async def _place(self, completion: Completion, deadline: float) -> None:
        """Waits for room and makes an attempt."""
        request, timeline = completion.request, completion.timeline
        alone = await self._poison.settle(request, deadline)
        remaining = deadline - monotonic()
        if remaining <= 0:
            raise DeadlineExceeded(f"the deadline passed after {request.generated} tokens", field="deadline")
        kv_holder = request.kv_holder if timeline.attempts == 0 and not alone else ""
        adapter = request.adapter, request.adapter_fingerprint
        prompt = await self._prefixes.prompt(request.tokens, request.salt, *adapter)
        waiting = WaitingRequest(
            len(request.tokens),
            request.tenant,
            request.priority,
            begun=bool(request.generated),
            ahead=min(RESERVED_OUTPUT_TOKENS, request.max_tokens - request.generated),
            kv_holder=kv_holder,
            begun_with=timeline.begun_with,
            unsuited=request.unsuited,
            cached=functools.partial(self._prefixes.cached, prompt),
            holders=functools.partial(self._prefixes.holders, prompt),
            alone=alone,
            is_job=request.is_job,
        )
        async with self._scheduler.placed(
            waiting,
            remaining,
            ttft_s=request.ttft_s,
            spent_s=timeline.elapsed(),
            follows=completion.follows and not request.generated,
        ) as placement:
            before, began = request.generated, monotonic()
            timeline.placed(placement)
            try:
                with _attempt_span(timeline, placement) as span:
                    await self._attempt(completion, placement, deadline, span, alone)
            except (Busy, TooLarge, Unavailable, DataLoss, IncompatibleLayout) as error:
                refused = self._refused(error, placement, request)
                if not refused and request.generated - before < 2:
                    self._poison.failed(request, error, placement, began, alone)
                if refused or self._spared(error, completion, alone):
                    full = isinstance(error, Busy) and error.reason != NO_ADAPTER_SLOT
                    self._scheduler.rejected(placement, full=full)
                    timeline.refused()
                    return
                timeline.failed()
                request.notes.append(f"attempt {timeline.attempts} at token {request.generated}: {error.message}")
                log.warning(
                    "attempt.failed", request=request.request_id, attempt=timeline.attempts, error=error.message
                )
                if request.finish() is None and timeline.attempts >= self._settings.max_attempts:
                    raise _given_up(request, timeline, error) from error
            if request.generated - before >= 2:
                self._poison.served(request)

    async def _attempt(
        self, completion: Completion, placement: Placement, deadline: float, span: Span, alone: bool
    ) -> None:
        """Reads one decode worker's stream to its end, or to the token that completes a stop string."""
        timeline, worker, lost = completion.timeline, placement.decode.worker_id, DECODE_UNREACHABLE
        timeline.dispatched()
        completion.request.end_at(placement.decode.eos_token_ids)
        message = _decode_request(completion.request, placement, timeline.attempts, alone)
        try:
            async with self._muxes.decode(placement.decode, message, deadline, span) as (call, substream):
                async for event in call:
                    if event.HasField("admitted"):
                        completion.admitted(event.admitted, worker)
                        self._scheduler.admitted(placement)
                        lost = "DECODE_LOST"
                        continue
                    over = completion.take(event)
                    self._scheduler.prefilled(placement)
                    if not over:
                        await substream.read(completion.take, call)
                    break
                else:
                    raise WorkerLost(f"{worker} ended the stream early")
        except WorkerLost as error:
            reason = NOT_SENT if error.reason == NOT_SENT else lost
            raise WorkerLost(f"{worker}: {error.message}", reason=reason) from error
        self._scheduler.observe_path(placement, timeline.path_latency())

    def _refused(self, error: TandemError, placement: Placement, request: Request) -> bool:
        """Whether a worker refused at once what another may take: it has no room, is too small, or lacks the adapter,
        which each says once. Otherwise the attempt has failed, and a worker is blamed."""
        if isinstance(error, TooLarge):
            _asks_another(request, placement, error)
            return True
        if isinstance(error, Busy) and error.reason not in UNSUITED:
            return True
        known = len(request.unsuited)
        self._blame(error, placement, request)
        if error.reason != OTHER_ADAPTER or len(request.unsuited) == known:
            return False
        request.notes.append(error.message)
        return True

    def _spared(self, error: TandemError, completion: Completion, alone: bool) -> bool:
        """Whether a loss is no attempt: the request was not sent, or may still have waited there to begin alone."""
        request, timeline = completion.request, completion.timeline
        if error.reason == NOT_SENT and timeline.unsent() < self._settings.queue_timeout_s:
            log.info("attempt.not_sent", request=request.request_id, error=error.message)
            return True
        return alone and error.reason == DECODE_UNREACHABLE and timeline.spare()

    def _blame(self, error: TandemError, placement: Placement, request: Request) -> None:
        """Decides which worker gets no new requests for a while. A digest mismatch does not mean that a worker is dead:
        the same pair may try again. A failed transfer counts against the pair: either worker may work with others. A
        worker that is unsuited for the request still gets others."""
        scheduler, prefill = self._scheduler, placement.prefill
        if error.reason in UNSUITED:
            of_prefill = isinstance(error, IncompatibleLayout) or error.reason.startswith("PREFILL")
            request.unsuited.add((prefill if prefill and of_prefill else placement.decode).identity)
        elif isinstance(error, StepFailed):
            worker, role = (prefill, "prefill") if error.reason.startswith("PREFILL") else (placement.decode, "decode")
            if worker:
                scheduler.suspect_unless_alone(worker, role)
        elif prefill and error.reason == TRANSFER_FAILED:
            scheduler.avoid(placement.decode, prefill)
        elif error.reason in ("PREFILL_LOST", "PREFILL_REFUSED"):
            if prefill:
                scheduler.lost(placement.decode, prefill)
        elif isinstance(error, IncompatibleLayout):
            if prefill:
                scheduler.suspect(prefill)
        elif isinstance(error, Unavailable):
            scheduler.suspect(placement.decode)


def _asks_another(request: Request, placement: Placement, error: TooLarge) -> None:
    """Excludes the worker for this request, because a worker with a longer context may have room. Raises the error if
    the worker was excluded already, because then there is no other, or if the error has another cause."""
    decode = placement.decode.identity
    if error.reason != TooLarge.default_reason or decode in request.unsuited:
        raise error
    request.unsuited.add(decode)


def _decode_request(request: Request, placement: Placement, attempt: int, alone: bool) -> decode_pb2.DecodeRequest:
    message = decode_pb2.DecodeRequest(
        request_id=request.internal_id,
        attempt=attempt,
        token_ids=request.tokens,
        prompt_tokens=request.prompt_len,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop_token_ids=request.stop_ids,
        cache_salt=request.salt,
        tenant=request.tenant,
        alone=alone,
    )
    if request.generated:
        message.sampling.ClearField("prompt_logprobs")  # they were sent with the first token
    if request.adapter:
        message.adapter.name, message.adapter.fingerprint = request.adapter, request.adapter_fingerprint
    if placement.prefill:
        message.prefill.worker_id = placement.prefill.worker_id
        message.prefill.incarnation = placement.prefill.incarnation
        message.prefill.address = placement.prefill.address
    return message


def _attempt_span(timeline: RequestTimeline, placement: Placement) -> Span:
    if not timeline.span:
        return timeline.span
    attributes: dict[str, Any] = {
        "tandem.attempt": timeline.attempts + 1,
        "tandem.decode_worker": placement.decode.worker_id,
    }
    if placement.prefill:
        attributes["tandem.prefill_worker"] = placement.prefill.worker_id
    return timeline.span.begin("attempt", attributes)


def _given_up(request: Request, timeline: RequestTimeline, error: TandemError) -> TandemError:
    """After the first token the error must not suggest that nothing was generated."""
    message = f"given up after {timeline.attempts} attempts: {error.message}"
    if request.generated:
        return ResumeFailed(f"{message}; {request.generated} tokens had been generated")
    return type(error)(message, reason=error.reason, retry_after=1.0)
