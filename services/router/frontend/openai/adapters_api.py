"""vLLM's endpoints that change the adapters of a running cluster.

POST  /v1/load_lora_adapter    {"lora_name", "lora_path"}
POST  /v1/unload_lora_adapter  {"lora_name"}

Statuses as in vLLM: 200 with a line of text, 400 for a name that is taken and for an adapter that does not fit, 404 for
a folder without an adapter and for an unknown name.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from services.router.frontend.adapter_control import AdapterControl
from services.router.frontend.http_body import BodyReader
from services.router.frontend.openai import openai_protocol
from services.router.tenancy.api_keys import ApiKeys
from tandem.errors import InvalidRequest, TandemError

MAX_TEXT = 4096  # characters
BODY_FIELDS = {"name": "lora_name", "path": "lora_path"}
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Kind = TypeVar("Kind", bound=BaseModel)


class LoadAdapter(BaseModel):
    lora_name: Text
    lora_path: Text
    model: Text | None = None  # Tandem's extension: one of several models
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapter(BaseModel):
    lora_name: Text
    lora_int_id: int | None = None  # vLLM ignores it, too


class AdaptersApi:
    def __init__(self, control: AdapterControl, bodies: BodyReader, keys: ApiKeys | None) -> None:
        self._control = control
        self._bodies = bodies
        self._keys = keys

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        body = await self._read(request, LoadAdapter)
        for field in ("load_inplace", "is_3d_lora_weight"):
            if getattr(body, field):
                raise InvalidRequest(f"{field} is not served", field=field, bound="absent or false")
        try:
            await self._control.load(body.lora_name, body.lora_path, body.model or "")
        except TandemError as error:
            raise _named(error) from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        body = await self._read(request, UnloadAdapter)
        try:
            await self._control.unload(body.lora_name)
        except TandemError as error:
            raise _named(error) from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _read(self, request: Request, kind: type[Kind]) -> Kind:
        """Raises PermissionDenied for a key that may only generate, before the body is read; InvalidRequest."""
        if self._keys is not None:
            self._keys.check(request.headers.get("authorization"), admin=True)
        return await self._bodies.read(request, openai_protocol.parse, kind)


def _named(error: TandemError) -> TandemError:
    """The error with the body's field names."""
    field = BODY_FIELDS.get(error.field or "", error.field)
    return type(error)(
        error.message, reason=error.reason, field=field, bound=error.bound, retry_after=error.retry_after
    )
