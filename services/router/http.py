"""The endpoints of the HTTP front door: sizes, errors and clients that leave. What the bodies say is in openai.py, the
connections are http_server.py's, and tokens come from the same `generate` that gRPC calls.

A client that hangs up cancels its generation, which frees its blocks everywhere. A stream's status is decided by its
first token: what goes wrong before it has a status code, what goes wrong later has an error event and no [DONE].
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import structlog
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.registry import State
from services.router import openai, openai_answers
from services.router.admin import AdminServicer
from services.router.admit import checked_request_id
from services.router.dashboard import PAGES, Dashboard, Goal, Seen
from services.router.http_server import Server
from services.router.keys import Keys
from services.router.openai import Defaults
from services.router.openai_answers import Events
from services.router.text import Text
from services.view import ClusterView
from tandem import metrics
from tandem.errors import (
    Busy,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    TandemError,
    TooLarge,
    Unavailable,
)
from tandem.settings import Settings
from tandem.status import known_errors
from tandem.tasks import end, merged
from tandem.v1 import generation_pb2

if TYPE_CHECKING:
    from services.router.servicer import GenerationServicer

log = structlog.get_logger(__name__)

BODY_TIMEOUT_S = 30.0
MOST_BODY_BYTES = 64 * 1024 * 1024  # of a tenant's at a time
MAX_TOKENIZE = 2**17  # tokens to text or back, or the context if that is longer
NEED_NO_KEY = ("/health", "/version", *PAGES)  # probes have none, and the page asks its user for it


class Tokenize(BaseModel):
    """POST /tokenize."""

    prompt: str
    add_special_tokens: bool = True


class Detokenize(BaseModel):
    """POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


Asked = tuple[openai.Sampled, str, str, list[generation_pb2.GenerateRequest]]
Result = TypeVar("Result")


