"""Which workers are alive, how many are wanted, and who supervises. Works with Redis and Valkey (cluster/store.py). All
keys of workers are in this file:

    tandem:{<cluster>}:workers      hash: worker id -> incarnation, when that life began, JSON of its WorkerRecord
    tandem:{<cluster>}:beats        sorted set: worker id -> when its record expires (server clock, ms)
    tandem:{<cluster>}:versions     sorted set: worker id -> number of the last change of its record or of its removal
    tandem:{<cluster>}:version      hash: the number of the last change; the epoch, a random name of this numbering
    tandem:{<cluster>}:supervisor   token of the supervisor; a lease that expires after SUPERVISOR_LEASE_S
    tandem:{<cluster>}:wanted       hash role -> number of workers
    tandem:{<cluster>}:autoscale    JSON of what the autoscaler found last (cluster/scaling.py), expires after 10 s
    tandem:{<cluster>}:changed      pub/sub channel: "workers" or "wanted": a change that others should hear of now

A beat that changes nothing in a record moves only its expiry. A reader asks for what has changed since the version that
it knows, so its cost grows with changes and not with workers. Nothing here is the truth about a request: losing it all
costs placement quality, never a running stream.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from time import perf_counter, time
from typing import Any

import structlog
from pydantic import TypeAdapter

from cluster.store import FAILURES, Store, raise_lost_cancel
from tandem.errors import PreconditionFailed, Unavailable
from tandem.tasks import end, forever

log = structlog.get_logger(__name__)
CONNECTIONS = 8
RECONNECT_S = 0.5
SLICE = 128  # records that are parsed in one turn of the event loop
TOGETHER_S = 0.01  # announcements within this time are one change
SCALING_KEPT_S = 10.0
SUPERVISOR_LEASE_S = 10.0


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One life of one worker, as it last described itself."""

    worker_id: str
    role: str
    state: State
    pid: int
    incarnation: str
    address: str  # host:port
    model: str = ""
    layout_hash: str = ""  # of its KV blocks; equal on both sides of a transfer
    kv_dtype: str = ""  # of an element of K or V there, such as "int8"
    sum_order: str = ""  # equal in two workers: the same bits, such as "tile32"; "": not known
    kv_token_bytes: float = 0.0  # of one token's KV, scales and padding included
    max_model_len: int = 0  # longest sequence that this worker can hold
    vocab_size: int = 0
    eos_token_ids: list[int] = field(default_factory=list)
    block_size: int = 0
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    blocks_total: int = 0
    blocks_held: int = 0
    weights: str = ""  # format of the weights of its products
    weight_bytes: int = 0  # of the model as it is served
    step_s: float = 0.0  # seconds of a step of one stream; 0: not known
    stream_s: float = 0.0  # that each further stream adds
    prompt_rate: float = 0.0  # prompt tokens per second; 0: not known
    backlog: int = 0  # prompt tokens still to be computed; of a router, of those who wait for a place
    begun: int = 0  # requests received by this incarnation: each changes the record, which routers then read
    arrived: int = 0  # of a router: prompt tokens to be computed that have come in its life, refused ones included
    slow_products: str = ""  # a sentence where the compiled products lose to torch's (engine/speedcheck.py)
    metrics_address: str = ""  # host:port of /metrics; empty: it has none
    beat: float = 0.0  # unix seconds on the worker's clock

    def age(self) -> float:
        return max(0.0, time() - self.beat)

    @classmethod
    def parse(cls, text: str | bytes) -> WorkerRecord:
        """Fields of a newer version are skipped; a worker in a state that only a newer version knows takes no new
        requests. Raises ValueError for anything that is not a record."""
        try:
            return _RECORD.validate_json(text)
        except ValueError:
            values = json.loads(text)
            if not isinstance(values, dict) or values.get("state") in set(State):
                raise
            return _RECORD.validate_python({**values, "state": State.DRAINING})


_RECORD = TypeAdapter(WorkerRecord)


# ---- scripts. The first four keys are workers, beats, versions, version; the first arguments are the channel and a
# name for a new epoch. Each first removes what has expired.

_BEGIN = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('HSETNX', KEYS[4], 'epoch', ARGV[2])
local function changed(id)
  redis.call('ZADD', KEYS[3], redis.call('HINCRBY', KEYS[4], 'number', 1), id)
end
local function removed(id)
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
  changed(id)
  if redis.call('ZCARD', KEYS[3]) > redis.call('HLEN', KEYS[1]) + 1000 then  -- a new epoch forgets who is gone
    redis.call('DEL', KEYS[3])
    redis.call('HSET', KEYS[4], 'epoch', ARGV[2])
  end
end
local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1000)
for _, id in ipairs(expired) do removed(id) end
if #expired > 0 then redis.call('PUBLISH', ARGV[1], 'workers') end
"""
PING = "return 'pong'"
BEAT = (
    _BEGIN
    + """
