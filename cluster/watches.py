"""Following the streams of many jobs over one connection.

XREAD BLOCK over all watched streams ──▶ for each watcher a Tail, which holds some entries
                 ▲                                └─ too many: it is *behind*, and its watcher reads by itself
                 └─ an entry in this router's own `wake` stream ends the call when a job is added
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cluster.store import Store
from tandem.errors import InternalError, TandemError, Unavailable
from tandem.tasks import end, once

BLOCK_S = 5.0  # of one read
TOGETHER_S = 0.02  # entries within this time are one read
COUNT = 100  # entries of one stream in one read
HELD = 256  # entries that a tail holds
WAKE_KEPT_S = 3600


Raw = tuple[bytes, dict[bytes, bytes]]  # an entry's place in its stream, and its fields


def later(one: str, other: str) -> bool:
    """Whether a place in a stream is behind another one."""
    return _place(one) > _place(other)


def _place(at: str) -> tuple[int, ...]:
    return tuple(map(int, at.split("-")))


class Tail:
    """What has come for one watcher and was not taken yet."""

    def __init__(self, behind: bool) -> None:
        self.behind = behind  # entries are missing here; they are in the stream
        self._entries: deque[Raw] = deque()
        self._error: TandemError | None = None
        self._news = asyncio.Event()

    def catch_up(self) -> bool:
        """Whether its watcher has to read the stream now. From here on nothing is missing."""
        behind, self.behind = self.behind, False
        return behind

    async def take(self, idle_s: float) -> list[Raw]:
        """What has come, waiting up to `idle_s` seconds; nothing when the tail is behind. Raises what ended the
        watching."""
        try:
            async with asyncio.timeout(idle_s):
                await self._news.wait()
        except TimeoutError:
            return []
        self._news.clear()
        if self._error is not None:
            raise self._error
        found = list(self._entries)
        self._entries.clear()
        return found

    def put(self, entries: list[Raw]) -> None:
        if not self.behind:
            self._entries.extend(entries)
        if len(self._entries) > HELD:
            self._entries.clear()
            self.behind = True
        self._news.set()

    def fail(self, error: TandemError) -> None:
        self._error = error
        self._news.set()


@dataclass(slots=True)
class _Stream:
    at: str
    tails: set[Tail] = field(default_factory=set)


class Watches:
    """One reader for all watchers of this process."""

    def __init__(self, blocking: Store, other: Store, key: Callable[[str], str], wake: str) -> None:
        """`blocking` is this reader's alone; `key` names a job's stream."""
        self._blocking, self._other, self._key = blocking, other, key
        self._wake, self._woken = f"{wake}:{secrets.token_hex(8)}", "0"
        self._streams: dict[str, _Stream] = {}  # by key
        self._some = asyncio.Event()
        self._reading = self._waking = False
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def joined(self, job_id: str, at: str) -> AsyncIterator[Tail]:
        """What comes in the job's stream behind `at`."""
        key = self._key(job_id)
        known = key in self._streams
        stream = self._streams.setdefault(key, _Stream(at))
        tail = Tail(behind=known)  # others may be further
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
        """Every watcher ends with this error."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            for tail in stream.tails:
                tail.fail(error)

    async def close(self) -> None:
        await end(self._task)
        await self._blocking.close()

    async def _read_now(self) -> None:
        """The reader, which may be waiting for others, also reads what was added."""
        if self._task is None or self._task.done():
            self._task = once(self._run(), name="watches", failed=self._failed)
        self._some.set()
        if self._reading and not self._waking:
            self._waking = True
            try:
                async with self._other.turn() as client:
                    await client.xadd(self._wake, {"w": 1}, maxlen=1, approximate=False)
                    await client.expire(self._wake, WAKE_KEPT_S)
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
            except Unavailable as error:  # watchers come back when it answers
                self.fail(error)
            await asyncio.sleep(TOGETHER_S)

    async def _read(self) -> None:
        asked = dict(self._streams)
        places = {key: stream.at for key, stream in asked.items()}
        self._reading, self._waking = True, False
        try:
            found = await self._blocking.xread({self._wake: self._woken, **places}, COUNT, BLOCK_S)
        finally:
            self._reading = False
        for name, entries in found:
            key = name.decode()
            if key == self._wake:
                self._woken = entries[-1][0].decode()
            elif (stream := asked[key]) is self._streams.get(key):  # else its watchers left, and others may have come
                stream.at = entries[-1][0].decode()
                for tail in stream.tails:
                    tail.put(entries)

    def _failed(self, error: BaseException) -> None:
        self.fail(InternalError(f"the journal's reader failed: {error!r}"))
