"""The registry: live workers, wanted pool sizes and the supervisor's lease. Works with Redis and Valkey
(cluster/state/redis_store.py). All keys of workers are in this file, those of adapters in adapter_list.py:

    tandem:{<cluster>}:workers      hash: worker id -> incarnation, when it began, JSON of its WorkerRecord
    tandem:{<cluster>}:beats        sorted set: worker id -> when its record expires (server clock, ms)
    tandem:{<cluster>}:versions     sorted set: worker id -> number of the last change of its record or of its removal
    tandem:{<cluster>}:version      hash: the number of the last change; the epoch, a random name of this numbering;
                                    the server's clock at the last heartbeat, ms
    tandem:{<cluster>}:supervisor   token of the supervisor; a lease that expires after SUPERVISOR_LEASE_S
    tandem:{<cluster>}:wanted       hash role -> number of workers
    tandem:{<cluster>}:autoscale    JSON of the autoscaler's last verdicts (cluster/autoscaler.py), expires after 10 s
    tandem:{<cluster>}:changed      pub/sub channel: "workers", "wanted" or "adapters": a change to be read now

A heartbeat that does not change the record moves only its expiry. A reader asks for the changes since its last version:
its cost grows with changes, not with workers. No request depends on it: its loss impairs placement, no running stream.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from time import perf_counter, time
from typing import Any

import structlog
from pydantic import TypeAdapter, with_config

from cluster.state import redis_store
from cluster.state.redis_store import FAILURES, RedisStore, raise_lost_cancel
from cluster.state.registry_scripts import (
    ACQUIRE_LEASE,
    BEAT,
    CHANGES,
    KEEP_WANTED,
    PUBLISH_SCALING,
    RELEASE_LEASE,
    SET_WANTED,
    WITHDRAW,
)

log = structlog.get_logger(__name__)
MAX_CONNECTIONS = 8
RECONNECT_S = 0.5
RECORDS_PER_SLICE = 128  # records that are parsed in one turn of the event loop
COALESCE_S = 0.01  # announcements within this time are one change
SCALING_TTL_S = 10.0
SUPERVISOR_LEASE_S = 10.0


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    OTHER_VOCABULARY = "other-vocabulary"  # to the reader (services/worker_liveness.py); no worker reports it


@dataclass(slots=True)
class WorkerRecord:
    """One incarnation of one worker, as it last described itself. Treat it as immutable; it is not frozen because a
    frozen one takes three times as long to make, and a router makes one per worker and second."""

    worker_id: str
    role: str
    state: State
    pid: int
    incarnation: str
    address: str  # host:port
    model: str = ""
    kv_meaning: str = ""  # of its KV: workers can read KV of equal meaning, also in other blocks
    computes_with: str = ""  # checkpoint, its type and that of KV: workers with equal values give the same tokens
    kv_dtype: str = ""  # of an element of K or V, such as "int8"
    sum_order: str = ""  # such as "tile32"; workers with equal values compute equal bits; "": not known
    kv_token_bytes: float = 0.0  # of one token's KV, scales and padding included
    max_model_len: int = 0  # longest sequence that this worker can hold
    vocab_size: int = 0
    eos_token_ids: list[int] = field(default_factory=list)
    vocabulary: str = ""  # digest of what its token ids mean; "": no tokenizer, or a worker of an older version
    block_size: int = 0
    state_blocks: int = 0  # blocks of a copy of a sequence's recurrent states; 0: no such states
    max_running: int = 0
    blocks_total: int = 0
    weights: str = ""  # format of the weights of its products
    weight_bytes: int = 0  # of the model as it is served
    slow_products: str = ""  # a sentence where the compiled products lose to torch's (engine/kernels/speed_check.py)
    metrics_address: str = ""  # host:port of /metrics; empty: it has none
    node: str = ""  # the name of its host
    device: str = ""  # of its engine: "cpu", or "cuda:" and the GPU's number on the host
    adapters_version: int = 0  # of the list of adapters that it serves (cluster/state/adapter_list.py)
    tp: int = 1  # number of ranks (tensor parallelism)
    # From here on, what changes with the worker's load (RecordReader):
    running: int = 0
    waiting: int = 0
    blocks_held: int = 0
    step_s: float = 0.0  # seconds of a step of one stream; 0: not known
    stream_s: float = 0.0  # that each further stream adds
    prompt_rate: float = 0.0  # prompt tokens per second; 0: not known
    backlog: int = 0  # prompt tokens still to be computed; of a router, those of requests that wait for a placement
    begun: int = 0  # requests received by this incarnation: each changes the record, which routers then read
    arrived: int = (
        0  # of a router: prompt tokens to be computed since its start: of clients, also refused, and of placed jobs
    )
    beat: float = 0.0  # unix seconds on the worker's clock

    def text(self) -> str:
        """JSON in the order of the fields, without the beat."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "beat"})

    @classmethod
    def parse(cls, text: str | bytes) -> WorkerRecord:
        """Ignores unknown fields; a worker in an unknown state gets no new requests. Raises ValueError."""
        try:
            return _parse_record(text)
        except ValueError:
            values = json.loads(text)
            if not isinstance(values, dict) or values.get("state") in set(State):
                raise
            return _RECORD.validate_python({**values, "state": State.DRAINING})


_RECORD = TypeAdapter(WorkerRecord)
_parse_record: Callable[[str | bytes], WorkerRecord] = _RECORD.validator.validate_json


@with_config(extra="forbid")
@dataclass(slots=True)
class _Load:
    """The fields of a WorkerRecord from `running` on, in their order, without the beat."""

    running: int
    waiting: int
    blocks_held: int
    step_s: float
    stream_s: float
    prompt_rate: float
    backlog: int
    begun: int
    arrived: int


_parse_load = TypeAdapter(_Load).validator.validate_json
_numbers = attrgetter(*(column.name for column in fields(_Load)))
_description = attrgetter(*(column.name for column in fields(WorkerRecord)[: -len(fields(_Load)) - 1]))
_LOAD_BEGINS = b', "running": '  # cannot occur within a text, where quotes are escaped


class RecordReader:
    """Parses the records of the registry. If only a worker's load has changed, it parses only the load: a router reads
    a record of each worker every second, on the event loop that relays tokens."""

    def __init__(self) -> None:
        # By worker: its value as far as the load, and the fields in that.
        self._known: dict[bytes, tuple[bytes, tuple[Any, ...]]] = {}

    def read(self, name: bytes, value: bytes | None, beat: float) -> WorkerRecord | None:
        """The record; None if it is gone or cannot be read, which must not prevent reading the others."""
        if value is None:
            self._known.pop(name, None)
            return None
        described, separator, load = value.partition(_LOAD_BEGINS)
        known = self._known.get(name)
        try:
            if separator and known is not None and known[0] == described:
                try:
                    numbers = _numbers(_parse_load(b'{"running": ' + load))
                    return WorkerRecord(*(*known[1], *numbers, beat))
                except ValueError:
                    pass  # it has more fields than the load there
            record = WorkerRecord.parse(value.split(b" ", 2)[2])
        except (ValueError, IndexError) as error:
            log.error("registry.unreadable_record", worker=name.decode(errors="replace"), error=repr(error))
            return None
        record.beat = beat
        self._known[name] = described, _description(record)
        return record

    def keep_only(self, names: Collection[bytes]) -> None:
        """Forgets all other workers."""
        for name in [name for name in self._known if name not in names]:
            del self._known[name]


@dataclass(frozen=True, slots=True)
class RegistryChanges:
    """Changes of the registry since an earlier answer. `mark` names this answer in the next call."""

    mark: tuple[str, int]
    full: bool  # `records` are all workers; otherwise those that have changed, None for one that was removed
    records: dict[str, WorkerRecord | None]


