"""Frees a request's resources on this decode worker when its call ends: finished, failed, or cancelled because a client
disconnected or the router was lost.

A request holds an adapter slot, an entry among the requests in progress, and KV blocks. They are freed in reverse
order. Blocks into which a transfer may still write are freed only after its reads have ended, which can take long; the
request fails at once, and its blocks stay held, and in the ledger, until then.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from time import monotonic

import structlog

from engine.core.sequence import Sequence
from kvtransfer.receiver import Receiver
from services.worker import Worker
from tandem.errors import TandemError
from tandem.tasks import once

log = structlog.get_logger(__name__)
ABORT_WAIT_S = 0.25  # the caller waits this long for aborted reads; most end within it


class RequestCleanup:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stuck: list[AsyncExitStack] = []  # never closed; a stack that is garbage collected would close itself

    async def register(self, sequence: Sequence, held: AsyncExitStack) -> None:
        """The request is in progress until `held` is closed, which then also drops its blocks. Raises Unavailable while
        the worker drains."""
        await held.enter_async_context(self._worker.in_progress(sequence.id))
        held.push_async_callback(self._worker.engine_thread.drop, sequence.id)

    async def after_abort(self, name: str, receiver: Receiver, held: AsyncExitStack) -> None:
        """Aborts the transfer, and closes `held` when no read can write into the blocks any more. Returns after
        ABORT_WAIT_S at the latest; the abort continues in the background."""
        task = once(self._abort(name, receiver, held), name=f"abandon {name}")
        await asyncio.wait({task}, timeout=ABORT_WAIT_S)

    async def _abort(self, name: str, receiver: Receiver, held: AsyncExitStack) -> None:
        began = monotonic()
        try:
            await receiver.abort()
        except Exception as error:  # noqa: BLE001, it is logged
            # Fail closed: a read that may still be in flight must not write into another request's KV.
            log.error("transfer.not_ended", sequence=name, error=str(error), note="its blocks stay held")
            self._stuck.append(held)
            return
        if (seconds := monotonic() - began) > ABORT_WAIT_S:
            log.warning("transfer.ended_late", sequence=name, seconds=round(seconds, 2))
        try:
            await held.aclose()
        except TandemError as error:
            log.warning("transfer.not_freed", sequence=name, error=error.message)  # the engine has stopped
