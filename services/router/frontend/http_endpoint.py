"""What every endpoint that generates has in common: it reads the body, generates, and answers in its own format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from services.router.frontend.http_answers import AnswerEncoder, Collected, Streaming, merged_events
from services.router.frontend.http_body import BodyReader
from services.router.generation import Generation
from services.router.preprocess.served_model import ServedModel
from tandem.errors import NotFound
from tandem.settings import Settings
from tandem.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Prepared:
    """A parsed body: what to generate, and the encoder of the answer."""

    requests: list[generation_pb2.GenerateRequest]  # one for each prompt
    encoder: AnswerEncoder
    request_id: str
    stream: bool
    default_max_tokens: int


Parse = Callable[[bytes, str | None], Prepared]  # of the body and of x-request-id; runs on a thread


class GeneratingEndpoint:
    def __init__(self, settings: Settings, generation: Generation, model: ServedModel, bodies: BodyReader) -> None:
        self._names = settings.model_names
        self._accepted = {*settings.model_names, settings.model}
        self._model = model
        self._generation = generation
        self._bodies = bodies

    async def answer(self, request: Request, parse: Parse) -> Response:
        """Raises what `parse` raises, and the errors of a body that is out of bounds."""
        return self.respond(request, await self._bodies.read(request, parse, request.headers.get("x-request-id")))

    def respond(self, request: Request, prepared: Prepared) -> Response:
        """Generates what was prepared for this request."""
        key, headers = request.headers.get("authorization"), request.headers.items
        events = merged_events(
            [
                self._generation.generate(message, None, prepared.default_max_tokens, key, headers=headers)
                for message in prepared.requests
            ]
        )
        kind = Streaming if prepared.stream else Collected
        return kind(prepared.encoder, events, prepared.request_id)

    def resolve_model(self, name: str | None) -> tuple[str, str]:
        """The name in the answer for the model that a request names, and the adapter if that is one; absent: the base
        model. Raises NotFound."""
        adapters = self._model.adapters
        if name and name in adapters:
            return name, name
        if not name or name in self._accepted:
            return self._names[0], ""
        names = ", ".join((*self._names, *adapters))
        raise NotFound(f"there is no model {name!r:.140}; there are: {names}", field="model", bound=names)
