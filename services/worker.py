"""The base of both kinds of workers: engine, pages on a transport, gRPC server, record, ledger, orderly shutdown."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from time import monotonic

import grpc
import structlog

from cluster.state.heartbeat import Heartbeat
from cluster.state.registry import Registry, State, WorkerRecord
from engine.builder import build_engine, device_name
from engine.core.step_time import PROMPTS_S
from engine.engine_thread import EngineThread
from engine.kv.kv_cache import KvCache
from kvtransfer.factory import make_transport
from kvtransfer.transport import Transport
from kvtransfer.types import Region
from services.adapter_slots import AdapterSlots
from services.cluster_credentials import guard, of_worker
from services.grpc_server import GrpcServer
from services.kv_events import KvEvents
from services.runtime_adapters import RuntimeAdapters
from services.watchdog import Check, Watchdog
from tandem.errors import InternalError, TandemError, Unavailable
from tandem.linear_fit import places
from tandem.settings import PROMPT_STEP_SHARE, Settings
from tandem.tasks import fail, once, within
from tandem.telemetry import tracing
from tandem.telemetry.cluster_metrics import Reach
from tandem.telemetry.metrics import Load, WorkerMetrics
from tandem.telemetry.metrics_server import Probes, Served
from tandem.v1 import common_pb2, worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)
CUT_REQUESTS_WAIT_S = 5.0  # that cancelled requests have to free their blocks
BROKEN_WAIT_S = 1.0  # that the requests of a broken worker have to receive its error
BROKEN_EXIT_S = 2.0  # after which a broken worker's process ends in any case
MAX_HEARTBEAT_S = 15.0  # beyond its interval: registry calls have their own timeouts
MAX_LOOP_BLOCKED_S = 5.0  # for which the event loop may be blocked


class Worker:
    """One incarnation of a worker. `start` it, then `wait` for its end, `stop` it, or `release` its engine to the next
    incarnation in the same process."""

    def __init__(self, role: str, settings: Settings, worker_id: str, engine: EngineThread) -> None:
        self.role, self.settings, self.worker_id = role, settings, worker_id
        self.incarnation = secrets.token_hex(8)
        self.engine_thread, self.engine = engine, engine.engine
        self.engine.alone_s = alone_s(role, settings)
        self.can_switch_role = self.engine.config.generates and settings.prefill_tp == settings.decode_tp
        self.layout, self.weight_bytes = self.engine.pages.layout, self.engine.model.weight_bytes
        self.layout_hash = self.layout.hash()
        region = region_of(self.engine.pages, self.engine.spare)
        self.transport = self.transport_over(region, self.incarnation, self.layout_hash)
        self.registry = Registry(settings.redis or "", settings.cluster, settings.heartbeat_ttl_s)
        self._heartbeat = Heartbeat(self.registry, self.record, settings.heartbeat_s)
        lora = self.engine.model.lora
        self.runtime_adapters = RuntimeAdapters(lora, settings, self.registry, self._heartbeat.changed)
        self.adapters = AdapterSlots(engine, settings.queue_timeout_s, self.runtime_adapters)
        self.cache_news = KvEvents(engine)
        self.grpc = GrpcServer(
            guard=guard(settings), advertise=settings.advertise_host, credentials=of_worker(settings)
        )
        self.address, self.state = "", State.STARTING
        self.metrics = WorkerMetrics(settings, role, worker_id, self._load, self._reach)
        engine.after_step = self.metrics.step
        self._metrics_served: Served | None = None
        self.tracing = tracing.of_process(settings, role, worker_id)
        self._open: dict[str, float] = {}  # requests in progress: id -> when they began
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._begun, self._stopped = 0, False
        self._watchdog = Watchdog(self._checks(), self._stuck, MAX_LOOP_BLOCKED_S)

    def transport_over(self, region: Region, incarnation: str, layout_hash: str) -> Transport:
        host = self.settings.advertise_host or self.settings.host
        return make_transport(self.settings.transport, region, self.worker_id, incarnation, layout_hash, host)

    # ---- start and stop

    async def start(self, services: list[str]) -> None:
        """Call it after adding all servicers to `self.grpc.server`."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(WorkerServicer(self), self.grpc.server)
        self._here = asyncio.get_running_loop()
        self.engine_thread.tell(self._broke)
        self.transport.on_broken = partial(self.transport_broke, self.transport)
        probes = Probes(self._here, lambda: self.state is State.READY)
        self._metrics_served = await asyncio.to_thread(self.metrics.serve, probes)
        services, host, port = [*services, "tandem.v1.WorkerService"], self.settings.host, self.settings.worker_port
        self.address = await self.grpc.start(host, port, services, field="worker_port")
        await self.runtime_adapters.start()
        self.state = State.READY
        await self._heartbeat.start()
        self._watchdog.start()
        log.info("worker.ready", worker=self.worker_id, incarnation=self.incarnation, address=self.address)

    async def wait(self) -> None:
        """Returns when this worker has drained, raises if it breaks."""
        await asyncio.shield(self._ended)

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Refuses new requests and waits for running ones. Returns how many finished, and how many have not."""
        self.state = State.DRAINING
        self._heartbeat.changed()
        await self.grpc.not_serving(drains=True)
        before = len(self._open)
        if not await within(self._idle, grace_s):
            log.warning("worker.drain_cut", worker=self.worker_id, requests=len(self._open))
        return before - len(self._open), len(self._open)

    async def stop(self, grace_s: float) -> None:
        """Drains, then shuts down. Safe to call twice."""
        if not self._stopped:
            await self._end(grace_s, keep_engine=False)

    async def release(self, grace_s: float) -> EngineThread:
        """As `stop`, but keeps the engine, with its weights and prefix cache, for the next incarnation in this process.
        Raises Unavailable when this one is already ending, InternalError when it leaves requests or blocks in the
        engine."""
        if self._stopped:
            raise Unavailable(f"{self.worker_id} is ending", reason="DRAINING")
        await self._end(grace_s, keep_engine=True)
        return self.engine_thread

    async def _end(self, grace_s: float, keep_engine: bool) -> None:
        self._stopped = True
        await self.drain(grace_s)
        await self.grpc.stop(0.1)
        await self._heartbeat.stop()  # after the calls: until then the registry shows this worker as draining
        await self.close()
        await self.runtime_adapters.stop()
        await self.adapters.close()
        if self._metrics_served:
            await asyncio.to_thread(self._metrics_served.close)
        await asyncio.to_thread(self.tracing.close)
        await asyncio.to_thread(self._watchdog.stop)
        if not keep_engine:
            await asyncio.to_thread(self.engine_thread.stop)
        unclosed: TandemError | None = None
        try:
            await asyncio.to_thread(self.transport.close)  # from here on no peer reads or writes the pages
        except InternalError as error:
            unclosed = error
            log.exception("worker.transport_not_closed", worker=self.worker_id)
        await self.registry.close()
        if keep_engine:
            if unclosed is not None:
                raise unclosed  # the next incarnation must not use pages that a peer may still write
            await self._leave_engine()
        if not self._ended.done():
            self._ended.set_result(None)

    async def _leave_engine(self) -> None:
        """Checks that no request and no block of this incarnation is left in the engine."""
        if not await within(self._idle, CUT_REQUESTS_WAIT_S):
            raise InternalError(f"{self.worker_id} still has {len(self._open)} requests; its engine ends")
        books = await self.engine_thread.call(self._ledger)
        if books.held or books.faults:
            faults = "; ".join(books.faults) or f"{books.held} blocks are held"
            raise InternalError(f"{self.worker_id} cannot pass its engine to another incarnation: {faults}")
        self.engine_thread.on_broken = self.engine_thread.after_step = self.engine_thread.after_iteration = None
        await self.engine_thread.call(self.engine.pool.unlisten)

    async def close(self) -> None:
        """Hook: shuts down the role's own parts."""

    async def drain_and_end(self, grace_s: float) -> tuple[int, int]:
        """As `drain`, then stops once the caller has been answered; also if the caller goes away meanwhile."""
        drain = asyncio.create_task(self.drain(grace_s), name="drain")
        drain.add_done_callback(lambda _: once(self.stop(0.0), name="stop-after-drain", failed=self._end_with))
        return await asyncio.shield(drain)

    # ---- requests in progress

    @asynccontextmanager
    async def in_progress(self, name: str) -> AsyncIterator[None]:
        """Accounts for one request; refuses it when this worker is draining or broken."""
        if self.state is not State.READY:
            raise Unavailable(f"{self.worker_id} is draining; place the request elsewhere", reason="DRAINING")
        if self.engine_thread.broken:
            raise self.engine_thread.broken
        self._begun += 1
        self._open[name] = monotonic()
        self._idle.clear()
        try:
            yield
        finally:
            del self._open[name]
            if not self._open:
                self._idle.set()

    # ---- state for the registry, metrics and audits

    def record(self) -> WorkerRecord:
        scheduler, pool, model = self.engine.scheduler, self.engine.pool, self.engine.model
        return WorkerRecord(
            worker_id=self.worker_id,
            role=self.role,
            state=self.state,
            pid=os.getpid(),
            incarnation=self.incarnation,
            address=self.address,
            model=self.settings.model,
            kv_meaning=self.layout.meaning(),
            computes_with=self.layout.computes_with(),
            kv_dtype=self.layout.dtype,
            sum_order=model.sum_order,
            kv_token_bytes=self.layout.block_bytes / self.layout.block_size,
            max_model_len=min(model.max_model_len, (pool.total - self.engine.state_blocks) * pool.block_size),
            vocab_size=model.vocab_size,
            eos_token_ids=list(model.eos_token_ids),
            vocabulary=self.engine.vocabulary,
            block_size=pool.block_size,
            state_blocks=self.engine.state_blocks,
            running=len(self._open),
            waiting=len(scheduler.waiting),
            max_running=scheduler.max_running,
            blocks_total=pool.total,
            blocks_held=min(pool.total, pool.held + self.engine.scheduler.owed),
            weights=model.weights,
            weight_bytes=self.weight_bytes,
            step_s=self.engine.pace.step_s,
            stream_s=self.engine.pace.stream_s,
            prompt_rate=self.engine.pace.prompt_rate,
            backlog=scheduler.backlog,
            begun=self._begun,
            slow_products=self.engine.products.warning if self.engine.products else "",
            metrics_address=self._metrics_served.address if self._metrics_served else "",
            node=socket.gethostname(),
            device=device_name(self.engine.model.device),
            adapters_version=self.runtime_adapters.list.version,
            tp=self.engine.model.size,
        )

    def _load(self) -> Load:
        """Called on the thread that serves the metrics."""
        scheduler, pool, pace, states = self.engine.scheduler, self.engine.pool, self.engine.pace, self.engine.states
        free, cached = pool.free, pool.cached
        return Load(
            state=self.state,
            inflight=len(self._open),
            waiting=len(scheduler.waiting),
            free=free,
            cached=cached,
            held=pool.total - free - cached,
            backlog=scheduler.backlog,
            prompt_rate=pace.prompt_rate,
            preemptions=scheduler.preemptions,
            places=places(scheduler.max_running, pace.step_s, pace.stream_s, self.settings.slo_tpot_s),
            product_time_ratio=self.engine.products.worst.ratio if self.engine.products else None,
            states=(states.slots.free, states.slots.held, states.snapshots, states.evictions) if states else None,
        )

    def _reach(self) -> Reach:
        return Reach(self._heartbeat.registry_ok, self._heartbeat.round_trip_s)

    async def ledger(self) -> common_pb2.Ledger:
        """The ledger, read between two engine steps, so that it is consistent."""
        return await self.engine_thread.call(self._ledger)

    def _ledger(self) -> common_pb2.Ledger:
        pool, now = self.engine.pool, monotonic()
        faults = self.engine.check(live=self.engine.sequences.keys() | self._open.keys())
        forgotten = sorted(self.engine.sequences.keys() - self._open.keys())
        faults += [f"{name} is in the engine, but no request is in progress for it" for name in forgotten]
        entries = [
            common_pb2.LedgerEntry(owner=owner, blocks=pool.table(owner), age_seconds=now - self._open.get(owner, now))
            for owner in pool.owners()
        ]
        return common_pb2.Ledger(
            worker=common_pb2.WorkerRef(worker_id=self.worker_id, incarnation=self.incarnation, address=self.address),
            total=pool.total,
            free=pool.free,
            cached=pool.cached,
            held=pool.held,
            entries=entries,
            faults=faults,
            states=self._states(),
        )

    def _states(self) -> common_pb2.StateLedger | None:
        if self.engine.states is None:
            return None
        slots, snapshots = self.engine.states.slots, self.engine.states.snapshots
        return common_pb2.StateLedger(total=slots.total, free=slots.free, owners=slots.owners(), snapshots=snapshots)

    # ---- failure

    def _checks(self) -> list[Check]:
        """The work that must make progress."""

        def heartbeat() -> tuple[int, float]:
            return self._heartbeat.beats, self.settings.heartbeat_s + MAX_HEARTBEAT_S

        return [
            Check("the engine", "ENGINE_STUCK", lambda: self.engine_thread.under_way),
            Check("the KV transport", "TRANSPORT_STUCK", lambda: self.transport.under_way),
            Check("the heartbeat", "HEARTBEAT_STUCK", heartbeat),
        ]

    def _stuck(self, check: Check, why: str) -> None:
        """On the watchdog's thread."""
        self.engine_thread.abandon(Unavailable(f"{self.worker_id}: {why}", reason=check.reason))

    def transport_broke(self, transport: Transport) -> None:
        """On the thread of `transport`."""
        what = transport.broken.message if transport.broken else "unknown"
        error = Unavailable(f"the KV transport of {self.worker_id} broke: {what}", reason="TRANSPORT_BROKEN")
        self.engine_thread.abandon(error)

    def _broke(self) -> None:
        """Called on the thread that noticed. The event loop may be blocked, so the watchdog also ends the process."""
        self._watchdog.exit_within(BROKEN_EXIT_S)
        with suppress(RuntimeError):  # the event loop is closed: the process is ending
            self._here.call_soon_threadsafe(lambda: once(self._leave(), name="leave", failed=self._end_with))

    async def _leave(self) -> None:
        """Reports the failure to registry and health checks, lets the requests receive the error, ends `wait`."""
        assert self.engine_thread.broken is not None
        self.state = State.DRAINING
        self._heartbeat.changed()
        await self.grpc.not_serving()
        if not await within(self._idle, BROKEN_WAIT_S):
            log.warning("worker.left_requests", worker=self.worker_id, requests=len(self._open))
        self._end_with(self.engine_thread.broken)

    def _end_with(self, error: BaseException) -> None:
        """Makes `wait` raise the error."""
        fail(self._ended, error)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def GetLedger(
        self, request: worker_pb2.GetLedgerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetLedgerResponse:
        return worker_pb2.GetLedgerResponse(ledger=await self._worker.ledger())

    async def WatchCache(
        self, request: worker_pb2.WatchCacheRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[worker_pb2.WatchCacheResponse, None]:
        async with aclosing(self._worker.cache_news.watch()) as messages:
            async for message in messages:
                if message.sequence == 0:
                    message.incarnation = self._worker.incarnation
                    message.adapters.update(self._worker.adapters.fingerprints())
                yield message

    async def PrepareAdapter(
        self, request: worker_pb2.PrepareAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.PrepareAdapterResponse:
        adapter = await self._worker.runtime_adapters.prepare(request.name, request.path)
        return worker_pb2.PrepareAdapterResponse(fingerprint=adapter.fingerprint)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DrainResponse:
        finished, cut = await self._worker.drain_and_end(request.grace_seconds)
        return worker_pb2.DrainResponse(finished=finished, cut=cut)


async def load_engine(
    settings: Settings, say: Callable[[str], None], *, ranks: int = 1, generates: bool = True
) -> EngineThread:
    """Loads and checks the model on the engine's thread, without blocking the event loop."""
    engine_thread = EngineThread(partial(build_engine, settings, say, generates=generates, ranks=ranks))
    await engine_thread.built()
    return engine_thread


def alone_s(role: str, settings: Settings) -> float:
    """Seconds that a step without streams may take. On a decode worker KV may arrive during such a step; its stream
    then waits for the rest of the step and for the next one. Each may take half of the TPOT objective."""
    if role == "decode" and settings.disaggregated and settings.slo_tpot_s is not None:
        return min(PROMPTS_S, PROMPT_STEP_SHARE * settings.slo_tpot_s)
    return PROMPTS_S


def region_of(pages: KvCache, spare: int | None = None) -> Region:
    return Region(
        address=pages.base_address,
        num_blocks=pages.num_blocks,
        block_bytes=pages.block_bytes,
        device=pages.device_id,
        memory="dram" if pages.buffer.device.type == "cpu" else "vram",
        spare_block=spare,
        keepalive=pages.buffer,
    )
