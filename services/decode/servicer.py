"""The decode worker: reserves room, gets the prompt's KV, and generates.

    Decode     reserve ─▶ admitted ─┬─ prefill elsewhere: stream ▶ pull blocks ▶ Release ▶ commit ─┬─▶ tokens ─▶ ended
                                    └─ prefill here ───────────────────────────────────────────────┘

The first token goes up as soon as the prefill worker has sampled it, while blocks are still on their way. Blocks that
were read are used only after the source has confirmed that it held them until the last read was over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import grpc

from engine.loop import EngineLoop, Timed, Watch
from engine.sequence import Finish, InSlot, Sampling, Sequence
from kvtransfer.blocks import DigestBlock, Peer, digest
from kvtransfer.pull import PullStats
from services.access import to_workers
from services.convert import (
    FINISH,
    adapter_to,
    logprobs_to,
    prompt_logprobs_to,
    sampling_from,
    sequence_tokens,
)
from services.decode.feeds import Feeds
from services.decode.probes import Probes
from services.decode.remote_prefill import AbandonedTransfers, RemotePrefill, from_below
from services.decode.sources import Source, Sources
from services.server import Channels
from services.view import ClusterView
from services.worker import Worker, block_reader, load_engine
from tandem.errors import IncompatibleLayout, PreconditionFailed, TandemError, TransferFailed, Unavailable
from tandem.settings import Settings
from tandem.tasks import end, forever
from tandem.tracing import Span
from tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2

# Output room reserved with the prompt, in tokens: the first stretch, so that a joining stream is not preempted at once.
AHEAD_TOKENS = 64
TRANSFER = "kv.transfer"  # the span
Tell = Callable[[decode_pb2.DecodeResponse], None]


@dataclass
class _Handover:
    """What the prefill elsewhere left behind: the watch on the running sequence, or a sequence that ended at once."""

    watch: Watch | None = None
    joined: float = 0.0  # when a sequence that is prefilled here was given to the engine
    finish: Finish | None = None
    report: common_pb2.TransferReport | None = None


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker: Worker, sources: Sources, probes: Probes, digest_block: DigestBlock) -> None:
        self._worker = worker
        self._sources = sources
        self._probes = probes
        self._digest_block = digest_block
        self._feeds = Feeds()
        self._abandoned = AbandonedTransfers()

    async def Feed(
        self, request: decode_pb2.FeedRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        with self._feeds.opened(request.feed_id, request.interval_seconds) as feed:
            yield decode_pb2.FeedResponse(incarnation=self._worker.incarnation)
            async with aclosing(feed.messages()) as messages:
                async for message in messages:
                    yield message

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        feed = self._feeds.get(request.feed_id) if request.feed_id else None
        begun = False

        def tell(event: decode_pb2.DecodeResponse) -> None:
            assert feed is not None
            event.lane = request.lane
            feed.put(event)

        with self._worker.tracing.serve("decode", context.invocation_metadata) as span:
            async with aclosing(
                self._decode(request, context.time_remaining(), span, tell if feed else None)
            ) as events:
                async for event in events:
                    if feed is not None and begun:
                        tell(event)
                    else:
                        if span and event.tokens.HasField("first"):
                            _tell_phases(span, event.tokens.first)
                        yield event
                        begun = event.HasField("tokens")

    async def _decode(
        self, request: decode_pb2.DecodeRequest, remaining: float | None, span: Span, tell: Tell | None
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """One request from its reservation to its end. Tokens after the first go to `tell` if there is one."""
        started = monotonic()
        vocab_size = self._worker.engine.model.vocab_size
        sampling = sampling_from(request.sampling, vocab_size)
        grammar = await self._worker.loop.compiled(sampling)
        self._check_adapter(request)
        async with AsyncExitStack() as stack:
            adapter = await stack.enter_async_context(self._worker.adapters.held(request.adapter.name))
            sequence = _sequence(request, sampling, grammar, adapter, vocab_size)
            await stack.enter_async_context(self._worker.in_progress(sequence.id))
            stack.push_async_callback(self._worker.loop.drop, sequence.id)
            await self._worker.loop.call(lambda: self._worker.engine.reserve(sequence, AHEAD_TOKENS))
            admitted = decode_pb2.Admitted(
                incarnation=self._worker.incarnation,
                cached_tokens=min(sequence.cached, sequence.prompt_len),
                adapter_fingerprint=sequence.fingerprint,
            )
            yield decode_pb2.DecodeResponse(admitted=admitted)
            handover = _Handover()
            if request.HasField("prefill"):
                events = self._prefill_elsewhere(request, sequence, started, handover, remaining, span, stack)
                async with aclosing(events):
                    async for event in events:
                        yield event
            else:
                handover.joined = monotonic()
                handover.watch = await self._worker.loop.join(sequence, None)
            if handover.watch is not None:
                began, before = monotonic(), len(sequence.tokens)
                async with aclosing(self._generate(sequence, handover, started, tell)) as tokens:
                    async for event in tokens:
                        yield event
                about = {"tandem.tokens": len(sequence.tokens) - before, "tandem.preemptions": sequence.preemptions}
                span.part("generate", began, monotonic() - began, about)
            assert handover.finish is not None
            ended = decode_pb2.Ended(
                reason=FINISH[handover.finish],
                transfer=handover.report,
                preemptions=sequence.preemptions,
                drafted=sequence.drafted,
                accepted=sequence.accepted,
            )
            yield decode_pb2.DecodeResponse(ended=ended)

    def _check_adapter(self, request: decode_pb2.DecodeRequest) -> None:
        """What was generated so far must have been by the adapter that is here."""
        wanted = request.adapter.fingerprint
        if wanted and wanted != self._worker.adapters.fingerprint(request.adapter.name):
            raise Unavailable(
                f"{self._worker.worker_id} has another adapter named {request.adapter.name} than the one that began",
                reason="OTHER_ADAPTER",
            )

    async def _prefill_elsewhere(
        self,
        request: decode_pb2.DecodeRequest,
        sequence: Sequence,
        started: float,
        handover: _Handover,
        remaining: float | None,
        span: Span,
        held: AsyncExitStack,
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """Get the KV from the named prefill worker and commit it. Yields the first token meanwhile. `held` is what the
        request holds here: taken over by the clean-up when a read must still be ended."""
        reserved = monotonic()
        where = request.prefill
        async with AsyncExitStack() as using:
            source = await self._source(using, where)
            asked = self._prefill_request(request, sequence, source.peer)
            prefill = RemotePrefill(self._worker, source, asked, sequence, self._digest_block, remaining, span.headers)
            with self._worker.metrics.transfer() as transfer:
                try:
                    first = await prefill.first_token()
                    yield _first_token(first, sequence, started, reserved, prefill.first_at)
                    handover.finish = _ends_at_once(sequence, first.token_id)
                    if handover.finish is not None:
                        return  # nobody needs the KV; leaving ends the stream and with it the lease
                    stats = await prefill.finish()
                    transfer.committed = True
                    span.part(TRANSFER, prefill.opened_at, monotonic() - prefill.opened_at, _about(stats))
                    self._worker.metrics.moved(stats.transport, stats.bytes, stats.seconds)
                    self._worker.metrics.prompt(sequence.cached, remote=len(sequence.tokens) - sequence.cached)
                    # Only now: the source held these blocks, unchanged, until every byte had been read and verified.
                    handover.watch = await self._worker.loop.join(sequence, first.token_id)
                    handover.report = _report(stats, exposed=monotonic() - prefill.first_at)
                except TandemError as error:
                    if prefill.pull is not None:
                        span.part(TRANSFER, prefill.opened_at, monotonic() - prefill.opened_at, error=error)
                    if isinstance(error, TransferFailed):
                        self._sources.failed(source, error)
                    raise
                finally:
                    transfer.opened = prefill.pull is not None
                    prefill.close()
                    if prefill.pull is not None and handover.watch is None:
                        await self._abandoned.end(sequence.id, prefill.pull, held.pop_all())

    async def _source(self, using: AsyncExitStack, where: common_pb2.WorkerRef) -> Source:
        try:
            return await using.enter_async_context(
                self._sources.using(where.worker_id, where.incarnation, where.address)
            )
        except TandemError as error:
            raise from_below(error, where.worker_id) from error

    async def _generate(
        self, sequence: Sequence, handover: _Handover, started: float, tell: Tell | None
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """What the engine samples; the tokens of several steps in one message when the reader is behind."""
        watch = handover.watch
        assert watch is not None
        if handover.report is None:  # prefilled here: the first token is still to come
            first, handover.finish = await self._first_here(sequence, watch, handover.joined, started)
            if first:
                yield first
        report = handover.report

        def said(news: list[Timed]) -> decode_pb2.DecodeResponse | None:
            nonlocal report
            message = _tokens(sequence, news)
            handover.finish = news[-1].progress.finish
            if message and report:
                message.tokens.transfer.CopyFrom(report)
                report = None
            return message

        def take(news: list[Timed]) -> bool:
            assert tell is not None
            if message := said(news):
                tell(message)
            return handover.finish is not None

        if handover.finish is None and tell:
            await watch.follow(take)
        while handover.finish is None:
            if message := said(await watch.next()):
                yield message

    async def _first_here(
        self, sequence: Sequence, watch: Watch, joined: float, started: float
    ) -> tuple[decode_pb2.DecodeResponse | None, Finish | None]:
        """Up to the first token of a prompt that is computed here, or to an end without one."""
        news = await watch.next()
        while (message := _tokens(sequence, news)) is None:
            if news[-1].progress.finish is not None:
                return None, news[-1].progress.finish
            news += await watch.next()
        self._worker.metrics.prompt(sequence.cached)
        ended = next(item.ended for item in news if item.progress.token is not None)
        message.tokens.first.CopyFrom(
            decode_pb2.FirstTokenTiming(
                total_seconds=monotonic() - started,
                admit_seconds=joined - started,
                prefill=common_pb2.PrefillTiming(
                    queue_seconds=news[0].started - joined,
                    compute_seconds=ended - news[0].started,
                    cached_tokens=sequence.cached,
                    computed_tokens=message.tokens.position - sequence.cached,
                ),
                path=common_pb2.PATH_LOCAL,
            )
        )
        if sequence.sampling.prompt_logprobs is not None:
            scores = await asyncio.to_thread(prompt_logprobs_to, sequence)
            message.tokens.prompt_logprobs.CopyFrom(scores or common_pb2.Logprobs())
        return message, news[-1].progress.finish

    def _prefill_request(
        self, request: decode_pb2.DecodeRequest, sequence: Sequence, peer: Peer
    ) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request_id=f"{request.request_id}/{request.attempt}",
            token_ids=request.token_ids,
            prompt_tokens=request.prompt_tokens,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            skip_blocks=sequence.cached // self._worker.engine.pool.block_size,
            layout_hash=self._worker.layout_hash,
            incarnation=request.prefill.incarnation,
            source_progress=not self._worker.transport.one_sided(peer),
            stop_token_ids=request.stop_token_ids,
            adapter=adapter_to(request.adapter.name, sequence.adapter),
        )

    async def ProbePair(
        self, request: decode_pb2.ProbePairRequest, context: grpc.aio.ServicerContext
    ) -> decode_pb2.ProbePairResponse:
        """Measures the link to a prefill worker, by reads into blocks that are nobody's."""
        worker, where = self._worker, request.prefill
        try:
            async with self._sources.using(where.worker_id, where.incarnation, where.address) as source:
                speed = await self._probes.speed(source.peer)
        except IncompatibleLayout as error:
            return decode_pb2.ProbePairResponse(compatible=False, differences=[error.message])
        here, there = worker.adapters.fingerprints(), source.adapters
        return decode_pb2.ProbePairResponse(
            compatible=True,
            differences=[
                f"adapter {name} is not the same on both"
                for name in sorted(here.keys() | there.keys())
                if here.get(name) != there.get(name)
            ],
            transport=worker.transport.link(source.peer),
            bytes_per_second=speed,
        )


