"""The Prefill call of one request: the handoff of its KV, from the opened transfer to the confirmed release.

    first_token()     Opened ▶ Ready ... ▶ FirstToken         announced blocks are read from here on
    finish()          Ready ... ▶ last ▶ all landed ▶ Release  the source held every block, unchanged, until now
    close()           the stream ends, and with it the lease on the source's blocks

Blocks that were read are used only after the source has confirmed that it held them until the last read was over. A
read that fails ends the wait for further announcements at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import grpc

from engine.core.sequence import Sequence
from kvtransfer.receiver import Reads, Receiver, TransferStats
from kvtransfer.types import DigestBlocks, Ticket
from services.decode import first_token
from services.decode.decode_call import DecodeCall
from services.decode.kv_landing import KvLanding, Landed
from services.decode.prefill_peers import PrefillPeer
from services.proto_convert import ready_from
from services.worker import Worker
from tandem.errors import (
    Busy,
    DataLoss,
    DeadlineExceeded,
    IncompatibleLayout,
    PreconditionFailed,
    StepFailed,
    TandemError,
    TransferFailed,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)
from tandem.grpc_errors import calling
from tandem.tasks import once
from tandem.v1 import prefill_pb2

# Reasons of a prefill worker that serves others and not this request: it compiles no grammar for its tenant now, is too
# small, has no slot for its adapter, or cannot load it (its folder has changed, or a rank could not take it).
SERVES_OTHERS = ("GRAMMARS_STUCK", "TOO_LARGE", "NO_ADAPTER_SLOT", "CHECKPOINT_REFUSED", "RANK_WITHOUT_ADAPTER")
DEADLINE_SLACK_S = 0.02  # an error this close to the caller's deadline counts as its expiry


class PrefillStream:
    """The Prefill call of one request, and the reads of the blocks that it announces. All methods raise errors for the
    router: see `from_below`."""

    def __init__(
        self,
        worker: Worker,
        prefill: PrefillPeer,
        request: prefill_pb2.PrefillRequest,
        sequence: Sequence,
        digest_blocks: DigestBlocks,
        call: DecodeCall,
    ) -> None:
        self.receiver: Receiver | None = None  # None until the prefill worker has opened the transfer
        self.opened_at = self.first_at = 0.0  # monotonic seconds
        self._worker, self._prefill, self._sequence = worker, prefill, sequence
        self._request, self._remaining_s, self._headers = request, call.remaining_s, call.span.headers
        self._digest_blocks = digest_blocks
        self._deadline = None if call.remaining_s is None else monotonic() + call.remaining_s
        self._call: Any = None
        self._first: prefill_pb2.FirstToken | None = None
        self._last = False  # all blocks are announced
        self._watching: asyncio.Task[None] | None = None
        self._landed: Landed | None = None  # of a source whose blocks are converted

    @property
    def converted(self) -> str:
        """What was done to its blocks; empty where they are the same here."""
        return self._landed.landing.names if self._landed else ""

    async def first_token(self) -> prefill_pb2.FirstToken:
        """Opens the stream, and reads it up to the first token."""
        with self._errors():
            self._call = self._prefill.stub.Prefill(self._request, timeout=self._remaining_s, metadata=self._headers)
            while self._first is None:
                await self._read()
            return self._first

    async def finish(self) -> TransferStats:
        """Waits until every block has arrived and the source has confirmed that it held them all. After
        `first_token`."""
        with self._errors():
            while not self._last:
                await self._read()
            assert self.receiver is not None
            stats = await self.receiver.finish()
            await self._release(self.receiver.ticket)
            return stats

    def close(self) -> None:
        """Ends the stream, and with it the lease on the source's blocks. The caller ends the receiver."""
        if self._call is not None:
            self._call.cancel()
        if self._watching is not None:
            self._watching.cancel()

    async def _read(self) -> None:
        """Handles the next message of the stream."""
        event: Any = await self._call.read()
        if event is grpc.aio.EOF or event is None:  # None: bytes that are not a message
            raise WorkerLost("it ended the prefill stream early")
        if self.receiver is None and event.HasField("opened"):
            self._open(event.opened)
        elif self.receiver is None:
            raise WorkerLost("it sent something before it opened a transfer")
        elif event.HasField("first_token"):
            first_token.check(event.first_token, self._request, self._worker.engine.model.vocab_size)
            self._first, self.first_at = event.first_token, monotonic()
        else:
            await self.receiver.add(ready_from(event.ready))
            self._last = event.ready.last
            if self._last and self._first is None:
                raise WorkerLost("it sent no token")

    def _open(self, opened: prefill_pb2.Opened) -> None:
        """Expects exactly the blocks of the prompt that are not cached here, each for its own place, and in any case
        the copy of its recurrent states."""
        sequence, pool = self._sequence, self._worker.engine.pool
        _check_adapter(opened, sequence)
        if (landing := self._prefill.landing) is not None:
            tokens = range(sequence.cached, len(sequence.tokens))
            sequence.rounded = not landing.keeps_bits
            self._landed = landed = Landed(landing, list(pool.table(sequence.id)), tokens, {})
            self._receive(opened, landed, landed.expected(sequence), landed.digest_blocks)
            return
        states = self._worker.engine.state_blocks
        contexts, table = sequence.contexts(pool.block_size, states), pool.table(sequence.id)
        places = table[: len(contexts) - states] + table[len(table) - states :]
        missing = range(first_missing(self._worker, sequence, None), len(contexts))
        expected = {index: (contexts[index], places[index]) for index in missing}
        self._receive(opened, self._worker.transport, expected, self._digest_blocks)

    def _receive(
        self,
        opened: prefill_pb2.Opened,
        reads: Reads,
        expected: dict[int, tuple[bytes, int]],
        digest_blocks: DigestBlocks,
    ) -> None:
        """`expected`: by index in the sequence, the hash of a block and where it is read to."""
        self.receiver = Receiver(
            reads,
            self._prefill.peer,
            Ticket(opened.transfer_id, opened.generation, opened.incarnation),
            expected,
            digest_blocks,
            self._worker.settings.transfer_timeout_s,
        )
        self.opened_at = monotonic()
        self._watching = once(self._cancel_when_failed(self.receiver), name=f"watch {self._sequence.id}")

    def give_back(self) -> None:
        """Places of blocks that were read and not used; after the receiver has ended."""
        if self._landed is not None:
            self._landed.close()

    async def _cancel_when_failed(self, receiver: Receiver) -> None:
        await receiver.failed.wait()
        self._call.cancel()

    async def _release(self, ticket: Ticket) -> None:
        timeout_s = self._worker.settings.transfer_timeout_s
        try:
            with calling(self._prefill.incarnation[0]):
                await self._prefill.stub.ReleaseTransfer(
                    prefill_pb2.ReleaseTransferRequest(
                        transfer_id=ticket.transfer_id, generation=ticket.generation, incarnation=ticket.incarnation
                    ),
                    timeout=timeout_s,
                )
        except DeadlineExceeded as error:
            raise TransferFailed(f"it did not confirm the transfer within {timeout_s:g} s") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        name = self._prefill.incarnation[0]
        try:
            with calling(name):
                yield
        except TandemError as error:
            failed = self.receiver and self.receiver.error  # if so, it made us cancel the stream
            if isinstance(failed, WorkerLost):  # of the connection: the source may live, and be connected again
                failed = TransferFailed(failed.message)
            expired = self._deadline is not None and monotonic() >= self._deadline - DEADLINE_SLACK_S
            raise from_below(failed or error, name, began=self.receiver is not None, expired=expired) from error


def _check_adapter(opened: prefill_pb2.Opened, sequence: Sequence) -> None:
    """The prefill worker must use this worker's adapter; checked before its first token is passed on."""
    if opened.adapter_fingerprint != sequence.fingerprint:
        raise IncompatibleLayout("it computes with another adapter of the same name, or none", reason="OTHER_ADAPTER")


def from_below(error: TandemError, source: str, *, began: bool = False, expired: bool = False) -> TandemError:
    """Translates an error of the prefill worker for the router, which reads from class and reason which worker to avoid
    and whether to retry. `began`: the prefill worker had accepted the request. `expired`: the caller's own deadline has
    passed; any other expired time limit is an internal one, and the request may be retried."""
    message = f"{source}: {error.message}"
    if isinstance(error, DeadlineExceeded) and not expired:
        return TransferFailed(message)
    if isinstance(error, DataLoss | IncompatibleLayout | DeadlineExceeded | TransferFailed):
        return type(error)(message, reason=error.reason)
    if isinstance(error, StepFailed):
        return StepFailed(message, reason=f"PREFILL_{error.reason}")
    if isinstance(error, WorkerLost) and began:
        return Unavailable(message, reason="PREFILL_LOST")
    if error.reason in SERVES_OTHERS:
        return Unavailable(message, reason=f"PREFILL_{error.reason}")
    # It was dead already, restarted, drains, revoked the transfer, has no room, or another cluster_token.
    if isinstance(error, Unavailable | PreconditionFailed | Busy | Unauthenticated):
        return Unavailable(message, reason="PREFILL_REFUSED")
    return error


def first_missing(worker: Worker, sequence: Sequence, landing: KvLanding | None) -> int:
    """The first of a prompt's blocks, as the source has them, that has to arrive: after those cached here. Those
    of a model without attention hold nothing, so it is the first of the state's copy."""
    if landing is not None:
        return sequence.cached // landing.layout.block_size
    pool = worker.engine.pool
    return sequence.cached // pool.block_size if worker.layout.calls else pool.blocks_for(len(sequence.tokens))
