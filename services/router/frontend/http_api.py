"""The HTTP endpoints: errors, and clients that disconnect. openai_protocol.py parses bodies, http_body.py bounds their
sizes, http_server.py handles connections, and tokens come from the same `generate` as for gRPC.

A client that disconnects cancels its generation, which frees its blocks everywhere. A stream's status is fixed with its
first token: an earlier error has a status code, a later one is an error event without [DONE].
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import structlog
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.frontend import openai_errors, openai_protocol, openai_responses
from services.router.frontend.dashboard import PAGES
from services.router.frontend.http_body import BodyReader
from services.router.frontend.json_body import to_json
from services.router.frontend.openai_responses import Events
from services.router.frontend.openai_sampling import Defaults, Sampled
from services.router.generation import Generation
from services.router.preprocess.served_model import ServedModel
from services.router.preprocess.tokenizer import Tokenizer
from services.router.preprocess.validation import checked_request_id
from services.router.tenancy.api_keys import ApiKeys
from tandem.errors import (
    InvalidRequest,
    NotFound,
    TandemError,
    Unavailable,
)
from tandem.grpc_errors import known_errors
from tandem.settings import Settings
from tandem.tasks import end, merged
from tandem.telemetry.metrics import CONTENT_TYPE, RouterMetrics
from tandem.v1 import generation_pb2

log = structlog.get_logger(__name__)

MAX_TOKENIZE_TOKENS = 2**17  # tokens to text or back, or the context if that is longer
PUBLIC_PATHS = ("/health", "/version", *PAGES)  # probes have none, and the page asks its user for it


class Tokenize(BaseModel):
    """POST /tokenize."""

    prompt: str
    add_special_tokens: bool = True


class Detokenize(BaseModel):
    """POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


Parsed = tuple[Sampled, str, str, list[generation_pb2.GenerateRequest]]


class Api:
    """The endpoints."""

    def __init__(
        self,
        settings: Settings,
        generation: Generation,
        model: ServedModel,
        tokenizer: Tokenizer,
        defaults: Defaults,
        bodies: BodyReader,
        metrics: RouterMetrics,
    ) -> None:
        self._settings = settings
        self._generation = generation
        self._model = model
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._bodies = bodies
        self._metrics = metrics
        self._began = int(time.time())

    def app(self, *more: Route, keys: ApiKeys | None) -> ASGIApp:
        """These and `more`; with `keys`, for those who have one."""
        app = Starlette(
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
        return KeyMiddleware(app, keys) if keys else app

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, openai_protocol.Completions)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, openai_protocol.Chat)

    async def models(self, request: Request) -> Response:
        base = self._settings.model
        about = {"object": "model", "created": self._began, "owned_by": "tandem"}
        about["max_model_len"] = self._model.facts().context
        adapters = [{"id": name, **about, "parent": base} for name in self._settings.adapters]
        return JSONResponse({"object": "list", "data": [{"id": base, **about}, *adapters]})

    async def health(self, request: Request) -> Response:
        """200 while requests can be served."""
        return Response(status_code=200 if self._model.ready() else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": importlib.metadata.version("tandem-serving")})

    async def metrics(self, request: Request) -> Response:
        """Of this router, for Prometheus."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def tokenize(self, request: Request) -> Response:
        return Response(await self._bodies.read(request, self._tokenized), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        return Response(await self._bodies.read(request, self._detokenized), media_type="application/json")

    def _tokenized(self, raw: bytes) -> bytes:
        body = openai_protocol.parse(raw, Tokenize)
        context = self._model.facts().context
        if least := self._tokenizer.at_least(body.prompt, max(context, MAX_TOKENIZE_TOKENS)):
            bound = f"at most {max(context, MAX_TOKENIZE_TOKENS)} tokens"
            raise InvalidRequest(f"prompt has over {least} tokens", field="prompt", bound=bound)
        ids = self._tokenizer.encode(body.prompt, special=body.add_special_tokens)
        return to_json({"count": len(ids), "max_model_len": context, "tokens": ids})

    def _detokenized(self, raw: bytes) -> bytes:
        body = openai_protocol.parse(raw, Detokenize, max(self._model.facts().context, MAX_TOKENIZE_TOKENS))
        return to_json({"prompt": self._tokenizer.decode(body.tokens)})

    async def _answer(self, request: Request, kind: type[Sampled]) -> Response:
        parsed = await self._bodies.read(request, self._parsed, kind, request.headers.get("x-request-id"))
        body, request_id, model, requests = parsed
        key, generate = request.headers.get("authorization"), self._generation.generate
        headers = request.headers.items
        events = _merged(
            [
                generate(generate_request, None, body.default_max_tokens, key, headers=headers)
                for generate_request in requests
            ]
        )
        answer = openai_responses.answer(body, request_id, model, self._tokenizer, requests)
        return Streaming(answer, events, request_id) if body.stream else Collected(answer, events, request_id)

    def _parsed(self, raw: bytes, kind: type[Sampled], request_id: str | None) -> Parsed:
        """Raises InvalidRequest, NotFound for a model that there is not."""
        context = self._model.facts().context
        body = openai_protocol.parse(raw, kind, kind.most_numbers(context))
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
        return body, request_id, model, openai_protocol.requests(body, request_id, self._defaults, adapter, context)


# ---- answers


class Generating(Response, ABC):
    """A generated answer; the generation ends when the client disconnects."""

    def __init__(self, answer: openai_responses.Answer, events: Events, request_id: str) -> None:
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
        """Sends the whole answer."""

    async def _fail(self, error: TandemError, send: Send) -> None:
        headers = {"x-request-id": self._request_id, **openai_errors.error_headers(error)}
        await _write(send, error.http, openai_errors.error_body(error), headers)


class Collected(Generating):
    async def _send(self, events: Events, send: Send) -> None:
        body = await self._answer.collect(events)
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
        await send({"type": "http.response.body", "body": openai_errors.error_event(error), "more_body": False})


def _head(status: int, headers: dict[str, str]) -> dict[str, Any]:
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": fields}


async def _write(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    about = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await send(_head(status, about))
    await send({"type": "http.response.body", "body": body})


async def _gone(receive: Receive) -> None:
    """Returns when the client disconnects. Its body has been read, so no other message can arrive."""
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


class KeyMiddleware:
    """Checks the key of every request before its body is read."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            authorization = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            try:
                self._keys.check(authorization.decode("latin-1"), metrics=scope["path"] == "/metrics")
            except TandemError as error:
                headers = {"www-authenticate": "Bearer", "connection": "close", **openai_errors.error_headers(error)}
                await _write(send, error.http, openai_errors.error_body(error), headers)
                return
        await self._app(scope, receive, send)


# ---- errors


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return Response(openai_errors.error_body(error), error.http, openai_errors.error_headers(error), "application/json")


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    """404 and 405 of the router of URLs, in the shape that every client reads."""
    assert isinstance(error, HTTPException)
    body = openai_errors.error_body(NotFound(f"{request.method} {request.url.path:.100} is not served", field="url"))
    return Response(body, error.status_code, error.headers, "application/json")
