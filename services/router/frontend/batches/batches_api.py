"""/v1/batches of OpenAI's API. batch_runner.py runs them, at any router."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.state.batch_store import BatchRecord, BatchStore
from services.router.frontend.batches.batch_runner import BatchRunner
from services.router.frontend.batches.files_api import PURPOSE, checked_kept_s, page_of
from services.router.frontend.http_body import BodyReader
from services.router.frontend.json_body import check_metadata, clean, to_json
from services.router.frontend.openai import openai_protocol
from services.router.preprocess.json_limits import out_of_bounds

WINDOW = "24h"
MAX_PAGE, DEFAULT_PAGE = 100, 20  # batches of one page; OpenAI's bounds
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(strict=True)

    anchor: str
    seconds: int


class BatchBody(BaseModel):
    """POST /v1/batches."""

    model_config = ConfigDict(strict=True)

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchesApi:
    def __init__(
        self,
        store: BatchStore,
        runner: BatchRunner,
        bodies: BodyReader,
        endpoints: Sequence[str],
    ) -> None:
        """`endpoints`: those whose requests a batch may have."""
        self._store = store
        self._runner = runner
        self._bodies = bodies
        self._endpoints = tuple(endpoints)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self.retrieve, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Raises InvalidRequest, and what `BatchStore.create` raises."""
        tenant = self._bodies.tenant(request)
        body = await self._bodies.read(request, self._parsed)
        file = await self._store.file(tenant, body.input_file_id)
        if file.purpose != PURPOSE:
            raise out_of_bounds(
                "input_file_id", f"a file of the purpose {file.purpose}", f"a file of the purpose {PURPOSE}"
            )
        expires = body.output_expires_after
        fields = {
            "endpoint": body.endpoint,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "metadata": json.dumps(body.metadata, ensure_ascii=False),
            "output_name": f"file-{secrets.token_hex(16)}",
            "error_name": f"file-{secrets.token_hex(16)}",
            "output_kept_s": str(expires.seconds if expires else 0),
        }
        record = await self._store.create(tenant, f"batch_{secrets.token_hex(16)}", body.input_file_id, fields)
        self._runner.look()
        return JSONResponse(_batch(record))

    async def list(self, request: Request) -> Response:
        """Raises InvalidRequest."""
        query = request.query_params
        limit = openai_protocol.page_limit(query.get("limit"), MAX_PAGE, DEFAULT_PAGE)
        tenant = self._bodies.tenant(request)
        page = await self._store.batches(tenant, limit, query.get("after", ""))
        if page is None:
            raise out_of_bounds("after", "unknown", "the id of a batch")
        size = sum(len(value) for record in page[0] for value in record.fields.values())
        return await self._bodies.answer(tenant, size, _listed, *page)

    async def retrieve(self, request: Request) -> Response:
        """Raises NotFound."""
        return JSONResponse(
            _batch(await self._store.batch(self._bodies.tenant(request), request.path_params["batch_id"]))
        )

    async def cancel(self, request: Request) -> Response:
        """Raises NotFound, PreconditionFailed when it has ended."""
        tenant, batch_id = self._bodies.tenant(request), request.path_params["batch_id"]
        await self._store.cancel(tenant, batch_id)
        self._runner.look()
        return JSONResponse(_batch(await self._store.batch(tenant, batch_id)))

    def _parsed(self, raw: bytes) -> BatchBody:
        body = openai_protocol.parse(raw, BatchBody)
        if body.endpoint not in self._endpoints:
            raise out_of_bounds("endpoint", "not one for batches", " or ".join(self._endpoints))
        if body.completion_window != WINDOW:
            raise out_of_bounds("completion_window", "not served", WINDOW)
        check_metadata(body.metadata or {})
        clean(body.input_file_id, "input_file_id")
        if (expires := body.output_expires_after) is not None:
            if expires.anchor != "created_at":
                raise out_of_bounds("output_expires_after.anchor", "unknown", "created_at")
            checked_kept_s(str(expires.seconds), "output_expires_after.seconds")
        return body


def _listed(records: Sequence[BatchRecord], more: bool) -> bytes:
    return to_json(page_of([_batch(record) for record in records], more=more))


def _batch(record: BatchRecord) -> dict[str, Any]:
    fields = record.fields
    errors = json.loads(fields.get("errors") or "[]")
    tokens = {name: record.number(name) for name in ("input_tokens", "output_tokens")}
    return {
        "id": record.batch_id,
        "object": "batch",
        "endpoint": fields["endpoint"],
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": fields["input_file_id"],
        "completion_window": fields["completion_window"],
        "status": fields["status"],
        "output_file_id": fields.get("output_file_id"),
        "error_file_id": fields.get("error_file_id"),
        "created_at": record.number("created_at"),
        "expires_at": record.number("expires_at"),
        **{f"{name}_at": record.number(f"{name}_at") or None for name in TIMES},
        "request_counts": {name: record.number(name) for name in ("total", "completed", "failed")},
        "usage": {
            **tokens,
            "total_tokens": sum(tokens.values()),
            "input_tokens_details": {"cached_tokens": record.number("cached_tokens")},
            "output_tokens_details": {"reasoning_tokens": record.number("reasoning_tokens")},
        },
        "metadata": json.loads(fields["metadata"]),
    }