class Bodies:
    """Bytes of the bodies that are being received, or wait to be read: so many at most for each tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    def total(self) -> int:
        return self._held.total()

    @contextmanager
    def of(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """A function that is told of more bytes, which count until the block ends. It raises Busy when there are too
        many."""
        mine = 0

        def more(count: int) -> None:
            nonlocal mine
            if self._held[tenant] + count > self._most:
                raise Busy(
                    f"bodies of {self._held[tenant]} bytes are being received, and {self._most} is the limit",
                    reason="BODIES",
                    retry_after=1.0,
                )
            mine += count
            self._held[tenant] += count

        try:
            yield more
        finally:
            self._held[tenant] -= mine
            if not self._held[tenant]:
                del self._held[tenant]


class Api:
    """The endpoints."""

    def __init__(
        self,
        settings: Settings,
        generation: GenerationServicer,
        view: ClusterView,
        text: Text,
        defaults: Defaults,
    ) -> None:
        self._settings = settings
        self._generation = generation
        self._view = view
        self._text = text
        self._defaults = defaults
        self._began = int(time.time())
        self.bodies = Bodies(max(MOST_BODY_BYTES, settings.max_prompt_bytes))

    def app(self, *more: Route) -> Starlette:
        return Starlette(
            routes=[
                *more,
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/health", self.health),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
            ],
            exception_handlers={TandemError: _refusal, HTTPException: _no_such_endpoint},
        )

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, openai.Completions)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, openai.Chat)

    async def models(self, request: Request) -> Response:
        base = self._settings.model
        about = {"object": "model", "created": self._began, "owned_by": "tandem"}
        about["max_model_len"] = self._generation.facts().context
        adapters = [{"id": name, **about, "parent": base} for name in self._settings.adapters]
        return JSONResponse({"object": "list", "data": [{"id": base, **about}, *adapters]})

    async def health(self, request: Request) -> Response:
        """200 while a request could be served now."""
        ready = any(record.state is State.READY for record in self._view.of_role("decode"))
        return Response(status_code=200 if ready else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": importlib.metadata.version("tandem-serving")})

    async def metrics(self, request: Request) -> Response:
        """Of this router, for Prometheus."""
        return Response(self._generation.metrics.text(), media_type=metrics.CONTENT_TYPE)

    async def tokenize(self, request: Request) -> Response:
        return Response(await self._worked(request, self._tokenized), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        return Response(await self._worked(request, self._detokenized), media_type="application/json")

    def _tokenized(self, raw: bytes) -> bytes:
        body = openai.parse(raw, Tokenize)
        context = self._generation.facts().context
        if least := self._text.at_least(body.prompt, max(context, MAX_TOKENIZE)):
            bound = f"at most {max(context, MAX_TOKENIZE)} tokens"
            raise InvalidRequest(f"prompt has over {least} tokens", field="prompt", bound=bound)
        ids = self._text.encode(body.prompt, special=body.add_special_tokens)
        return openai.to_json({"count": len(ids), "max_model_len": context, "tokens": ids})

    def _detokenized(self, raw: bytes) -> bytes:
        body = openai.parse(raw, Detokenize, max(self._generation.facts().context, MAX_TOKENIZE))
        return openai.to_json({"prompt": self._text.decode(body.tokens)})

    async def _worked(self, request: Request, work: Callable[..., Result], *args: Any) -> Result:
        """What work(body, *args) makes of the request's body."""
        tenant = self._generation.tenant(request.headers.get("authorization")).name
        with self.bodies.of(tenant) as more:
            raw = await self._body(request, more)
            with known_errors("http"):
                return await self._generation.offload.run(tenant, len(raw), work, raw, *args)

    async def _answer(self, request: Request, kind: type[openai.Sampled]) -> Response:
        asked = await self._worked(request, self._asked, kind, request.headers.get("x-request-id"))
        body, request_id, model, requests = asked
        key, generate = request.headers.get("authorization"), self._generation.generate
        headers = request.headers.items
        events = _merged([generate(one, None, body.default_max_tokens, key, headers=headers) for one in requests])
        answer = openai_answers.answer(body, request_id, model, self._text, requests)
        return Streaming(answer, events, request_id) if body.stream else Whole(answer, events, request_id)

    def _asked(self, raw: bytes, kind: type[openai.Sampled], request_id: str | None) -> Asked:
        """Raises InvalidRequest, NotFound for a model that there is not."""
        context = self._generation.facts().context
        body = openai.parse(raw, kind, kind.most_numbers(context))
        names = (self._settings.model, *self._settings.adapters)
        model = body.model or self._settings.model
        if model not in names:
            raise NotFound(
                f"there is no model {model!r:.140}; there are: {', '.join(names)}",
                field="model",
                bound=", ".join(names),
            )
        adapter = model if model in self._settings.adapters else ""
        request_id = checked_request_id(request_id or body.request_id or "")
        return body, request_id, model, openai.requests(body, request_id, self._defaults, adapter, context)

    async def _body(self, request: Request, more: Callable[[int], None]) -> bytes:
        """All of it, unless it is larger than a gRPC message may be. Raises TooLarge before it is in memory. `more` is
        told of each part's size."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise InvalidRequest("the body is not declared as JSON", field="content-type", bound="application/json")
        most = self._settings.max_prompt_bytes
        too_large = TooLarge(f"the body has over {most} bytes", field="body", bound=f"at most {most} bytes")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    more(len(chunk))
                    body += chunk
                    if len(body) > most:
                        raise too_large
        except TimeoutError as error:
            raise DeadlineExceeded(f"the body did not come within {BODY_TIMEOUT_S:g} s") from error
        except ClientDisconnect as error:
            raise Cancelled("the client left before it had sent its request") from error
        return bytes(body)


# ---- answers


class Generating(Response, ABC):
    """An answer that is generated while the client stays."""

    def __init__(self, answer: openai_answers.Answer, events: Events, request_id: str) -> None:
        self._answer = answer
        self._events = events
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server's grace is over
            await end(work)
            await self._fail(Unavailable("the router is stopping", reason="DRAINING", retry_after=1.0), send)
        finally:
            await end(gone)
            await end(work)
        if not work.cancelled():
            work.result()

    async def _run(self, send: Send) -> None:
        try:
            with known_errors("http"):
                async with aclosing(self._events) as events:
                    await self._send(events, send)
        except TandemError as error:
            await self._fail(self._answer.named(error), send)

    @abstractmethod
    async def _send(self, events: Events, send: Send) -> None:
        """All of the answer."""

    async def _fail(self, error: TandemError, send: Send) -> None:
        headers = {"x-request-id": self._request_id, **openai.error_headers(error)}
        await _write(send, error.http, openai.error_body(error), headers)


class Whole(Generating):
    async def _send(self, events: Events, send: Send) -> None:
        body = await self._answer.whole(events)
        await _write(send, 200, body, {"x-request-id": self._request_id})


class Streaming(Generating):
    """One write for each message of the decode worker."""

    _started = False

    async def _send(self, events: Events, send: Send) -> None:
        async for index, event in events:
            if not (message := await self._answer.stream(index, event)):
                continue
            if not self._started:
                self._started = True
                headers = {"content-type": "text/event-stream; charset=utf-8", "x-request-id": self._request_id}
                await send(_head(200, {**headers, "cache-control": "no-cache"}))
            await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, error: TandemError, send: Send) -> None:
        if not self._started:
            await super()._fail(error, send)
            return
        log.warning("stream.failed", request=self._request_id, error=error.message)
        await send({"type": "http.response.body", "body": openai.error_event(error), "more_body": False})


def _head(status: int, headers: dict[str, str]) -> dict[str, Any]:
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": fields}


async def _write(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    about = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await send(_head(status, about))
    await send({"type": "http.response.body", "body": body})


async def _gone(receive: Receive) -> None:
    """Until the client hangs up. Its body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _merged(sources: list[AsyncGenerator[generation_pb2.GenerateResponse, None]]) -> Events:
    """The events of all, each with the number of its source, as they come."""
    numbered = [_numbered(number, source) for number, source in enumerate(sources)]
    return numbered[0] if len(numbered) == 1 else merged(numbered)


async def _numbered(number: int, source: AsyncGenerator[generation_pb2.GenerateResponse, None]) -> Events:
    async with aclosing(source) as events:
        async for event in events:
            yield number, event


class Guard:
    """Asks every request for its key, before its body is read."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in NEED_NO_KEY:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            try:
                self._keys.check(given.decode("latin-1"), metrics=scope["path"] == "/metrics")
            except TandemError as error:
                headers = {"www-authenticate": "Bearer", "connection": "close", **openai.error_headers(error)}
                await _write(send, error.http, openai.error_body(error), headers)
                return
        await self._app(scope, receive, send)


# ---- errors


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return Response(openai.error_body(error), error.http, openai.error_headers(error), "application/json")


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    """404 and 405 of the router of URLs, in the shape that every client reads."""
    assert isinstance(error, HTTPException)
    body = openai.error_body(NotFound(f"{request.method} {request.url.path:.100} is not served", field="url"))
    return Response(body, error.status_code, error.headers, "application/json")


# ---- all of it


class HttpServer:
    """The endpoints behind their server. Nothing at all while `http_port` is absent."""

    def __init__(
        self,
        settings: Settings,
        generation: GenerationServicer,
        view: ClusterView,
        text: Text,
        defaults: Defaults,
        admin: AdminServicer,
        keys: Keys | None,
        worker_id: str,
    ) -> None:
        self._settings = settings
        self.address = ""

        def seen() -> Seen:
            queued, outcomes = generation.waiting(), generation.metrics.outcomes()
            return Seen(settings.model, worker_id, view.registry_ok, generation.running, queued, outcomes)

        goal = Goal(settings.slo_ttft_s, settings.slo_tpot_s)
        self.dashboard = Dashboard(goal, generation.receipts, seen, admin, keys)
        self.failed: Callable[[BaseException], object] | None = None  # called when the server ends by itself
        api = Api(settings, generation, view, text, defaults)
        self.bodies = api.bodies
        app: ASGIApp = api.app(*self.dashboard.routes())
        self._server = Server(Guard(app, keys) if keys else app, settings)

    async def start(self) -> None:
        """Listen. Raises SettingsError when the port is taken."""
        if self._settings.http_port is not None:
            self.address = await self._server.start(self._settings.http_port, self.failed)
            log.info("http.ready", address=self.address)

    async def stop(self, grace_s: float) -> None:
        """Accept nothing, let requests end for `grace_s` seconds, then cancel them."""
        self.dashboard.close()
        await self._server.stop(grace_s)


__all__ = ["Api", "HttpServer"]
