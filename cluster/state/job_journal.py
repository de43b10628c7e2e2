"""Jobs and their tokens, stored so that any router can continue them. All Redis keys of jobs are in this file:

    tandem:{<cluster>}:job:<id>        hash: the request, the state, the owner's generation, and how many tokens each
                                       completion has (tokens, tokens:1, tokens:2, ...)
    tandem:{<cluster>}:events:<id>     stream: the events that watchers receive, one entry each
    tandem:{<cluster>}:jobs            sorted set: id of each open job -> when its owner's lease ends, in ms
    tandem:{<cluster>}:open            sorted set: the same ids, all with score 0, so that a tenant's jobs are one range
    tandem:{<cluster>}:ended:<tenant>  sorted set: id of each ended job -> when it expires, in ms
    tandem:{<cluster>}:ended-bytes:<tenant>  hash: id of each ended job -> its bytes; under the empty name, those of all
    tandem:{<cluster>}:wake:<router>   stream: ends the blocking read of a router that has another job to watch

An id is TENANT/NAME, and no tenant's name contains `/`. Each change is one script, which first checks that the caller
still owns the job: a router that was presumed dead and returns can add nothing. Times are the server's.

A router's number of connections does not depend on how many jobs it runs or clients watch: some are for changes, some
for pages that watchers read, one for the blocking read (cluster/state/stream_watches.py).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.state import job_scripts as scripts
from cluster.state.redis_store import RedisStore, no_such
from cluster.state.stream_watches import Raw, StreamWatches, later
from tandem import errors
from tandem.errors import Busy, PreconditionFailed, TandemError, TooLarge

WRITE_CONNECTIONS, READ_CONNECTIONS = 32, 8  # connections
PAGE_ENTRIES = 256  # entries of one read
LEASES_PER_SCRIPT = 500  # leases of one script
COMPLETIONS = 16  # of one job, at most
STATUS = ("state", "generation", "error", "tokens", *(f"tokens:{number}" for number in range(1, COMPLETIONS)))
OWN_BYTES = 5 * 1024  # that a job takes in addition to its content, most of them Valkey's for a stream
EXPIRED_PER_SCRIPT = 64  # expired jobs whose entries one script removes
DAY_S = 86_400
KEPT = "ended jobs are forgotten after job_kept_s, or sooner if newer ones need the room"


class JobState(StrEnum):
    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Kept(StrEnum):
    """The outcome of a change."""

    KEPT = "kept"
    CANCELLED = "cancelled"  # a client has cancelled the job
    LOST = "lost"  # another router owns it now, or it has ended
    GAP = "gap"  # the tokens do not begin where the stored ones end


@dataclass(frozen=True, slots=True)
class JobRecord:
    """`request` is empty in a status."""

    job_id: str
    request: bytes
    state: JobState
    generation: int
    tokens: int
    error: TandemError | None


@dataclass(frozen=True, slots=True)
class Entry:
    """`at`: the entry's id in the job's stream. The last entry has `ended`, the final state, and no `event`."""

    at: str
    event: bytes
    ended: JobState | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A job to be stored; requests with equal digests are the same job."""

    job_id: str
    request: bytes
    digest: str


