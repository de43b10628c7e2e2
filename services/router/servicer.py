"""The router: text in, text out. Knows no torch.

Generate   admit ─▶ a task for each completion: place, decode, detokenise (completion.py) ─▶ outbox ─▶ client
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from time import monotonic

import grpc

from cluster.registry import Heartbeat, Registry, State, WorkerRecord
from services.access import front_door, to_workers
from services.router.admin import AdminServicer
from services.router.admit import DEFAULT_MAX_TOKENS, DEFAULT_PRIORITY, Job, ModelFacts, Past, admit
from services.router.checkpoint import local_folder
from services.router.completion import Completion, Outbox, Shared
from services.router.feeds import Feeds
from services.router.http import HttpServer
from services.router.jobs import Jobs
from services.router.keys import Key, KeyGuard, Keys
from services.router.offload import Offload
from services.router.openai import Defaults
from services.router.placer import Placer
from services.router.policy import Rules
from services.router.prefixes import Prefixes
from services.router.quarantine import Quarantine, identity
from services.router.receipt import Account, Receipts
from services.router.tenants import Tenants
from services.router.text import Text
from services.server import Channels, GrpcServer
from services.view import ClusterView
from services.watchdog import Watchdog
from tandem import tracing
from tandem.errors import InternalError, NoWorker
from tandem.metrics import RouterMetrics, Served
from tandem.settings import Settings
from tandem.tasks import end, forever
from tandem.tracing import OFF, Headers, Tracing
from tandem.v1 import admin_pb2_grpc, generation_pb2, generation_pb2_grpc, jobs_pb2_grpc

SERVICES = ["tandem.v1.GenerationService", "tandem.v1.JobService", "tandem.v1.AdminService"]
LOOP_S = 30.0  # that the event loop may be blocked; then the process ends, to be started again
SLICE = 64  # channels that are looked at before the streams have their turn again


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(
        self,
        settings: Settings,
        view: ClusterView,
        text: Text,
        channels: Channels,
        keys: Keys | None = None,
        worker_id: str = "router",
        tracing: Tracing = OFF,
    ) -> None:
        self._settings = settings
        self._view = view
        self._text = text
        self.feeds = Feeds(channels, settings.stream_interval_s)
        self.prefixes = Prefixes(view, channels)
        rules = Rules(
            local=settings.local_prefill,
            stretch=settings.stretch,
            beside_s=settings.beside_s,
            ttft=settings.slo_ttft_s,
            tpot=settings.slo_tpot_s,
        )
        self.tenants = Tenants(keys)
        self.offload = Offload(settings.queue_timeout_s)
        self._quarantine = Quarantine(view.ended)
        self._placer = Placer(view, settings.queue_timeout_s, rules)
        self.metrics = RouterMetrics(settings, worker_id, self._placer.waiting)
        self._tracing = tracing
        self._model: ModelFacts | None = None
        self._facts_of: object = None  # the view that they were read from
        self.running = 0  # requests in progress
        self.waiting = self._placer.waiting
        self.receipts = Receipts()
        self._shared = Shared(
            settings=settings,
            view=view,
            text=text,
            channels=channels,
            feeds=self.feeds,
            prefixes=self.prefixes,
            placer=self._placer,
            tenants=self.tenants,
            quarantine=self._quarantine,
            metrics=self.metrics,
            receipts=self.receipts,
        )

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        return self.generate(
            request,
            context.time_remaining(),
            authorization=_authorization(context),
            headers=context.invocation_metadata,
        )

    async def generate(
        self,
        request: generation_pb2.GenerateRequest,
        remaining_s: float | None = None,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
        authorization: str | None = None,
        tenant: Key | None = None,
        past: Sequence[generation_pb2.GenerateResponse] | None = None,
        headers: Headers = tuple,
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The path of one request, whichever front door it came through: started, deltas, finished.

        `remaining_s` is until the client's deadline, None when it set none; `authorization` is the header with its key,
        where `tenant` is not known yet. `past` is what earlier lives of a job gave, a request that `fixed` made;
        `headers` may name its trace. To be closed by whoever stops reading.
        """
        arrived = monotonic()
        longest = self._settings.request_timeout_s
        deadline = arrived + (longest if remaining_s is None else min(remaining_s, longest))
        span = self._tracing.request(request, self._settings.model, headers)
        with self.metrics.request() as counted, span:
            account = Account(arrived, span)
            tenant = tenant or self.tenants.who(authorization)
            job = await self._admit(request, tenant, default_max_tokens, fixed=past is not None)
            _give_to(tenant, job)
            account.admitted()
            if self._quarantine:
                self._quarantine.check(identity(job), monotonic())
            before = Past(past or ())
            job.adapter_fingerprint = before.adapter_fingerprint
            left = job.choices - len(before.ended)
            started = generation_pb2.Started(
                request_id=job.request_id, model=self._settings.model, prompt_tokens=job.prompt_len, choices=job.choices
            )
            # The tokens of a job are services/router/jobs.py's business.
            admitted = nullcontext() if past is not None else self.tenants.admitted(tenant, job.prompt_len, job.choices)
            with admitted:
                yield generation_pb2.GenerateResponse(started=started)
                with self._in_progress():
                    async with self._completing(job, account, deadline, before) as outbox:
                        while left:
                            event = await outbox.take()
                            left -= event.HasField("finished")
                            counted.complete = left == 0
                            yield event

    @asynccontextmanager
    async def _completing(self, job: Job, account: Account, deadline: float, past: Past) -> AsyncIterator[Outbox]:
        """Its completions at work, until the block ends. The first one gets the prompt's KV; when its decode worker has
        it, the others start there, share its full blocks and compute the rest of the last one. Those that have ended in
        an earlier life are left out."""
        outbox = Outbox()
        mine, *others = [one for one in job.fan_out() if one.choice not in past.ended]
        lead = Completion(self._shared, mine, account, deadline, outbox, past.deltas[mine.choice])

        async def follow(other: Job) -> None:
            await lead.begun.wait()
            if mine.generated > 1 and not past.deltas[other.choice]:  # else it has tokens that are not there
                other.near = account.decode_worker
            with account.span.begin(f"choice {other.choice}") as span:
                own = Account(account.arrived, span)
                own.admitted(account)
                await Completion(self._shared, other, own, deadline, outbox, past.deltas[other.choice]).run()

        tasks = [asyncio.create_task(work) for work in (lead.run(), *map(follow, others))]
        for task in tasks:
            task.add_done_callback(outbox.over)
        try:
            yield outbox
        finally:
            await asyncio.gather(*map(end, tasks))

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def fixed(self, request: generation_pb2.GenerateRequest, tenant: Key) -> generation_pb2.GenerateRequest:
        """The same request with nothing left open: its prompt as token ids, its seed, its limits. Raises what
        `generate` would raise before it begins."""
        job = await self._admit(request, tenant, DEFAULT_MAX_TOKENS)
        _give_to(tenant, job)
        found = generation_pb2.GenerateRequest()
        found.CopyFrom(request)
        found.request_id, found.priority = job.request_id, job.priority
        found.token_ids.ids[:] = job.tokens
        found.sampling.seed, found.sampling.max_tokens = job.sampling.seed, job.max_tokens
        if job.sampling.HasField("grammar"):  # a forced call's is made of the chat, which is tokens now
            found.sampling.grammar.CopyFrom(job.sampling.grammar)
        return found

    def who(self, context: grpc.aio.ServicerContext) -> Key:
        """Raises Unauthenticated."""
        return self.tenants.who(_authorization(context))

    def tenant(self, authorization: str | None) -> Key:
        """Whose header that is. Raises Unauthenticated."""
        return self.tenants.who(authorization)

    async def _admit(
        self, request: generation_pb2.GenerateRequest, tenant: Key, default_max_tokens: int, fixed: bool = False
    ) -> Job:
        args = (request, self._text, self.facts(), default_max_tokens, fixed)
        return await self.offload.run(tenant.name, request.ByteSize(), admit, *args)

    async def keep_up(self) -> None:
        """Takes over what is new in the view."""
        await self._placer.keep_up()

    def loaded(self, record: WorkerRecord) -> WorkerRecord:
        """The router's record with what it has to do."""
        return replace(
            record,
            running=self.running,
            waiting=self._placer.waiting(),
            backlog=self._placer.waiting_tokens(),
            arrived=self._placer.arrived,
        )

    def facts(self) -> ModelFacts:
        """What the decode workers say; the last known answer while none lives. Raises NoWorker before the first."""
        if self._facts_of is self._view.workers and self._model:
            return self._model
        self._facts_of = self._view.workers
        records = self._view.of_role("decode")
        if records:
            longest = max(records, key=lambda record: record.max_model_len)
            self._model = ModelFacts(
                name=longest.model,
                context=longest.max_model_len,
                vocab_size=longest.vocab_size,
                eos_token_ids=tuple(longest.eos_token_ids),
                adapters=tuple(self._settings.adapters),
                layout_hash=longest.layout_hash,
            )
        if self._model is None:
            raise NoWorker("no decode worker has come up yet; `tandem workers` shows the pools", retry_after=2.0)
        return self._model

    def layouts(self) -> set[str]:
        """The KV layouts of the decode workers that are known now."""
        return {record.layout_hash for record in self._view.of_role("decode")}

    async def GetModelInfo(
        self, request: generation_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GetModelInfoResponse:
        model = self.facts()
        return generation_pb2.GetModelInfoResponse(
            model=self._settings.model,
            max_context_tokens=model.context,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            has_tokenizer=self._text.tokenizer is not None,
            has_chat_template=self._text.template is not None,
            adapters=model.adapters,
        )


def _authorization(context: grpc.aio.ServicerContext) -> str | None:
    given = dict(context.invocation_metadata() or ()).get("authorization")
    return given if isinstance(given, str) else None


def _give_to(tenant: Key, job: Job) -> None:
    """What a tenant may do, and that no other one can tell from the time to its first token what it has asked."""
    if tenant.name:
        most_urgent = DEFAULT_PRIORITY if tenant.limits.priority is None else tenant.limits.priority
        job.priority = max(job.priority, most_urgent)
        job.tenant = tenant.name
        job.salt = hashlib.blake2b(job.salt, key=tenant.name.encode(), digest_size=32, person=b"tandem.tenant").digest()


class Router:
    """One life of one router process."""

    def __init__(self, settings: Settings, worker_id: str, text: Text, defaults: Defaults) -> None:
        self.settings = settings
        self.worker_id = worker_id
        self.incarnation = secrets.token_hex(8)
        self.turns = False  # it has no engine
        self.address = ""
        self.registry = Registry(settings.redis or "", settings.cluster, settings.heartbeat_ttl_s)
        self.view = ClusterView(self.registry, settings.heartbeat_s)
        self.channels = Channels(settings.cluster_token, to_workers(settings))
        keys = Keys(settings.api_keys) if settings.api_keys else None
        self.tracing = tracing.of_process(settings, "router", worker_id)
        self.grpc = GrpcServer(
            max_message_bytes=settings.max_prompt_bytes,
            interceptors=[KeyGuard(keys)] if keys else (),
            share_port=settings.routers > 1,
            advertise=settings.advertise_host,
            credentials=front_door(settings),
        )
        generation = self._generation = GenerationServicer(
            settings, self.view, text, self.channels, keys, worker_id, self.tracing
        )
        admin = AdminServicer(settings, self.registry, self.view, self.channels, generation.receipts)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, self.grpc.server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self.grpc.server)
        self.jobs = Jobs(settings, generation, self.tracing)
        jobs_pb2_grpc.add_JobServiceServicer_to_server(self.jobs, self.grpc.server)
        self.http = HttpServer(settings, generation, self.view, text, defaults, admin, keys, worker_id)
        self._record = WorkerRecord(
            worker_id=worker_id,
            role="router",
            state=State.STARTING,
            pid=os.getpid(),
            incarnation=self.incarnation,
            address="",
            model=settings.model,
        )
        self._heartbeat = Heartbeat(self.registry, lambda: generation.loaded(self._record), settings.heartbeat_s)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.http.failed = self._on_broken
        self._watchdog = Watchdog([], lambda check, why: self._watchdog.exit_within(0.0), LOOP_S)
        self._following: asyncio.Task[None] | None = None
        self._indexing: asyncio.Task[None] | None = None
        self._metrics_served: Served | None = None
        self._stopped = False

    async def start(self) -> None:
        await self.view.start()
        self.address = await self.grpc.start(self.settings.host, self.settings.port, SERVICES)
        await self.http.start()
        self._metrics_served = await asyncio.to_thread(self._generation.metrics.serve)
        self._record = replace(
            self._record,
            state=State.READY,
            address=self.address,
            metrics_address=self._metrics_served.address if self._metrics_served else "",
        )
        await self._heartbeat.start()
        self._watchdog.start()
        await self.jobs.start()
        self._following = forever(self._follow, name="warm-channels")
        if self.settings.place_by_prefix:
            self._indexing = forever(self._generation.prefixes.follow, name="prefixes")

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._record = replace(self._record, state=State.DRAINING)
        self._heartbeat.changed()
        await self.jobs.leave()
        await asyncio.gather(self.grpc.stop(grace_s), self.http.stop(grace_s))
        await end(self._following)
        await end(self._indexing)
        await self._heartbeat.stop()
        await self.view.stop()
        await self._generation.feeds.close()
        await self.channels.close()
        await self.jobs.close()
        self._generation.offload.close()
        await self.registry.close()
        if self._metrics_served:
            await asyncio.to_thread(self._metrics_served.close)
        await asyncio.to_thread(self.tracing.close)
        await asyncio.to_thread(self._watchdog.stop)
        if not self._ended.done():
            self._ended.set_result(None)

    def _on_broken(self, error: BaseException) -> None:
        """Ends this process, to be started again: one of its doors is shut for good."""
        if not self._ended.done():
            self._ended.set_exception(InternalError(f"{self.worker_id} broke: {error}"))
            self._ended.exception()  # retrieved: nobody may be waiting

    async def _follow(self) -> None:
        """Connect to workers before a request needs them, and hang up on those that are gone."""
        async for _ in self.view.updates():
            lives = self.view.lives.values()
            addresses = {record.address for record in lives if record.role != "router"}
            self.channels.keep_only(addresses)
            await self._generation.keep_up()
            for number, address in enumerate(addresses):
                self.channels.to(address).get_state(try_to_connect=True)
                if number % SLICE == SLICE - 1:
                    await asyncio.sleep(0)


async def start(settings: Settings, worker_id: str, say: Callable[[str], None]) -> Router:
    """A router that listens on settings.port, and on settings.http_port if there is one. Raises SettingsError (port in
    use), CheckpointRefused (tokenizer)."""
    folder = await asyncio.to_thread(local_folder, settings.model)
    text = await asyncio.to_thread(Text.load, folder)
    say("tokenizer loaded")
    router = Router(settings, worker_id, text, Defaults.load(folder))
    await router.start()
    return router