local id, incarnation, born = ARGV[3], ARGV[4], tonumber(ARGV[5])
local value = incarnation .. ' ' .. ARGV[5] .. ' ' .. ARGV[6]
local old = redis.call('HGET', KEYS[1], id)
if old then
  local other, began = string.match(old, '^(%S*) (%S+) ')
  began = tonumber(began)
  if other ~= incarnation and (began > born or (began == born and other > incarnation)) then return 'superseded' end
end
if old ~= value then
  redis.call('HSET', KEYS[1], id, value)
  changed(id)
end
redis.call('ZADD', KEYS[2], now + ARGV[7], id)
if ARGV[8] == '1' then redis.call('PUBLISH', ARGV[1], 'workers') end
return 'kept'
"""
)
WITHDRAW = (
    _BEGIN
    + """
local old = redis.call('HGET', KEYS[1], ARGV[3])
if not old or string.match(old, '^(%S*) ') ~= ARGV[4] then return 0 end
removed(ARGV[3])
redis.call('PUBLISH', ARGV[1], 'workers')
return 1
"""
)
NEWS = (
    _BEGIN
    + """
local epoch, number = unpack(redis.call('HMGET', KEYS[4], 'epoch', 'number'))
number = tonumber(number or 0)
if epoch == ARGV[3] and tonumber(ARGV[4]) <= number then
  local ids = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[4], '+inf')
  if #ids <= 1000 then
    local found = {}
    if #ids > 0 then
      for i, value in ipairs(redis.call('HMGET', KEYS[1], unpack(ids))) do
        found[2 * i - 1], found[2 * i] = ids[i], value
      end
    end
    return {epoch, number, 0, now, found, {}}
  end
