"""The handoff: a prefill worker computes the prompt, and its KV is read meanwhile.

    RemotePrefill.run   first_token() ▶ emit ▶ finish() ▶ join the engine ▶ PrefillResult

    PrefillStream
      first_token()     Opened ▶ Ready ... ▶ FirstToken         announced blocks are read from here on
      finish()          Ready ... ▶ last ▶ all landed ▶ Release  the source held every block, unchanged, until now
      close()           the stream ends, and with it the lease on the source's blocks

The first token goes to the router as soon as the prefill worker has sampled it, while blocks are still on their way.
Blocks that were read are used only after the source has confirmed that it held them until the last read was over.

A read that fails ends the wait for further announcements at once. Unless the transfer commits, RequestCleanup ends the
reads and then frees what the request holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import grpc

from engine.core.sequence import Finish, Sequence
from engine.engine_thread import SequenceStream
from kvtransfer.receiver import Reads, Receiver, TransferStats
from kvtransfer.types import DigestBlocks, Ticket
from services.decode.begin_gate import BeginGate
from services.decode.decode_call import DecodeCall
from services.decode.kv_landing import KvLanding, Landed
from services.decode.prefill_peers import PrefillPeer, PrefillPeers
from services.decode.request_cleanup import RequestCleanup
from services.proto_convert import adapter_to, ready_from
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
from tandem.grpc_errors import calling
from tandem.tasks import once
from tandem.telemetry.metrics import Transfer
from tandem.v1 import common_pb2, decode_pb2, prefill_pb2

DEADLINE_SLACK_S = 0.02  # an error this close to the caller's deadline counts as its expiry
TRANSFER_SPAN = "kv.transfer"


@dataclass(frozen=True)
class PrefillResult:
    """The state after a prefill whose first token has been emitted. `finish` is set if the first token is the last one.
    `watch`: the engine's stream of the sequence, which joined at `joined_at` (monotonic seconds); None where the
    prefill worker's token ended the request."""

    finish: Finish | None = None
    watch: SequenceStream | None = None
    joined_at: float = 0.0
    transfer: common_pb2.TransferReport | None = None
    begun: Callable[[], None] = lambda: None  # to be called when the engine has sampled a token of it


class RemotePrefill:
    """Sends the prompts of a decode worker to prefill workers and reads the KV."""

    def __init__(
        self,
        worker: Worker,
        peers: PrefillPeers,
        gate: BeginGate,
        cleanup: RequestCleanup,
        digest_blocks: DigestBlocks,
    ) -> None:
        self._worker = worker
        self._peers = peers
        self._gate = gate
        self._cleanup = cleanup
        self._digest_blocks = digest_blocks

    async def run(self, call: DecodeCall, sequence: Sequence, held: AsyncExitStack) -> PrefillResult:
        """Gets the KV of a sequence with reserved blocks from the prefill worker that the call names, emits the first
        token meanwhile, and lets the engine run the sequence. Raises errors for the router: see `from_below`.

        `held` frees what the request holds on this worker. If reads are still in flight at the end, its content is
        moved to the cleanup, which closes it when they have ended.
        """
        reserved_at = monotonic()
        async with AsyncExitStack() as using:
            prefill = await self._connected(using, call.request.prefill)
            asked = self._request(call.request, sequence, prefill)
            stream = PrefillStream(self._worker, prefill, asked, sequence, self._digest_blocks, call)
            held.callback(stream.give_back)
            result: PrefillResult | None = None
            with self._worker.metrics.transfer() as transfer:
                try:
                    first = await stream.first_token()
                    await call.emit(_first_token(first, sequence, call.started, reserved_at, stream.first_at))
                    finish = _ends_at_once(sequence, first.token_id)
                    if finish is not None:
                        return PrefillResult(finish)  # the KV is not needed; leaving ends the stream and the lease
                    result = await self._commit(call, sequence, stream, transfer, first.token_id)
                    return result
                except TandemError as error:
                    if stream.receiver is not None:
                        call.span.part(TRANSFER_SPAN, stream.opened_at, monotonic() - stream.opened_at, error=error)
                    if isinstance(error, TransferFailed):
                        self._peers.failed(prefill, error)
                    raise
                finally:
                    transfer.opened = stream.receiver is not None
                    stream.close()
                    if stream.receiver is not None and result is None:
                        await self._cleanup.after_abort(sequence.id, stream.receiver, held.pop_all())

    async def _commit(
        self, call: DecodeCall, sequence: Sequence, stream: PrefillStream, transfer: Transfer, first_token: int
    ) -> PrefillResult:
        """Waits for the KV, then hands the sequence to the engine."""
        metrics = self._worker.metrics
        stats = await stream.finish()
        transfer.committed = True
        call.span.part(TRANSFER_SPAN, stream.opened_at, monotonic() - stream.opened_at, _attributes(stats))
        metrics.moved(stats.transport, stats.bytes, stats.seconds)
        metrics.prompt(sequence.cached, remote=len(sequence.tokens) - sequence.cached)
        # Only now: the source has confirmed that it held these blocks until every byte had been read and verified.
        beginning = await self._gate.enter()
        try:
            watch = await self._worker.loop.join(sequence, first_token)
        except BaseException:
            beginning.close()
            raise
        now = monotonic()
        report = _report(stats, exposed=now - stream.first_at, converted=stream.converted)
        return PrefillResult(None, watch, now, report, beginning.close)

    async def _connected(self, using: AsyncExitStack, where: common_pb2.WorkerRef) -> PrefillPeer:
        try:
            return await using.enter_async_context(self._peers.using(where.worker_id, where.incarnation, where.address))
        except TandemError as error:
            raise from_below(error, where.worker_id) from error

    def _request(
        self, request: decode_pb2.DecodeRequest, sequence: Sequence, prefill: PrefillPeer
    ) -> prefill_pb2.PrefillRequest:
        """In the source's own blocks."""
        return prefill_pb2.PrefillRequest(
            request_id=f"{request.request_id}/{request.attempt}",
            token_ids=request.token_ids,
            prompt_tokens=request.prompt_tokens,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            skip_blocks=_first_missing(self._worker, sequence, prefill.landing),
            layout_hash=prefill.peer.layout_hash,
            incarnation=request.prefill.incarnation,
            source_progress=not prefill.transport.one_sided(prefill.peer),
            stop_token_ids=request.stop_token_ids,
            adapter=adapter_to(request.adapter.name, sequence.adapter),
        )


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
        for each in (self._call, self._watching):
            if each is not None:
                each.cancel()

    async def _read(self) -> None:
        """Handles the next message of the stream."""
        name = self._prefill.incarnation[0]
        event: Any = await self._call.read()
        if event is grpc.aio.EOF:
            raise WorkerLost("it ended the prefill stream early")
        if self.receiver is None and event.HasField("opened"):
            self._open(event.opened)
        elif self.receiver is None:
            raise InternalError(f"{name} sent something before it opened a transfer")
        elif event.HasField("first_token"):
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
        missing = range(_first_missing(self._worker, sequence, None), len(contexts))
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
            {index: context for index, (context, _) in expected.items()},
            {index: place for index, (_, place) in expected.items()},
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
        return StepFailed(message, reason="PREFILL_STEP_FAILED")
    if isinstance(error, WorkerLost) and began:
        return Unavailable(message, reason="PREFILL_LOST")
    if error.reason in ("GRAMMARS_STUCK", "TOO_LARGE"):  # it serves others
        return Unavailable(message, reason=f"PREFILL_{error.reason}")
    # It was dead already, restarted, drains, revoked the transfer, or has no room.
    if isinstance(error, Unavailable | PreconditionFailed | Busy):
        return Unavailable(message, reason="PREFILL_REFUSED")
    return error


