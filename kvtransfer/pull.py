"""The decode side of one transfer: read what is announced, verify it, account for every block.

    add(ready) ─▶ read ─▶ digest ─▶ landed          several at once, while the source computes the next chunk
    finish()   ─▶ every expected block landed exactly once, or an error and nothing may be committed
    abort()    ─▶ nothing can be written any more

A Pull never commits: the service does, after the source has answered the Release. Use it as `async with`, which aborts
on every way out that is not a successful finish.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from kvtransfer.blocks import DigestBlock, Peer, ReadyBlock, Ticket
from kvtransfer.transport import Transport
from tandem.errors import DataLoss, InternalError, InvalidRequest, StaleTransfer, TandemError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PullStats:
    """`seconds` is the time with at least one read in flight; the two instants are of time.monotonic()."""

    bytes: int
    blocks: int
    seconds: float
    first_ready_at: float | None
    done_at: float
    transport: str


class Pull:
    """`contexts` and `local_blocks` say, for each index in the sequence that is expected, its chained hash and the
    local block reserved for it. `timeout` bounds each read, in seconds. Raises StaleTransfer for a foreign ticket,
    InvalidRequest if the two mappings disagree.
    """

    def __init__(
        self,
        transport: Transport,
        peer: Peer,
        ticket: Ticket,
        contexts: Mapping[int, bytes],
        local_blocks: Mapping[int, int],
        digest_block: DigestBlock,
        timeout: float,
    ) -> None:
        if ticket.incarnation != peer.incarnation:
            raise StaleTransfer(
                f"transfer {ticket.transfer_id} is of {peer.worker_id}'s life {ticket.incarnation}, "
                f"which now lives as {peer.incarnation}"
            )
        if contexts.keys() != local_blocks.keys():
            raise InvalidRequest("hashes and local blocks name different indices", field="local_blocks")
        if len(set(local_blocks.values())) != len(local_blocks):
            raise InvalidRequest("a local block is reserved for two indices", field="local_blocks")
        self.ticket = ticket
        self._transport, self._peer = transport, peer
        self._contexts, self._local_blocks = dict(contexts), dict(local_blocks)
        self._digest_block = digest_block
        self._timeout = timeout
        self._announced: set[int] = set()
        self._landed: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: TandemError | None = None
        self._ended = False
        self._bytes = 0
        self._reading = 0
        self._reading_since = 0.0
        self._busy = 0.0
        self._first_ready_at: float | None = None

    async def __aenter__(self) -> Pull:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort()

    async def add(self, ready: Sequence[ReadyBlock]) -> None:
        """Starts to read announced blocks and returns at once.

        Raises DataLoss for a block that is not expected, came before or lies outside the peer's region, StaleTransfer
        after finish or abort, and the error of an earlier read as soon as there is one.
        """
        if self._ended:
            raise StaleTransfer(f"transfer {self.ticket.transfer_id} is over here")
        if self._error:
            raise self._error
        for block in ready:
            self._admit(block)
        if ready:
            self._first_ready_at = self._first_ready_at or time.monotonic()
            task = asyncio.create_task(self._fetch(list(ready)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def finish(self) -> PullStats:
        """Waits for all reads; returns only if every expected block landed exactly once with the right digest.

        Raises what went wrong first (WorkerLost, DataLoss, DeadlineExceeded, ...), by then with no read in flight. A
        caller that is cancelled here must still call `abort`.
        """
        if self._ended:
            raise StaleTransfer(f"transfer {self.ticket.transfer_id} is over here")
        while self._tasks and not self._error:
            # Each task ends within the read's own timeout; this one only bounds a single look.
            await asyncio.wait(self._tasks, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._error:
            await self.abort()
            raise self._error
        self._ended = True
        missing = sorted(self._contexts.keys() - self._landed)
        if missing:
            raise DataLoss(
                f"transfer {self.ticket.transfer_id} ended without {len(missing)} blocks, first index {missing[0]}",
                reason="MISSING_BLOCK",
            )
        return PullStats(
            bytes=self._bytes,
            blocks=len(self._landed),
            seconds=self._busy,
            first_ready_at=self._first_ready_at,
            done_at=time.monotonic(),
            transport=self._transport.link(self._peer),
        )

    async def abort(self) -> None:
        """Ends all reads. When it returns, nothing of this transfer can reach the local blocks any more. Repeatable."""
        self._ended = True
        cancelled: asyncio.CancelledError | None = None
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            # A cancelled read ends only when its memory is safe; see Transport.read. So may this, and no earlier.
            try:
                await asyncio.wait(set(self._tasks), timeout=self._timeout)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled:
            raise cancelled

    def _admit(self, block: ReadyBlock) -> None:
        where = f"transfer {self.ticket.transfer_id}: block index {block.index}"
        if block.index not in self._contexts:
            raise self._fail(DataLoss(f"{where} was not asked for", reason="UNEXPECTED_BLOCK"))
        if block.index in self._announced:
            raise self._fail(DataLoss(f"{where} was announced twice", reason="DUPLICATE_BLOCK"))
        if not 0 <= block.remote_block < self._peer.num_blocks:
            raise self._fail(DataLoss(f"{where} lies outside the source's region", reason="BLOCK_OUT_OF_RANGE"))
        self._announced.add(block.index)

    def _fail(self, error: TandemError) -> TandemError:
        self._error = self._error or error
        return error

    async def _fetch(self, ready: list[ReadyBlock]) -> None:
        pairs = [(block.remote_block, self._local_blocks[block.index]) for block in ready]
        try:
            self._start_reading()
            try:
                stats = await self._transport.read(self._peer, pairs, self._timeout)
            finally:
                self._stop_reading()
            wrong = await asyncio.to_thread(self._first_wrong, ready)
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
        self._landed.update(block.index for block in ready)

    def _first_wrong(self, ready: list[ReadyBlock]) -> int | None:
        for block in ready:
            if self._digest_block(self._local_blocks[block.index], self._contexts[block.index]) != block.digest:
                return block.index
        return None

    def _start_reading(self) -> None:
        if self._reading == 0:
            self._reading_since = time.monotonic()
        self._reading += 1

    def _stop_reading(self) -> None:
        self._reading -= 1
        if self._reading == 0:
            self._busy += time.monotonic() - self._reading_since
