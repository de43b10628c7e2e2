"""The router: text in, text out. Knows no torch.

Generate   admit ─▶ place ─▶ decode worker's stream ─▶ detokenise, find stop strings ─▶ client
                      ▲            │ it, or the prefill worker behind it, died
                      └────────────┘ placed again with the tokens sent so far: same seed and positions, same tokens
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from time import monotonic

import grpc
import structlog

from cluster.registry import Heartbeat, Registry, State, WorkerRecord
from services.router.admin import AdminServicer
from services.router.admit import DEFAULT_MAX_TOKENS, Job, ModelFacts, admit
from services.router.checkpoint import local_folder
from services.router.http import HttpServer
from services.router.openai import Defaults
from services.router.placer import Placer
from services.router.policy import Placement, Rules
from services.router.reader import Reader
from services.router.receipt import Account
from services.router.text import Text
from services.server import Channels, GrpcServer
from services.view import ClusterView
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
from tandem.settings import Settings
from tandem.status import calling
from tandem.tasks import end, merged
from tandem.v1 import (
    admin_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)

log = structlog.get_logger(__name__)
LONG_TEXT_BYTES = 64 * 1024  # tokenised on a thread, so that streams do not wait for it


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, settings: Settings, view: ClusterView, text: Text, channels: Channels) -> None:
        self._settings = settings
        self._view = view
        self._text = text
        self._channels = channels
        rules = Rules(weigh=settings.local_prefill == "measured", stretch=settings.stretch)
        self._placer = Placer(view, settings.queue_timeout_s, rules)
        self._model: ModelFacts | None = None
        self.running = 0  # requests in progress

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        return self.generate(request, context.time_remaining())

    async def generate(
        self,
        request: generation_pb2.GenerateRequest,
        remaining_s: float | None = None,
        default_max_tokens: int = DEFAULT_MAX_TOKENS,
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The path of one request, whichever front door it came through: started, deltas, finished.

        `remaining_s` is until the client's deadline, None when it set none. To be closed by whoever stops reading.
        """
        account = Account(monotonic())
        longest = self._settings.request_timeout_s
        deadline = account.arrived + (longest if remaining_s is None else min(remaining_s, longest))
        job = await self._admit(request, default_max_tokens)
        account.admitted()
        started = generation_pb2.Started(
            request_id=job.request_id, model=self._settings.model, prompt_tokens=job.prompt_len, choices=job.choices
        )
        yield generation_pb2.GenerateResponse(started=started)
        answer = self._answer(job, account, deadline) if job.choices == 1 else self._answers(job, account, deadline)
        async with self._in_progress(), aclosing(answer) as events:
            async for event in events:
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
            own = Account(account.arrived)
            own.admitted(account)
            async with aclosing(self._answer(other, own, deadline)) as events:
                async for event in events:
                    yield event

        async with aclosing(merged([lead(), *(follow(other) for other in others)])) as events:
            async for event in events:
                yield event

    async def _answer(
        self, job: Job, account: Account, deadline: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """One completion: deltas, then `finished`."""
        text = Reader(self._text.stream(), job)
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
                account.sent(len(stretch.token_ids))
                yield generation_pb2.GenerateResponse(delta=delta)
                if job.stopped:
                    break  # leaving ends the stream below, and with it everything that is held for it
        tail = text.finish()
        finished = generation_pb2.Finished(
            reason=job.finish(),
            text=tail,
            receipt=account.receipt(job, self._settings.model),
            choice=job.choice,
        )
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
            async with self._placer.placed(len(job.tokens), limit, remaining, near) as placement:
                account.placed(placement, waited=monotonic() - waiting_since)
                try:
                    async with aclosing(self._attempt(job, placement, account, deadline)) as stretches:
                        async for stretch in stretches:
                            yield stretch
                except Busy:
                    self._placer.said_no(placement.decode)
                    account.refused()
                except (Unavailable, DataLoss, IncompatibleLayout) as error:
                    self._blame(error, placement)
                    account.failed(error)
                    job.notes.append(f"attempt {account.attempts} at token {job.generated}: {error.message}")
                    log.warning("attempt.failed", request=job.request_id, attempt=account.attempts, error=error.message)
                    if account.attempts >= self._settings.max_attempts:
                        raise _given_up(job, account, error) from error

    async def _attempt(
        self, job: Job, placement: Placement, account: Account, deadline: float
    ) -> AsyncGenerator[decode_pb2.Tokens, None]:
        """One decode worker's stream. Adds to the journal what it yields."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels.to(placement.decode.address))
        account.dispatched()
        request = _decode_request(job, placement, account.attempts)
        call = stub.Decode(request, timeout=max(0.001, deadline - monotonic()))
        worker, adapter = placement.decode.worker_id, b""
        try:
            with calling(worker):
                async for event in call:
                    if event.HasField("admitted"):
                        _check_adapter(job, event.admitted, worker)
                        adapter = event.admitted.adapter_fingerprint
                    elif event.HasField("tokens"):
                        if event.tokens.position != len(job.tokens):
                            raise InternalError(
                                f"{worker} sent position {event.tokens.position}, expected {len(job.tokens)};"
                                " the stream was stopped to keep it exact"
                            )
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
                        return
            raise WorkerLost(f"{worker} ended the stream early")
        except WorkerLost as error:
            raise WorkerLost(f"{worker}: {error.message}", reason="DECODE_LOST") from error
        finally:
            call.cancel()

    def _blame(self, error: TandemError, placement: Placement) -> None:
        """Who should get nothing new for a while. A digest mismatch is nobody's death: the same pair may try again."""
        if error.reason == "PREFILL_LOST" or isinstance(error, IncompatibleLayout):
            if placement.prefill:
                self._placer.suspect(placement.prefill)
        elif isinstance(error, Unavailable):
            self._placer.suspect(placement.decode)

    async def _admit(self, request: generation_pb2.GenerateRequest, default_max_tokens: int) -> Job:
        model = self.facts()
        if request.ByteSize() > LONG_TEXT_BYTES:
            return await asyncio.to_thread(admit, request, self._text, model, default_max_tokens)
        return admit(request, self._text, model, default_max_tokens)

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


def _decode_request(job: Job, placement: Placement, attempt: int) -> decode_pb2.DecodeRequest:
    request = decode_pb2.DecodeRequest(
        request_id=job.internal_id,
        attempt=attempt,
        token_ids=job.tokens,
        prompt_tokens=job.prompt_len,
        max_tokens=job.max_tokens,
        sampling=job.sampling,
        stop_token_ids=job.stop_ids,
        cache_salt=job.salt,
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


def _check_adapter(job: Job, admitted: decode_pb2.Admitted, worker_id: str) -> None:
    """A worker that knows nothing of adapters would answer with the base model."""
    said, began = admitted.adapter_fingerprint, job.adapter_fingerprint
    if bool(said) != bool(job.adapter) or (began and said != began):
        raise InternalError(f"{worker_id} did not admit the request with adapter {job.adapter!r}; it was stopped")


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
        self.address = ""
        self.registry = Registry(settings.redis or "", settings.cluster, settings.heartbeat_ttl_s)
        self.view = ClusterView(self.registry, settings.heartbeat_s)
        self.channels = Channels()
        self.grpc = GrpcServer(max_message_bytes=settings.max_prompt_bytes)
        generation = GenerationServicer(settings, self.view, text, self.channels)
        admin = AdminServicer(settings, self.registry, self.view, self.channels)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, self.grpc.server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self.grpc.server)
        self.http = HttpServer(settings, generation, self.view, text, defaults)
        self._record = WorkerRecord(
            worker_id=worker_id,
            role="router",
            state=State.STARTING,
            pid=os.getpid(),
            incarnation=self.incarnation,
            address="",
            model=settings.model,
        )
        self._heartbeat = Heartbeat(
            self.registry, lambda: replace(self._record, running=generation.running), settings.heartbeat_s
        )
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._following: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        await self.view.start()
        self.address = await self.grpc.start(
            self.settings.host, self.settings.port, ["tandem.v1.GenerationService", "tandem.v1.AdminService"]
        )
        await self.http.start()
        self._record = replace(self._record, state=State.READY, address=self.address)
        await self._heartbeat.start()
        self._following = asyncio.create_task(self._follow(), name="warm-channels")

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._record = replace(self._record, state=State.DRAINING)
        self._heartbeat.changed()
        await asyncio.gather(self.grpc.stop(grace_s), self.http.stop(grace_s))
        await end(self._following)
        await self._heartbeat.stop()
        await self.view.stop()
        await self.channels.close()
        await self.registry.close()
        if not self._ended.done():
            self._ended.set_result(None)

    async def _follow(self) -> None:
        """Connect to workers before a request needs them, and hang up on those that are gone."""
        async for workers in self.view.updates():
            addresses = {record.address for record in workers.values() if record.role != "router"}
            self.channels.keep_only(addresses)
            for address in addresses:
                self.channels.to(address).get_state(try_to_connect=True)


async def start(settings: Settings, worker_id: str) -> Router:
    """A router that listens on settings.port, and on settings.http_port if there is one. Raises SettingsError (port in
    use), CheckpointRefused (tokenizer)."""
    folder = await asyncio.to_thread(local_folder, settings.model)
    text = await asyncio.to_thread(Text.load, folder)
    router = Router(settings, worker_id, text, Defaults.load(folder))
    await router.start()
    return router
