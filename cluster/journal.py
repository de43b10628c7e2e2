"""Jobs and their tokens, kept so that any router can go on with them. With cluster/registry.py the only file that knows
Redis, and every key of jobs in it:

    tandem:<cluster>:job:<id>          hash: what was asked, the state, whose it is (generation), and how many tokens
                                       each completion has (tokens, tokens:1, tokens:2, ...)
    tandem:<cluster>:job:<id>:events   stream: what its watchers get, one entry for each event
    tandem:<cluster>:jobs              sorted set: id of each open job -> when its owner's lease ends, in ms

Each change is one script, which first asks whether the caller still owns the job: a router that was taken for dead and
comes back can add nothing. The server's clock counts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from cluster.registry import CALL_TIMEOUT_S, answering
from tandem import errors
from tandem.errors import Busy, NotFound, PreconditionFailed, TandemError

_NOW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
"""
_OWNED = """
local job = redis.call('HMGET', KEYS[1], 'generation', 'state', 'cancelled')
if job[1] ~= ARGV[1] or job[2] ~= 'open' then return 'lost' end
"""
SUBMIT = (
    _NOW
    + """
local known = redis.call('HGET', KEYS[1], 'digest')
if known then return known == ARGV[2] and 'known' or 'other' end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[5]) then return 'full' end
redis.call('HSET', KEYS[1], 'request', ARGV[1], 'digest', ARGV[2], 'state', 'open', 'generation', 1, 'tokens', 0)
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[4])
return 'new'
"""
)
APPEND = (
    _OWNED
    + """
if job[3] then return 'cancelled' end
if (redis.call('HGET', KEYS[1], ARGV[5]) or '0') ~= ARGV[2] then return 'gap' end
redis.call('XADD', KEYS[2], '*', 'event', ARGV[4])
redis.call('HSET', KEYS[1], ARGV[5], ARGV[3])
return 'kept'
"""
)
END = (
    _OWNED
    + """
if ARGV[3] ~= '' then redis.call('XADD', KEYS[2], '*', 'event', ARGV[3]) end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'error', ARGV[4])
redis.call('ZREM', KEYS[3], ARGV[5])
redis.call('XADD', KEYS[2], '*', 'end', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
return 'kept'
"""
)
RENEW = (
    _NOW
    + _OWNED
    + """
redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[3])
return job[3] and 'cancelled' or 'kept'
"""
)
CLAIM = (
    _NOW
    + """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1)[1]
if not due then return false end
local key = ARGV[1] .. due
if redis.call('HGET', key, 'state') ~= 'open' then
  redis.call('ZREM', KEYS[1], due)
  return {due, '0'}
end
redis.call('ZADD', KEYS[1], now + ARGV[2], due)
return {due, tostring(redis.call('HINCRBY', key, 'generation', 1))}
"""
)
CANCEL = """
if redis.call('HGET', KEYS[1], 'state') == 'open' then redis.call('HSET', KEYS[1], 'cancelled', 1) end
return redis.call('EXISTS', KEYS[1])
"""


class JobState(StrEnum):
    OPEN = "open"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Kept(StrEnum):
    """What became of a change."""

    KEPT = "kept"
    CANCELLED = "cancelled"  # somebody wants the job to end
    LOST = "lost"  # it is another router's by now, or has ended
    GAP = "gap"  # the tokens do not stand where those before them end


@dataclass(frozen=True, slots=True)
class JobRecord:
    job_id: str
    request: bytes
    state: JobState
    generation: int
    tokens: int
    error: TandemError | None


@dataclass(frozen=True, slots=True)
class Entry:
    """`at`: its place in the job's stream. Of the last one `ended` says how the job ended, and `event` is empty."""

    at: str
    event: bytes
    ended: JobState | None = None


