"""The router: text in, text out. Knows no torch.

Generate   admit ─▶ place ─▶ decode worker's stream ─▶ detokenise, find stop strings ─▶ client
                      ▲            │ it, or the prefill worker behind it, died
                      └────────────┘ placed again with the tokens sent so far: same seed and positions, same tokens
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import grpc
import structlog

from cluster.registry import Heartbeat, Registry, State, WorkerRecord
from services.access import front_door, to_workers
from services.router.admin import AdminServicer
from services.router.admit import DEFAULT_MAX_TOKENS, Job, ModelFacts, admit
from services.router.checkpoint import local_folder
from services.router.feeds import Feeds, Lane
from services.router.http import HttpServer
from services.router.jobs import Jobs
from services.router.keys import Key, KeyGuard, Keys
from services.router.openai import Defaults
from services.router.placer import Placer
from services.router.policy import Placement, Rules
from services.router.prefixes import Prefixes
from services.router.quarantine import MOST_LOST, Quarantine, identity
from services.router.reader import Reader
from services.router.receipt import Account, Answered
from services.router.tenants import Tenants
from services.router.text import Text
from services.server import Channels, GrpcServer
from services.view import ClusterView
from tandem import tracing
from tandem.errors import (
    Busy,
    DataLoss,
    DeadlineExceeded,
    IncompatibleLayout,
    InternalError,
    NoWorker,
    ResumeFailed,
    TandemError,
    Unavailable,
    WorkerLost,
)
from tandem.metrics import RouterMetrics, Served
from tandem.settings import Settings
from tandem.status import calling
from tandem.tasks import end, merged
from tandem.tracing import OFF, Headers, Span, Tracing
from tandem.v1 import (
    admin_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    jobs_pb2_grpc,
)

log = structlog.get_logger(__name__)
SERVICES = ["tandem.v1.GenerationService", "tandem.v1.JobService", "tandem.v1.AdminService"]
RECEIPTS = 1000  # that are kept for `tandem explain` and the dashboard
LONG_TEXT_BYTES = 64 * 1024  # tokenised on a thread, so that streams do not wait for it


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
        self._channels = channels
        self.feeds = Feeds(channels)
        self.prefixes = Prefixes(view, channels)
        rules = Rules(
            local=settings.local_prefill,
            stretch=settings.stretch,
            ttft=settings.slo_ttft_s,
            tpot=settings.slo_tpot_s,
        )
        self._tenants = Tenants(keys)
        self._quarantine = Quarantine()
        self._placer = Placer(view, settings.queue_timeout_s, rules)
        self.metrics = RouterMetrics(settings, worker_id, self._placer.waiting)
        self._tracing = tracing
        self._model: ModelFacts | None = None
        self.running = 0  # requests in progress
        self.waiting = self._placer.waiting
        self.receipts: deque[Answered] = deque(maxlen=RECEIPTS)  # of those that ended lately

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
        past: Sequence[generation_pb2.Delta] = (),
        headers: Headers = tuple,
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The path of one request, whichever front door it came through: started, deltas, finished.

        `remaining_s` is until the client's deadline, None when it set none; `authorization` is the header with its key,
        where `tenant` is not known yet. `past` is what an earlier life of the request gave; `headers` may name
        its trace. To be closed by whoever stops reading.
        """
        arrived = monotonic()
        longest = self._settings.request_timeout_s
        deadline = arrived + (longest if remaining_s is None else min(remaining_s, longest))
        span = self._tracing.request(request, self._settings.model, headers)
        with self.metrics.request() as counted, span:
            account = Account(arrived, span)
            tenant = tenant or self._tenants.who(authorization)
            job = await self._admit(request, default_max_tokens)
            _give_to(tenant, job)
            account.admitted()
            if self._quarantine:
                self._quarantine.check(identity(job), monotonic())
            left = job.choices
            answer = self._answer(job, account, deadline, past) if left == 1 else self._answers(job, account, deadline)
            started = generation_pb2.Started(
                request_id=job.request_id, model=self._settings.model, prompt_tokens=job.prompt_len, choices=left
            )
            with self._tenants.admitted(tenant, job.prompt_len, job.choices):
                yield generation_pb2.GenerateResponse(started=started)
                async with self._in_progress(), aclosing(answer) as events:
                    async for event in events:
                        left -= event.HasField("finished")
                        counted.complete = left == 0
                        yield event

    async def _answers(
        self, job: Job, account: Account, deadline: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Several completions at once. The first one gets the prompt's KV; when its decode worker has it, the others
        start there, share its full blocks and compute the rest of the last one."""
        first, *others = job.fan_out()
        begun = asyncio.Event()

        async def lead() -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
            async with aclosing(self._answer(first, account, deadline)) as events:
                async for event in events:
                    if first.generated > 1 and not begun.is_set():  # a second token is computed from KV that is there
                        for other in others:
                            other.near = account.decode_worker
                        begun.set()
                    yield event
            begun.set()

        async def follow(other: Job) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
            await begun.wait()
            with account.span.begin(f"choice {other.choice}") as span:
                own = Account(account.arrived, span)
                own.admitted(account)
                async with aclosing(self._answer(other, own, deadline)) as events:
                    async for event in events:
                        yield event

        async with aclosing(merged([lead(), *(follow(other) for other in others)])) as events:
            async for event in events:
                yield event

    async def _answer(
        self, job: Job, account: Account, deadline: float, past: Sequence[generation_pb2.Delta] = ()
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """One completion: deltas, then `finished`. What is past is in the journal, and its text was shown."""
        text = Reader(self._text.stream(), job)
        for delta in past:
            job.tokens.extend(delta.token_ids)
            text.read(decode_pb2.Tokens(token_ids=delta.token_ids))
        async with aclosing(self._tokens(job, account, deadline)) as stretches:
            async for stretch in stretches:
                first = job.generated - len(stretch.token_ids)
                shown = text.read(stretch)
                delta = generation_pb2.Delta(
                    index=first,
                    token_ids=stretch.token_ids,
                    text=shown,
                    logprobs=stretch.logprobs if stretch.HasField("logprobs") else None,
                    prompt_logprobs=_prompt_logprobs(job, stretch),
                    choice=job.choice,
                    last=job.finish() is not None,
                )
                self.metrics.sent(len(stretch.token_ids), account.sent(len(stretch.token_ids)))
                yield generation_pb2.GenerateResponse(delta=delta)
                if job.stopped:
                    break  # leaving ends the stream below, and with it everything that is held for it
        tail = text.finish()
        receipt = account.receipt(job, self._settings.model)
        self.receipts.append(Answered(monotonic(), receipt))
        self.metrics.finished(receipt)
        finished = generation_pb2.Finished(
            reason=job.finish(),
            text=tail,
            receipt=receipt,
            choice=job.choice,
            stop=text.stop,
        )
        account.span.answered(finished)
        yield generation_pb2.GenerateResponse(finished=finished)

    @asynccontextmanager
    async def _in_progress(self) -> AsyncIterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def _tokens(self, job: Job, account: Account, deadline: float) -> AsyncGenerator[decode_pb2.Tokens, None]:
        """The completion, in stretches, across as many attempts as it takes. Each stretch is in the journal already."""
        while job.finish() is None:
            waiting_since = monotonic()
            remaining = deadline - waiting_since
            if remaining <= 0:
                raise DeadlineExceeded(f"the deadline passed after {job.generated} tokens", field="deadline")
            limit = job.prompt_len + job.max_tokens
            near = job.near if account.attempts == 0 else ""
            prompt = await self.prefixes.prompt(job.tokens, job.salt, job.adapter)
            cached = functools.partial(self.prefixes.cached, prompt)
            ttft_s = None if job.ttft_s is None else job.ttft_s - account.elapsed()
            async with self._placer.placed(
                len(job.tokens),
                limit,
                remaining,
                near,
                cached,
                tenant=job.tenant,
                priority=job.priority,
                ttft_s=ttft_s,
                begun=bool(job.generated or near),
            ) as placement:
                before = job.generated
                account.placed(placement, waited=monotonic() - waiting_since)
                try:
                    with _attempt_span(account, placement) as span:
                        async with aclosing(self._attempt(job, placement, account, deadline, span)) as stretches:
                            async for stretch in stretches:
                                self._charge(job, len(stretch.token_ids))
                                yield stretch
                except Busy:
                    self._placer.said_no(placement.decode)
                    account.refused()
                except (Unavailable, DataLoss, IncompatibleLayout) as error:
                    self._blame(error, placement)
                    account.failed(error)
                    job.notes.append(f"attempt {account.attempts} at token {job.generated}: {error.message}")
                    log.warning("attempt.failed", request=job.request_id, attempt=account.attempts, error=error.message)
                    if error.reason in ("DECODE_LOST", "PREFILL_LOST") and job.generated - before < 2:
                        self._suspect(job, error)
                    if account.attempts >= self._settings.max_attempts:
                        raise _given_up(job, account, error) from error
                if self._quarantine and job.generated - before >= 2:
                    self._quarantine.served(identity(job))

    async def _attempt(
        self, job: Job, placement: Placement, account: Account, deadline: float, span: Span
    ) -> AsyncGenerator[decode_pb2.Tokens, None]:
        """One decode worker's stream. Adds to the journal what it yields."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels.to(placement.decode.address))
        account.dispatched()
        worker, adapter, lost = placement.decode.worker_id, b"", "DECODE_UNREACHABLE"
        try:
            feed = await self.feeds.of(placement.decode)
            with feed.lane() as lane, calling(worker):
                request = _decode_request(job, placement, account.attempts, lane)
                call = stub.Decode(request, timeout=max(0.001, deadline - monotonic()), metadata=span.headers)
                async with aclosing(_events(call, lane)) as events:
                    async for event in events:
                        if event.HasField("admitted"):
                            _check_adapter(job, event.admitted, worker)
                            lost = "DECODE_LOST"
                            adapter = event.admitted.adapter_fingerprint
                        elif event.HasField("tokens"):
                            _check_position(job, event.tokens, worker)
                            _check_prompt_logprobs(job, event.tokens, worker)
                            job.adapter_fingerprint = adapter
                            job.tokens.extend(event.tokens.token_ids)
                            if event.tokens.HasField("first"):
                                account.first_token(event.tokens.first)
                                await self._placer.prefilled(placement)
                            account.told(event.tokens)
                            yield event.tokens
                        elif event.HasField("ended"):
                            account.ended(event.ended)
                            self._placer.took(placement, account.way())
                            return
            raise WorkerLost(f"{worker} ended the stream early")
        except WorkerLost as error:
            raise WorkerLost(f"{worker}: {error.message}", reason=lost) from error

    def _charge(self, job: Job, tokens: int) -> None:
        self._tenants.generated(job.tenant, tokens)
        self._placer.generated(job.tenant, tokens)

    def _suspect(self, job: Job, error: TandemError) -> None:
        """A worker was lost while it began with this request. Raises InternalError when it is the second one."""
        request, now = identity(job), monotonic()
        count = self._quarantine.lost(request, now)
        if count >= MOST_LOST:
            log.error("request.kills_workers", request=job.request_id, workers=count, last=error.message)
        self._quarantine.check(request, now)

    def _blame(self, error: TandemError, placement: Placement) -> None:
        """Who should get nothing new for a while. A digest mismatch is nobody's death: the same pair may try again."""
        if error.reason in ("PREFILL_LOST", "PREFILL_REFUSED") or isinstance(error, IncompatibleLayout):
            if placement.prefill:
                self._placer.suspect(placement.prefill)
        elif isinstance(error, Unavailable):
            self._placer.suspect(placement.decode)

    async def fixed(self, request: generation_pb2.GenerateRequest, tenant: Key) -> generation_pb2.GenerateRequest:
        """The same request with nothing left open: its prompt as token ids, its seed, its limits. Raises what
        `generate` would raise before it begins."""
        job = await self._admit(request, DEFAULT_MAX_TOKENS)
        _give_to(tenant, job)
        found = generation_pb2.GenerateRequest()
        found.CopyFrom(request)
        found.request_id, found.priority = job.request_id, job.priority
        found.token_ids.ids[:] = job.tokens
        found.sampling.seed, found.sampling.max_tokens = job.sampling.seed, job.max_tokens
        return found

    def who(self, context: grpc.aio.ServicerContext) -> Key:
        """Raises Unauthenticated."""
        return self._tenants.who(_authorization(context))

    async def _admit(self, request: generation_pb2.GenerateRequest, default_max_tokens: int) -> Job:
        model = self.facts()
        if request.ByteSize() > LONG_TEXT_BYTES:
            return await asyncio.to_thread(admit, request, self._text, model, default_max_tokens)
        return admit(request, self._text, model, default_max_tokens)

    def keep_only(self, workers: Sequence[WorkerRecord]) -> None:
        """Forgets what it knows of all others."""
        self.feeds.keep_only({(record.worker_id, record.incarnation) for record in workers})
        self._placer.ways.keep_only({record.worker_id for record in workers})

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
    if tenant.limits.priority is not None:
        job.priority = max(job.priority, tenant.limits.priority)
    if tenant.name:
        job.tenant = tenant.name
        job.salt = hashlib.blake2b(job.salt, key=tenant.name.encode(), digest_size=32, person=b"tandem.tenant").digest()


async def _events(call: Any, lane: Lane) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
    """What a decode worker says about one request: up to the first token on the call itself, then in the feed. Leaving
    ends the call, and with it everything that is held for it."""
    try:
        async for event in call:
            yield event
            if event.HasField("tokens"):
                break
        else:
            return
        async with aclosing(lane.events(call)) as events:
            async for event in events:
                yield event
    finally:
        call.cancel()


def _decode_request(job: Job, placement: Placement, attempt: int, lane: Lane) -> decode_pb2.DecodeRequest:
    request = decode_pb2.DecodeRequest(
        request_id=job.internal_id,
        attempt=attempt,
        token_ids=job.tokens,
        prompt_tokens=job.prompt_len,
        max_tokens=job.max_tokens,
        sampling=job.sampling,
        stop_token_ids=job.stop_ids,
        cache_salt=job.salt,
        feed_id=lane.feed_id,
        lane=lane.number,
    )
    if job.generated:
        request.sampling.ClearField("prompt_logprobs")  # they went out with the first token
    if job.adapter:
        request.adapter.name, request.adapter.fingerprint = job.adapter, job.adapter_fingerprint
    if placement.prefill:
        request.prefill.worker_id = placement.prefill.worker_id
        request.prefill.incarnation = placement.prefill.incarnation
        request.prefill.address = placement.prefill.address
    return request


def _attempt_span(account: Account, placement: Placement) -> Span:
    if not account.span:
        return account.span
    about: dict[str, Any] = {"tandem.attempt": account.attempts + 1, "tandem.decode_worker": placement.decode.worker_id}
    if placement.prefill:
        about["tandem.prefill_worker"] = placement.prefill.worker_id
    return account.span.begin("attempt", about)


def _check_adapter(job: Job, admitted: decode_pb2.Admitted, worker_id: str) -> None:
    """A worker that knows nothing of adapters would answer with the base model."""
    said, began = admitted.adapter_fingerprint, job.adapter_fingerprint
    if bool(said) != bool(job.adapter) or (began and said != began):
        raise InternalError(f"{worker_id} did not admit the request with adapter {job.adapter!r}; it was stopped")


def _check_position(job: Job, tokens: decode_pb2.Tokens, worker_id: str) -> None:
    """Nothing was lost, and nothing came twice."""
    if tokens.position != len(job.tokens):
        raise InternalError(
            f"{worker_id} sent position {tokens.position}, expected {len(job.tokens)};"
            " the stream was stopped to keep it exact"
        )


def _check_prompt_logprobs(job: Job, tokens: decode_pb2.Tokens, worker_id: str) -> None:
    """Before the first token enters the journal: the log probabilities that were asked for are there, each of them."""
    if job.sampling.HasField("prompt_logprobs") and not job.generated:
        said = len(tokens.prompt_logprobs.chosen)
        if not tokens.HasField("prompt_logprobs") or said != job.prompt_len - 1:
            raise InternalError(f"{worker_id} sent {said} prompt log probabilities for {job.prompt_len} tokens")


def _prompt_logprobs(job: Job, tokens: decode_pb2.Tokens) -> generation_pb2.PromptLogprobs | None:
    if not tokens.HasField("prompt_logprobs"):
        return None
    return generation_pb2.PromptLogprobs(token_ids=job.tokens[: job.prompt_len], logprobs=tokens.prompt_logprobs)


def _given_up(job: Job, account: Account, error: TandemError) -> TandemError:
    """After the first token a client must not take the failure for "nothing happened"."""
    message = f"given up after {account.attempts} attempts: {error.message}"
    if job.generated:
        return ResumeFailed(f"{message}; {job.generated} tokens had been sent")
    return type(error)(message, reason=error.reason, retry_after=1.0)


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
        self.jobs = Jobs(settings, generation)
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
        await self.jobs.start()
        self._following = asyncio.create_task(self._follow(), name="warm-channels")
        if self.settings.place_by_prefix:
            self._indexing = asyncio.create_task(self._generation.prefixes.follow(), name="prefixes")

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
        await self.registry.close()
        if self._metrics_served:
            await asyncio.to_thread(self._metrics_served.close)
        await asyncio.to_thread(self.tracing.close)
        if not self._ended.done():
            self._ended.set_result(None)

    async def _follow(self) -> None:
        """Connect to workers before a request needs them, and hang up on those that are gone."""
        async for workers in self.view.updates():
            addresses = {record.address for record in workers.values() if record.role != "router"}
            self.channels.keep_only(addresses)
            self._generation.keep_only(list(workers.values()))
            for address in addresses:
                self.channels.to(address).get_state(try_to_connect=True)


async def start(settings: Settings, worker_id: str, say: Callable[[str], None]) -> Router:
    """A router that listens on settings.port, and on settings.http_port if there is one. Raises SettingsError (port in
    use), CheckpointRefused (tokenizer)."""
    folder = await asyncio.to_thread(local_folder, settings.model)
    text = await asyncio.to_thread(Text.load, folder)
    say("tokenizer loaded")
    router = Router(settings, worker_id, text, Defaults.load(folder))
    await router.start()
    return router
