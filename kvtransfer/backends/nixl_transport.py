"""A Transport over NIXL and UCX.

NixlTransport   the interface, on the event loop
OwnerThread     nixl_owner.py: the one thread that drives the agent, in rounds
NixlReads       nixl_reads.py: peers and reads on that thread, and why no read writes after its end
NixlAgent       nixl_agent.py: every call of NIXL
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TypeVar

from kvtransfer.backends.nixl_owner import OwnerThread
from kvtransfer.backends.reads import Read
from kvtransfer.transport import STALL_S, Dial, Pair, batches, check_pairs, describe, no_links, settle
from kvtransfer.types import LinkMessage, Peer, ReadStats, Region, agent_name, check_compatible
from tandem.errors import TandemError, TransferFailed

log = logging.getLogger(__name__)

T = TypeVar("T")

# Links over which the reader copies by itself: cma and xpmem (by the kernel), shared memory, CUDA's own. Over all
# others, RDMA included until it has been tried, the source must make progress.
ONE_SIDED = frozenset({"cma", "xpmem", "knem", "cuda_ipc"})


class NixlTransport:
    """See Transport. Call `start` first."""

    kind = "nixl"

    def __init__(self, region: Region, worker_id: str, incarnation: str, layout_hash: str) -> None:
        self.region = region
        self.layout_hash = layout_hash
        self.broken: TandemError | None = None
        self.dial: Dial | None = None
        self.on_broken: Callable[[], object] | None = None
        self._worker_id, self._incarnation = worker_id, incarnation
        self._name = agent_name(worker_id, incarnation)
        self._owner = OwnerThread(self._name, worker_id, region, self._broke)
        self._connecting: dict[str, tuple[Peer, asyncio.Task[None]]] = {}

    def start(self) -> None:
        """Raises Unavailable if no NIXL agent can be started."""
        self._owner.start()

    @property
    def under_way(self) -> tuple[float, float]:
        return self._owner.clock.last_tick, self._owner.clock.call_s

    def peer(self) -> Peer:
        return describe(self, self._worker_id, self._incarnation, self._owner.agent.metadata)

    async def connect(self, peer: Peer, timeout: float) -> None:
        check_compatible(self.region, self.layout_hash, peer, self.kind)
        known, attempt = self._connecting.get(peer.agent_name, (None, None))
        if attempt is None or known != peer:  # a peer's description changes when its agent is replaced
            attempt = asyncio.create_task(self._connect(peer))
            self._connecting[peer.agent_name] = peer, attempt
            attempt.add_done_callback(lambda task: self._connected(peer, task))
        done, _ = await asyncio.wait([attempt], timeout=timeout)
        if not done:
            raise TransferFailed(f"connecting to {peer.worker_id} took longer than {timeout} s")
        await attempt

    async def read(
        self,
        peer: Peer,
        pairs: Sequence[Pair],
        stall: float,
        failing: Callable[[TandemError], None] | None = None,
    ) -> ReadStats:
        check_compatible(self.region, self.layout_hash, peer, self.kind)
        check_pairs(self.region, peer, pairs)
        started = time.monotonic()
        read = Read(peer, deque(batches(pairs, self.region.block_bytes)), stall)
        if failing is not None:
            read.failing = partial(_report, asyncio.get_running_loop(), failing)
        await self._perform(read)
        return ReadStats(len(pairs) * self.region.block_bytes, time.monotonic() - started, self.link(peer))

    def answer(self, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        return no_links(self.kind)

    def serving(self) -> AbstractContextManager[None]:
        return self._owner.serving()

    def one_sided(self, peer: Peer) -> bool:
        return self.link(peer).rpartition(":")[2] in ONE_SIDED

    def link(self, peer: Peer) -> str:
        return self._owner.reads.links.get(peer.agent_name, "nixl:ucx:unknown")

    def device(self, peer: Peer) -> str:
        return self._owner.reads.devices.get(peer.agent_name, "")

    def why(self, peer: Peer) -> str:
        return ""

    def forget(self, peer: Peer) -> None:
        if not self._owner.closing and self.broken is None:
            self._owner.submit(lambda: self._owner.reads.lose(peer.agent_name, f"{peer.agent_name} was forgotten"))

    def close(self) -> None:
        self._owner.close()

    async def _connect(self, peer: Peer) -> None:
        if await self._call(lambda: self._owner.reads.introduce(peer)):
            # Twice: wire-up may replace the endpoint's configuration, and only then is the choice of transport final.
            await self._perform(Read(peer, deque([[], []]), STALL_S, warm_up=True))

    def _connected(self, peer: Peer, attempt: asyncio.Task[None]) -> None:
        if self._connecting.get(peer.agent_name) == (peer, attempt):
            del self._connecting[peer.agent_name]
        if not attempt.cancelled() and attempt.exception() is not None:
            log.info("connecting to %s: %s", peer.agent_name, attempt.exception())

    async def _perform(self, read: Read) -> None:
        read.done.set_running_or_notify_cancel()
        self._owner.submit(lambda: self._owner.reads.accept(read))
        done = asyncio.wrap_future(read.done)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            read.cancelled = True
            self._owner.wake()
            await settle(done, f"a read from {read.peer.agent_name}")
            raise

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs a short function on the owner thread."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except Exception as error:  # noqa: BLE001, it reaches the caller
                result.set_exception(error)

        result.set_running_or_notify_cancel()
        self._owner.submit(run)
        return await asyncio.wrap_future(result)

    def _broke(self, error: TandemError) -> None:
        """Called on the owner thread."""
        self.broken = error
        if self.on_broken is not None:
            self.on_broken()


def _report(loop: asyncio.AbstractEventLoop, failing: Callable[[TandemError], None], error: TandemError) -> None:
    with suppress(RuntimeError):  # the loop is closed: no reader waits
        loop.call_soon_threadsafe(failing, error)
