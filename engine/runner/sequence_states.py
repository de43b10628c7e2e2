"""The recurrent states of an engine's sequences: who has which slot, and copies of them in blocks.

A copy is what moves to another worker: it is in the last blocks of a sequence's table, so it has the owner, the ticket,
the transfer and the digest of the sequence's KV.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.attention.forward_context import device_done
from engine.core.state_slots import StateSlots
from engine.kv.kv_cache import KvCache


class SequenceStates:
    def __init__(self, pages: KvCache) -> None:
        """`pages` have slots, of which the last is not a sequence's."""
        assert pages.states is not None, "this model keeps no states"
        self._pages, self._memory = pages, pages.states
        self.blocks = pages.layout.state_blocks  # that hold a copy
        self.slots = StateSlots(len(pages.states.buffer) - 1, self.blocks)

    def commit(self) -> bool:
        """The states of the last forward are those of the slots from now on; always True."""
        self._memory.commit()
        return True

    def save(self, owner: str, table: Sequence[int]) -> None:
        """Copies the owner's state into the last blocks of its table, from where a transfer may read it at once."""
        self._pages.save_state(self.slots.slot(owner), table[-self.blocks :])
        device_done(self._pages.buffer.device)

    def load(self, owner: str, table: Sequence[int]) -> None:
        """The inverse of `save`; a transfer may write to the blocks again at once."""
        self._pages.load_state(self.slots.slot(owner), table[-self.blocks :])
        device_done(self._pages.buffer.device)
