"""The prefill worker: computes a prompt's KV and first token, offers the blocks, and holds them until released.

    Prefill(stream)   opened ▶ ready(blocks 0-3) ▶ ready(4-7) ▶ first_token ▶ ready(8, last) ▶ ... open until released
    ReleaseTransfer                                                                         ▶ "held until now", once

Blocks are freed on release, or when the stream ends for any other reason (the caller cancelled, its deadline passed,
or keepalive found its machine gone). The ticket is always revoked before the blocks are freed: a later release must not
succeed for blocks that may belong to another sequence by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, nullcontext
from time import monotonic
from typing import Any

import grpc
from structlog.contextvars import bind_contextvars

from engine.core.sequence import LoraSlot, Sequence
from engine.engine_thread import EngineThread, StepOutput
from engine.runner.block_reader import block_reader
from kvtransfer.sender import PART_BYTES, Sender
from kvtransfer.types import DigestBlocks, Offer, Ticket, digests
from services.kv_links import answered
from services.proto_convert import (
    client_request_id,
    logprobs_to,
    peer_to,
    prompt_logprobs_to,
    ready_to,
    sampling_from,
    sequence_tokens,
)
from services.worker import Worker, load_engine
from tandem.errors import IncompatibleLayout, StaleTransfer
from tandem.sampling import Sampling
from tandem.settings import Settings
from tandem.telemetry.tracing import Span
from tandem.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, worker: Worker, digest_blocks: DigestBlocks) -> None:
        self._worker = worker
        self._sender = Sender(worker.incarnation, digest_blocks)
        self._released: dict[Ticket, asyncio.Event] = {}

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        worker = self._worker
        with worker.tracing.serve("prefill", context.invocation_metadata) as span:
            bind_contextvars(request=client_request_id(request.request_id))
            self._check(request)
            began = monotonic()
            sampling = sampling_from(request.sampling, worker.engine.model.vocab_size)
            grammar = await worker.engine_thread.compiled(sampling, request.tenant)
            async with worker.adapters.held(request.adapter.name, request.adapter.fingerprint) as adapter:
                prepare_seconds = monotonic() - began
                async with aclosing(self._offer(request, sampling, grammar, adapter, span)) as events:
                    async for event in events:
                        if event.HasField("first_token"):
                            event.first_token.timing.prepare_seconds = prepare_seconds
                        yield event

    async def _offer(
        self,
        request: prefill_pb2.PrefillRequest,
        sampling: Sampling,
        grammar: Any,
        adapter: LoraSlot | None,
        span: Span,
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Computes and announces the blocks, and holds them until they are released."""
        worker = self._worker
        ticket = self._sender.open(request.request_id)
        owner = f"transfer:{ticket.transfer_id}#{ticket.generation}"
        released = self._released[ticket] = asyncio.Event()
        try:
            async with worker.in_progress(owner):
                try:
                    with worker.transport.serving() if request.source_progress else nullcontext():
                        yield prefill_pb2.PrefillResponse(
                            opened=prefill_pb2.Opened(
                                transfer_id=ticket.transfer_id,
                                generation=ticket.generation,
                                incarnation=ticket.incarnation,
                                adapter_fingerprint=adapter.fingerprint if adapter else b"",
                            )
                        )
                        async with aclosing(
                            self._compute(request, sampling, grammar, adapter, ticket, owner, span)
                        ) as events:
                            async for event in events:
                                yield event
                        computed = monotonic()
                        await released.wait()  # bounded by the call's deadline; a dead peer cancels it
                        span.part("held until released", computed, monotonic() - computed)
                finally:
                    self._sender.revoke_ticket(ticket, "its stream has ended")
                    await worker.engine_thread.drop(owner)
        finally:
            self._sender.revoke_ticket(ticket, "its stream was refused")
            del self._released[ticket]

    async def _compute(
        self,
        request: prefill_pb2.PrefillRequest,
        sampling: Sampling,
        grammar: Any,
        adapter: LoraSlot | None,
        ticket: Ticket,
        owner: str,
        span: Span,
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Runs the prompt; announces blocks as they become final, and the first token as soon as it is sampled."""
        pool = self._worker.engine.pool
        tokens = sequence_tokens(request.token_ids, request.prompt_tokens, self._worker.engine.model.vocab_size)
        sequence = Sequence(
            id=owner,
            tokens=list(tokens),
            prompt_len=request.prompt_tokens,
            max_len=len(tokens) + 1,
            stop_ids=frozenset(request.stop_token_ids),
            sampling=sampling,
            grammar=grammar,
            salt=request.cache_salt,
            tenant=request.tenant,
            adapter=adapter,
            handoff=True,
        )
        contexts = sequence.contexts(pool.block_size, self._worker.engine.state_blocks)
        arrived = monotonic()
        watch = await self._worker.engine_thread.add(sequence)
        announced, first_step = request.skip_blocks, None
        part = max(1, PART_BYTES // self._worker.layout.block_bytes)
        while True:
            news = await watch.next()
            first_step = first_step if first_step is not None else news[0].started
            latest = news[-1].progress
            finished = latest.token is not None
            if finished:
                asked = sequence.sampling.prompt_logprobs is not None
                scores = await asyncio.to_thread(prompt_logprobs_to, sequence) if asked else None
                self._worker.metrics.prompt(local=sequence.cached)
                first = _first_token(sequence, news[-1], arrived, first_step, scores)
                timing = first.first_token.timing
                span.phase("prefill_queue", arrived, timing.queue_seconds)
                span.phase("prefill_compute", first_step, timing.compute_seconds)
                yield first
            # Full blocks are final. The last, partial block and the copy of a recurrent state after it are final with
            # the prompt, because nothing is appended here.
            final = len(contexts) if finished else latest.num_computed // pool.block_size
            if final > announced or finished:
                for start in range(announced, max(final, announced + 1), part):
                    end = min(start + part, final)
                    offers = [Offer(index, pool.table(owner)[index], contexts[index]) for index in range(start, end)]
                    ready = await asyncio.to_thread(self._sender.announce, ticket, offers)
                    yield prefill_pb2.PrefillResponse(ready=ready_to(ready, last=finished and end == final))
                announced = max(announced, final)
            if finished:
                return

    async def ReleaseTransfer(
        self, request: prefill_pb2.ReleaseTransferRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.ReleaseTransferResponse:
        ticket = Ticket(request.transfer_id, request.generation, request.incarnation)
        self._sender.release(ticket)  # the fence: raises unless the blocks were held, unchanged, until now
        self._released[ticket].set()
        return prefill_pb2.ReleaseTransferResponse()

    async def Link(
        self, request_iterator: AsyncIterator[prefill_pb2.LinkRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[prefill_pb2.LinkResponse, None]:
        async with aclosing(answered(self._worker.transport, request_iterator)) as responses:
            async for response in responses:
                yield response

    async def GetPeer(
        self, request: prefill_pb2.GetPeerRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.GetPeerResponse:
        return prefill_pb2.GetPeerResponse(
            peer=peer_to(self._worker.transport.peer()),
            layout_json=self._worker.layout.to_json(),
            adapters=self._worker.adapters.fingerprints(),
        )

    def _check(self, request: prefill_pb2.PrefillRequest) -> None:
        worker = self._worker
        if request.incarnation != worker.incarnation:
            raise StaleTransfer(
                f"{worker.worker_id} is incarnation {worker.incarnation}, not {request.incarnation}; look it up again",
                reason="STALE_INCARNATION",
            )
        if request.layout_hash != worker.layout_hash:
            raise IncompatibleLayout(
                f"{worker.worker_id} has KV layout {worker.layout_hash}, the caller {request.layout_hash};"
                " `tandem doctor` names the differences"
            )
        name, meant = request.adapter.name, request.adapter.fingerprint
        if name and (why := worker.adapters.lacks(name, meant)):
            raise IncompatibleLayout(
                f"{worker.worker_id} {why}; `tandem doctor` compares the adapters of all workers",
                reason="OTHER_ADAPTER",
            )


def _first_token(
    sequence: Sequence,
    timed: StepOutput,
    arrived: float,
    first_step: float,
    scores: common_pb2.Logprobs | None,
) -> prefill_pb2.PrefillResponse:
    timing = common_pb2.PrefillTiming(
        queue_seconds=first_step - arrived,
        compute_seconds=timed.ended - first_step,
        cached_tokens=sequence.cached,
        unresumed_tokens=sequence.unresumed,
    )
    token = timed.progress.token
    assert token is not None
    logprobs = logprobs_to([timed.progress.logprob])
    return prefill_pb2.PrefillResponse(
        first_token=prefill_pb2.FirstToken(token_id=token, timing=timing, logprobs=logprobs, prompt_logprobs=scores)
    )


async def start(
    settings: Settings, worker_id: str, say: Callable[[str], None], engine: EngineThread | None = None
) -> Worker:
    """A ready prefill worker, with an engine that another incarnation has released, or a new one. Raises
    CheckpointRefused and SettingsError before it listens."""
    engine = engine or await load_engine(settings, say, ranks=settings.prefill_tp, generates=settings.flips)
    worker = Worker("prefill", settings, worker_id, engine)
    servicer = PrefillServicer(worker, digests(block_reader(engine.engine.pages)))
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, worker.grpc.server)
    await worker.start(["tandem.v1.PrefillService"])
    return worker
