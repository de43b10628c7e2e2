"""Tells routers which blocks this worker has: the whole at first, then what changes, numbered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

from engine.loop import EngineLoop
from tandem.v1 import worker_pb2

# Between two messages to one router: what changes meanwhile travels together. A router listens to every worker, so that
# of 1,000 busy ones it reads 2,000 messages a second; a conversation's next turn comes later than this.
PACE_S = 0.5


class CacheNews:
    """The book of this worker's blocks, on the event loop; the engine's thread sends it what changes."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._begun: asyncio.Task[None] | None = None
        self._here: set[bytes] = set()
        self._watchers: set[_Watcher] = set()

    async def watch(self) -> AsyncGenerator[worker_pb2.WatchCacheResponse, None]:
        """Messages without incarnation and adapters; the first has all blocks."""
        if self._begun is None or _failed(self._begun):  # until somebody asks the engine keeps no account of changes
            self._begun = asyncio.create_task(self._begin(), name="cache-news")
        await asyncio.shield(self._begun)
        watcher = _Watcher()
        watcher.add((digest, True) for digest in self._here)
        self._watchers.add(watcher)
        try:
            sequence = 0
            while True:
                added, removed = watcher.take()
                yield worker_pb2.WatchCacheResponse(sequence=sequence, added=added, removed=removed)
                sequence += 1
                await watcher.changed.wait()
                await asyncio.sleep(PACE_S)
        finally:
            self._watchers.discard(watcher)

    async def _begin(self) -> None:
        here = asyncio.get_running_loop()
        pool = self._loop.engine.pool

        def tell() -> None:  # on the engine's thread, after each turn
            if news := pool.news():
                here.call_soon_threadsafe(self._change, news)

        def listen() -> None:
            whole = [(digest, True) for digest in pool.listen()]
            here.call_soon_threadsafe(self._change, whole)  # before any news, on the same way
            self._loop.after_turn = tell

        await self._loop.call(listen)
        done = asyncio.Event()
        here.call_soon(done.set)  # behind the whole, which was sent before the call returned
        await done.wait()

    def _change(self, news: Iterable[tuple[bytes, bool]]) -> None:
        news = list(news)
        for digest, is_here in news:
            (self._here.add if is_here else self._here.discard)(digest)
        for watcher in self._watchers:
            watcher.add(news)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class _Watcher:
    """What one router has not been told."""

    def __init__(self) -> None:
        self._news: dict[bytes, bool] = {}
        self._known: set[bytes] = set()  # what the router believes to be here
        self.changed = asyncio.Event()

    def add(self, news: Iterable[tuple[bytes, bool]]) -> None:
        self._news.update(news)
        if self._news:
            self.changed.set()

    def take(self) -> tuple[bytes, bytes]:
        """Hashes that came and those that went, one behind another."""
        added = [digest for digest, here in self._news.items() if here and digest not in self._known]
        removed = [digest for digest, here in self._news.items() if not here and digest in self._known]
        self._known.update(added)
        self._known.difference_update(removed)
        self._news.clear()
        self.changed.clear()
        return b"".join(added), b"".join(removed)
