"""The base of every generating endpoint: reads the body, generates, and answers in the endpoint's format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from services.router.frontend.http_answers import AnswerEncoder, Collected, Streaming, merged_events
from services.router.frontend.http_body import BodyReader
from services.router.models import Model
from tandem.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Prepared:
    """A parsed body: the requests, the model, and the encoder of the answer."""

    model: Model
    requests: list[generation_pb2.GenerateRequest]  # one for each prompt
    encoder: AnswerEncoder
    request_id: str
    stream: bool
    default_max_tokens: int

    def __post_init__(self) -> None:
        for message in self.requests:  # also requests that are stored as jobs
            message.model = self.model.key


Parse = Callable[[bytes, str | None], Prepared]  # of the body and of x-request-id; runs on a thread


class GeneratingEndpoint:
    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies

    async def answer(self, request: Request, parse: Parse) -> Response:
        """Raises what `parse` raises, and the errors of a body that is out of bounds."""
        return self.respond(request, await self._bodies.read(request, parse, request.headers.get("x-request-id")))

    def respond(self, request: Request, prepared: Prepared, size: int = 0) -> Response:
        """Generates the prepared requests, which have this size if that is more than the body's. Raises TooLarge for
        more answers than the tenant may ever have in progress; otherwise the last ones would be refused as retryable,
        because each request is admitted separately."""
        if len(prepared.requests) > 1:
            self._bodies.check_together(request, sum(message.sampling.n or 1 for message in prepared.requests))
        key, headers = request.headers.get("authorization"), request.headers.items
        events = merged_events(
            [
                prepared.model.generation.generate(message, None, prepared.default_max_tokens, key, headers=headers)
                for message in prepared.requests
            ]
        )
        kind = Streaming if prepared.stream else Collected
        kept = partial(self._bodies.kept, self._bodies.tenant(request))
        return kind(prepared.encoder, events, prepared.request_id, kept, max(size, request.state.body_bytes))