class JobJournal:
    """Every call is bounded and raises Unavailable when Redis does not answer."""

    def __init__(
        self,
        url: str,
        cluster: str,
        *,
        lease_s: float,
        kept_s: float,
        most: int,
        most_bytes: int,
        most_each: int | None = None,
    ) -> None:
        """`lease_s`: the time without a renewal after which a router loses a job; `kept_s`: how long an ended job is
        kept; `most`: the limit on open jobs; `most_bytes`: of the requests of one tenant's open jobs, and of its ended
        jobs, beyond which the oldest ones are removed; `most_each`: as `most`, of one named tenant."""
        self.lease_s, self._most_bytes = lease_s, most_bytes
        self._kept_ms, self._most, self._most_each = int(kept_s * 1000), most, most if most_each is None else most_each
        self._prefix = f"tandem:{{{cluster}}}"
        self._writes, self._reads = RedisStore(url, most=WRITE_CONNECTIONS), RedisStore(url, most=READ_CONNECTIONS)
        self._watches = StreamWatches(RedisStore(url, most=1), self._reads, self._events, f"{self._prefix}:wake")

    async def close(self) -> None:
        await self._watches.close()
        await self._writes.close()
        await self._reads.close()

    async def submit(self, jobs: Sequence[Asked], tenant: str = "", timeout_s: float = DAY_S) -> list[bool]:
        """Stores all of them or none. Returns whether each is new; the first owner of a new job has generation 1. A job
        that no router ends expires after `timeout_s` and the time for which ended jobs are kept. Raises
        PreconditionFailed for another request under the same id, Busy when too many are open, or too many bytes of
        them, TooLarge for more new ones than may ever be open."""
        args: list[Any] = [self._lease_ms, self._most, self._most_each, tenant, self._most_bytes, self._job("")]
        args.append(int(timeout_s * 1000) + self._kept_ms)
        for job in jobs:
            args += [job.job_id, job.request, job.digest]
        keys = [*self._open, *(self._job(job.job_id) for job in jobs)]
        outcome, *about = [part.decode() for part in await self._writes.run(scripts.SUBMIT, keys, args, tenant)]
        if outcome == "other":
            raise PreconditionFailed(
                f"job {about[0]!r:.140} exists already, with a different request",
                reason="JOB_DIFFERS",
                field="request_id",
                bound="a new one for a new request",
            )
        what, most = "new jobs", min(self._most, self._most_each) if tenant else self._most
        room = f"{self._most_each} open jobs"
        if outcome == "bytes":
            what, most = "bytes of new jobs", self._most_bytes
            room = f"{most} bytes of open jobs (max_tenant_job_mib)"
        if outcome != "kept" and (new := int(about[0])) > most:
            raise TooLarge(f"{new} {what} are more than {most}, the maximum of open ones", bound=f"at most {most}")
        if outcome == "full":
            raise Busy(f"{self._most} jobs are open, the maximum (max_jobs)", reason="JOBS_FULL", retry_after=5.0)
        if outcome != "kept":
            raise Busy(
                f"{tenant or 'all clients together'} may have {room}, which these would exceed",
                reason="TENANT_JOBS",
                retry_after=5.0,
            )
        return [status == "new" for status in about]

    async def append(self, job_id: str, generation: int, first: int, end: int, event: bytes, choice: int = 0) -> Kept:
        """Appends tokens [first, end) of a completion; an empty range when it has ended and others continue."""
        keys = [self._job(job_id), self._events(job_id)]
        place = f"tokens:{choice}" if choice else "tokens"
        return Kept(await self._run(scripts.APPEND, keys, [generation, first, end, event, place], job_id))

    async def end(
        self,
        job_id: str,
        generation: int,
        state: JobState,
        event: bytes = b"",
        error: TandemError | None = None,
    ) -> Kept:
        """Also removes the tenant's oldest ended jobs, if this one needs their room."""
        error_json = _to_json(error) if error else ""
        args = [generation, state.value, event, error_json, job_id, self._kept_ms, self._most_bytes]
        args += [self._job(""), self._events(""), OWN_BYTES, EXPIRED_PER_SCRIPT]
        return Kept(await self._run(scripts.END, [*self._ended(job_id), *self._open], args, job_id))

    async def renew(self, owned: Sequence[tuple[str, int]]) -> list[Kept]:
        """Renews the leases of these jobs, given by id and generation."""
        return await self._lease(owned, self._lease_ms)

    async def release(self, owned: Sequence[tuple[str, int]]) -> None:
        """Ends the leases at once, so that another router can claim the jobs."""
        await self._lease(owned, 0)

    async def _lease(self, owned: Sequence[tuple[str, int]], lease_ms: int) -> list[Kept]:
        outcomes: list[Kept] = []
        for start in range(0, len(owned), LEASES_PER_SCRIPT):
            some = owned[start : start + LEASES_PER_SCRIPT]
            keys = [self._open[0], *(self._job(job_id) for job_id, _ in some)]
            args = [lease_ms, *(part for lease in some for part in lease)]
            outcomes += [Kept(outcome.decode()) for outcome in await self._writes.run(scripts.RENEW, keys, args)]
        return outcomes

    async def claim(self) -> JobRecord | None:
        """Takes over a job whose lease has expired; None when there is none."""
        while True:
            claimed = await self._writes.run(scripts.CLAIM, self._open, [f"{self._prefix}:job:", self._lease_ms])
            if not claimed:
                return None
            if generation := int(claimed[1]):
                # Not in its turn: a tenant with many calls would delay jobs of others that are claimed next.
                record = await self._record("", claimed[0].decode(), "request", *STATUS)
                if record.generation == generation:
                    return record

    async def cancel(self, job_id: str) -> None:
        """The owner notices with the next token, or when it renews its lease. Raises NotFound."""
        if not int(await self._run(scripts.CANCEL, [self._job(job_id)], [], job_id)):
            raise no_such("job", job_id, KEPT)

    async def open_with(self, prefix: str) -> list[str]:
        """The ids of the open jobs that begin with `prefix`."""
        first = prefix.encode()
        async with self._reads.connection(tenant=_tenant(prefix)) as client:
            # No id has the byte 0xff, since ids are UTF-8.
            found = await client.zrangebylex(self._open[1], b"[" + first, b"(" + first + b"\xff")
        return [job_id.decode() for job_id in found]

    async def forget(self, job_id: str) -> bool:
        """Removes a job that has ended, before its time. False: there is none."""
        return bool(await self._writes.run(scripts.FORGET, self._ended(job_id), [job_id], _tenant(job_id)))

    async def get(self, job_id: str) -> JobRecord:
        """Raises NotFound."""
        return await self._record(_tenant(job_id), job_id, "request", *STATUS)

    async def status(self, job_id: str) -> JobRecord:
        """Without the request, which may be megabytes. Raises NotFound."""
        return await self._record(_tenant(job_id), job_id, *STATUS)

    async def _record(self, turn: str, job_id: str, *names: str) -> JobRecord:
        async with self._reads.connection(tenant=turn) as client:
            values = await client.hmget(self._job(job_id), names)
        fields = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if "state" not in fields:
            raise no_such("job", job_id, KEPT)
        error = fields.get("error", b"").decode()
        return JobRecord(
            job_id,
            fields.get("request", b""),
            JobState(fields["state"].decode()),
            int(fields["generation"]),
            sum(int(count) for name, count in fields.items() if name.startswith("tokens")),
            _from_json(error) if error else None,
        )

    async def entries(self, job_id: str, after: str = "0") -> list[Entry]:
        """The entries after `after`, in order, at most one page."""
        async with self._reads.connection(tenant=_tenant(job_id)) as client:
            rows = await client.xrange(self._events(job_id), f"({after}", "+", count=PAGE_ENTRIES)
        return [_entry(row) for row in rows]

    async def pages(self, job_id: str) -> AsyncGenerator[list[Entry], None]:
        """All stored entries of the job."""
        at = "0"
        while page := await self.entries(job_id, at):
            yield page
            at = page[-1].at

    async def watch(self, job_id: str, idle_s: float) -> AsyncGenerator[list[Entry], None]:
        """Yields all stored entries, then new ones as they arrive; an empty list after `idle_s` seconds without one.
        A slow watcher delays only itself."""
        at = "0"
        while page := await self.entries(job_id, at):
            yield page
            at = page[-1].at
        async with self._watches.joined(job_id, at) as tail:
            while True:
                if tail.catch_up():
                    while page := await self.entries(job_id, at):
                        yield page
                        at = page[-1].at
                entries = [entry for entry in map(_entry, await tail.take(idle_s)) if later(entry.at, at)]
                if entries or not tail.behind:
                    yield entries
                at = entries[-1].at if entries else at
                del entries  # otherwise kept while it waits for more

    def end_watches(self, error: TandemError) -> None:
        """Ends all watches with this error."""
        self._watches.fail(error)

    # ---- inside

    @property
    def _open(self) -> list[str]:
        return [f"{self._prefix}:jobs", f"{self._prefix}:open"]

    @property
    def _lease_ms(self) -> int:
        return int(self.lease_s * 1000)

    def _job(self, job_id: str) -> str:
        return f"{self._prefix}:job:{job_id}"

    def _events(self, job_id: str) -> str:
        return f"{self._prefix}:events:{job_id}"

    def _ended(self, job_id: str) -> list[str]:
        """The keys of a job, and of the ended jobs of its tenant."""
        tenant, prefix = _tenant(job_id), self._prefix
        return [
            *(self._job(job_id), self._events(job_id)),
            *(f"{prefix}:ended:{tenant}", f"{prefix}:ended-bytes:{tenant}"),
        ]

    async def _run(self, script: str, keys: list[str], args: list[Any], job_id: str) -> str:
        outcome = await self._writes.run(script, keys, args, _tenant(job_id))
        return outcome.decode() if isinstance(outcome, bytes) else str(outcome)


def _tenant(job_id: str) -> str:
    return job_id.partition("/")[0]


def _entry(raw: Raw) -> Entry:
    at, fields = raw
    ended = fields.get(b"end")
    return Entry(at.decode(), fields.get(b"event", b""), JobState(ended.decode()) if ended else None)


def _to_json(error: TandemError) -> str:
    about = {name: getattr(error, name) for name in ("message", "reason", "field", "bound", "retry_after")}
    return json.dumps({"class": type(error).__name__, **about})


def _from_json(text: str) -> TandemError:
    about = json.loads(text)
    kind = getattr(errors, about.pop("class"), errors.InternalError)
    return kind(about.pop("message"), **about)