def _sequence(
    request: decode_pb2.DecodeRequest, sampling: Sampling, grammar: Any, adapter: InSlot | None, vocab_size: int
) -> Sequence:
    if request.HasField("prefill"):
        sampling = replace(sampling, prompt_logprobs=None)  # who computes the prompt computes them
    return Sequence(
        id=f"sequence:{request.request_id}/{request.attempt}",
        tokens=sequence_tokens(request.token_ids, request.prompt_tokens, vocab_size),
        prompt_len=request.prompt_tokens,
        limit=request.prompt_tokens + request.max_tokens,
        stop_ids=frozenset(request.stop_token_ids),
        sampling=sampling,
        grammar=grammar,
        salt=request.cache_salt,
        adapter=adapter,
    )


def _tokens(sequence: Sequence, news: list[Timed]) -> decode_pb2.DecodeResponse | None:
    """Those that were sampled, if any was."""
    sampled = [item.progress for item in news if item.progress.token is not None]
    if not sampled:
        return None
    tokens = decode_pb2.Tokens(
        # Where the first of them stands: `len(sequence.tokens)` may be ahead, the engine does not wait for readers.
        position=sampled[0].done,
        token_ids=[progress.token for progress in sampled if progress.token is not None],
        logprobs=logprobs_to(progress.logprob for progress in sampled),
        preemptions=sequence.preemptions,
    )
    return decode_pb2.DecodeResponse(tokens=tokens)


