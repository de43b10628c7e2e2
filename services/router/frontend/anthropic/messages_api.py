"""The endpoints of Anthropic's Messages API. messages_body.py parses bodies, messages_answer.py encodes answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.router.frontend.anthropic import messages_body, messages_errors
from services.router.frontend.anthropic.messages_answer import MessagesAnswer
from services.router.frontend.http_answers import id_headers
from services.router.frontend.http_body import BodyReader
from services.router.frontend.http_endpoint import GeneratingEndpoint, Prepared
from services.router.frontend.json_body import to_json
from services.router.frontend.openai.openai_errors import error_headers
from services.router.models import Models
from services.router.preprocess.chat.prompt import prompt_tokens
from services.router.preprocess.validation import checked_request_id
from tandem.errors import TandemError
from tandem.v1 import generation_pb2

MAX_COUNTED_TOKENS = 2**17  # tokens of a prompt that is only counted, or the context if that is longer


class MessagesApi:
    def __init__(self, endpoint: GeneratingEndpoint, models: Models, bodies: BodyReader) -> None:
        self._endpoint = endpoint
        self._models = models
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        return await self._answered(request, self._generated)

    async def count_tokens(self, request: Request) -> Response:
        return await self._answered(request, self._counted)

    async def _answered(self, request: Request, answer: Callable[[Request, str], Awaitable[Response]]) -> Response:
        """The answer, or the error in the shape of this API. Every request has an id before its body is parsed."""
        request_id = ""
        try:
            request_id = checked_request_id(request.headers.get("x-request-id", ""))
            return await answer(request, request_id)
        except TandemError as error:
            request_id = request_id or checked_request_id("")
            headers = {**id_headers(request_id), **error_headers(error)}
            body = messages_errors.error_body(error, request_id)
            return Response(body, error.http, headers, "application/json")

    async def _generated(self, request: Request, request_id: str) -> Response:
        return await self._endpoint.answer(request, partial(self._prepared, request_id))

    async def _counted(self, request: Request, request_id: str) -> Response:
        body = await self._bodies.read(request, self._count)
        return Response(body, headers=id_headers(request_id), media_type="application/json")

    def _prepared(self, request_id: str, raw: bytes, _: str | None) -> Prepared:
        """Raises InvalidRequest, NotFound for an unknown model."""
        body = messages_body.parse(raw, messages_body.Messages)
        model, name, adapter = self._models.resolve(body.model)
        message = body.request(request_id, model.defaults, adapter)
        encoder = MessagesAnswer(request_id, name, body.max_tokens)
        return Prepared(model, [message], encoder, request_id, bool(body.stream), max(1, body.max_tokens))

    def _count(self, raw: bytes) -> bytes:
        """Raises as `_prepared`, and InvalidRequest for a prompt that is too long to be counted."""
        body = messages_body.parse(raw, messages_body.Prompt)
        model, _, _ = self._models.resolve(body.model)
        facts = model.served.facts()
        facts = replace(facts, context=max(facts.context, MAX_COUNTED_TOKENS))
        message = generation_pb2.GenerateRequest(chat=body.chat())
        prompt = prompt_tokens(message, model.tokenizer, facts)
        return to_json({"input_tokens": len(prompt.tokens)})
