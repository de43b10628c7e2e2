"""A prefill on another worker: the first token goes to the router, the KV is read meanwhile, the sequence joins.

    RemotePrefill.run   first_token() ▶ emit ▶ finish() ▶ join the engine ▶ PrefillResult

The first token goes to the router as soon as the prefill worker has sampled it, while blocks are still on their way
(services/decode/prefill_stream.py). Unless the transfer commits, RequestCleanup ends the reads and then frees what the
request holds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any

from engine.core.sequence import Finish, Sequence
from engine.engine_thread import SequenceStream
from kvtransfer.receiver import TransferStats
from kvtransfer.types import DigestBlocks
from services.decode import first_token
from services.decode.begin_gate import BeginGate
from services.decode.decode_call import DecodeCall
from services.decode.prefill_peers import PrefillPeer, PrefillPeers
from services.decode.prefill_stream import PrefillStream, first_missing, from_below
from services.decode.request_cleanup import RequestCleanup
from services.proto_convert import adapter_to
from services.worker import Worker
from tandem.errors import TandemError, TransferFailed
from tandem.telemetry.metrics import Transfer
from tandem.v1 import common_pb2, decode_pb2, prefill_pb2

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
        """Reads the KV of a sequence with reserved blocks from the call's prefill worker, emits the first token
        meanwhile, and then joins the sequence to the engine. Raises errors for the router: see `from_below`.

        `held` frees the request's resources on this worker. If reads are still in flight at the end, its content moves
        to the cleanup, which closes it when they have ended.
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
                    await call.emit(first_token.to_router(first, sequence, call.started, reserved_at, stream.first_at))
                    finish = sequence.ends_with(first.token_id)
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
        self, call: DecodeCall, sequence: Sequence, stream: PrefillStream, transfer: Transfer, token: int
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
            watch = await self._worker.engine_thread.join(sequence, token)
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
        """The request, in terms of the source's blocks."""
        return prefill_pb2.PrefillRequest(
            request_id=f"{request.request_id}/{request.attempt}",
            token_ids=request.token_ids,
            prompt_tokens=request.prompt_tokens,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            skip_blocks=first_missing(self._worker, sequence, prefill.landing),
            layout_hash=prefill.peer.layout_hash,
            incarnation=request.prefill.incarnation,
            source_progress=not prefill.transport.one_sided(prefill.peer),
            stop_token_ids=request.stop_token_ids,
            adapter=adapter_to(request.adapter.name, sequence.adapter),
        )


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
    """The attributes of the transfer's span."""
    return {
        "tandem.kv.transport": stats.transport,
        "tandem.kv.bytes": stats.bytes,
        "tandem.kv.blocks": stats.blocks,
        "tandem.kv.read_seconds": stats.seconds,
    }
