"""Follows the streams of many jobs over one connection.

XREAD BLOCK over all watched streams ──▶ a Tail per watcher, which buffers some entries
                 ▲                                └─ too many: it is *behind*, and its watcher reads the stream itself
                 └─ an entry in this router's own `wake` stream ends the call when a job is added
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cluster.state.redis_store import EVEN_IF_FULL, RedisStore
from tandem.errors import InternalError, TandemError, Unavailable
from tandem.tasks import end, once, within

READ_BLOCK_S = 5.0  # of one read
COALESCE_S = 0.02  # entries within this time are one read
ENTRIES_PER_READ = 100  # entries of one stream in one read
MAX_TAIL_ENTRIES = 256  # entries that a tail holds
WAKE_TTL_S = 3600
WAKE = (
    EVEN_IF_FULL
    + """
redis.call('XADD', KEYS[1], 'MAXLEN', 1, '*', 'w', 1)
return redis.call('EXPIRE', KEYS[1], ARGV[1])
"""
)

Raw = tuple[bytes, dict[bytes, bytes]]  # an entry's id and its fields


def later(entry_id: str, other: str) -> bool:
    """Whether `entry_id` is after `other`."""
    return _place(entry_id) > _place(other)


def _place(at: str) -> tuple[int, ...]:
    return tuple(map(int, at.split("-")))


class Tail:
    """Entries for one watcher that it has not taken yet."""

    def __init__(self, behind: bool) -> None:
        self.behind = behind  # some entries are in the stream only
        self._entries: deque[Raw] = deque()
        self._error: TandemError | None = None
        self._changed = asyncio.Event()

    def catch_up(self) -> bool:
        """Whether the watcher must read the stream now. From here on every entry is buffered."""
        behind, self.behind = self.behind, False
        return behind

    async def take(self, idle_s: float) -> list[Raw]:
        """The buffered entries; waits for them for up to `idle_s` seconds. Empty if the tail is behind. Raises the
        error that ended the watch."""
        if not await within(self._changed, idle_s):
            return []
        self._changed.clear()
        if self._error is not None:
            raise self._error
        entries = list(self._entries)
        self._entries.clear()
        return entries

    def put(self, entries: list[Raw]) -> None:
        if not self.behind:
            self._entries.extend(entries)
        if len(self._entries) > MAX_TAIL_ENTRIES:
            self._entries.clear()
            self.behind = True
        self._changed.set()

    def fail(self, error: TandemError) -> None:
        self._error = error
        self._changed.set()


@dataclass(slots=True)
class _Stream:
    at: str
    tails: set[Tail] = field(default_factory=set)


class StreamWatches:
    """One reader for all watchers of this process."""

    def __init__(self, blocking: RedisStore, other: RedisStore, key: Callable[[str], str], wake: str) -> None:
        """Only this reader uses `blocking`; `key` names a job's stream."""
        self._blocking, self._other, self._key = blocking, other, key
        self._wake, self._woken = f"{wake}:{secrets.token_hex(8)}", "0"
        self._streams: dict[str, _Stream] = {}  # by key
        self._some = asyncio.Event()
        self._reading = self._waking = False
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def joined(self, job_id: str, at: str) -> AsyncIterator[Tail]:
        """New entries of the job's stream after id `at`."""
        key = self._key(job_id)
        known = key in self._streams
        stream = self._streams.setdefault(key, _Stream(at))
        tail = Tail(behind=known)  # other watchers may have read further
        stream.tails.add(tail)
        try:
            if not known:
                await self._read_now()
            yield tail
        finally:
            stream.tails.discard(tail)
            if not stream.tails and self._streams.get(key) is stream:
                del self._streams[key]

    def fail(self, error: TandemError) -> None:
        """Ends every watch with this error."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            for tail in stream.tails:
                tail.fail(error)

    async def close(self) -> None:
        await end(self._task)
        await self._blocking.close()

    async def _read_now(self) -> None:
        """Makes the reader, which may be blocked on other streams, include a new stream."""
        if self._task is None or self._task.done():
            self._task = once(self._run(), name="watches", failed=self._failed)
        self._some.set()
        if self._reading and not self._waking:
            self._waking = True
            try:
                await self._other.run(WAKE, [self._wake], [WAKE_TTL_S])
            except BaseException:
                self._waking = False  # the next watcher tries again
                raise

    async def _run(self) -> None:
        while True:
            while not self._streams:
                self._some.clear()
                await self._some.wait()
            try:
                await self._read()
            except Unavailable as error:  # watchers retry
                self._woken = "0"  # the server may have restarted with a clock that is behind
                self.fail(error)
            await asyncio.sleep(COALESCE_S)

    async def _read(self) -> None:
        asked = dict(self._streams)
        places = {key: stream.at for key, stream in asked.items()}
        self._reading, self._waking = True, False
        try:
            answer = await self._blocking.xread({self._wake: self._woken, **places}, ENTRIES_PER_READ, READ_BLOCK_S)
        finally:
            self._reading = False
        for name, entries in answer:
            key = name.decode()
            if key == self._wake:
                self._woken = entries[-1][0].decode()
            elif (stream := asked[key]) is self._streams.get(key):  # otherwise its watchers have left
                stream.at = entries[-1][0].decode()
                for tail in stream.tails:
                    tail.put(entries)

    def _failed(self, error: BaseException) -> None:
        self.fail(InternalError(f"the journal's reader failed: {error!r}"))
