"""One handoff as the decode worker sees it: a prefill worker computes the prompt, and its KV is read meanwhile.

    first_token()   Opened ▶ Ready ... ▶ FirstToken         announced blocks are read from here on
    finish()        Ready ... ▶ last ▶ all landed ▶ Release  the source held every block, unchanged, until now
    close()         the stream ends; reads that were given up are ended, and only then the blocks freed

A read that fails ends the wait for further announcements at once. It may take its transport much longer to make sure
that such a read writes nothing any more: the caller hears of the failure first, and the blocks stay held and accounted
for until then (`AbandonedTransfers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from time import monotonic
from typing import Any

import grpc
import structlog

from engine import hashing
from engine.sequence import Sequence
from kvtransfer.blocks import DigestBlock, Ticket
from kvtransfer.pull import Pull, PullStats
from services.convert import ready_from
from services.decode.sources import Source
from services.worker import Worker
from tandem.errors import (
    Busy,
    DataLoss,
    DeadlineExceeded,
    IncompatibleLayout,
    InternalError,
    PreconditionFailed,
    StepFailed,
    TandemError,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from tandem.status import calling
from tandem.tasks import once
from tandem.v1 import prefill_pb2

log = structlog.get_logger(__name__)
SOON_S = 0.25  # most reads that are given up end within this time, and the caller waits for it
LATE_S = 0.02  # an error within this time of the caller's deadline is taken for its passing


class AbandonedTransfers:
    """Ends the reads of transfers that failed or are not needed, then gives back what was held for them."""

    def __init__(self) -> None:
        self._stuck: list[AsyncExitStack] = []  # what is never given back: collected, a stack would close itself

    async def end(self, name: str, pull: Pull, held: AsyncExitStack) -> None:
        """Closes `held` when nothing can write into the blocks any more. Returns then, or after SOON_S while it goes on
        in the background."""
        task = once(self._end(name, pull, held), name=f"abandon {name}")
        await asyncio.wait({task}, timeout=SOON_S)

    async def _end(self, name: str, pull: Pull, held: AsyncExitStack) -> None:
        began = monotonic()
        try:
            await pull.abort()
        except Exception as error:  # noqa: BLE001, it is logged
            # Fail closed: whatever may still be written must not reach another request's KV.
            log.error("transfer.not_ended", request=name, error=str(error), note="its blocks stay held")
            self._stuck.append(held)
            return
        if (seconds := monotonic() - began) > SOON_S:
            log.warning("transfer.ended_late", request=name, seconds=round(seconds, 2))
        try:
            await held.aclose()
        except TandemError as error:
            log.warning("transfer.not_freed", request=name, error=error.message)  # the engine has stopped


class RemotePrefill:
    """`remaining_s` is until the caller's deadline. All methods raise errors for the router: see `from_below`."""

    def __init__(
        self,
        worker: Worker,
        source: Source,
        request: prefill_pb2.PrefillRequest,
        sequence: Sequence,
        digest_block: DigestBlock,
        remaining_s: float | None,
        headers: Any,
    ) -> None:
        self.pull: Pull | None = None
        self.opened_at = self.first_at = 0.0  # monotonic seconds
        self._worker, self._source, self._sequence = worker, source, sequence
        self._digest_block = digest_block
        self._deadline = None if remaining_s is None else monotonic() + remaining_s
        self._first: prefill_pb2.FirstToken | None = None
        self._last = False  # all blocks are announced
        self._watching: asyncio.Task[None] | None = None
        with self._errors():
            self._call = source.stub.Prefill(request, timeout=remaining_s, metadata=headers)

    async def first_token(self) -> prefill_pb2.FirstToken:
        with self._errors():
            while self._first is None:
                await self._step()
            return self._first

    async def finish(self) -> PullStats:
        """Until every block has arrived and the source has confirmed that it held all of them. After `first_token`."""
        with self._errors():
            while not self._last:
                await self._step()
            assert self.pull is not None
            stats = await self.pull.finish()
            await self._release(self.pull.ticket)
            return stats

    def close(self) -> None:
        """Ends the stream, and with it the lease on the source's blocks. The pull is left to the caller."""
        self._call.cancel()
        if self._watching:
            self._watching.cancel()

    async def _step(self) -> None:
        """Takes the next message of the stream."""
        name = self._source.life[0]
        event: Any = await self._call.read()
        if event is grpc.aio.EOF:
            raise WorkerLost("it ended the prefill stream early")
        if event.HasField("opened"):
            self._open(event.opened)
        elif self.pull is None:
            raise InternalError(f"{name} sent something before it opened a transfer")
        elif event.HasField("first_token"):
            self._first, self.first_at = event.first_token, monotonic()
        else:
            await self.pull.add(ready_from(event.ready))
            self._last = event.ready.last
            if self._last and self._first is None:
                raise WorkerLost("it sent no token")

    def _open(self, opened: prefill_pb2.Opened) -> None:
        """Expects exactly the blocks of the prompt that are not cached here, each for its own place."""
        sequence, pool = self._sequence, self._worker.engine.pool
        _check_adapter(opened, sequence)
        contexts = hashing.chain(
            sequence.tokens, pool.block_size, sequence.salt, adapter=sequence.fingerprint, partial=True
        )
        missing = range(sequence.cached // pool.block_size, len(contexts))
        table = pool.table(sequence.id)
        self.pull = Pull(
            self._worker.transport,
            self._source.peer,
            Ticket(opened.transfer_id, opened.generation, opened.incarnation),
            {index: contexts[index] for index in missing},
            {index: table[index] for index in missing},
            self._digest_block,
            self._worker.settings.transfer_timeout_s,
        )
        self.opened_at = monotonic()
        self._watching = once(self._cancel_when_failed(self.pull), name=f"watch {sequence.id}")

    async def _cancel_when_failed(self, pull: Pull) -> None:
        await pull.failed.wait()
        self._call.cancel()

    async def _release(self, ticket: Ticket) -> None:
        timeout_s = self._worker.settings.transfer_timeout_s
        try:
            with calling(self._source.life[0]):
                await self._source.stub.ReleaseTransfer(
                    prefill_pb2.ReleaseTransferRequest(
                        transfer_id=ticket.transfer_id, generation=ticket.generation, incarnation=ticket.incarnation
                    ),
                    timeout=timeout_s,
                )
        except DeadlineExceeded as error:
            raise TransferFailed(f"it did not confirm the transfer within {timeout_s:g} s") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        name = self._source.life[0]
        try:
            with calling(name):
                yield
        except TandemError as error:
            cause = (self.pull and self.pull.error) or error  # a failed read made us cancel the stream
            expired = self._deadline is not None and monotonic() >= self._deadline - LATE_S
            raise from_below(cause, name, began=self.pull is not None, expired=expired) from error


def _check_adapter(opened: prefill_pb2.Opened, sequence: Sequence) -> None:
    """Before its first token goes up: the prefill worker computes with the adapter that is here."""
    if opened.adapter_fingerprint != sequence.fingerprint:
        raise IncompatibleLayout("it computes with another adapter of the same name, or with none")


def from_below(error: TandemError, source: str, *, began: bool = False, expired: bool = False) -> TandemError:
    """An error of the hop below, for the hop above: what the router needs to know is whom to avoid and whether to try
    again, which it reads from the class and the reason. `began`: the prefill worker had taken the request. `expired`:
    the caller's own deadline has passed; any other time limit is ours, and no reason to give the request up."""
    message = f"{source}: {error.message}"
    if isinstance(error, DeadlineExceeded) and not expired:
        return TransferFailed(message)
    if isinstance(error, DataLoss | IncompatibleLayout | DeadlineExceeded | TransferFailed):
        return type(error)(message, reason=error.reason)
    if isinstance(error, StepFailed):
        return StepFailed(message, reason="PREFILL_STEP_FAILED")
    if isinstance(error, WorkerLost) and began:
        return Unavailable(message, reason="PREFILL_LOST")
    # Dead before, restarted, draining, it revoked the transfer, or it cannot take this one.
    if isinstance(error, Unavailable | PreconditionFailed | Busy):
        return Unavailable(message, reason="PREFILL_REFUSED")
    return error
