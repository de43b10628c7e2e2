"""The prefill side's ledger of open transfers. It does not hold blocks and does no I/O.

The engine must hold every announced block, unchanged, until `release` or `revoke_ticket` returns its id; only then may
it be freed. Both first remove the ticket under one lock, so no later call can succeed for the same blocks.

    open ──announce*──▶ release       ─▶ ids to free    the sink read them and they were held until now
                  └───▶ revoke_ticket ─▶ ids to free    the stream ended, was cancelled, or the engine was reset
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.types import DigestBlocks, Offer, ReadyBlock, Ticket
from tandem.errors import InternalError, InvalidRequest, StaleTransfer

# One announcement names blocks of at most this many bytes (or one block), so that the digests of a cached prompt's next
# part are computed while the previous one moves. The digests of 64 MiB take about 7 ms.
PART_BYTES = 64 << 20

# Ended transfers that are remembered, so that the error for their tickets has the reason.
MAX_REMEMBERED_ENDS = 1024


@dataclass
class _Entry:
    ticket: Ticket
    # index in the sequence -> block id
    blocks: dict[int, int] = field(default_factory=dict)


class Sender:
    """Thread-safe: announcements may be digested in a worker thread while a release arrives on the event loop."""

    def __init__(self, incarnation: str, digest_blocks: DigestBlocks) -> None:
        self._incarnation = incarnation
        self._digest_blocks = digest_blocks
        self._lock = threading.Lock()
        self._generation = 0
        self._entries: dict[str, _Entry] = {}
        self._ends: OrderedDict[tuple[str, int], str] = OrderedDict()

    def open(self, transfer_id: str) -> Ticket:
        """Starts a transfer. Raises InvalidRequest while one with this id is open."""
        with self._lock:
            if transfer_id in self._entries:
                raise InvalidRequest(f"transfer {transfer_id} is open already", field="transfer_id")
            self._generation += 1
            ticket = Ticket(transfer_id, self._generation, self._incarnation)
            self._entries[transfer_id] = _Entry(ticket)
            return ticket

    def announce(self, ticket: Ticket, offers: Sequence[Offer]) -> list[ReadyBlock]:
        """Digests finished blocks and enters them as held. Costs about 0.1 ms per MiB: large ones belong in a thread.

        Raises StaleTransfer if the ticket is or becomes dead, InternalError if an index is offered twice; in both cases
        nothing is entered.
        """
        with self._lock:
            self._living(ticket)
        found = self._digest_blocks([(offer.block, offer.context) for offer in offers])
        ready = [ReadyBlock(offer.index, offer.block, each) for offer, each in zip(offers, found, strict=True)]
        with self._lock:
            entry = self._living(ticket)
            new = {block.index: block.remote_block for block in ready}
            if len(new) != len(ready) or new.keys() & entry.blocks.keys():
                raise InternalError(f"transfer {ticket.transfer_id} was offered a block index twice")
            entry.blocks.update(new)
        return ready

    def release(self, ticket: Ticket) -> tuple[int, ...]:
        """The fence: returns the block ids, now free, if they were held unchanged until this call.

        Raises StaleTransfer for a ticket that was released, revoked, replaced, never issued, or of another incarnation.
        """
        with self._lock:
            self._living(ticket)
            return self._end(ticket.transfer_id, "released")

    def revoke_ticket(self, ticket: Ticket, why: str) -> tuple[int, ...]:
        """Ends the transfer and returns its block ids, now free; none if it has ended already. A later transfer with
        the same id is not affected."""
        with self._lock:
            entry = self._entries.get(ticket.transfer_id)
            return self._end(ticket.transfer_id, why) if entry and entry.ticket == ticket else ()

    def _living(self, ticket: Ticket) -> _Entry:
        entry = self._entries.get(ticket.transfer_id)
        if entry is not None and entry.ticket == ticket:
            return entry
        if ticket.incarnation != self._incarnation:
            why = "belongs to another incarnation of this worker"
        else:
            why = self._ends.get((ticket.transfer_id, ticket.generation), "is not open here")
        raise StaleTransfer(f"transfer {ticket.transfer_id} generation {ticket.generation}: {why}")

    def _end(self, transfer_id: str, why: str) -> tuple[int, ...]:
        entry = self._entries.pop(transfer_id)
        self._ends[(transfer_id, entry.ticket.generation)] = why
        while len(self._ends) > MAX_REMEMBERED_ENDS:
            self._ends.popitem(last=False)
        return tuple(entry.blocks[index] for index in sorted(entry.blocks))