class Journal:
    """Every call is bounded and raises Unavailable when Redis does not answer."""

    def __init__(self, url: str, cluster: str, *, lease_s: float, kept_s: float, most: int) -> None:
        """`lease_s`: how long a job is its router's without a word of it; `kept_s`: how long an ended one is kept;
        `most`: open jobs."""
        self.lease_s = lease_s
        self._kept_ms, self._most = int(kept_s * 1000), most
        self._prefix = f"tandem:{cluster}"
        self._redis = redis.Redis.from_url(
            url, socket_timeout=None, socket_connect_timeout=CALL_TIMEOUT_S, health_check_interval=30
        )
        self._scripts = {
            name: self._redis.register_script(text)
            for name, text in {
                "submit": SUBMIT,
                "append": APPEND,
                "end": END,
                "renew": RENEW,
                "claim": CLAIM,
                "cancel": CANCEL,
            }.items()
        }

    async def close(self) -> None:
        await self._redis.aclose()

    async def submit(self, job_id: str, request: bytes, digest: str) -> bool:
        """Whether it is new; its first owner has generation 1. Raises PreconditionFailed for another request under the
        same id, Busy when there are too many open ones."""
        found = await self._run(
            "submit", [self._job(job_id), self._open], [request, digest, self._lease_ms, job_id, self._most]
        )
        if found == "other":
            raise PreconditionFailed(
                f"there is a job {job_id!r:.140} already, and it asked for something else",
                reason="JOB_DIFFERS",
                field="request_id",
                bound="a new one for a new request",
            )
        if found == "full":
            raise Busy(f"{self._most} jobs are open, and more are not kept", reason="JOBS_FULL", retry_after=5.0)
        return found == "new"

    async def append(self, job_id: str, generation: int, first: int, end: int, event: bytes, choice: int = 0) -> Kept:
        """Tokens [first, end) of a completion; none where it has ended and others go on."""
        keys = [self._job(job_id), self._events(job_id)]
        place = f"tokens:{choice}" if choice else "tokens"
        return Kept(await self._run("append", keys, [generation, first, end, event, place]))

    async def end(
        self,
        job_id: str,
        generation: int,
        state: JobState,
        event: bytes = b"",
        error: TandemError | None = None,
    ) -> Kept:
        keys = [self._job(job_id), self._events(job_id), self._open]
        said = _to_json(error) if error else ""
        return Kept(await self._run("end", keys, [generation, state.value, event, said, job_id, self._kept_ms]))

    async def renew(self, job_id: str, generation: int) -> Kept:
        """Its owner is there."""
        keys = [self._job(job_id), self._open]
        return Kept(await self._run("renew", keys, [generation, self._lease_ms, job_id]))

    async def release(self, job_id: str, generation: int) -> None:
        """Its owner leaves it to whoever claims first."""
        await self._run("renew", [self._job(job_id), self._open], [generation, 0, job_id])

    async def claim(self) -> JobRecord | None:
        """A job whose owner's lease has ended, now the caller's; None when there is none."""
        while True:
            async with _bounded():
                found = await self._scripts["claim"](keys=[self._open], args=[f"{self._prefix}:job:", self._lease_ms])
            if not found:
                return None
            if (generation := int(found[1])) and (record := await self.get(found[0].decode())).generation == generation:
                return record

    async def cancel(self, job_id: str) -> None:
        """Its owner hears of it with the next token, or when it renews its lease. Raises NotFound."""
        if not int(await self._run("cancel", [self._job(job_id)], [])):
            raise _unknown(job_id)

    async def get(self, job_id: str) -> JobRecord:
        """Raises NotFound."""
        async with _bounded():
            found: dict[bytes, bytes] = await self._redis.hgetall(self._job(job_id))  # type: ignore[assignment]
        if b"state" not in found:
            raise _unknown(job_id)
        error = found.get(b"error", b"").decode()
        return JobRecord(
            job_id,
            found[b"request"],
            JobState(found[b"state"].decode()),
            int(found[b"generation"]),
            sum(int(count) for name, count in found.items() if name.startswith(b"tokens")),
            _from_json(error) if error else None,
        )

    async def entries(self, job_id: str, after: str = "0", wait_s: float = 0.0) -> list[Entry]:
        """What was kept after `after`, in order; waits so long when there is nothing."""
        async with _bounded(wait_s):
            found: Any = await self._redis.xread(
                {self._events(job_id): after}, count=1000, block=int(wait_s * 1000) if wait_s else None
            )
        return [_entry(at.decode(), fields) for _, entries in found for at, fields in entries]

    async def all(self, job_id: str) -> list[Entry]:
        """Everything that was kept, however much."""
        found: list[Entry] = []
        while more := await self.entries(job_id, found[-1].at if found else "0"):
            found += more
        return found

    # ---- inside

    @property
    def _open(self) -> str:
        return f"{self._prefix}:jobs"

    @property
    def _lease_ms(self) -> int:
        return int(self.lease_s * 1000)

    def _job(self, job_id: str) -> str:
        return f"{self._prefix}:job:{job_id}"

    def _events(self, job_id: str) -> str:
        return f"{self._job(job_id)}:events"

    async def _run(self, name: str, keys: list[str], args: list[Any]) -> str:
        async with _bounded():
            found = await self._scripts[name](keys=keys, args=args)
        return found.decode() if isinstance(found, bytes) else str(found)


@asynccontextmanager
async def _bounded(more_s: float = 0.0) -> AsyncIterator[None]:
    """Within, the server must answer in time. Raises Unavailable."""
    with answering():
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S + more_s):
                yield
        except TimeoutError as error:
            raise RedisError("it took too long") from error


def _entry(at: str, fields: dict[bytes, bytes]) -> Entry:
    ended = fields.get(b"end")
    return Entry(at, fields.get(b"event", b""), JobState(ended.decode()) if ended else None)


def _unknown(job_id: str) -> NotFound:
    return NotFound(
        f"there is no job {job_id!r:.140}; ended ones are forgotten after a while",
        reason="NO_SUCH_JOB",
        field="job_id",
        bound="the id of a job that is kept",
    )


def _to_json(error: TandemError) -> str:
    about = {name: getattr(error, name) for name in ("message", "reason", "field", "bound", "retry_after")}
    return json.dumps({"class": type(error).__name__, **about})


def _from_json(text: str) -> TandemError:
    about = json.loads(text)
    kind = getattr(errors, about.pop("class"), errors.InternalError)
    return kind(about.pop("message"), **about)