def _ends_at_once(sequence: Sequence, token: int) -> Finish | None:
    """Why the sequence ends with its first token; None if it goes on. The token is appended when the sequence joins."""
    if token in sequence.stop_ids:
        return Finish.STOP
    return Finish.LENGTH if len(sequence.tokens) + 1 >= sequence.max_len else None


def _first_token(
    first: prefill_pb2.FirstToken, sequence: Sequence, started: float, reserved: float, now: float
) -> decode_pb2.DecodeResponse:
    timing = decode_pb2.FirstTokenTiming(
        total_seconds=now - started,
        admit_seconds=reserved - started,
        prefill=first.timing,
        path=common_pb2.PATH_DISAGGREGATED,
    )
    tokens = decode_pb2.Tokens(
        position=len(sequence.tokens),
        token_ids=[first.token_id],
        first=timing,
        logprobs=first.logprobs if first.HasField("logprobs") else None,
        prompt_logprobs=first.prompt_logprobs if first.HasField("prompt_logprobs") else None,
    )
    return decode_pb2.DecodeResponse(tokens=tokens)


def _first_missing(worker: Worker, sequence: Sequence, landing: KvLanding | None) -> int:
    """The first of a prompt's blocks, as the source has them, that has to arrive: after those cached here. Those
    of a model without attention hold nothing, so it is the first of the state's copy."""
    if landing is not None:
        return sequence.cached // landing.layout.block_size
    pool = worker.engine.pool
    return sequence.cached // pool.block_size if worker.layout.calls else pool.blocks_for(len(sequence.tokens))


def _report(stats: TransferStats, exposed: float, converted: str) -> common_pb2.TransferReport:
    return common_pb2.TransferReport(
        transport=stats.transport,
        bytes=stats.bytes,
        blocks=stats.blocks,
        seconds=stats.seconds,
        exposed_seconds=max(0.0, exposed),
        why=stats.why,
        converted=converted,
    )


def _attributes(stats: TransferStats) -> dict[str, Any]:
    """Of the transfer's span."""
    return {
        "tandem.kv.transport": stats.transport,
        "tandem.kv.bytes": stats.bytes,
        "tandem.kv.blocks": stats.blocks,
        "tandem.kv.read_seconds": stats.seconds,
    }
