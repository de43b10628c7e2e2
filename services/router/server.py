"""The router: builds its parts, starts and stops them. It never imports torch."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import replace

from cluster.state.heartbeat import Heartbeat
from cluster.state.registry import Registry, State, WorkerRecord
from cluster.state.response_store import ResponseStore
from services.adapter_follower import AdapterFollower
from services.cluster_credentials import front_door, to_workers
from services.grpc_server import Channels, GrpcServer
from services.router.execution.completion_runner import CompletionRunner
from services.router.execution.poison_check import PoisonCheck
from services.router.execution.request_executor import RequestExecutor
from services.router.execution.request_timeline import ReceiptLog
from services.router.execution.stream_mux import StreamMuxes
from services.router.execution.usage_meter import UsageMeter
from services.router.frontend.adapter_control import AdapterControl
from services.router.frontend.admin_service import AdminServicer
from services.router.frontend.anthropic.messages_api import MessagesApi
from services.router.frontend.batches.batch_runner import BatchRunner, open_store
from services.router.frontend.batches.batches_api import BatchesApi
from services.router.frontend.batches.files_api import FilesApi
from services.router.frontend.batches.line_runner import LineRunner
from services.router.frontend.dashboard import Dashboard, Goal, RouterState
from services.router.frontend.grpc_service import GenerationServicer
from services.router.frontend.http_api import Api
from services.router.frontend.http_body import BodyReader
from services.router.frontend.http_endpoint import GeneratingEndpoint
from services.router.frontend.http_server import Server
from services.router.frontend.job_runner import JobRunner, open_journal
from services.router.frontend.jobs_service import JobService
from services.router.frontend.openai.adapters_api import AdaptersApi
from services.router.frontend.openai.openai_sampling import Defaults
from services.router.frontend.openai.responses_api import ResponsePreparation, ResponsesApi
from services.router.frontend.openai.stored_responses import StoredResponses
from services.router.generation import Generation
from services.router.preprocess.model_folder import local_folder
from services.router.preprocess.offload import Offload
from services.router.preprocess.preprocessor import Preprocessor
from services.router.preprocess.served_model import ServedModel
from services.router.preprocess.tokenizer import Tokenizer
from services.router.routing.placement import RoutingConfig
from services.router.routing.prefix_index import PrefixIndex
from services.router.routing.request_scheduler import RequestScheduler
from services.router.tenancy.api_keys import ApiKeys
from services.router.tenancy.rate_limits import RateLimits
from services.watchdog import Watchdog
from services.worker_liveness import WorkerLiveness
from tandem.errors import InternalError
from tandem.settings import Settings
from tandem.tasks import end, fail, forever
from tandem.telemetry import tracing
from tandem.telemetry.metrics import RouterMetrics
from tandem.telemetry.metrics_server import Probes, Served
from tandem.v1 import admin_pb2_grpc, generation_pb2_grpc, jobs_pb2_grpc

SERVICES = ["tandem.v1.GenerationService", "tandem.v1.JobService", "tandem.v1.AdminService"]
MAX_LOOP_BLOCKED_S = 30.0  # of the event loop; then the process ends, to be restarted
CHANNELS_PER_SLICE = 64  # channels that are checked before the event loop serves streams again
EXPIRY_BEATS = 4  # heartbeats after the expiry of a dead worker's record, after which its absence is certain


class Router:
    """One incarnation of a router."""

    can_switch_role = False  # its role cannot be switched: it has no engine

    def __init__(self, settings: Settings, worker_id: str, tokenizer: Tokenizer, defaults: Defaults) -> None:
        self.settings = settings
        self.worker_id = worker_id
        self.incarnation = secrets.token_hex(8)
        self.address = ""
        self.registry = Registry(settings.redis or "", settings.cluster, settings.heartbeat_ttl_s)
        self.view = WorkerLiveness(self.registry, settings.heartbeat_s)
        self.channels = Channels(settings.cluster_token, to_workers(settings))
        self.tracing = tracing.of_process(settings, "router", worker_id)
        self.adapters = AdapterFollower(self.registry, settings.heartbeat_s, lambda: self._heartbeat.changed())
        self.model = ServedModel(self.view, settings.adapters, self.adapters)
        self.offload = Offload(settings.queue_timeout_s)
        self.muxes = StreamMuxes(self.channels, settings.stream_interval_s)
        self.prefixes = PrefixIndex(self.view, self.channels)
        self.scheduler = RequestScheduler(self.view, settings.queue_timeout_s, _routing_config(settings))
        self.metrics = RouterMetrics(settings, worker_id, self.scheduler.waiting)
        self.receipts = ReceiptLog()
        keys = ApiKeys(settings.api_keys) if settings.api_keys else None
        self.rate_limits = RateLimits(keys)
        self.generation = self._build_generation(tokenizer)
        self._build_front_doors(tokenizer, defaults, keys)
        self._record = WorkerRecord(
            worker_id=worker_id,
            role="router",
            state=State.STARTING,
            pid=os.getpid(),
            incarnation=self.incarnation,
            address="",
            model=settings.model,
        )
        self._heartbeat = Heartbeat(self.registry, self._current_record, settings.heartbeat_s)
        self._watchdog = Watchdog([], lambda check, why: self._watchdog.exit_within(0.0), MAX_LOOP_BLOCKED_S)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._following: asyncio.Task[None] | None = None
        self._indexing: asyncio.Task[None] | None = None
        self._metrics_served: Served | None = None
        self._had_workers = self._stopped = False

    def _build_generation(self, tokenizer: Tokenizer) -> Generation:
        settings = self.settings
        poison = PoisonCheck(self.view, settings.heartbeat_ttl_s + EXPIRY_BEATS * settings.heartbeat_s)
        runner = CompletionRunner(settings, self.scheduler, self.prefixes, self.muxes, poison)
        usage = UsageMeter(self.metrics, self.receipts, self.rate_limits, self.scheduler)
        executor = RequestExecutor(runner, tokenizer, usage)
        preprocessor = Preprocessor(tokenizer, self.model, self.offload)
        return Generation(settings, preprocessor, self.rate_limits, poison, executor, self.metrics, self.tracing)

    def _build_front_doors(self, tokenizer: Tokenizer, defaults: Defaults, keys: ApiKeys | None) -> None:
        settings = self.settings
        self.journal = open_journal(settings)
        self.job_runner = JobRunner(self.generation, self.model, self.rate_limits, self.journal)
        self.jobs = JobService(
            settings, self.generation, self.model, self.rate_limits, self.journal, self.job_runner, self.tracing
        )
        control = AdapterControl(settings, self.adapters, self.view, self.channels)
        admin = AdminServicer(settings, self.registry, self.view, self.channels, self.receipts, control)
        self.grpc = GrpcServer(
            max_message_bytes=settings.max_prompt_bytes,
            guard=keys.guard if keys else None,
            share_port=settings.routers > 1,
            advertise=settings.advertise_host,
            credentials=front_door(settings),
            for_clients=True,
        )
        servicer = GenerationServicer(settings, self.generation, self.model, tokenizer)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self.grpc.server)
        jobs_pb2_grpc.add_JobServiceServicer_to_server(self.jobs, self.grpc.server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self.grpc.server)
        self.bodies = BodyReader(self.rate_limits, self.offload, settings.max_prompt_bytes)
        self.dashboard = Dashboard(
            Goal(settings.slo_ttft_s, settings.slo_tpot_s), self.receipts, self._state, admin, keys
        )
        api = Api(settings, self.generation, self.model, tokenizer, defaults, self.bodies, self.metrics)
        endpoint = GeneratingEndpoint(settings, self.generation, self.model, self.bodies)
        messages = MessagesApi(endpoint, self.model, tokenizer, defaults, self.bodies)
        responses = self._build_responses(endpoint, tokenizer, defaults)
        adapters = AdaptersApi(control, self.bodies, keys)
        doors = (self.dashboard, messages, responses, adapters, *self._build_batches(api))
        routes = [route for door in doors for route in door.routes()]
        self.http = Server(api.app(*routes, keys=keys), settings)

    def _build_responses(self, endpoint: GeneratingEndpoint, tokenizer: Tokenizer, defaults: Defaults) -> ResponsesApi:
        settings = self.settings
        self.response_store = ResponseStore(
            settings.redis or "",
            settings.cluster,
            ttl_s=settings.response_ttl_s,
            most_bytes=settings.max_tenant_response_mib * 1024 * 1024,
        )
        stored = StoredResponses(settings, self.response_store, self.rate_limits, self.offload)
        preparation = ResponsePreparation(endpoint, stored, self.model, tokenizer, defaults)
        return ResponsesApi(endpoint, preparation, stored, self.bodies, self.offload)

    def _build_batches(self, api: Api) -> tuple[FilesApi, BatchesApi]:
        most_bytes = self.settings.max_file_mib * 1024 * 1024
        self.batch_store = open_store(self.settings)
        lines = LineRunner(self.jobs, self.journal, self.rate_limits, self.offload, api.parsers)
        self.batch_runner = BatchRunner(self.batch_store, lines, self.offload, self.scheduler.waiting)
        files = FilesApi(self.batch_store, self.bodies, self.rate_limits, most_bytes)
        batches = BatchesApi(self.batch_store, self.batch_runner, self.bodies, self.rate_limits, list(api.parsers))
        return files, batches

    async def start(self) -> None:
        await self.view.start()
        await self.adapters.start()
        self.address = await self.grpc.start(self.settings.host, self.settings.port, SERVICES)
        if self.settings.http_port is not None:
            await self.http.start(self.settings.http_port, self._on_broken)
        probes = Probes(asyncio.get_running_loop(), self._ready)
        self._metrics_served = await asyncio.to_thread(self.metrics.serve, probes)
        self._record = replace(
            self._record,
            state=State.READY,
            address=self.address,
            metrics_address=self._metrics_served.address if self._metrics_served else "",
        )
        await self._heartbeat.start()
        self._watchdog.start()
        await self.job_runner.start()
        await self.batch_runner.start()
        self._following = forever(self._follow, name="warm-channels")
        if self.settings.place_by_prefix:
            self._indexing = forever(self.prefixes.follow, name="prefixes")

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    def _ready(self) -> bool:
        """For /readyz: whether a decode worker has ever been ready. Later losses do not count: all routers see the
        same workers, and without any router clients would get no answer at all."""
        self._had_workers = self._had_workers or self.model.ready()
        return self._had_workers and not self._stopped

    async def stop(self, grace_s: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._record = replace(self._record, state=State.DRAINING)
        self._heartbeat.changed()
        await self.batch_runner.leave()
        await self.jobs.leave()
        self.dashboard.close()
        await asyncio.gather(self.grpc.stop(grace_s), self.http.stop(grace_s))
        await end(self._following)
        await end(self._indexing)
        await self.adapters.stop()
        await self._heartbeat.stop()
        await self.view.stop()
        await self.muxes.close()
        await self.channels.close()
        await self.journal.close()
        await self.response_store.close()
        await self.batch_store.close()
        self.offload.close()
        await self.registry.close()
        if self._metrics_served:
            await asyncio.to_thread(self._metrics_served.close)
        await asyncio.to_thread(self.tracing.close)
        await asyncio.to_thread(self._watchdog.stop)
        if not self._ended.done():
            self._ended.set_result(None)

    def _current_record(self) -> WorkerRecord:
        """The router's record with its present load."""
        return replace(
            self._record,
            running=self.generation.running,
            waiting=self.scheduler.waiting(),
            backlog=self.scheduler.waiting_tokens(),
            arrived=self.scheduler.arrived,
            adapters_version=self.adapters.list.version,
        )

    def _state(self) -> RouterState:
        """What the dashboard shows of this router."""
        outcomes = self.metrics.outcomes()
        running, waiting, name = self.generation.running, self.scheduler.waiting(), self.settings.model_names[0]
        return RouterState(name, self.worker_id, self.view.registry_ok, running, waiting, outcomes)

    def _on_broken(self, error: BaseException) -> None:
        """Ends this process, to be restarted: one of its servers has failed."""
        fail(self._ended, InternalError(f"{self.worker_id} broke: {error}"))

    async def _follow(self) -> None:
        """Connects to workers before a request needs them, and closes channels to those that are gone."""
        async for _ in self.view.updates():
            incarnations = self.view.incarnations.values()
            addresses = {record.address for record in incarnations if record.role != "router"}
            self.channels.keep_only(addresses)
            await self.scheduler.keep_up()
            for number, address in enumerate(addresses):
                self.channels.to(address).get_state(try_to_connect=True)
                if number % CHANNELS_PER_SLICE == CHANNELS_PER_SLICE - 1:
                    await asyncio.sleep(0)


def _routing_config(settings: Settings) -> RoutingConfig:
    return RoutingConfig(
        local=settings.local_prefill,
        decode_slowdown_limit=settings.stretch,
        mixed_step_floor_s=settings.beside_s,
        ttft=settings.slo_ttft_s,
        tpot=settings.slo_tpot_s,
    )


async def start(settings: Settings, worker_id: str, say: Callable[[str], None]) -> Router:
    """A router that listens on settings.port, and on settings.http_port if there is one. Raises SettingsError (port in
    use), CheckpointRefused (tokenizer)."""
    folder = await asyncio.to_thread(local_folder, settings.model)
    tokenizer = await asyncio.to_thread(
        Tokenizer.load,
        folder,
        request_templates=settings.allow_request_chat_template,
        reasoning=settings.reasoning_format,
        calls=settings.tool_call_format,
    )
    say("tokenizer loaded")
    router = Router(settings, worker_id, tokenizer, Defaults.load(folder))
    await router.start()
    return router
