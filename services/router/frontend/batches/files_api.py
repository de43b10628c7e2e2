"""/v1/files of OpenAI's API, for the inputs and outputs of batches."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.state.batch_store import PIECE_BYTES, BatchStore, FileRecord
from services.router.frontend.batches.multipart import MAX_FRAMING_BYTES, boundary_of, fields_of
from services.router.frontend.http_body import BodyReader, BoundedAnswer, BoundedStream
from services.router.frontend.json_body import to_json
from services.router.frontend.openai.openai_protocol import page_limit
from services.router.preprocess.json_limits import out_of_bounds
from tandem.errors import TooLarge

PURPOSE = "batch"
MAX_FILENAME = 255  # characters
MIN_KEPT_S, MAX_KEPT_S = 3600, 2_592_000  # seconds; OpenAI's bounds
MAX_PAGE = 10_000  # files of one page; OpenAI's bound and default


@dataclass(frozen=True, slots=True)
class Upload:
    filename: str
    content: bytes
    kept_s: int | None


class FilesApi:
    def __init__(self, store: BatchStore, bodies: BodyReader, most: int) -> None:
        """`most`: bytes of one file."""
        self._store = store
        self._bodies = bodies
        self._most = most

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self.create, methods=["POST"]),
            Route("/v1/files", self.list, methods=["GET"]),
            Route("/v1/files/{file_id}", self.retrieve, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        """Raises InvalidRequest, TooLarge, PreconditionFailed when the tenant has too many files."""
        tenant = self._bodies.tenant(request)
        boundary = boundary_of(request.headers.get("content-type", ""))
        upload = await self._bodies.read_form(request, self._most + MAX_FRAMING_BYTES, self._uploaded, boundary)
        file_id = f"file-{secrets.token_hex(16)}"
        record = await self._store.add_file(
            tenant, file_id, upload.filename, PURPOSE, upload.content, kept_s=upload.kept_s
        )
        return JSONResponse(_file(record))

    async def list(self, request: Request) -> Response:
        """Raises InvalidRequest."""
        query = request.query_params
        limit, order = page_limit(query.get("limit"), MAX_PAGE, MAX_PAGE), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise out_of_bounds("order", "unknown", "asc or desc")
        newest_first, purpose = order == "desc", query.get("purpose", "")
        tenant, after = self._bodies.tenant(request), query.get("after", "")
        page = await self._store.files(tenant, limit, after, newest_first=newest_first, purpose=purpose)
        if page is None:
            raise out_of_bounds("after", "unknown", "the id of a file")
        listed = page_of([_file(record) for record in page[0]], more=page[1])
        return BoundedAnswer(to_json(listed), self._bodies.bodies, tenant)

    async def retrieve(self, request: Request) -> Response:
        """Raises NotFound."""
        return JSONResponse(_file(await self._store.file(self._bodies.tenant(request), request.path_params["file_id"])))

    async def delete(self, request: Request) -> Response:
        """Raises NotFound."""
        file_id = request.path_params["file_id"]
        await self._store.delete_file(self._bodies.tenant(request), file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """Raises NotFound, Busy for too many at a time."""
        tenant = self._bodies.tenant(request)
        record = await self._store.file(tenant, request.path_params["file_id"])
        headers = {"content-length": str(record.size), "content-disposition": "attachment"}
        pages = self._store.content(tenant, record)
        return BoundedStream(pages, PIECE_BYTES, headers, self._bodies.bodies, tenant)

    def _uploaded(self, body: bytes, boundary: bytes) -> Upload:
        fields = fields_of(body, boundary)
        file, purpose = fields.get("file"), fields.get("purpose")
        if purpose is None or purpose.content != PURPOSE.encode():
            raise out_of_bounds("purpose", "absent or not served", PURPOSE)
        if file is None or file.filename is None:
            raise out_of_bounds("file", "absent or no file", "a file")
        if len(file.content) > self._most:
            bound = f"at most {self._most} bytes (max_file_mib)"
            raise TooLarge(f"the file has {len(file.content)} bytes; it may have {bound}", field="file", bound=bound)
        name = "".join(letter for letter in file.filename if letter.isprintable())
        kept_s = None
        if anchor := fields.get("expires_after[anchor]"):
            if anchor.content != b"created_at":
                raise out_of_bounds("expires_after.anchor", "unknown", "created_at")
            seconds = fields.get("expires_after[seconds]")
            kept_s = checked_kept_s(seconds.content.decode("latin-1") if seconds else "", "expires_after.seconds")
        return Upload(name[:MAX_FILENAME], file.content, kept_s)


def checked_kept_s(value: str, field: str) -> int:
    """Raises InvalidRequest."""
    if not (value.isascii() and value.isdigit() and len(value) <= 7 and MIN_KEPT_S <= int(value) <= MAX_KEPT_S):
        raise out_of_bounds(field, "out of bounds", f"{MIN_KEPT_S} to {MAX_KEPT_S} seconds")
    return int(value)


def page_of(data: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """A page of a list, as OpenAI's API has it."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": more}


def _file(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.file_id,
        "object": "file",
        "bytes": record.size,
        "created_at": record.created,
        "expires_at": record.expires,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }
