"""Files and batches of OpenAI's API, stored so that any router can serve or continue them. All Redis keys of both are
in this file:

    tandem:{<cluster>}:file:<tenant>/<id>       hash: filename, purpose, bytes, created and expires in Unix seconds
    tandem:{<cluster>}:content:<tenant>/<id>    list: the file's bytes in pieces; a line of an output file has its own
    tandem:{<cluster>}:files:<tenant>           sorted set: id of each file -> when it was created, in ms
    tandem:{<cluster>}:batch:<tenant>/<id>      hash: what was asked, the status, the owner's generation, the counts
    tandem:{<cluster>}:input:<tenant>/<id>      list: the batch's own copy of its input; gone when it has ended
    tandem:{<cluster>}:answered:<tenant>/<id>   bitmap: the lines that have a result; gone when it has ended
    tandem:{<cluster>}:batches:<tenant>         sorted set: id of each batch -> when it was created, in ms
    tandem:{<cluster>}:open-batches             sorted set: TENANT/ID of each open batch -> end of its owner's lease, ms

The results of a batch are appended to the contents of its output and error file, which become files when it ends. A
result is appended by the script that marks its line as answered, and only for the batch's owner, so each line is in one
of the two files once, whichever routers die. Times are the server's.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.state import batch_scripts as scripts
from cluster.state.job_journal import Kept
from cluster.state.job_scripts import CLAIM, RENEW
from cluster.state.redis_store import RedisStore, no_such
from tandem.errors import Busy, PreconditionFailed, Unavailable

FILES_KEPT = "files are forgotten after batch_kept_s"
BATCHES_KEPT = "ended batches are forgotten after batch_kept_s"
MAX_CONNECTIONS = 8
PIECE_BYTES = 256 * 1024  # of one piece of a file, and of one page of a read, at most
MAX_PAGE_PIECES = 256  # pieces of one page
UPLOAD_MS = 60_000  # after its last piece, an abandoned upload that could not be deleted expires
INDEX_MS = 62 * 86_400_000  # lifetime of a tenant's lists: longer than that of their items
MAX_FILES, MAX_BATCHES, MAX_OPEN_BATCHES = 1000, 1000, 4  # of one tenant
OUTPUT_SHARE = 4  # the answers of one batch may have this part of a tenant's bytes
DAY_S = 86_400


class BatchStatus(StrEnum):
    """The statuses of OpenAI's API. The last four are final."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    FAILED = "failed"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Stored(StrEnum):
    """The outcome of storing results."""

    KEPT = "kept"
    LOST = "lost"  # another router owns the batch now, or it has ended
    FULL = "full"  # the batch's answers exceed their limit


@dataclass(frozen=True, slots=True)
class FileRecord:
    """`created` and `expires` in Unix seconds."""

    file_id: str
    filename: str
    purpose: str
    size: int
    created: int
    expires: int


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """`fields` as they are stored: numbers as text."""

    tenant: str
    batch_id: str
    fields: Mapping[str, str]

    @property
    def generation(self) -> int:
        return self.number("generation")

    @property
    def cancelled(self) -> bool:
        return "cancelled" in self.fields

    def number(self, name: str) -> int:
        """The field's number; 0 if it is absent."""
        return int(self.fields.get(name, "0"))


