"""The HTTP endpoints. openai/openai_protocol.py parses bodies, http_body.py bounds their sizes, http_answers.py sends
answers, http_server.py handles connections, and tokens come from the same `generate` as for gRPC.
"""

from __future__ import annotations

import importlib.metadata
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import structlog
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.frontend.anthropic import messages_errors
from services.router.frontend.cors import with_cors
from services.router.frontend.dashboard import PAGES
from services.router.frontend.http_answers import write
from services.router.frontend.http_body import BodyReader, BoundedAnswer
from services.router.frontend.http_endpoint import GeneratingEndpoint, Parse, Prepared
from services.router.frontend.json_body import to_json
from services.router.frontend.openai import openai_answers, openai_errors, openai_protocol
from services.router.frontend.openai.openai_sampling import Sampled, to_bytes
from services.router.models import Models
from services.router.preprocess.validation import checked_request_id, utf8
from services.router.tenancy.api_keys import ApiKeys
from tandem.errors import InvalidRequest, NotFound, NoWorker, TandemError, Unauthenticated
from tandem.settings import Settings
from tandem.telemetry.exposition import CONTENT_TYPE, Exposition

log = structlog.get_logger(__name__)
MAX_LOGGED_PATH = 100  # characters
MAX_TOKENIZE_TOKENS = 2**17  # tokens of one body, or the context if that is longer
PUBLIC_PATHS = ("/health", "/version", *PAGES)  # probes have no key, and the page asks its user for one