end
return {epoch, number, 1, now, redis.call('HGETALL', KEYS[1]), redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')}
"""
)
WANT = """
if #ARGV > 1 then redis.call('HSET', KEYS[1], unpack(ARGV, 2)) end
redis.call('PUBLISH', ARGV[1], 'wanted')
return 1
"""
LEAD = """
local holder = redis.call('GET', KEYS[1])
local ours = ARGV[2] .. '/'
if not holder or holder == ARGV[1] or (ARGV[2] ~= '' and string.sub(holder, 1, #ours) == ours) then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
  holder = ARGV[1]
end
return {holder, redis.call('PTTL', KEYS[1])}
"""
RESIGN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


@dataclass(frozen=True, slots=True)
class News:
    """What has changed in the registry since an earlier answer. `mark` names this answer in the next question."""

    mark: tuple[str, int]
    full: bool  # `records` are all workers; otherwise those that have changed, None for one that is gone
    records: dict[str, WorkerRecord | None]


class Registry:
    """A connection to the registry. Every call is bounded and raises Unavailable when it does not answer."""

    def __init__(self, url: str, cluster: str, ttl_s: float) -> None:
        self.cluster = cluster
        self.ttl_s = ttl_s
        self._prefix = f"tandem:{{{cluster}}}"
        self._store = Store(url, most=CONNECTIONS)
        self._keys = [f"{self._prefix}:{name}" for name in ("workers", "beats", "versions", "version")]

    async def close(self) -> None:
        await self._store.close()

    async def ping(self) -> float:
        """Seconds of one round trip."""
        start = perf_counter()
        await self._store.run(PING, self._keys[:1], [])
        return perf_counter() - start

    # ---- workers

    async def beat(self, record: WorkerRecord, *, announce: bool = False, born: float = 0.0) -> bool:
        """Keep the record for another ttl; `announce` a change of state so that routers see it at once.

        False: a life of this worker that began after `born` (unix seconds) is alive, and its record stays.
        """
        described = asdict(record)
        del described["beat"]
        said = json.dumps(described)
        life = [record.worker_id, record.incarnation, repr(born)]
        return bool(await self._run(BEAT, [*life, said, int(self.ttl_s * 1000), int(announce)]) == b"kept")

    async def withdraw(self, worker_id: str, incarnation: str) -> bool:
        """Forget a life of a worker that has stopped. False: the record is that of another life, and stays."""
        return bool(int(await self._run(WITHDRAW, [worker_id, incarnation])))

    async def workers(self) -> list[WorkerRecord]:
        """Every worker heard of within the ttl, by id."""
        records = (await self.news()).records
        return [record for _, record in sorted(records.items()) if record is not None]

    async def news(self, mark: tuple[str, int] = ("", 0)) -> News:
        """What has changed since the answer with this mark; all workers when that cannot be told."""
        epoch, number, full, now_ms, values, beats = await self._run(NEWS, [mark[0], mark[1]])
        ages = {name: (int(now_ms) - int(until)) / 1000 + self.ttl_s for name, until in _pairs(beats)}
        records: dict[str, WorkerRecord | None] = {}
        for at, (name, value) in enumerate(_pairs(values), 1):
            beat = time() - ages.get(name, 0.0)
            records[name.decode()] = None if value is None else parse_value(name, value, beat)
            if at % SLICE == 0:
                await asyncio.sleep(0)  # the reader relays tokens on the same event loop
        return News((epoch.decode(), int(number)), bool(int(full)), records)

    async def _run(self, script: str, args: list[Any]) -> Any:
        return await self._store.run(script, self._keys, [f"{self._prefix}:changed", secrets.token_hex(8), *args])

    # ---- wanted pool sizes

    async def want(self, sizes: dict[str, int]) -> None:
        flat = [part for role, size in sizes.items() for part in (role, size)]
        await self._store.run(WANT, [f"{self._prefix}:wanted"], [f"{self._prefix}:changed", *flat])

    async def wanted(self) -> dict[str, int]:
        async with self._store.turn() as client:
            values = await client.hgetall(f"{self._prefix}:wanted")
        return {role.decode(): int(size) for role, size in values.items() if size.isdigit()}

    # ---- the supervisor's lease

    async def lead(self, token: str, run: str, lease_s: float = SUPERVISOR_LEASE_S) -> tuple[str, float]:
        """Take or renew the supervisor's lease. Returns who holds it now (`token`: the caller), and for how many
        seconds. A holder whose token begins with `run` and `/` gives way; an empty `run` only renews."""
        holder, left_ms = await self._store.run(LEAD, [f"{self._prefix}:supervisor"], [token, run, int(lease_s * 1000)])
        return holder.decode(), int(left_ms) / 1000

    async def resign(self, token: str) -> None:
        """Give the supervisor's lease back, if it is the caller's."""
        await self._store.run(RESIGN, [f"{self._prefix}:supervisor"], [token])

    # ---- what the autoscaler found

    async def tell_scaling(self, text: str) -> None:
        async with self._store.turn() as client:
            await client.set(f"{self._prefix}:autoscale", text, px=int(SCALING_KEPT_S * 1000))

    async def scaling(self) -> str | None:
        """None: it has said nothing lately."""
        async with self._store.turn() as client:
            found = await client.get(f"{self._prefix}:autoscale")
        return None if found is None else str(found.decode())

    # ---- changes

    async def changes(self, every_s: float) -> AsyncGenerator[None, None]:
        """Yields when something changed, once for announcements that come together, and at least every `every_s`
        seconds. Survives a lost registry."""
        yield None
        while True:
            try:
                async with self._store.client.pubsub() as channel:
                    await channel.subscribe(f"{self._prefix}:changed")
                    while True:
                        found = await channel.get_message(ignore_subscribe_messages=True, timeout=every_s)
                        raise_lost_cancel()
                        if found is not None:
                            await asyncio.sleep(TOGETHER_S)
                            while await channel.get_message(ignore_subscribe_messages=True, timeout=0.0) is not None:
                                raise_lost_cancel()
                        yield None
            except FAILURES as error:
                raise_lost_cancel()
                log.warning("registry.lost", error=str(error))
                await asyncio.sleep(min(every_s, RECONNECT_S))  # one that came back empty is filled soon
                yield None


def _pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def parse_value(name: bytes, value: bytes, beat: float) -> WorkerRecord | None:
    """None: it cannot be read, which must not keep its reader from all others."""
    try:
        record = WorkerRecord.parse(value.split(b" ", 2)[2])
        object.__setattr__(record, "beat", beat)  # it is not shared yet, and `replace` takes longer than parsing
        return record
    except (ValueError, IndexError) as error:
        log.error("registry.unreadable_record", worker=name.decode(errors="replace"), error=repr(error))
        return None


class Heartbeat:
    """Keeps the record of one life of one worker alive in the background, and says so at once when its state changes.

    Of two lives with one id the one that began last is in the registry; the other one goes on beating, in case the
    later one ends first.
    """

    def __init__(self, registry: Registry, describe: Callable[[], WorkerRecord], interval_s: float) -> None:
        self._registry = registry
        self._describe = describe
        self._interval_s = interval_s
        self._born = time()
        self._superseded = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.turns = 0  # beats that were tried

    async def start(self) -> None:
        """Writes the first record. Raises Unavailable if that fails: an unregistered worker must not start. Raises
        PreconditionFailed if a life of this worker that began later is alive."""
        record = self._describe()
        if not await self._registry.beat(record, announce=True, born=self._born):
            raise PreconditionFailed(
                f"another {record.worker_id} that started later is alive in cluster {self._registry.cluster!r}",
                reason="SUPERSEDED",
                field="cluster",
                bound="a name that no other cluster on this registry has",
            )
        self._task = forever(self._run, name="heartbeat")

    def changed(self) -> None:
        self._changed.set()

    async def stop(self) -> None:
        await end(self._task)
        record = self._describe()
        try:
            await self._registry.withdraw(record.worker_id, record.incarnation)
        except Unavailable as error:
            log.warning("registry.withdraw_failed", error=error.message)  # the record expires by itself

    async def _run(self) -> None:
        while True:
            announce = await _within(self._changed, self._interval_s)
            self._changed.clear()
            self.turns += 1
            try:
                kept = await self._registry.beat(self._describe(), announce=announce, born=self._born)
            except Unavailable as error:
                log.warning("registry.beat_failed", error=error.message)  # serving goes on; the next beat tries again
                continue
            if kept == self._superseded:
                self._superseded = not kept
                log.log(40 if self._superseded else 20, "registry.superseded", now=self._superseded)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event came within that time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
