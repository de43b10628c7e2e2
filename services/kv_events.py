"""Streams the block hashes of this worker to routers: all of them first, then numbered changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from engine.engine_thread import EngineThread
from tandem.tasks import failed
from tandem.v1 import worker_pb2

# Between two messages to one router; changes in between share a message. A router reads the streams of all workers:
# 2,000 messages per second for 1,000 busy ones. The next turn of a conversation comes later than this.
MESSAGE_INTERVAL_S = 0.5


class KvEvents:
    """The hashes of this worker's blocks, kept on the event loop; the engine's thread sends the changes."""

    def __init__(self, engine_thread: EngineThread) -> None:
        self._engine_thread = engine_thread
        self._begun: asyncio.Task[None] | None = None
        self._present: set[bytes] = set()
        self._watchers: set[_Watcher] = set()

    async def watch(self) -> AsyncGenerator[worker_pb2.WatchCacheResponse, None]:
        """Yields messages without incarnation and adapters; the first one has all blocks."""
        if self._begun is None or failed(self._begun):  # the engine records changes only after the first watcher
            self._begun = asyncio.create_task(self._begin(), name="kv-events")
        await asyncio.shield(self._begun)
        watcher = _Watcher()
        watcher.add((digest, True) for digest in self._present)
        self._watchers.add(watcher)
        try:
            sequence = 0
            while True:
                added, removed = watcher.take()
                yield worker_pb2.WatchCacheResponse(sequence=sequence, added=added, removed=removed)
                sequence += 1
                await watcher.changed.wait()
                await asyncio.sleep(MESSAGE_INTERVAL_S)
        finally:
            self._watchers.discard(watcher)

    async def _begin(self) -> None:
        event_loop = asyncio.get_running_loop()
        pool = self._engine_thread.engine.pool

        def publish() -> None:  # on the engine's thread, after each iteration
            if changes := pool.news():
                event_loop.call_soon_threadsafe(self._change, changes)

        def listen() -> None:
            present = [(digest, True) for digest in pool.listen()]
            event_loop.call_soon_threadsafe(self._change, present)  # before any change
            self._engine_thread.after_iteration = publish

        await self._engine_thread.call(listen)
        done = asyncio.Event()
        event_loop.call_soon(done.set)  # after the present hashes, which were sent before the call returned
        await done.wait()

    def _change(self, changes: list[tuple[bytes, bool]]) -> None:
        for digest, is_present in changes:
            (self._present.add if is_present else self._present.discard)(digest)
        for watcher in self._watchers:
            watcher.add(changes)


class _Watcher:
    """Changes that one router has not received yet."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}
        self._known: set[bytes] = set()  # what the router believes to be present
        self.changed = asyncio.Event()

    def add(self, changes: Iterable[tuple[bytes, bool]]) -> None:
        self._changes.update(changes)
        if self._changes:
            self.changed.set()

    def take(self) -> tuple[bytes, bytes]:
        """The added hashes and the removed ones, each concatenated."""
        added = [digest for digest, present in self._changes.items() if present and digest not in self._known]
        removed = [digest for digest, present in self._changes.items() if not present and digest in self._known]
        self._known.update(added)
        self._known.difference_update(removed)
        self._changes.clear()
        self.changed.clear()
        return b"".join(added), b"".join(removed)