class Tokenize(BaseModel):
    """POST /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None


class Detokenize(BaseModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class Api:
    """The endpoints."""

    def __init__(self, settings: Settings, models: Models, bodies: BodyReader, metrics: Exposition) -> None:
        self._settings = settings
        self._endpoint = GeneratingEndpoint(bodies)
        self._models = models
        self._bodies = bodies
        self._metrics = metrics
        self._began = int(time.time())
        self.parsers: dict[str, Parse] = {  # of the bodies that generate, by endpoint
            "/v1/completions": partial(self._parsed, openai_protocol.Completions),
            "/v1/chat/completions": partial(self._parsed, openai_protocol.Chat),
        }

    def app(self, *more: Route, keys: ApiKeys | None) -> ASGIApp:
        """The app with these routes and `more`; with `keys`, a key is required."""
        app = Starlette(
            routes=[
                *more,
                *(
                    Route(path, partial(self._endpoint.answer, parse=parse), methods=["POST"])
                    for path, parse in self.parsers.items()
                ),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/health", self.health),
                Route("/version", self.version),
                Route("/metrics", partial(self.metrics, keys)),
            ],
            exception_handlers={TandemError: _refusal, HTTPException: _no_such_endpoint},
        )
        return with_cors(KeyMiddleware(app, keys) if keys else app, self._settings.cors_origins)

    async def models(self, request: Request) -> Response:
        names = [name for model in self._models for name in (model.names[0], *model.served.adapters)]
        return JSONResponse({"object": "list", "data": [self._about(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """One model, by any of its names. Raises NotFound."""
        if not request.path_params["name"]:
            return await self.models(request)
        return JSONResponse(self._about(request.path_params["name"]))

    def _about(self, name: str) -> dict[str, Any]:
        model, shown, adapter = self._models.resolve(name)
        about = {"id": shown, "object": "model", "created": self._began, "owned_by": "tandem"}
        with suppress(NoWorker):  # its pools may be empty, unlike those of another model
            about["max_model_len"] = model.context
        return {**about, "parent": model.names[0]} if adapter else about

    async def health(self, request: Request) -> Response:
        """200 while requests can be served."""
        return Response(status_code=200 if self._models.ready() else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": importlib.metadata.version("tandem-serving")})

    async def metrics(self, keys: ApiKeys | None, request: Request) -> Response:
        """Of this router, for Prometheus. Raises PermissionDenied for a key without the right to them."""
        if keys is not None:
            keys.check(request.headers.get("authorization"), metrics=True)
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def tokenize(self, request: Request) -> Response:
        return await self._answered(request, self._tokenized)

    async def detokenize(self, request: Request) -> Response:
        return await self._answered(request, self._detokenized)

    async def _answered(self, request: Request, work: Callable[[bytes], bytes]) -> Response:
        """The answer may be many times as long as the body."""
        answer = await self._bodies.read(request, work)
        return BoundedAnswer(answer, self._bodies.bodies, self._bodies.tenant(request))

    def _tokenized(self, raw: bytes) -> bytes:
        body = openai_protocol.parse(raw, Tokenize)
        model, _, _ = self._models.resolve(body.model)
        context = model.context
        prompt = utf8(to_bytes(body.prompt), "prompt", None)
        if least := model.tokenizer.at_least(prompt, max(context, MAX_TOKENIZE_TOKENS)):
            bound = f"at most {max(context, MAX_TOKENIZE_TOKENS)} tokens"
            raise InvalidRequest(f"prompt has over {least} tokens", field="prompt", bound=bound)
        ids = model.tokenizer.encode(prompt, special=body.add_special_tokens is not False)
        return to_json({"count": len(ids), "max_model_len": context, "tokens": ids})

    def _detokenized(self, raw: bytes) -> bytes:
        body = openai_protocol.parse(raw, Detokenize, max(self._models.context, MAX_TOKENIZE_TOKENS))
        model, _, _ = self._models.resolve(body.model)
        return to_json({"prompt": model.tokenizer.decode(body.tokens)})

    def _parsed(self, kind: type[Sampled], raw: bytes, request_id: str | None) -> Prepared:
        """Raises InvalidRequest, NotFound for an unknown model."""
        body = openai_protocol.parse(raw, kind, kind.most_numbers(self._models.context))
        model, name, adapter = self._models.resolve(body.model)
        request_id = checked_request_id(request_id or body.request_id or "")
        requests = openai_protocol.requests(body, request_id, model.defaults, adapter, model.context)
        openai_protocol.check_scores(requests, model.tokenizer)
        encoder = openai_answers.answer(body, request_id, name, model.tokenizer, requests)
        return Prepared(model, requests, encoder, request_id, bool(body.stream), body.default_max_tokens)


class KeyMiddleware:
    """Checks the key of every request before its body is read. What takes more than a key, its endpoint checks: paths
    that differ may lead to the same one (Starlette takes `/metrics%0A` for `/metrics`)."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            try:
                authorization = _authorization(scope)
                self._keys.check(authorization.decode("latin-1"))
            except TandemError as error:
                headers = {"www-authenticate": "Bearer", "connection": "close", **openai_errors.error_headers(error)}
                _log_refusal(scope["path"], error)
                await write(send, error.http, _body(scope["path"], error), headers)
                return
            others = [pair for pair in scope["headers"] if pair[0] not in (b"authorization", b"x-api-key")]
            scope = {**scope, "headers": [*others, (b"authorization", authorization)]}
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> bytes:
    """The header with the key: `authorization`, or built from `x-api-key`, which Anthropic's clients send. Raises
    Unauthenticated for two different keys."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    found += [b"Bearer " + value.strip() for name, value in scope["headers"] if name == b"x-api-key"]
    if len({re.sub(rb"^bearer +", b"Bearer ", value.strip(), flags=re.IGNORECASE) for value in found}) > 1:
        raise Unauthenticated(
            "the request has two different keys", field="x-api-key", bound="absent, or the same key as in authorization"
        )
    return found[0] if found else b""


# ---- errors


def _body(path: str, error: TandemError) -> bytes:
    """The error's body in the format of that path's clients."""
    if path.startswith("/v1/messages"):
        return messages_errors.error_body(error)
    return openai_errors.error_body(error)


def _log_refusal(path: str, error: TandemError) -> None:
    """Logs a request that was refused before `generate`, which writes a separate line
    (execution/request_account.py)."""
    log.info("http.refused", path=path[:MAX_LOGGED_PATH], status=error.http, reason=error.reason)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    _log_refusal(request.url.path, error)
    return Response(openai_errors.error_body(error), error.http, openai_errors.error_headers(error), "application/json")


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    """404 and 405 for unknown URLs and methods, in a format for all clients."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    body = _body(path, NotFound(f"{request.method} {path:.100} is not served", field="url"))
    return Response(body, error.status_code, error.headers, "application/json")