def _ends_at_once(sequence: Sequence, token: int) -> Finish | None:
    """Whether the first token is also the last. Asked of a copy: the sequence itself takes the token when it joins."""
    if token in sequence.stop_ids:
        return Finish.STOP
    return Finish.LENGTH if len(sequence.tokens) + 1 >= sequence.limit else None


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


def _report(stats: PullStats, exposed: float) -> common_pb2.TransferReport:
    return common_pb2.TransferReport(
        transport=stats.transport,
        bytes=stats.bytes,
        blocks=stats.blocks,
        seconds=stats.seconds,
        exposed_seconds=max(0.0, exposed),
    )


def _about(stats: PullStats) -> dict[str, Any]:
    return {
        "tandem.kv.transport": stats.transport,
        "tandem.kv.bytes": stats.bytes,
        "tandem.kv.blocks": stats.blocks,
        "tandem.kv.read_seconds": stats.seconds,
    }


def _tell_phases(span: Span, timing: decode_pb2.FirstTokenTiming) -> None:
    """Those that this worker has measured, as the receipt will have them; the last ended now."""
    prefill, start = timing.prefill, monotonic() - timing.total_seconds
    inside = prefill.queue_seconds + prefill.compute_seconds
    handoff = timing.total_seconds - timing.admit_seconds - inside
    span.phase("reserve", start, timing.admit_seconds)
    span.phase("handoff", start + timing.admit_seconds, handoff)
    if timing.path == common_pb2.PATH_LOCAL:  # else they are the prefill worker's
        start += timing.admit_seconds + handoff
        span.phase("prefill_queue", start, prefill.queue_seconds)
        span.phase("prefill_compute", start + prefill.queue_seconds, prefill.compute_seconds)


