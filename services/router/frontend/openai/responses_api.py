"""The endpoints of the Responses API.

POST    /v1/responses                    a response, streamed or not
GET     /v1/responses/{id}               a stored one
DELETE  /v1/responses/{id}
GET     /v1/responses/{id}/input_items   the items before its answer
POST    /v1/responses/{id}/cancel        400: no response runs in the background
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count as numbers

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.state.response_store import Count, StoredResponse
from services.router.frontend.http_body import BodyReader, BoundedAnswer
from services.router.frontend.http_endpoint import GeneratingEndpoint, Prepared
from services.router.frontend.json_body import to_json
from services.router.frontend.openai import openai_protocol
from services.router.frontend.openai.responses_answer import ResponsesAnswer
from services.router.frontend.openai.responses_body import Responses
from services.router.frontend.openai.responses_items import FIRST_INPUT, RESPONSE_PREFIX, Item, item_id, referenced_ids
from services.router.frontend.openai.stored_responses import StoredResponses, conversation
from services.router.models import Models
from services.router.preprocess.json_limits import out_of_bounds
from services.router.preprocess.offload import Offload
from services.router.preprocess.validation import checked_request_id
from tandem.errors import InvalidRequest

PATH = "/v1/responses"


class ResponsePreparation:
    """Turns a parsed body into requests. Long bodies belong on a thread."""

    def __init__(self, stored: StoredResponses, models: Models) -> None:
        self._stored = stored
        self._models = models

    def prepared(
        self,
        body: Responses,
        request_id: str | None,
        tenant: str,
        before: StoredResponse | None = None,
        known: Mapping[str, Item] | None = None,
    ) -> Prepared:
        """`before`: the response that the body continues; `known`: the stored items that it refers to. Raises
        InvalidRequest, NotFound for an unknown model or item, TooLarge for a conversation that cannot be stored."""
        model, name, adapter = self._models.resolve(body.model)
        request_id = checked_request_id(request_id or body.request_id or "")
        response_id = RESPONSE_PREFIX + secrets.token_hex(24)
        number = numbers(FIRST_INPUT)
        history = conversation(before) if before else []
        items = body.begin(lambda prefix: item_id(prefix, response_id, next(number)), history, known)
        requests = openai_protocol.requests(body, request_id, model.defaults, adapter, model.context)
        encoded, shown = _encoded(items, "input"), _encoded(body.shown(name, requests[0].sampling), "body")
        if body.stores:  # the response repeats what is shown of the request; its answer comes in addition
            self._stored.store.check_size(len(encoded) + len(shown))
        keep = partial(self._stored.store.put, tenant, response_id, encoded) if body.stores else None
        encoder = ResponsesAnswer(body, response_id, shown, model.tokenizer, keep)
        return Prepared(model, requests, encoder, request_id, bool(body.stream), body.default_max_tokens)


class ResponsesApi:
    def __init__(
        self,
        endpoint: GeneratingEndpoint,
        preparation: ResponsePreparation,
        stored: StoredResponses,
        bodies: BodyReader,
        offload: Offload,
    ) -> None:
        self._endpoint = endpoint
        self._preparation = preparation
        self._stored = stored
        self._bodies = bodies
        self._offload = offload

    def routes(self) -> list[Route]:
        return [
            Route(PATH, self.create, methods=["POST"]),
            Route(PATH + "/{id}", self.retrieve, methods=["GET"]),
            Route(PATH + "/{id}", self.delete, methods=["DELETE"]),
            Route(PATH + "/{id}/input_items", self.input_items, methods=["GET"]),
            Route(PATH + "/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        tenant = self._bodies.tenant(request)
        request_id = request.headers.get("x-request-id")
        size, body, prepared = await self._bodies.read(request, self._first, request_id, tenant)
        kept = size
        if prepared is None:
            with self._counting(tenant, size) as count:  # a short body may refer to megabytes

                async def keep(more: int) -> None:
                    nonlocal kept
                    kept += more
                    await count(more)

                known = await self._stored.referenced(tenant, referenced_ids(body.input), keep)
                name = body.previous_response_id
                before = await self._stored.previous(tenant, name, keep) if name else None
                size += before.size if before else 0
                about = (body, request_id, tenant, before, known)
                prepared = await self._offload.run(tenant, size, self._preparation.prepared, *about)
        elif body.stores:
            await self._stored.store.check(tenant)  # now, not after the answer has been computed
        return self._endpoint.respond(request, prepared, kept)

    def _first(self, raw: bytes, request_id: str | None, tenant: str) -> tuple[int, Responses, Prepared | None]:
        """The size of the body, the body, and its requests unless they need stored items."""
        body = openai_protocol.parse(raw, Responses)
        if body.previous_response_id or referenced_ids(body.input):
            return len(raw), body, None
        return len(raw), body, self._preparation.prepared(body, request_id, tenant)

    def in_batch(self, raw: bytes, request_id: str | None) -> Prepared:
        """A line of a batch: a response that is neither stored nor refers to a stored one."""
        body = openai_protocol.parse(raw, Responses)
        kept = {
            "store": body.store,
            "previous_response_id": body.previous_response_id,
            "input": referenced_ids(body.input),
        }
        for name, value in kept.items():
            if value:
                bound = "without item_reference in a batch" if name == "input" else "absent in a batch"
                raise out_of_bounds(name, "not served in a batch, whose responses are not stored", bound)
        body.store = False
        return self._preparation.prepared(body, request_id, "")

    async def retrieve(self, request: Request) -> Response:
        for name in ("stream", "starting_after"):
            if request.query_params.get(name, "false").lower() != "false":
                raise InvalidRequest(
                    f"{name} is not served: a stored response has ended, and comes as one object",
                    field=name,
                    bound="absent",
                )
        tenant = self._bodies.tenant(request)
        with self._counting(tenant) as count:
            return self._answer(tenant, await self._stored.response(tenant, request.path_params["id"], count))

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        await self._stored.delete(self._bodies.tenant(request), response_id)
        return JSONResponse({"id": response_id, "object": "response.deleted", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        tenant, response_id = self._bodies.tenant(request), request.path_params["id"]
        with self._counting(tenant) as count:
            return self._answer(tenant, await self._stored.page(tenant, response_id, request.query_params, count))

    @contextmanager
    def _counting(self, tenant: str, size: int = 0) -> Iterator[Count]:
        """Yields a function that counts stored bytes before they are read: for the tenant's rate, and until the block
        ends, with `size` others, as a body of the tenant. Both raise Busy."""
        with self._bodies.bodies.of(tenant) as more:
            more(size)

            async def count(size: int) -> None:
                more(size)
                await self._bodies.bodies.keep_rate(tenant, size)

            yield count

    def _answer(self, tenant: str, stored: bytes) -> Response:
        return BoundedAnswer(stored, self._bodies.bodies, tenant)

    async def cancel(self, request: Request) -> Response:
        await self._stored.check(self._bodies.tenant(request), request.path_params["id"])
        raise InvalidRequest(
            "only a response with `background` true can be cancelled, and none is; close the connection instead",
            field="response_id",
            bound="the id of a response in the background",
        )


def _encoded(value: object, name: str) -> bytes:
    """As JSON. Raises InvalidRequest for lone surrogates, which JSON permits in a body and UTF-8 does not."""
    try:
        return to_json(value)
    except UnicodeEncodeError as error:
        raise out_of_bounds(name, "not valid Unicode in one of its texts", "valid Unicode") from error
