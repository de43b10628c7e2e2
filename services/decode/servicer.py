"""The decode worker: reserves blocks, gets the prompt's KV, and generates.

    Decode   reserve ▶ Admitted ─┬─ remote_prefill.py: stream ▶ read blocks ▶ Release ▶ join ─┬─▶ tokens ▶ Ended
                                 └─ join ▶ the prompt is computed on this worker ─────────────┘

Every event of a request goes through `DecodeCall.emit`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import replace
from time import monotonic
from typing import Any

import grpc
from structlog.contextvars import bind_contextvars

from engine.core.sequence import LoraSlot, Sequence
from engine.engine_thread import EngineThread, StepOutput
from engine.runner.block_reader import block_reader
from kvtransfer.backends.network_devices import why_slow
from kvtransfer.types import DigestBlocks, digests
from services.cluster_credentials import to_workers
from services.decode.begin_gate import BeginGate
from services.decode.decode_call import DecodeCall
from services.decode.kv_landing import MOST, KvLandings
from services.decode.link_probes import Probes
from services.decode.prefill_peers import PrefillPeers
from services.decode.remote_prefill import PrefillResult, RemotePrefill
from services.decode.request_cleanup import RequestCleanup
from services.decode.stream_mux import StreamMuxes
from services.grpc_server import Channels
from services.proto_convert import (
    client_request_id,
    logprobs_to,
    prompt_logprobs_to,
    sampling_from,
    sequence_tokens,
)
from services.watchdog import Check
from services.worker import Worker, load_engine
from services.worker_liveness import WorkerLiveness
from tandem.errors import IncompatibleLayout, PreconditionFailed, Unavailable
from tandem.sampling import Sampling
from tandem.settings import RESERVED_OUTPUT_TOKENS, Settings
from tandem.tasks import end, forever
from tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc

# A crash of this process may lose messages that gRPC got less than this time ago. The router must learn that a request
# begins alone before it can crash this worker, and that it has begun before another request can.
SENT_S = 0.05


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker: Worker, peers: PrefillPeers, probes: Probes, digest_blocks: DigestBlocks) -> None:
        self._worker = worker
        self._peers = peers
        self._probes = probes
        self._gate = BeginGate()
        self._cleanup = RequestCleanup(worker)
        self._remote = RemotePrefill(worker, peers, self._gate, self._cleanup, digest_blocks)
        self._muxes = StreamMuxes()
        self._calls = itertools.count(1)

    async def Feed(
        self, request: decode_pb2.FeedRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        with self._muxes.opened(request.feed_id, request.interval_seconds) as mux:
            yield decode_pb2.FeedResponse(incarnation=self._worker.incarnation)
            async with aclosing(mux.messages()) as messages:
                async for message in messages:
                    yield message

    async def Decode(self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext) -> None:
        mux = self._muxes.get(request.feed_id)
        with self._worker.tracing.serve("decode", context.invocation_metadata) as span:
            bind_contextvars(request=client_request_id(request.request_id))
            await self._decode(DecodeCall(request, context, mux, span))

    async def _decode(self, call: DecodeCall) -> None:
        """One request from its reservation to its end."""
        request, worker, engine = call.request, self._worker, self._worker.engine
        vocab_size = engine.model.vocab_size
        sampling = sampling_from(request.sampling, vocab_size)
        grammar = await worker.engine_thread.compiled(sampling, request.tenant)
        self._check_adapter(request)
        async with AsyncExitStack() as held:
            name, meant = request.adapter.name, request.adapter.fingerprint
            adapter = await held.enter_async_context(worker.adapters.held(name, meant))
            sequence = _sequence(request, next(self._calls), sampling, grammar, adapter, vocab_size)
            await self._cleanup.register(sequence, held)
            here = not request.HasField("prefill")
            await worker.engine_thread.call(lambda: engine.reserve(sequence, RESERVED_OUTPUT_TOKENS, arrives=not here))
            alone = held.enter_context(await self._gate.enter_alone()) if request.alone and here else None
            await call.emit(_admitted(sequence))
            if alone is not None:
                await asyncio.sleep(SENT_S)
            if not here:
                result = await self._remote.run(call, sequence, held)
                held.callback(result.begun)
            else:
                with alone or await self._gate.enter() as beginning:
                    result = await self._prefill_here(call, sequence, beginning)
            if result.finish is None:
                await self._generate(call, sequence, result)
            if result.watch is not None:
                before = len(request.token_ids) + int(request.HasField("prefill"))  # with the prefill worker's token
                attributes = {
                    "tandem.tokens": len(sequence.tokens) - before,
                    "tandem.preemptions": sequence.preemptions,
                }
                call.span.part("generate", result.joined_at, monotonic() - result.joined_at, attributes)
            await call.emit(_ended(sequence, result.transfer))

    def _check_adapter(self, request: decode_pb2.DecodeRequest) -> None:
        """Refuses an adapter that this worker lacks, as while an upgrade adds it, or that has other content here than
        the router means: that of the loaded adapter, or of the one that generated the tokens so far."""
        name, meant = request.adapter.name, request.adapter.fingerprint
        if name and (why := self._worker.adapters.lacks(name, meant)):
            raise Unavailable(f"{self._worker.worker_id} {why}", reason="OTHER_ADAPTER")

    async def _prefill_here(self, call: DecodeCall, sequence: Sequence, beginning: ExitStack) -> PrefillResult:
        """Computes the prompt on this worker, up to its first token or an end without a token."""
        joined_at = monotonic()
        watch = await self._worker.engine_thread.join(sequence, None)
        steps = await watch.next()
        while (message := _tokens(sequence, steps)) is None:
            if steps[-1].progress.finish is not None:
                return PrefillResult(steps[-1].progress.finish, watch, joined_at)
            steps += await watch.next()
        if not call.request.alone:
            beginning.close()
        self._worker.metrics.prompt(sequence.cached)
        ended = next(step.ended for step in steps if step.progress.token is not None)
        message.tokens.first.CopyFrom(
            decode_pb2.FirstTokenTiming(
                total_seconds=monotonic() - call.started,
                admit_seconds=joined_at - call.started,
                prefill=common_pb2.PrefillTiming(
                    queue_seconds=steps[0].started - joined_at,
                    compute_seconds=ended - steps[0].started,
                    cached_tokens=sequence.cached,
                    unresumed_tokens=sequence.unresumed,
                ),
                path=common_pb2.PATH_LOCAL,
            )
        )
        if sequence.sampling.prompt_logprobs is not None:
            message.tokens.prompt_logprobs.CopyFrom(await asyncio.to_thread(prompt_logprobs_to, sequence))
        await call.emit(message)
        if call.request.alone:  # the next request may crash this process
            await asyncio.sleep(SENT_S)
        return PrefillResult(steps[-1].progress.finish, watch, joined_at)

    async def _generate(self, call: DecodeCall, sequence: Sequence, result: PrefillResult) -> None:
        """Emits the tokens that the engine samples, to the end."""
        report = result.transfer

        def on_progress(steps: list[StepOutput]) -> bool:
            nonlocal report
            if message := _tokens(sequence, steps):
                result.begun()
                if report:
                    message.tokens.transfer.CopyFrom(report)
                    report = None
                call.emit_nowait(message)
            return steps[-1].progress.finish is not None

        assert result.watch is not None
        await result.watch.follow(on_progress)

    async def ProbePair(
        self, request: decode_pb2.ProbePairRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.ProbePairResponse:
        """Measures the link to a prefill worker, with reads into free blocks."""
        worker, where = self._worker, request.prefill
        try:
            async with self._peers.using(where.worker_id, where.incarnation, where.address) as source:
                speed = await self._probes.speed(source)
        except IncompatibleLayout as error:
            return decode_pb2.ProbePairResponse(compatible=False, differences=[error.message])
        here, there = worker.adapters.fingerprints(), await source.adapters()
        link, device = source.transport.link(source.peer), source.transport.device(source.peer)
        return decode_pb2.ProbePairResponse(
            compatible=True,
            differences=[
                f"adapter {name} is not the same on both"
                for name in sorted(here.keys() | there.keys())
                if here.get(name) != there.get(name)
            ],
            transport=link,
            bytes_per_second=speed,
            device=device,
            slow=why_slow(link, device),
            why=source.transport.why(source.peer),
            converted=source.landing.names if source.landing else "",
        )


def _sequence(
    request: decode_pb2.DecodeRequest,
    number: int,
    sampling: Sampling,
    grammar: Any,
    adapter: LoraSlot | None,
    vocab_size: int,
) -> Sequence:
    if request.HasField("prefill"):
        sampling = replace(sampling, prompt_logprobs=None)  # the prefill worker computes them
    return Sequence(
        # A unique name: the end of a call must not free the blocks of another call of the same attempt.
        id=f"sequence:{request.request_id}/{request.attempt}#{number}",
        tokens=sequence_tokens(request.token_ids, request.prompt_tokens, vocab_size),
        prompt_len=request.prompt_tokens,
        max_len=request.prompt_tokens + request.max_tokens,
        stop_ids=frozenset(request.stop_token_ids),
        sampling=sampling,
        grammar=grammar,
        salt=request.cache_salt,
        tenant=request.tenant,
        adapter=adapter,
    )


def _admitted(sequence: Sequence) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(admitted=decode_pb2.Admitted(adapter_fingerprint=sequence.fingerprint))


def _tokens(sequence: Sequence, steps: list[StepOutput]) -> decode_pb2.DecodeResponse | None:
    """The tokens that these steps sampled, or None."""
    sampled = [step.progress for step in steps if step.progress.token is not None]
    if not sampled:
        return None
    tokens = decode_pb2.Tokens(
        # Not derived from `len(sequence.tokens)`, which may be ahead: the engine does not wait for readers.
        position=sampled[0].num_computed,
        token_ids=[progress.token for progress in sampled if progress.token is not None],
        logprobs=logprobs_to(progress.logprob for progress in sampled),
        preemptions=sequence.preemptions,
    )
    return decode_pb2.DecodeResponse(tokens=tokens)


def _ended(sequence: Sequence, report: common_pb2.TransferReport | None) -> decode_pb2.DecodeResponse:
    ended = decode_pb2.Ended(
        transfer=report,
        preemptions=sequence.preemptions,
        drafted=sequence.drafted,
        accepted=sequence.accepted,
    )
    return decode_pb2.DecodeResponse(ended=ended)


async def start(
    settings: Settings, worker_id: str, report: Callable[[str], None], engine: EngineThread | None = None
) -> Worker:
    """A ready decode worker, with an engine that another incarnation has released, or a new one. Raises
    CheckpointRefused and SettingsError before it listens, PreconditionFailed for an engine that only prefills."""
    if engine is not None and not engine.engine.config.generates:
        raise PreconditionFailed("this engine was built without the parts that only decoding needs", reason="PREFILLS")
    engine = engine or await load_engine(settings, report, ranks=settings.decode_tp)
    worker = DecodeWorker("decode", settings, worker_id, engine)
    await worker.start(["tandem.v1.DecodeService"])
    return worker


class DecodeWorker(Worker):
    """A Worker that follows the prefill pool and connects to each of its workers before a request needs it."""

    _landings: KvLandings | None = None

    async def start(self, services: list[str]) -> None:
        self._channels = Channels(self.settings.cluster_token, to_workers(self.settings))
        self._view = WorkerLiveness(self.registry, self.settings.heartbeat_s * 2)
        self._landings = landings = KvLandings(self)
        probes = Probes(self)
        peers = self._peers = PrefillPeers(self.transport, landings, self._channels, probes.verify, probes.compare)
        servicer = DecodeServicer(self, peers, probes, digests(block_reader(self.engine.pages)))
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, self.grpc.server)
        await self._view.start()
        await super().start(services)
        self._following = forever(lambda: peers.follow(self._view), name="follow-prefill-pool")

    def _checks(self) -> list[Check]:
        def of(number: int) -> Callable[[], tuple[Hashable, float] | None]:
            return lambda: self._landings.under_way(number) if self._landings else None

        more = [Check("the KV transport of converted blocks", "TRANSPORT_STUCK", of(number)) for number in range(MOST)]
        return [*super()._checks(), *more]

    async def close(self) -> None:
        await end(self._following)
        await self._peers.close()
        if self._landings:
            await self._landings.close()
        await self._view.stop()
        await self._channels.close()