class Registry:
    """A connection to the registry. Every call is bounded and raises Unavailable when it does not answer."""

    def __init__(self, url: str, cluster: str, ttl_s: float) -> None:
        self.cluster = cluster
        self.ttl_s = ttl_s
        self._prefix = f"tandem:{{{cluster}}}"
        self._store = RedisStore(url, most=MAX_CONNECTIONS)
        self._reader = RecordReader()
        self._keys = [f"{self._prefix}:{name}" for name in ("workers", "beats", "versions", "version")]

    async def close(self) -> None:
        await self._store.close()

    async def ping(self) -> float:
        """Seconds of one round trip."""
        start = perf_counter()
        await self._store.run("return 'pong'", self._keys[:1], [])
        return perf_counter() - start

    # ---- workers

    async def beat(self, record: WorkerRecord, *, announce: bool = False, born: float = 0.0) -> bool:
        """Keeps the record for another ttl; `announce`: a change of state, which routers read at once.

        False: an incarnation of this worker that began after `born` (unix seconds) is alive, and its record stays.
        """
        incarnation = [record.worker_id, record.incarnation, repr(born)]
        return bool(
            await self._run(BEAT, [*incarnation, record.text(), int(self.ttl_s * 1000), int(announce)]) == b"kept"
        )

    async def withdraw(self, worker_id: str, incarnation: str) -> bool:
        """Removes the record of a worker that has stopped. False: it is that of another incarnation, and stays."""
        return bool(int(await self._run(WITHDRAW, [worker_id, incarnation])))

    async def workers(self) -> list[WorkerRecord]:
        """Every worker with a heartbeat within the ttl, by id."""
        records = (await self.changes_since()).records
        return [record for _, record in sorted(records.items()) if record is not None]

    async def changes_since(self, mark: tuple[str, int] = ("", 0)) -> RegistryChanges:
        """The changes since the answer with this mark; all workers if that mark is too old."""
        epoch, number, full, now_ms, values, beats = await self._run(CHANGES, [mark[0], mark[1]])
        ages = {name: (int(now_ms) - int(until)) / 1000 + self.ttl_s for name, until in _pairs(beats)}
        records: dict[str, WorkerRecord | None] = {}
        for at, (name, value) in enumerate(_pairs(values), 1):
            beat = time() - ages.get(name, 0.0)
            records[name.decode()] = self._reader.read(name, value, beat)
            if at % RECORDS_PER_SLICE == 0:
                await asyncio.sleep(0)  # the reader relays tokens on the same event loop
        if int(full):
            self._reader.keep_only({name for name, _ in _pairs(values)})
        return RegistryChanges((epoch.decode(), int(number)), bool(int(full)), records)

    async def _run(self, script: str, args: list[Any]) -> Any:
        return await self._store.run(script, self._keys, [f"{self._prefix}:changed", secrets.token_hex(8), *args])

    async def run(self, name: str, script: str, args: list[Any]) -> Any:
        """A script over the key of that name; its first argument is the channel."""
        return await self._store.run(script, [f"{self._prefix}:{name}"], [f"{self._prefix}:changed", *args])

    # ---- wanted pool sizes

    async def set_wanted(self, sizes: dict[str, int]) -> None:
        await self.run("wanted", SET_WANTED, [part for size in sizes.items() for part in size])

    async def keep_wanted(self, sizes: dict[str, int]) -> None:
        """Writes the sizes of roles that have none, and none that another process writes meanwhile."""
        await self.run("wanted", KEEP_WANTED, [part for size in sizes.items() for part in size])

    async def wanted(self) -> dict[str, int]:
        async with self._store.connection() as client:
            values = await client.hgetall(f"{self._prefix}:wanted")
        return {role.decode(): int(size) for role, size in values.items() if size.isdigit()}

    # ---- the supervisor's lease

    async def acquire_lease(self, token: str, run: str, lease_s: float = SUPERVISOR_LEASE_S) -> tuple[str, float]:
        """Acquires or renews the supervisor's lease. Returns the token of the holder (`token`: the caller) and the
        seconds left. A holder whose token begins with `run` and `/` is replaced; an empty `run` only renews."""
        holder, left_ms = await self._store.run(
            ACQUIRE_LEASE, [f"{self._prefix}:supervisor"], [token, run, int(lease_s * 1000)]
        )
        return holder.decode(), int(left_ms) / 1000

    async def supervised(self) -> bool:
        """Whether a supervisor holds the lease."""
        async with self._store.connection() as client:
            return bool(await client.exists(f"{self._prefix}:supervisor"))

    async def release_lease(self, token: str) -> None:
        """Releases the supervisor's lease, if it is the caller's."""
        await self._store.run(RELEASE_LEASE, [f"{self._prefix}:supervisor"], [token])

    # ---- the autoscaler's verdicts

    async def publish_scaling(self, text: str) -> None:
        await self.run("autoscale", PUBLISH_SCALING, [text, int(SCALING_TTL_S * 1000)])

    async def scaling(self) -> str | None:
        """None: it has not published any lately."""
        async with self._store.connection() as client:
            text = await client.get(f"{self._prefix}:autoscale")
        return None if text is None else str(text.decode())

    # ---- changes

    async def changes(self, every_s: float) -> AsyncGenerator[None, None]:
        """Yields after each change, once for all within COALESCE_S, and every `every_s` seconds; never raises."""
        yield None
        while True:
            try:
                async with self._store.client.pubsub() as channel:
                    # Bounded: both may connect, and redis-py waits for the answer to AUTH without a limit.
                    async with asyncio.timeout(redis_store.CALL_TIMEOUT_S):
                        await channel.subscribe(f"{self._prefix}:changed")
                    while True:
                        async with asyncio.timeout(every_s + redis_store.CALL_TIMEOUT_S):
                            message = await channel.get_message(ignore_subscribe_messages=True, timeout=every_s)
                            raise_lost_cancel()
                            if message is not None:
                                await asyncio.sleep(COALESCE_S)
                                while await channel.get_message(ignore_subscribe_messages=True, timeout=0.0):
                                    raise_lost_cancel()
                        yield None
            except (*FAILURES, TimeoutError) as error:
                raise_lost_cancel()
                log.warning("registry.lost", error=str(error) or "no answer in time")
                await asyncio.sleep(min(every_s, RECONNECT_S))  # one that restarted empty is filled soon
                yield None


def _pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))
