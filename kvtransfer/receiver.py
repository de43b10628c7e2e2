"""The decode side of one transfer: reads announced blocks, verifies them, accounts for every block.

    add(ready) ─▶ read ─▶ digest ─▶ landed          while the source computes the next chunk
                   └─▶ failed: read again, at most READ_ATTEMPTS in all
    finish()   ─▶ every expected block landed exactly once, or an error and nothing may be committed
    abort()    ─▶ nothing can be written any more

A Receiver never commits: the service does, after the source has answered the Release.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.transport import Pair, settle
from kvtransfer.types import DigestBlocks, Peer, ReadStats, ReadyBlock, Ticket
from tandem.errors import DataLoss, InternalError, InvalidRequest, StaleTransfer, TandemError, TransferFailed

log = logging.getLogger(__name__)

# Maximum number of reads of one part if reads fail. Wrong bytes are not read again.
READ_ATTEMPTS = 2

# Parts that are read at the same time: one moves while the previous one is verified. With more, each would end later.
READS_AT_ONCE = 2


class Reads(Protocol):
    """The methods of Transport that a Receiver needs."""

    async def read(
        self, peer: Peer, pairs: Sequence[Pair], stall: float, failing: Callable[[TandemError], None] | None = None
    ) -> ReadStats: ...

    def link(self, peer: Peer) -> str: ...

    def why(self, peer: Peer) -> str: ...


@dataclass(frozen=True)
class TransferStats:
    """`seconds` is the time with at least one read in flight."""

    bytes: int
    blocks: int
    seconds: float
    transport: str  # of the last read; without one, what the pair would use
    why: str = ""  # this transport


class Receiver:
    """`expected` maps each index in the sequence that is expected to its chained hash and to the local block reserved
    for it. `stall` is the time in seconds that a read may make no progress. Raises StaleTransfer for a foreign ticket,
    InvalidRequest if a block is reserved for two indices.

    An error is known before the memory is safe: `add` and `finish` raise at once, while a read from a hung peer may
    write into the local blocks until its transport has ended it (10 s and more). The blocks may be freed only when
    `abort` has returned; after a successful `finish` it returns at once. So the caller reports the error first, and
    runs `abort` and the freeing of the blocks in a separate task.
    """

    def __init__(
        self,
        transport: Reads,
        peer: Peer,
        ticket: Ticket,
        expected: Mapping[int, tuple[bytes, int]],
        digest_blocks: DigestBlocks,
        stall: float,
    ) -> None:
        if ticket.incarnation != peer.incarnation:
            raise StaleTransfer(
                f"transfer {ticket.transfer_id} is of incarnation {ticket.incarnation} of {peer.worker_id}, "
                f"which is now {peer.incarnation}"
            )
        if len({block for _, block in expected.values()}) != len(expected):
            raise InvalidRequest("a local block is reserved for two indices", field="expected")
        self.ticket = ticket
        self._transport, self._peer = transport, peer
        self._expected = dict(expected)
        self._digest_blocks = digest_blocks
        self._stall = stall
        self._turns = asyncio.Semaphore(READS_AT_ONCE)
        self._news = asyncio.Event()  # a task ended, or an error is known
        self._announced: set[int] = set()
        self._landed: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: TandemError | None = None
        self.failed = asyncio.Event()  # there is an `error`
        self._ended = False
        self._bytes = 0
        self._carrier = ""  # what the last read used: the pair may have changed its transport since
        self._reading = 0
        self._reading_since = 0.0
        self._busy = 0.0

    @property
    def error(self) -> TandemError | None:
        """The first error, if there is one."""
        return self._error

    async def add(self, ready: Sequence[ReadyBlock]) -> None:
        """Starts to read announced blocks and returns at once.

        Raises DataLoss for a block that is not expected, was announced before or lies outside the peer's region,
        StaleTransfer after finish or abort, and the error of an earlier read as soon as there is one.
        """
        if self._ended:
            raise StaleTransfer(f"transfer {self.ticket.transfer_id} is over here")
        if self._error:
            raise self._error
        for block in ready:
            self._admit(block)
        if ready:
            task = asyncio.create_task(self._fetch(list(ready)))
            self._tasks.add(task)
            task.add_done_callback(self._fetched)

    async def finish(self) -> TransferStats:
        """Waits for all reads; returns only if every expected block landed exactly once with the right digest.

        Raises the first error (TransferFailed, WorkerLost, DataLoss, ...) as soon as it is known, perhaps with reads in
        flight. Unless it returns, `abort` must still be called.
        """
        if self._ended:
            raise StaleTransfer(f"transfer {self.ticket.transfer_id} is over here")
        while self._tasks and not self._error:
            self._news.clear()
            await self._news.wait()  # bounded by the stall of the reads
        if self._error:
            raise self._error
        self._ended = True
        missing = sorted(self._expected.keys() - self._landed)
        if missing:
            raise DataLoss(
                f"transfer {self.ticket.transfer_id} ended without {len(missing)} blocks, first index {missing[0]}",
                reason="MISSING_BLOCK",
            )
        return TransferStats(
            bytes=self._bytes,
            blocks=len(self._landed),
            seconds=self._busy,
            transport=self._carrier or self._transport.link(self._peer),
            why=self._transport.why(self._peer),
        )

    async def abort(self) -> None:
        """Ends all reads. When it returns, nothing of this transfer can reach the local blocks any more. Repeatable."""
        self._ended = True
        cancelled: asyncio.CancelledError | None = None
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            # A cancelled read ends only when its memory is safe (Transport.read), and so must `abort`.
            try:
                await asyncio.wait(set(self._tasks), timeout=self._stall)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled:
            raise cancelled

    def _admit(self, block: ReadyBlock) -> None:
        where = f"transfer {self.ticket.transfer_id}: block index {block.index}"
        if block.index not in self._expected:
            raise self._failed(DataLoss(f"{where} was not asked for", reason="UNEXPECTED_BLOCK"))
        if block.index in self._announced:
            raise self._failed(DataLoss(f"{where} was announced twice", reason="DUPLICATE_BLOCK"))
        if not 0 <= block.remote_block < self._peer.num_blocks:
            raise self._failed(DataLoss(f"{where} lies outside the source's region", reason="BLOCK_OUT_OF_RANGE"))
        self._announced.add(block.index)

    def _fail(self, error: TandemError) -> None:
        self._error = self._error or error
        self.failed.set()
        self._news.set()

    def _failed(self, error: TandemError) -> TandemError:
        self._fail(error)
        return error

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._news.set()

    async def _fetch(self, ready: list[ReadyBlock]) -> None:
        pairs = [(block.remote_block, self._expected[block.index][1]) for block in ready]
        try:
            async with self._turns:
                if self._error:
                    return
                stats = await self._read(pairs)
            wrong = await self._verified(ready)
            if wrong is not None:
                raise DataLoss(f"transfer {self.ticket.transfer_id}: the digest of block index {wrong} does not match")
        except TandemError as error:
            self._fail(error)
            return
        except Exception as error:
            log.exception("a bug while reading transfer %s", self.ticket.transfer_id)
            self._fail(InternalError(f"reading transfer {self.ticket.transfer_id} failed: {error!r}"))
            return
        self._bytes += stats.bytes
        self._carrier = stats.transport
        self._landed.update(block.index for block in ready)

    async def _verified(self, ready: list[ReadyBlock]) -> int | None:
        """Does not return before the digests are computed, because computing them may also convert the blocks into the
        local ones."""
        check = asyncio.ensure_future(asyncio.to_thread(self._first_wrong, ready))
        try:
            return await asyncio.shield(check)
        except asyncio.CancelledError:
            await settle(check, f"the digest of blocks of transfer {self.ticket.transfer_id}")
            raise

    async def _read(self, pairs: list[Pair]) -> ReadStats:
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return await self._read_once(pairs)
            except TransferFailed as error:
                if self._error:
                    raise
                log.warning("transfer %s: %s; reading again", self.ticket.transfer_id, error)
            # No `connect` here: the transport restores a failed connection, and a peer whose next incarnation has
            # connected meanwhile must not replace that one.
        return await self._read_once(pairs)

    async def _read_once(self, pairs: list[Pair]) -> ReadStats:
        if self._reading == 0:
            self._reading_since = time.monotonic()
        self._reading += 1
        try:
            return await self._transport.read(self._peer, pairs, self._stall, failing=self._fail)
        finally:
            self._reading -= 1
            if self._reading == 0:
                self._busy += time.monotonic() - self._reading_since

    def _first_wrong(self, ready: list[ReadyBlock]) -> int | None:
        here = [(place, context) for context, place in (self._expected[block.index] for block in ready)]
        found = zip(ready, self._digest_blocks(here), strict=True)
        return next((block.index for block, each in found if each != block.digest), None)
