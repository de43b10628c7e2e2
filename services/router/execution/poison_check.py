"""Stops poison requests (poison_requests.py); waits for the registry while a worker's fate is unknown."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic

import structlog

from services.router.execution.poison_requests import Loss, PoisonRequests, identity
from services.router.preprocess.request import Request
from services.router.routing.placement import Placement
from services.worker_liveness import WorkerLiveness
from tandem.errors import InternalError, StepFailed, TandemError

log = structlog.get_logger(__name__)

# Reasons of errors (services/decode/prefill_stream.py, services/router/execution/completion_runner.py).
PREFILL_REFUSED = "PREFILL_REFUSED"
SHARED_STEP_FAILED = "SHARED_STEP_FAILED"  # likewise (engine/engine_thread.py)
DECODE_UNREACHABLE = "DECODE_UNREACHABLE"  # the worker has not admitted the request
LOST = ("DECODE_LOST", DECODE_UNREACHABLE, "PREFILL_LOST", PREFILL_REFUSED)


class PoisonCheck:
    def __init__(self, view: WorkerLiveness, settle_s: float) -> None:
        """`settle_s`: the time after which the registry certainly shows the death of a worker."""
        self._view = view
        self._settle_s = settle_s
        self._poison = PoisonRequests(view.ended)

    def check(self, request: Request) -> None:
        """Raises InternalError when the request crashed two workers."""
        if self._poison.remembers(monotonic()):
            self._poison.check(identity(request), monotonic())

    async def settle(self, request: Request, deadline: float) -> bool:
        """As `check`, once the fates of the workers involved are known, or after `settle_s`. Returns whether the
        request is suspected and must begin alone."""
        if not self._poison.remembers(monotonic()):
            return False
        key, now = identity(request), monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(self._settle_s, deadline - now))):
                if self._poison.undecided(key, monotonic()):
                    await self._view.refresh()  # in full, because the changes omit beats that change nothing
                while self._poison.undecided(key, monotonic()):
                    await self._view.newer_than(self._view.version)  # the view's own reads
        try:
            self._poison.check(key, monotonic())
        except InternalError as error:
            log.error("request.kills_workers", request=request.request_id, error=error.message)
            raise
        return self._poison.suspected(key, monotonic())

    def failed(self, request: Request, error: TandemError, placement: Placement, began: float, alone: bool) -> None:
        """An attempt, sent at `began` (monotonic seconds), failed before its second token. `alone`: no other request
        began on its decode worker."""
        if loss := _loss(error, placement, began, alone):
            self._poison.lost(identity(request), loss)

    def served(self, request: Request) -> None:
        """An attempt got past its first token."""
        if self._poison.remembers(monotonic()):
            self._poison.served(identity(request))


def _loss(error: TandemError, placement: Placement, began: float, alone: bool) -> Loss | None:
    """The worker that may have crashed, or has failed, because of the request. A worker that had not reported the
    admission counts as well: a crash loses unsent messages, and a grammar is compiled and an adapter loaded before it.
    But the request may still have waited to begin alone, so that is no proof."""
    alone = alone and error.reason != DECODE_UNREACHABLE
    if error.reason not in LOST and not isinstance(error, StepFailed):
        return None
    worker = placement.prefill if error.reason.startswith("PREFILL") else placement.decode
    if worker is None:
        return None
    shared = error.reason.endswith(SHARED_STEP_FAILED)
    failed_step = isinstance(error, StepFailed)
    return Loss(worker.worker_id, worker.incarnation, began, monotonic(), failed_step, alone, shared)
