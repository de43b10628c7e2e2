"""Reading blocks from a peer's region into the local one: the interface, the link probe, and code that backends
share."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from kvtransfer.types import LinkMessage, Peer, ReadStats, Region, agent_name
from tandem.errors import InvalidRequest, PreconditionFailed, TandemError

log = logging.getLogger(__name__)

# (block in the peer's region, block in the local one)
Pair = tuple[int, int]

# Bytes of one posted transfer, or one block: readers take turns, a cancelled read ends soon, and a slow link completes
# a transfer well within STALL_S.
BATCH_BYTES = 4 << 20

# Seconds without progress after which connecting to a peer has failed.
STALL_S = 4.0

# Seconds between two log lines of a caller that must still wait for the end of a read.
STUCK_REPORT_S = 5.0

T = TypeVar("T")

# Opens a link to a peer: takes the messages to it, yields the messages from it. It ends when either side ends it or
# dies.
Dial = Callable[[Peer, AsyncIterator[LinkMessage]], AsyncGenerator[LinkMessage, None]]


class Transport(Protocol):
    """Reads blocks of peers into the local region. All times are in seconds.

    Every method may be called from the event loop; none but `close` blocks it. The essential guarantee: when `read` has
    returned or raised, by any path, none of its bytes can reach the local blocks any more.

    TransferFailed means that bytes did not arrive: an error of the link, or no progress. The peer may be alive, and may
    be connected and read again. WorkerLost means that the connection is gone: the peer was forgotten, or has described
    itself anew, or this transport is closed.
    """

    kind: str  # its name in settings
    region: Region
    layout_hash: str
    # Why the transport has stopped working for good, if it has; every later connect and read raises TransferFailed.
    broken: TandemError | None
    # How links to sources are opened, for a transport in which both sides act. The owner sets it before it connects.
    dial: Dial | None
    # Called once when `broken` is set, on any thread; it must not block.
    on_broken: Callable[[], object] | None

    @property
    def under_way(self) -> tuple[Hashable, float] | None:
        """For a watchdog, on any thread: a value that identifies the current work of the thread that drives progress,
        and the seconds that it may take. None without such a thread."""

    def peer(self) -> Peer:
        """The description for other workers. Ask again each time: a transport that had to restart has new metadata."""

    async def connect(self, peer: Peer, timeout: float) -> None:
        """Makes the peer ready to be read, wire-up included. Repeating it is cheap; concurrent calls share one attempt.

        Peers connect concurrently, several incarnations of one worker among them: none takes another's place, and the
        owner forgets those that have ended. Raises IncompatibleLayout before any byte moves, TransferFailed (the peer
        is not there, makes no progress for STALL_S seconds, or the attempt took longer than `timeout`) and WorkerLost.
        """

    async def read(
        self,
        peer: Peer,
        pairs: Sequence[Pair],
        stall: float,
        failing: Callable[[TandemError], None] | None = None,
    ) -> ReadStats:
        """Copies remote blocks into local ones, in any order. The total time is unbounded: `stall` bounds the time of
        one posted batch of BATCH_BYTES.

        Raises InvalidRequest (a block id is out of range or a local block is named twice), IncompatibleLayout,
        TransferFailed and WorkerLost. After an error the content of the local blocks is undefined; after TransferFailed
        the next read reconnects. A read from a hung peer cannot be ended at once; `failing` is then called on the event
        loop with the error, and `read` raises it when the local blocks are safe.
        """

    def answer(self, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        """The source's side of a link that a decode worker has dialled: takes its messages, yields the messages to it.
        The link ends with either.

        Raises PreconditionFailed in a transport whose sources do not act, StaleTransfer (meant for another incarnation,
        or older than a link of the same worker), IncompatibleLayout, InvalidRequest and TransferFailed.
        """

    def serving(self) -> AbstractContextManager[None]:
        """Hold it while a transfer from this region is open: emulated transports need the source's progress."""

    def one_sided(self, peer: Peer) -> bool:
        """Whether reads from this peer are known to work without its participation; if so, it need not be `serving`."""

    def link(self, peer: Peer) -> str:
        """The path of reads from this peer, such as "nixl:ucx:cma"; ends in "unknown" if it was not observed."""

    def device(self, peer: Peer) -> str:
        """The network devices of this host over which reads from this peer go, with + between them; empty within one
        host, and if it was not observed."""

    def why(self, peer: Peer) -> str:
        """Why reads from this peer use their transport; empty if the settings name it."""

    def forget(self, peer: Peer) -> None:
        """Drops the connection; reads in flight end with WorkerLost. Unknown peers are ignored."""

    def close(self) -> None:
        """Ends every read with WorkerLost, then releases the memory registration and all threads. Repeatable.

        Raises InternalError if that failed: peers may still read or write the region, so it must not be used again.
        """


async def measure_link(transport: Transport, peer: Peer, blocks: Sequence[int], stall: float = STALL_S) -> float:
    """Bytes per second of one read from the peer's first blocks into `blocks`, whose content is lost.

    The first round only warms up. Raises what connect and read raise.
    """
    if not blocks:
        raise InvalidRequest("a probe needs at least one local block", field="blocks")
    await transport.connect(peer, stall)
    pairs = list(zip(itertools.cycle(range(peer.num_blocks)), blocks, strict=False))
    await transport.read(peer, pairs, stall)
    stats = await transport.read(peer, pairs, stall)
    return stats.bytes / stats.seconds


async def no_links(kind: str) -> AsyncGenerator[LinkMessage, None]:
    """`answer` of a transport whose sources do not act."""
    raise PreconditionFailed(f"the transport {kind} reads without links", reason="NO_LINKS")
    yield


def describe(transport: Transport, worker_id: str, incarnation: str, metadata: bytes) -> Peer:
    """A worker's description for other workers; `metadata` is specific to the kind of transport."""
    region = transport.region
    return Peer(
        worker_id=worker_id,
        incarnation=incarnation,
        agent_name=agent_name(worker_id, incarnation),
        metadata=metadata,
        layout_hash=transport.layout_hash,
        address=region.address,
        num_blocks=region.num_blocks,
        block_bytes=region.block_bytes,
        device=region.device,
        memory=region.memory,
        transport=transport.kind,
    )


def check_pairs(region: Region, peer: Peer, pairs: Sequence[Pair]) -> None:
    """Raises InvalidRequest unless every id exists on its side and no local block would be written twice."""
    for remote, local in pairs:
        if not 0 <= remote < peer.num_blocks:
            raise InvalidRequest(
                f"{peer.worker_id} has no block {remote}", field="remote_block", bound=f"< {peer.num_blocks}"
            )
        if not 0 <= local < region.num_blocks:
            raise InvalidRequest(
                f"this worker has no block {local}", field="local_block", bound=f"< {region.num_blocks}"
            )
    if len({local for _, local in pairs}) != len(pairs):
        raise InvalidRequest("a local block is named twice in one read", field="local_block")


def batches(pairs: Sequence[Pair], block_bytes: int) -> list[list[Pair]]:
    """The pairs in pieces of at most BATCH_BYTES, sorted so that neighbouring blocks can become one descriptor."""
    ordered = sorted(pairs)
    size = max(1, BATCH_BYTES // block_bytes)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


async def settle(future: asyncio.Future[T], what: str) -> None:
    """Waits until `future` is done, whatever its result, and cannot be cancelled meanwhile.

    Used for the end of a read: memory that may still be written must not be returned.
    """
    cancelled = False
    while not future.done():
        try:
            done, _ = await asyncio.wait([future], timeout=STUCK_REPORT_S)
        except asyncio.CancelledError:
            cancelled = True
            continue
        if not done:
            log.error("%s is still in flight; its blocks stay reserved", what)
    if not future.cancelled():
        future.exception()  # the caller was cancelled; the read's error needs no second report
    if cancelled:
        raise asyncio.CancelledError