@dataclass(frozen=True, slots=True)
class LineResult:
    """A line of the output file, or of the error file if not `completed`, and the tokens that it took."""

    line: int
    text: bytes
    completed: bool
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class BatchStore:
    """Every call is bounded and raises Unavailable when Redis does not answer."""

    def __init__(self, url: str, cluster: str, *, lease_s: float, kept_s: float, most_bytes: int) -> None:
        """`lease_s`: the time without a renewal after which a router loses a batch; `kept_s`: how long files and ended
        batches are kept; `most_bytes`: of all files of one tenant."""
        self.lease_s = lease_s
        self._kept_ms, self._most = int(kept_s * 1000), most_bytes
        self._prefix = f"tandem:{{{cluster}}}"
        self._store = RedisStore(url, most=MAX_CONNECTIONS)

    async def close(self) -> None:
        await self._store.close()

    # ---- files

    async def add_file(
        self, tenant: str, file_id: str, filename: str, purpose: str, content: bytes, kept_s: float | None = None
    ) -> FileRecord:
        """Raises PreconditionFailed when the tenant has too many files, or bytes in them. `kept_s` may shorten
        the time."""
        kept_ms = self._kept_ms if kept_s is None else min(self._kept_ms, int(kept_s * 1000))
        where = self._key("content", tenant, file_id)
        keys = [self._key("file", tenant, file_id), where, self._of_tenant("files", tenant)]
        about = [file_id, filename, purpose, len(content), kept_ms]
        args = [*about, self._most, MAX_FILES, self._key("file", tenant, ""), INDEX_MS]
        self._check_room(await self._store.run(scripts.ADD_FILE, keys, [*args, 0], tenant))
        try:
            for start in range(0, max(1, len(content)), PIECE_BYTES):
                piece = content[start : start + PIECE_BYTES]
                await self._store.run(scripts.ADD_PIECE, [where], [piece, UPLOAD_MS], tenant)
            outcome = await self._store.run(scripts.ADD_FILE, keys, [*args, 1], tenant)
            self._check_room(outcome)
            if outcome == b"gone":  # the pieces have expired, or were deleted before a late command
                raise Unavailable("the upload took too long; send the file again", retry_after=1.0)
        except BaseException:  # no index has its pieces, so the tenant's bounds do not count them
            with suppress(Unavailable):
                await self._store.run(scripts.DELETE_FILE, keys, [file_id])
            raise
        return await self.file(tenant, file_id)

    def _check_room(self, outcome: bytes) -> None:
        bounds = {b"bytes": f"{self._most} bytes (max_tenant_file_mib)", b"files": str(MAX_FILES)}
        if (bound := bounds.get(outcome)) is not None:
            raise PreconditionFailed(
                f"all files together may be {bound}, which this one would exceed: delete some",
                reason="FILES_FULL",
                field="file",
                bound=bound,
            )

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """Raises NotFound."""
        fields = await self._hash(tenant, "file", tenant, file_id)
        if not fields:
            raise no_such("file", file_id, FILES_KEPT)
        return _file(file_id, fields)

    async def files(
        self, tenant: str, limit: int, after: str = "", *, newest_first: bool = True, purpose: str = ""
    ) -> tuple[list[FileRecord], bool] | None:
        """A page, and whether there are more; None when there is no file `after`."""
        page = await self._page("file", "files", tenant, limit, after, newest_first, purpose)
        return page and ([_file(*row) for row in page[0]], page[1])

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Raises NotFound. A batch that has begun keeps its own copy of its input."""
        keys = [*(self._key(kind, tenant, file_id) for kind in ("file", "content")), self._of_tenant("files", tenant)]
        if not int(await self._store.run(scripts.DELETE_FILE, keys, [file_id], tenant)):
            raise no_such("file", file_id, FILES_KEPT)

    async def content(self, tenant: str, record: FileRecord) -> AsyncIterator[bytes]:
        """The file's bytes, page by page."""
        async for page in self._pages("content", tenant, record.file_id):
            yield page

    # ---- batches

    async def create(self, tenant: str, batch_id: str, file_id: str, fields: Mapping[str, str]) -> BatchRecord:
        """An open batch without an owner. Raises NotFound for an unknown file, Busy or PreconditionFailed when the
        tenant has too many batches, or bytes in files."""
        keys = [self._key("batch", tenant, batch_id), self._key("input", tenant, batch_id)]
        keys += [self._key("content", tenant, file_id), self._key("file", tenant, file_id)]
        keys += [self._of_tenant("batches", tenant), self._open, self._of_tenant("files", tenant)]
        about = [part for pair in fields.items() for part in pair]
        most = [MAX_OPEN_BATCHES, MAX_BATCHES, self._key("batch", tenant, ""), INDEX_MS, DAY_S]
        most += [self._key("file", tenant, ""), self._most]
        args = [batch_id, f"{tenant}/{batch_id}", *most, *about]
        outcome = await self._store.run(scripts.CREATE, keys, args, tenant)
        if outcome == b"no file":
            raise no_such("file", file_id, FILES_KEPT, "input_file_id")
        if outcome == b"bytes":
            raise PreconditionFailed(
                f"all files together, answers of batches included, have more than {self._most} bytes"
                " (max_tenant_file_mib): delete some",
                reason="FILES_FULL",
                field="input_file_id",
                bound=f"while all files together have at most {self._most} bytes",
            )
        if outcome == b"open":
            raise Busy(
                f"{MAX_OPEN_BATCHES} batches have not ended, the maximum", reason="TENANT_BATCHES", retry_after=30.0
            )
        if outcome == b"kept":
            raise PreconditionFailed(
                f"{MAX_BATCHES} batches are kept, the maximum; ended ones are forgotten after batch_kept_s",
                reason="BATCHES_FULL",
            )
        return await self.batch(tenant, batch_id)

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Raises NotFound."""
        return await self._batch(tenant, tenant, batch_id)

    async def _batch(self, turn: str, tenant: str, batch_id: str) -> BatchRecord:
        fields = await self._hash(turn, "batch", tenant, batch_id)
        if "state" not in fields:
            raise no_such("batch", batch_id, BATCHES_KEPT)
        return BatchRecord(tenant, batch_id, fields)

    async def batches(self, tenant: str, limit: int, after: str = "") -> tuple[list[BatchRecord], bool] | None:
        """A page, newest first, and whether there are more; None when there is no batch `after`."""
        page = await self._page("batch", "batches", tenant, limit, after, True, "")
        return page and ([BatchRecord(tenant, *row) for row in page[0]], page[1])

    async def cancel(self, tenant: str, batch_id: str) -> None:
        """The owner notices when it renews its lease. Raises NotFound, PreconditionFailed when it has ended."""
        status = (await self._store.run(scripts.CANCEL, [self._key("batch", tenant, batch_id)], [], tenant)).decode()
        if status == "unknown":
            raise no_such("batch", batch_id, BATCHES_KEPT)
        if status != "open":
            raise PreconditionFailed(
                f"the batch is {status}", reason="BATCH_ENDED", field="batch_id", bound="a batch that has not ended"
            )

    # ---- for the owner of a batch

    async def claim(self) -> BatchRecord | None:
        """Takes over a batch without an owner; None when there is none."""
        while True:
            args = [f"{self._prefix}:batch:", int(self.lease_s * 1000)]
            claimed = await self._store.run(CLAIM, [self._open, self._open], args)
            if not claimed:
                return None
            if generation := int(claimed[1]):
                # Not in its turn: a tenant with many calls would delay batches of others that are claimed next.
                record = await self._batch("", *claimed[0].decode().split("/", 1))
                if record.generation == generation:
                    return record

    async def renew(self, owned: Sequence[BatchRecord]) -> list[Kept]:
        """Renews the leases of these batches."""
        return await self._lease(owned, int(self.lease_s * 1000))

    async def release(self, owned: Sequence[BatchRecord]) -> None:
        """Ends the leases at once, so that another router can claim the batches."""
        await self._lease(owned, 0)

    async def _lease(self, owned: Sequence[BatchRecord], lease_ms: int) -> list[Kept]:
        if not owned:
            return []
        keys = [self._open, *(self._key("batch", one.tenant, one.batch_id) for one in owned)]
        names = [part for one in owned for part in (f"{one.tenant}/{one.batch_id}", one.generation)]
        return [Kept(outcome.decode()) for outcome in await self._store.run(RENEW, keys, [lease_ms, *names])]

    async def input(self, record: BatchRecord) -> list[bytes]:
        """The batch's input file in pieces; join long ones on a thread."""
        return [page async for page in self._pages("input", record.tenant, record.batch_id)]

    async def answered(self, record: BatchRecord) -> set[int]:
        """The lines that have a result."""
        async with self._store.connection(tenant=record.tenant) as client:
            bits = await client.get(self._key("answered", record.tenant, record.batch_id)) or b""
        return {8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte & 0x80 >> bit}

    async def begin(self, record: BatchRecord, status: BatchStatus, **counts: int) -> bool:
        """Stores a status that is not final, with its time, unless the batch was cancelled. False: it has another
        owner."""
        args = [record.generation, status.value, *(part for pair in counts.items() for part in pair)]
        key = self._key("batch", record.tenant, record.batch_id)
        return bool(await self._store.run(scripts.BEGIN, [key], args, record.tenant) == b"kept")

    async def add(self, record: BatchRecord, results: Sequence[LineResult]) -> Stored:
        """Appends the results of lines without one. FULL: only the results before the first one over the limit are
        stored."""
        names = [record.fields[name] for name in ("output_name", "error_name")]
        keys = [self._key(kind, record.tenant, record.batch_id) for kind in ("batch", "answered")]
        keys += [self._key("content", record.tenant, name) for name in names]
        args: list[Any] = [record.generation, self._most // OUTPUT_SHARE, PIECE_BYTES]
        for one in results:
            tokens = (one.input_tokens, one.cached_tokens, one.output_tokens, one.reasoning_tokens)
            args += [one.line, "completed" if one.completed else "failed", one.text, *tokens]
        return Stored((await self._store.run(scripts.ADD_RESULTS, keys, args, record.tenant)).decode())

    async def end(self, record: BatchRecord, status: BatchStatus, errors: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Stores the final status; the results become files. `errors` are those of the input. False: it has another
        owner, or needs one, because a line of a completed batch has no result."""
        tenant, batch_id = record.tenant, record.batch_id
        names = [record.fields[name] for name in ("output_name", "error_name")]
        keys = [*(self._key(kind, tenant, batch_id) for kind in ("batch", "input", "answered")), self._open]
        keys.append(self._of_tenant("files", tenant))
        keys += [self._key(kind, tenant, name) for name in names for kind in ("file", "content")]
        own_ms = 1000 * record.number("output_kept_s")
        kept_ms = min(own_ms, self._kept_ms) if own_ms else self._kept_ms
        about = [record.generation, f"{tenant}/{batch_id}", status.value, json.dumps(list(errors)) if errors else ""]
        args = [*about, self._kept_ms, kept_ms, batch_id, *names]
        return bool(await self._store.run(scripts.END, keys, args, tenant) == b"kept")

    # ---- inside

    @property
    def _open(self) -> str:
        return f"{self._prefix}:open-batches"

    def _key(self, kind: str, tenant: str, name: str) -> str:
        return f"{self._prefix}:{kind}:{tenant}/{name}"

    def _of_tenant(self, kind: str, tenant: str) -> str:
        return f"{self._prefix}:{kind}:{tenant}"

    async def _hash(self, turn: str, kind: str, tenant: str, name: str) -> dict[str, str]:
        async with self._store.connection(tenant=turn) as client:
            return _text(await client.hgetall(self._key(kind, tenant, name)))

    async def _page(
        self, kind: str, index: str, tenant: str, limit: int, after: str, newest_first: bool, purpose: str
    ) -> tuple[list[tuple[str, dict[str, str]]], bool] | None:
        args = [self._key(kind, tenant, ""), after, limit, int(newest_first), purpose]
        more, rows = await self._store.run(scripts.LIST, [self._of_tenant(index, tenant)], args, tenant)
        if int(more) < 0:
            return None
        found = [(name.decode(), _text(dict(zip(flat[::2], flat[1::2], strict=True)))) for name, flat in rows]
        return found, bool(more)

    async def _pages(self, kind: str, tenant: str, name: str) -> AsyncIterator[bytes]:
        at, keys = 0, [self._key(kind, tenant, name)]
        while pieces := await self._store.run(scripts.PAGE, keys, [at, PIECE_BYTES, MAX_PAGE_PIECES], tenant):
            yield b"".join(pieces)
            at += len(pieces)


def _text(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


def _file(file_id: str, fields: Mapping[str, str]) -> FileRecord:
    numbers = (int(fields[name]) for name in ("bytes", "created", "expires"))
    return FileRecord(file_id, fields["filename"], fields["purpose"], *numbers)
