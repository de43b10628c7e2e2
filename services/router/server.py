"""The router: builds its parts, starts and stops them. It never imports torch."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from cluster.state.registry import State, WorkerRecord
from cluster.state.response_store import ResponseStore
from cluster.state.router_samples import RouterSamples
from services.cluster_credentials import front_door, to_workers
from services.grpc_server import Channels, GrpcServer
from services.router.execution.completion_runner import CompletionRunner
from services.router.execution.poison_check import PoisonCheck
from services.router.execution.request_account import EndedRequests, RequestAccounts
from services.router.execution.request_executor import RequestExecutor
from services.router.execution.request_timeline import ReceiptLog
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
from services.router.frontend.history import History
from services.router.frontend.http_api import Api
from services.router.frontend.http_body import BodyReader
from services.router.frontend.http_endpoint import GeneratingEndpoint, Parse
from services.router.frontend.http_server import Server, most_connections
from services.router.frontend.job_runner import JobRunner, open_journal
from services.router.frontend.jobs_service import JobService
from services.router.frontend.openai.adapters_api import AdaptersApi
from services.router.frontend.openai.responses_api import PATH as RESPONSES_PATH
from services.router.frontend.openai.responses_api import ResponsePreparation, ResponsesApi
from services.router.frontend.openai.stored_responses import StoredResponses
from services.router.generation import Generation
from services.router.model_pools import ModelPools
from services.router.models import Model, Models
from services.router.preprocess.model_folder import local_folder
from services.router.preprocess.offload import Offload
from services.router.preprocess.preprocessor import Preprocessor
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.tokenizer import Tokenizer
from services.router.tenancy.api_keys import ApiKeys
from services.router.tenancy.rate_limits import RateLimits
from services.watchdog import Watchdog
from tandem.errors import InternalError
from tandem.model_settings import settings_of_models
from tandem.settings import Settings
from tandem.tasks import end, fail, forever
from tandem.telemetry import tracing
from tandem.telemetry.cluster_metrics import Reach
from tandem.telemetry.exposition import Exposition
from tandem.telemetry.metrics import RouterMetrics
from tandem.telemetry.metrics_server import Probes, Served
from tandem.v1 import admin_pb2_grpc, generation_pb2_grpc, jobs_pb2_grpc

SERVICES = ["tandem.v1.GenerationService", "tandem.v1.JobService", "tandem.v1.AdminService"]
MAX_LOOP_BLOCKED_S = 30.0  # of the event loop; then the process ends, to be restarted
CHANNELS_PER_SLICE = 64  # channels that are checked before the event loop serves streams again
SAMPLES_KEPT_S = 60  # without a new one; then the dashboard leaves a router out
EXPIRY_BEATS = 4  # heartbeats after the expiry of a dead worker's record, after which its absence is certain


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The files of one model that a router has read."""

    settings: Settings
    tokenizer: Tokenizer
    defaults: Defaults


class Router:
    """One incarnation of a router."""

    can_switch_role = False  # its role cannot be switched: it has no engine

    def __init__(self, settings: Settings, worker_id: str, parts: Mapping[str, ModelParts]) -> None:
        """`parts`: by the model's name in the setting `models`, empty for the only one."""
        self.settings = settings
        self.worker_id = worker_id
        self.incarnation = secrets.token_hex(8)
        self.address = ""
        self.channels = Channels(settings.cluster_token, to_workers(settings))
        self.tracing = tracing.of_process(settings, "router", worker_id)
        self.offload = Offload(settings.queue_timeout_s)
        self.samples = RouterSamples(settings.redis or "", settings.cluster, ttl_s=SAMPLES_KEPT_S)
        self.receipts = ReceiptLog()
        self.ended = EndedRequests()
        keys = ApiKeys(settings.api_keys) if settings.api_keys else None
        self.rate_limits = RateLimits(keys)
        self._metrics: list[RouterMetrics] = []
        self.models = Models([self._build_model(key, one) for key, one in parts.items()])
        self._exposition = Exposition(settings, [metrics.exposed for metrics in self._metrics])
        self._build_front_doors(keys)
        self._record = WorkerRecord(
            worker_id=worker_id,
            role="router",
            state=State.STARTING,
            pid=os.getpid(),
            incarnation=self.incarnation,
            address="",
            node=socket.gethostname(),
        )
        self._watchdog = Watchdog([], lambda check, why: self._watchdog.exit_within(0.0), MAX_LOOP_BLOCKED_S)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._following: list[asyncio.Task[None]] = []
        self._metrics_served: Served | None = None
        self._had_workers = self._stopped = False

    def _build_model(self, key: str, parts: ModelParts) -> Model:
        settings, tokenizer = parts.settings, parts.tokenizer
        pools = ModelPools(settings, self.channels, lambda: self._describe(model), tokenizer.vocabulary_digest)
        waiting, reach = pools.scheduler.waiting, partial(self._reach, pools)
        supervision, first = (lambda: pools.supervision.latest), not self._metrics
        metrics = RouterMetrics(settings, self.worker_id, waiting, reach, supervision, of_process=first)
        self._metrics.append(metrics)
        poison = PoisonCheck(pools.view, settings.heartbeat_ttl_s + EXPIRY_BEATS * settings.heartbeat_s)
        runner = CompletionRunner(settings, pools.scheduler, pools.prefixes, pools.muxes, poison)
        usage = UsageMeter(metrics, self.receipts, self.rate_limits, pools.scheduler)
        executor = RequestExecutor(runner, tokenizer, usage)
        preprocessor = Preprocessor(tokenizer, pools.served, self.offload)
        accounts = RequestAccounts(metrics, self.ended, settings.model_names[0])
        generation = Generation(settings, preprocessor, self.rate_limits, poison, executor, accounts, self.tracing)
        model = Model(key, tokenizer, parts.defaults, pools, generation)
        return model

    def _build_front_doors(self, keys: ApiKeys | None) -> None:
        settings, models = self.settings, self.models
        self.journal = open_journal(settings)
        self.job_runner = JobRunner(models, self.rate_limits, self.journal)
        self.jobs = JobService(settings, models, self.rate_limits, self.journal, self.job_runner, self.tracing)
        control = AdapterControl(models, self.channels)
        admin = AdminServicer(models, self.channels, self.receipts, control)
        self.grpc = GrpcServer(
            max_message_bytes=settings.max_prompt_bytes,
            guard=keys.guard if keys else None,
            share_port=settings.routers > 1,
            advertise=settings.advertise_host,
            credentials=front_door(settings),
            for_clients=True,
            most_connections=most_connections(4),
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(models), self.grpc.server)
        jobs_pb2_grpc.add_JobServiceServicer_to_server(self.jobs, self.grpc.server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self.grpc.server)
        self.bodies = BodyReader(self.rate_limits, self.offload, settings.max_prompt_bytes)
        of_models = [model.pools.settings for model in models]
        goals = {own.model_names[0]: Goal(own.slo_ttft_s, own.slo_tpot_s) for own in of_models}
        self.history = History(self.worker_id, self.incarnation, self.ended, self._load, self.samples.exchange)
        self.dashboard = Dashboard(
            goals, self.receipts, self._state, admin, keys, self.history, trace_url=settings.trace_url
        )
        api = Api(settings, models, self.bodies, self._exposition)
        endpoint = GeneratingEndpoint(self.bodies)
        messages = MessagesApi(endpoint, models, self.bodies)
        responses = self._build_responses(endpoint)
        adapters = AdaptersApi(control, self.bodies, keys)
        batches = self._build_batches({**api.parsers, RESPONSES_PATH: responses.in_batch})
        doors = (self.dashboard, messages, responses, adapters, *batches)
        routes = [route for door in doors for route in door.routes()]
        self.http = Server(api.app(*routes, keys=keys), settings)

    def _build_responses(self, endpoint: GeneratingEndpoint) -> ResponsesApi:
        settings = self.settings
        self.response_store = ResponseStore(
            settings.redis or "",
            settings.cluster,
            ttl_s=settings.response_ttl_s,
            most_bytes=settings.max_tenant_response_mib * 1024 * 1024,
        )
        stored = StoredResponses(settings, self.response_store, self.offload)
        preparation = ResponsePreparation(stored, self.models)
        return ResponsesApi(endpoint, preparation, stored, self.bodies, self.offload)

    def _build_batches(self, parsers: Mapping[str, Parse]) -> tuple[FilesApi, BatchesApi]:
        most_bytes = self.settings.max_file_mib * 1024 * 1024
        self.batch_store = open_store(self.settings)
        lines = LineRunner(self.jobs, self.journal, self.rate_limits, self.offload, parsers)
        self.batch_runner = BatchRunner(self.batch_store, lines, self.offload, self.models)
        files = FilesApi(self.batch_store, self.bodies, most_bytes)
        batches = BatchesApi(self.batch_store, self.batch_runner, self.bodies, list(parsers))
        return files, batches

    async def start(self) -> None:
        await asyncio.gather(*(model.pools.start() for model in self.models))
        self.address = await self.grpc.start(self.settings.host, self.settings.port, SERVICES)
        if self.settings.http_port is not None:
            await self.http.start(self.settings.http_port, self._on_broken)
        probes = Probes(asyncio.get_running_loop(), self._ready)
        self._metrics_served = await asyncio.to_thread(self._exposition.serve, probes)
        self._record = replace(
            self._record,
            state=State.READY,
            address=self.address,
            metrics_address=self._metrics_served.address if self._metrics_served else "",
        )
        await asyncio.gather(*(model.pools.announce() for model in self.models))
        self._watchdog.start()
        await self.job_runner.start()
        await self.batch_runner.start()
        self._following = [forever(partial(self._follow, model.pools), name="warm-channels") for model in self.models]
        self._following.append(forever(self.history.follow, name="history"))

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    def _ready(self) -> bool:
        """For /readyz and the router's record: whether a decode worker has ever answered, and one was ready of each
        model whose pools a ready router does not know, as in an upgrade; so routers that wait do not wait for each
        other. Later losses do not count: all routers see the same workers, and without any router clients would get
        no answer."""
        self._had_workers = self._had_workers or (self.models.reached() and not self.models.lacks_new_pools())
        return self._had_workers and not self._stopped

    async def stop(self, grace_s: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._record = replace(self._record, state=State.DRAINING)
        for model in self.models:
            model.pools.heartbeat.changed()
        await self.batch_runner.leave()
        await self.jobs.leave()
        self.dashboard.close()
        await asyncio.gather(self.grpc.stop(grace_s), self.http.stop(grace_s))
        await asyncio.gather(*map(end, self._following))
        await self.samples.close()
        await asyncio.gather(*(model.pools.stop() for model in self.models))
        await self.channels.close()
        await self.journal.close()
        await self.response_store.close()
        await self.batch_store.close()
        self.offload.close()
        if self._metrics_served:
            await asyncio.to_thread(self._metrics_served.close)
        await asyncio.to_thread(self.tracing.close)
        await asyncio.to_thread(self._watchdog.stop)
        if not self._ended.done():
            self._ended.set_result(None)

    def _describe(self, model: Model) -> WorkerRecord:
        """This router's record in the registry of a model, with its present load of it."""
        scheduler = model.pools.scheduler
        waits = self._record.state is State.READY and not self._ready()
        return replace(
            self._record,
            state=State.STARTING if waits else self._record.state,
            model=model.pools.settings.model,
            running=model.generation.running,
            waiting=scheduler.waiting(),
            backlog=scheduler.waiting_tokens(),
            arrived=scheduler.arrived,
            adapters_version=model.pools.adapters.list.version,
        )

    def _state(self) -> RouterState:
        """This router's state for the dashboard."""
        names = ", ".join(model.names[0] for model in self.models)
        registry_ok = all(model.pools.view.registry_ok for model in self.models)
        return RouterState(names, self.worker_id, registry_ok, *self._load(), dict(self.ended.outcomes))

    def _load(self) -> tuple[int, int]:
        """Requests in progress, and of these, waiting for a place."""
        return self.models.running(), self.models.waiting()

    def _reach(self, pools: ModelPools) -> Reach:
        return Reach(pools.heartbeat.registry_ok, pools.heartbeat.round_trip_s, self.samples.memory)

    def _on_broken(self, error: BaseException) -> None:
        """Ends this process, to be restarted: one of its servers has failed."""
        fail(self._ended, InternalError(f"{self.worker_id} broke: {error}"))

    async def _follow(self, pools: ModelPools) -> None:
        """Connects to workers before a request needs them, and closes channels to those that are gone."""
        async for _ in pools.view.updates():
            self.channels.keep_only({address for model in self.models for address in model.pools.addresses()})
            await pools.scheduler.keep_up()
            for number, address in enumerate(pools.addresses()):
                self.channels.to(address).get_state(try_to_connect=True)
                if number % CHANNELS_PER_SLICE == CHANNELS_PER_SLICE - 1:
                    await asyncio.sleep(0)


async def start(settings: Settings, worker_id: str, say: Callable[[str], None]) -> Router:
    """A router that listens on settings.port, and on settings.http_port if there is one. Raises SettingsError (port in
    use), CheckpointRefused (tokenizer)."""
    parts: dict[str, ModelParts] = {}
    for key, own in settings_of_models(settings).items():
        folder = await asyncio.to_thread(local_folder, own.model)
        tokenizer = await asyncio.to_thread(
            Tokenizer.load,
            folder,
            request_templates=own.allow_request_chat_template,
            reasoning=own.reasoning_format,
            calls=own.tool_call_format,
        )
        parts[key] = ModelParts(own, tokenizer, Defaults.load(folder))
        say(f"tokenizer of {key} loaded" if key else "tokenizer loaded")
    router = Router(settings, worker_id, parts)
    await router.start()
    return router
