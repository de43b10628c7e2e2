"""Who lives. With cluster/journal.py the only file that knows Redis, and every key of workers in it. Works with Redis
and Valkey.

    tandem:<cluster>:worker:<id>   JSON of one WorkerRecord, expires after heartbeat_ttl_s without a beat
    tandem:<cluster>:wanted        hash role -> number of workers
    tandem:<cluster>:autoscale     JSON of what the autoscaler found last (cluster/scaling.py), expires after 10 s
    tandem:<cluster>:changed       pub/sub channel: "workers" or "wanted": a change that others should hear of now

Nothing here is the truth about a request: losing it all costs placement quality, never a running stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from time import perf_counter, time

import redis.asyncio as redis
import structlog
from redis.exceptions import RedisError

from tandem.errors import Unavailable
from tandem.tasks import end

log = structlog.get_logger(__name__)
CALL_TIMEOUT_S = 2.0
RECONNECT_S = 0.5
SCALING_KEPT_S = 10.0


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
    arrived: int = 0  # of a router: prompt tokens to be computed that have come in its life, refused ones included
    metrics_address: str = ""  # host:port of /metrics; empty: it has none
    beat: float = 0.0  # unix seconds on the worker's clock

    def age(self) -> float:
        return max(0.0, time() - self.beat)

    @classmethod
    def parse(cls, text: str | bytes) -> WorkerRecord:
        known = {one.name for one in fields(cls)}
        values = {name: value for name, value in json.loads(text).items() if name in known}  # newer fields are skipped
        return cls(**{**values, "state": State(values["state"])})


class Registry:
    """A connection to the registry. Every call is bounded and raises Unavailable when it does not answer."""

    def __init__(self, url: str, cluster: str, ttl_s: float) -> None:
        self.url = url
        self.ttl_s = ttl_s
        self._prefix = f"tandem:{cluster}"
        self._redis = redis.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=CALL_TIMEOUT_S,
            socket_connect_timeout=CALL_TIMEOUT_S,
            health_check_interval=30,
        )

    async def close(self) -> None:
        await self._redis.aclose()

    async def ping(self) -> float:
        """Seconds of one round trip."""
        start = perf_counter()
        with answering():
            await self._redis.ping()
        return perf_counter() - start

    # ---- workers

    async def beat(self, record: WorkerRecord, *, announce: bool = False) -> None:
        """Write the record for another ttl; `announce` a change of state so that routers see it at once."""
        key = f"{self._prefix}:worker:{record.worker_id}"
        with answering():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.set(key, json.dumps({**asdict(record), "beat": time()}), px=int(self.ttl_s * 1000))
                if announce:
                    pipe.publish(f"{self._prefix}:changed", "workers")
                await pipe.execute()

    async def withdraw(self, worker_id: str) -> None:
        """Forget a worker that has stopped."""
        with answering():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.delete(f"{self._prefix}:worker:{worker_id}")
                pipe.publish(f"{self._prefix}:changed", "workers")
                await pipe.execute()

    async def workers(self) -> list[WorkerRecord]:
        """Every worker heard of within the ttl, by id."""
        with answering():
            keys = [key async for key in self._redis.scan_iter(match=f"{self._prefix}:worker:*", count=1000)]
            values = await self._redis.mget(keys) if keys else []
        records = [WorkerRecord.parse(value) for value in values if value is not None]
        return sorted(records, key=lambda record: record.worker_id)

    # ---- wanted pool sizes

    async def want(self, sizes: dict[str, int]) -> None:
        with answering():
            async with self._redis.pipeline(transaction=True) as pipe:
                if sizes:
                    pipe.hset(f"{self._prefix}:wanted", mapping={role: str(size) for role, size in sizes.items()})
                pipe.publish(f"{self._prefix}:changed", "wanted")
                await pipe.execute()

    async def wanted(self) -> dict[str, int]:
        with answering():
            values = await self._redis.hgetall(f"{self._prefix}:wanted")
        return {str(role): int(size) for role, size in values.items()}

    # ---- what the autoscaler found

    async def tell_scaling(self, text: str) -> None:
        with answering():
            await self._redis.set(f"{self._prefix}:autoscale", text, px=int(SCALING_KEPT_S * 1000))

    async def scaling(self) -> str | None:
        """None: it has said nothing lately."""
        with answering():
            found = await self._redis.get(f"{self._prefix}:autoscale")
        return None if found is None else str(found)

    # ---- changes

    async def changes(self, every_s: float) -> AsyncGenerator[None, None]:
        """Yields when something changed, and at least every `every_s` seconds. Survives a lost registry."""
        yield None
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(f"{self._prefix}:changed")
                    while True:
                        await channel.get_message(ignore_subscribe_messages=True, timeout=every_s)
                        _raise_lost_cancel()
                        yield None
            except RedisError as error:
                _raise_lost_cancel()
                log.warning("registry.lost", error=str(error))
                await asyncio.sleep(min(every_s, RECONNECT_S))  # one that came back empty is filled soon
                yield None


class Heartbeat:
    """Keeps one worker's record alive in the background, and says so at once when its state changes."""

    def __init__(self, registry: Registry, describe: Callable[[], WorkerRecord], interval_s: float) -> None:
        self._registry = registry
        self._describe = describe
        self._interval_s = interval_s
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises Unavailable if the first beat does not arrive: a worker that nobody can find must not start."""
        await self._registry.beat(self._describe(), announce=True)
        self._task = asyncio.create_task(self._run(), name="heartbeat")

    def changed(self) -> None:
        self._changed.set()

    async def stop(self) -> None:
        await end(self._task)
        try:
            await self._registry.withdraw(self._describe().worker_id)
        except Unavailable as error:
            log.warning("registry.withdraw_failed", error=error.message)  # the record expires by itself

    async def _run(self) -> None:
        while True:
            announce = await _within(self._changed, self._interval_s)
            self._changed.clear()
            try:
                await self._registry.beat(self._describe(), announce=announce)
            except Unavailable as error:
                log.warning("registry.beat_failed", error=error.message)  # serving goes on; the next beat tries again


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event came within that time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


@contextmanager
def answering() -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        _raise_lost_cancel()
        raise Unavailable(
            f"the registry does not answer: {error}", reason="REGISTRY_UNREACHABLE", retry_after=1.0
        ) from error
    _raise_lost_cancel()


def _raise_lost_cancel() -> None:
    """The client writes inside asyncio.wait_for, which in Python 3.11 loses a cancellation that arrives just when the
    write ends; whoever cancelled would wait for ever."""
    task = asyncio.current_task()
    if task and task.cancelling():
        raise asyncio.CancelledError
