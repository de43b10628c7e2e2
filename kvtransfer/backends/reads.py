"""The active reads and their peers: which batch may be posted next, and which has stalled.

Pure bookkeeping for `nixl_reads`: no NIXL, no threads, no clock. Times are in seconds on whatever clock the caller
uses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.transport import Pair
from kvtransfer.types import Peer
from tandem.errors import TandemError

# Batches in flight from one peer: one is on its way while the previous one lands. All reads from the peer share this
# limit, so a posted batch has few before it, and its age shows whether the peer is silent.
BATCHES_IN_FLIGHT = 2


@dataclass(eq=False)
class Flight:
    """One posted transfer."""

    handle: Any
    pairs: list[Pair]
    posted_at: float
    # Posting it failed, perhaps after some of its blocks; these may be written until the agent is destroyed.
    unknown: bool = False


@dataclass(eq=False)
class Read:
    """One call of `read`, or the warm-up of a connection. `stall`: seconds that a posted batch may take.

    `failing` is called once, with the error, when the read is certain to fail although its memory is not safe yet.
    """

    peer: Peer
    pending: deque[list[Pair]]
    stall: float
    # Reads a few bytes into unused memory, where a late write does no harm.
    warm_up: bool = False
    failing: Callable[[TandemError], None] | None = None
    done: Future[None] = field(default_factory=Future)
    flights: list[Flight] = field(default_factory=list)
    # Set by the reader's thread.
    cancelled: bool = False
    # Why the read posts nothing more, and since when.
    error: TandemError | None = None
    stopped_at: float = 0.0
    reported: bool = False  # to the reader, by `failing`

    def stop(self, error: TandemError, now: float) -> None:
        if self.error is None:
            self.error, self.stopped_at = error, now
            self.pending.clear()

    def give_up(self, error: TandemError, now: float) -> None:
        """As `stop`, but reports the error to the reader at once, because in-flight batches may take long to end."""
        self.stop(error, now)
        if not self.reported and self.failing is not None and self.error is not None:
            self.reported = True
            self.failing(self.error)

    def requeue(self) -> None:
        """The agent with its flights was destroyed: posts them again unless the read has failed."""
        if self.error is None:
            self.pending.extendleft(flight.pairs for flight in reversed(self.flights))
        self.flights.clear()


@dataclass(eq=False)
class Remote:
    """A known peer. `dlist` is None until the current agent has registered it."""

    peer: Peer
    dlist: Any = None
    # UCX's name for the connection.
    endpoint: str = ""
    # The warm-up has succeeded and nothing has failed since.
    ready: bool = False
    # The connection has failed: it is dropped when nothing is in flight over it, and the next batch connects again.
    renew: bool = False
    # A batch has stalled: no new reads until the batches in flight have ended.
    silent: bool = False
    # Forgotten, or its agent has been replaced: it is removed with its last read.
    lost: bool = False
    # In the order of their turns.
    reads: list[Read] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        return sum(len(read.flights) for read in self.reads)

    def next_read(self) -> Read | None:
        """The read whose batch is posted next; it becomes the last in turn."""
        if self.in_flight >= (1 if self.renew else BATCHES_IN_FLIGHT):
            return None
        for read in self.reads:
            if read.pending and not (read.warm_up and read.flights):
                self.reads.remove(read)
                self.reads.append(read)
                return read
        return None

    def stalled(self, now: float) -> bool:
        return any(now > flight.posted_at + read.stall for read in self.reads for flight in read.flights)

    def overdue(self, now: float, grace: float) -> bool:
        """Whether a read that was stopped `grace` seconds ago is still in flight."""
        return any(read.flights and read.error is not None and now > read.stopped_at + grace for read in self.reads)

    def fail(self) -> None:
        self.ready, self.renew = False, self.dlist is not None

    def unmet(self) -> None:
        """Called when the agent was destroyed or has removed the peer."""
        self.dlist, self.renew, self.silent = None, False, False
