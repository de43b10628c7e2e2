"""A Transport between workers of one process, for tests: memmove, with the failures of the real ones."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager

from kvtransfer.transport import Dial, Pair, batches, check_pairs, describe, no_links, settle
from kvtransfer.types import LinkMessage, Peer, ReadStats, Region, agent_name, check_compatible
from tandem.errors import InvalidRequest, TandemError, WorkerLost

_open: dict[str, InProcessTransport] = {}


class InProcessTransport:
    """Finds its peers by agent name in this process. Host memory only."""

    kind = "inprocess"

    def __init__(self, region: Region, worker_id: str, incarnation: str, layout_hash: str) -> None:
        if region.memory != "dram":
            raise InvalidRequest("the in-process transport copies host memory only", field="memory", bound='"dram"')
        self.region = region
        self.layout_hash = layout_hash
        self.broken: TandemError | None = None
        self.dial: Dial | None = None
        self.on_broken: Callable[[], object] | None = None
        self._worker_id, self._incarnation = worker_id, incarnation
        self._name = agent_name(worker_id, incarnation)
        self._connected: dict[str, Peer] = {}
        self._closed = False
        # Held during each copy: a region is not released while a transport reads from it or writes to it.
        self._lock = threading.RLock()
        if self._name in _open:
            raise InvalidRequest(f"{self._name} is already open in this process", field="worker_id")
        _open[self._name] = self

    @property
    def under_way(self) -> None:
        """There is no thread that could hang."""
        return None

    def peer(self) -> Peer:
        return describe(self, self._worker_id, self._incarnation, b"")

    async def connect(self, peer: Peer, timeout: float) -> None:
        check_compatible(self.region, self.layout_hash, peer, self.kind)
        self._find(peer)
        self._connected[peer.agent_name] = peer

    async def read(
        self,
        peer: Peer,
        pairs: Sequence[Pair],
        stall: float,
        failing: Callable[[TandemError], None] | None = None,
    ) -> ReadStats:
        """A copy within one process cannot stall."""
        check_compatible(self.region, self.layout_hash, peer, self.kind)
        check_pairs(self.region, peer, pairs)
        started = time.monotonic()
        for batch in batches(pairs, self.region.block_bytes):
            if peer.agent_name not in self._connected:
                raise WorkerLost(f"{peer.agent_name} is not connected")
            copy = asyncio.ensure_future(asyncio.to_thread(self._copy, peer, batch))
            try:
                await asyncio.shield(copy)
            except asyncio.CancelledError:
                await settle(copy, f"the read from {peer.agent_name}")
                raise
        return ReadStats(len(pairs) * self.region.block_bytes, time.monotonic() - started, self.link(peer))

    def answer(self, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        return no_links(self.kind)

    @contextmanager
    def serving(self) -> Iterator[None]:
        yield

    def one_sided(self, peer: Peer) -> bool:
        return True

    def device(self, peer: Peer) -> str:
        return ""

    def link(self, peer: Peer) -> str:
        return self.kind

    def why(self, peer: Peer) -> str:
        return ""

    def forget(self, peer: Peer) -> None:
        self._connected.pop(peer.agent_name, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if _open.get(self._name) is self:
                del _open[self._name]
        self._connected.clear()

    def _find(self, peer: Peer) -> InProcessTransport:
        source = _open.get(peer.agent_name)
        if self._closed or source is None:
            raise WorkerLost(f"{peer.agent_name} is closed")
        return source

    def _copy(self, peer: Peer, batch: Sequence[Pair]) -> None:
        source = self._find(peer)
        # Both locks, always in the order of the names, so that two workers may read from each other.
        first, second = sorted((self, source), key=lambda transport: transport._name)
        with first._lock, second._lock:
            self._find(peer)
            size = self.region.block_bytes
            for remote, local in batch:
                ctypes.memmove(self.region.address + local * size, source.region.address + remote * size, size)