async def start(
    settings: Settings, worker_id: str, say: Callable[[str], None], engine: EngineLoop | None = None
) -> Worker:
    """A ready decode worker, with an engine that another life has released or a new one. Raises CheckpointRefused and
    SettingsError before anything listens, PreconditionFailed for an engine that only prefills."""
    if engine is not None and not engine.engine.generates:
        raise PreconditionFailed("this engine was built without what the settings say of decoding", reason="PREFILLS")
    engine = engine or await load_engine(settings, say)
    worker = DecodeWorker("decode", settings, worker_id, engine)
    await worker.start(["tandem.v1.DecodeService"])
    return worker


class DecodeWorker(Worker):
    """A Worker that also follows the prefill pool, to be connected before a request needs it."""

    async def start(self, services: list[str]) -> None:
        read = block_reader(self.engine.pages)
        self._channels = Channels(self.settings.cluster_token, to_workers(self.settings))
        self._view = ClusterView(self.registry, self.settings.heartbeat_s * 2)
        probes = Probes(self)
        sources = self._sources = Sources(self.transport, self.layout, self._channels, probes.verify)
        servicer = DecodeServicer(self, sources, probes, lambda block, context: digest(read(block), context))
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, self.grpc.server)
        await self._view.start()
        await super().start(services)
        self._following = forever(lambda: sources.follow(self._view), name="follow-prefill-pool")

    async def close(self) -> None:
        await end(self._following)
        await self._sources.close()
        await self._view.stop()
        await self._channels.close()
