"""Reads from a prefill worker without a request, to measure a link's speed or to verify that it works."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtransfer.auto_transport import AutoTransport
from kvtransfer.transport import measure_link
from services.decode.prefill_peers import CONNECT_TIMEOUT_S, PrefillPeer
from services.worker import Worker
from tandem.errors import Busy, DeadlineExceeded, TransferFailed

PROBE_BYTES = 64 * 2**20
COMPARE_BYTES = 16 * 2**20  # at the start of each pair, alongside requests
PROBE_TIMEOUT_S = 10.0  # for connecting, and for each read
PROBE_WAIT_S = 10.0  # to wait for another probe of this worker


class Probes:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = asyncio.Lock()
        self._count = itertools.count(1)

    async def speed(self, source: PrefillPeer, size: int = PROBE_BYTES) -> float:
        """Bytes per second of reads from this source. A worker runs one probe at a time, so that probes do not slow
        each other down. Raises Busy and the transport's errors."""
        peer, transport = source.peer, source.transport
        room = source.landing.count if source.landing else self._worker.engine.pool.total
        count = min(size // peer.block_bytes, room // 4, peer.num_blocks)
        async with self._locked(), self._blocks(source, count) as blocks:
            if isinstance(transport, AutoTransport):
                return await transport.compare(peer, blocks, PROBE_TIMEOUT_S)
            return await measure_link(transport, peer, blocks, PROBE_TIMEOUT_S)

    async def compare(self, source: PrefillPeer) -> None:
        """Measures the transports of a new source, if there are several. Raises as `speed`."""
        if isinstance(source.transport, AutoTransport):
            await self.speed(source, COMPARE_BYTES)

    async def verify(self, source: PrefillPeer) -> None:
        """Reads one block. Raises TransferFailed, WorkerLost, Busy."""
        peer, transport = source.peer, source.transport
        async with self._blocks(source, 1) as (block,):
            try:
                await transport.connect(peer, CONNECT_TIMEOUT_S)
                await transport.read(peer, [(0, block)], CONNECT_TIMEOUT_S)
            except DeadlineExceeded as error:
                raise TransferFailed(f"no KV arrives from {peer.worker_id}: {error.message}") from error

    @asynccontextmanager
    async def _blocks(self, source: PrefillPeer, count: int) -> AsyncIterator[list[int]]:
        """Free blocks, whose content is overwritten. All reads into them have ended when the block ends: see
        Transport.read."""
        if (landing := source.landing) is not None:
            places = await landing.take(max(1, count))
            try:
                yield places
            finally:
                landing.give(places)
            return
        thread, pool = self._worker.engine_thread, self._worker.engine.pool
        # A name used only once: the end of one probe must not free the blocks of another.
        owner = f"probe:{source.peer.worker_id}#{next(self._count)}"
        async with self._worker.in_progress(owner):
            try:
                if await thread.call(lambda: pool.take(owner, [], max(1, count))) is None:
                    raise Busy(f"no {count} blocks are free for a probe now", reason="NO_ROOM", retry_after=1.0)
                yield list(pool.table(owner))
            finally:
                await thread.call(lambda: pool.drop(owner) if pool.owns(owner) else None)

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(PROBE_WAIT_S):
                await self._lock.acquire()
        except TimeoutError as error:
            raise Busy("another probe of this worker's links is running", reason="PROBING", retry_after=1.0) from error
        try:
            yield
        finally:
            self._lock.release()
