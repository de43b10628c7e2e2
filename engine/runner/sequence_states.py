"""The recurrent states of an engine's sequences: who has which slot, and copies of them in blocks.

A copy is what moves to another worker: it is in the last blocks of a sequence's table, so it has the owner, the ticket,
the transfer and the digest of the sequence's KV.

A copy is also what a later sequence begins with: a *snapshot* of the state at the end of a block, in blocks of its
own, which the pool finds by the hashes of that state. It is copied into the sequence's slot and never shared. KV is
reused up to the deepest snapshot only. Snapshots are kept where they take at most a quarter of the memory of the KV
before them, and at the last full block of what is computed at once; in all at most a quarter of the pool, the least
recently used ones go first. The pool evicts them like others: who loses one block of a state has lost it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.attention.forward_context import device_done
from engine.core import block_hash
from engine.core.block_pool import BlockPool
from engine.core.sequence import Sequence
from engine.core.state_slots import StateSlots
from engine.kv.kv_cache import KvCache
from tandem.errors import TooLarge

SHARE = 4  # of the KV's memory: one in so many blocks
SNAPSHOT = "snapshot"  # owner of its blocks while they are written or read


class SequenceStates:
    def __init__(self, pages: KvCache, pool: BlockPool) -> None:
        """`pages` have slots, of which the last is not a sequence's."""
        assert pages.states is not None, "this model keeps no states"
        self._pages, self._memory, self._pool = pages, pages.states, pool
        self.blocks = pages.layout.state_blocks  # that hold a copy
        self.slots = StateSlots(pages.states.slots - 1)
        if pool.total <= self.blocks:
            what = f"a copy of one sequence's recurrent states needs {self.blocks} blocks, there are {pool.total}"
            raise TooLarge(f"{what}; raise kv_blocks", field="kv_blocks", bound=f"> {self.blocks}")
        self._most = pool.total // SHARE // self.blocks
        self._interval = SHARE * self.blocks * pool.block_size  # tokens
        self._snapshots: OrderedDict[bytes, list[bytes]] = OrderedDict()  # hash of the block that ends -> of the state
        self._whose: dict[bytes, bytes] = {}  # the inverse
        self.evictions = 0  # of snapshots, for lack of room
        pool.on_lost = self._lost

    def __str__(self) -> str:
        state = self._pages.layout.state_bytes
        return f", {self.slots.total} slots of {state / 2**20:.1f} MiB for recurrent states"

    @property
    def snapshots(self) -> int:
        """How many a sequence can begin with."""
        return len(self._snapshots)

    def check(self, running: Iterable[str], live: Iterable[str]) -> list[str]:
        """One sentence for each inconsistency of slots (as theirs) and snapshots."""
        lost = sum(self._pool.find(parts) is None for parts in self._snapshots.values())
        faults = [f"{lost} snapshots of recurrent states lack blocks"] if lost else []
        return faults + self.slots.check(running, live)

    def commit(self) -> bool:
        """The states of the last forward are those of the slots from now on; always True."""
        self._memory.commit()
        return True

    def save(self, owner: str, table: Seq[int]) -> None:
        """Copies the owner's state into the last blocks of its table, from where a transfer may read it at once."""
        self._pages.save_state(self.slots.slot(owner), table[-self.blocks :])
        device_done(self._pages.buffer.device)

    def load(self, owner: str, table: Seq[int]) -> None:
        """The inverse of `save`; a transfer may write to the blocks again at once."""
        self._pages.load_state(self.slots.slot(owner), table[-self.blocks :])
        device_done(self._pages.buffer.device)

    def resume(self, sequence: Sequence, blocks: int) -> list[bytes] | None:
        """Gives it a slot with the deepest snapshot within its cached blocks, and returns the hashes of the blocks up
        to there; none without one. None: no slot is free, or the pool has no table of so many blocks. Then nothing was
        copied: a sequence that waits asks again in every step."""
        hashes = sequence.reusable(self._pool.block_size)
        found = self._pool.match(hashes)
        count = next((count for count in range(found, 0, -1) if hashes[count - 1] in self._snapshots), 0)
        if not self._pool.fits(hashes[:count], blocks) or not self.slots.take(sequence.id):
            return None
        if sequence.preemptions == 0:
            sequence.unresumed = (found - count) * self._pool.block_size
        if count:
            self._begin_with(hashes[count - 1], sequence)
        return hashes[:count]

    def cut(self, sequence: Sequence, count: int) -> int:
        """How many of its next `count` tokens to compute: up to the place of the next snapshot."""
        done = sequence.num_computed
        places = (self._last(sequence), done // self._interval * self._interval + self._interval)
        return min([count, *(place - done for place in places if place > done)]) if self._most else count

    def keep(self, sequence: Sequence, count: int) -> None:
        """After a step of `count` tokens of it: a snapshot, if this is the place for one."""
        done, size = sequence.num_computed, self._pool.block_size
        regular = done % self._interval == 0
        if not self._most or not (regular or (count > 1 and done % size == 0 and done >= self._last(sequence))):
            return
        digest = sequence.hashes(size)[done // size - 1]
        if digest in self._snapshots:
            self._snapshots.move_to_end(digest)
            return
        while len(self._snapshots) >= self._most:
            self._forget(next(iter(self._snapshots)))
            self.evictions += 1
        if self._pool.take(SNAPSHOT, [], self.blocks) is None:
            return
        parts = block_hash.of_state(digest, done, self.blocks)
        self.save(sequence.id, self._pool.table(SNAPSHOT))
        for index, part in enumerate(parts):
            self._pool.publish(SNAPSHOT, index, part)
        self._pool.drop(SNAPSHOT)
        self._snapshots[digest] = parts
        self._whose |= dict.fromkeys(parts, digest)

    def forget(self, sequence: Sequence) -> None:
        """Its states are in doubt: removes the snapshots of all of its beginnings."""
        for digest in sequence.hashes(self._pool.block_size):
            self._forget(digest)

    def _begin_with(self, digest: bytes, sequence: Sequence) -> None:
        """Copies a snapshot into the sequence's slot. From now on it is the most recently used one."""
        self._snapshots.move_to_end(digest)
        self._pool.take(SNAPSHOT, self._snapshots[digest], self.blocks)
        self.load(sequence.id, self._pool.table(SNAPSHOT))
        self._pool.drop(SNAPSHOT)

    def _lost(self, part: bytes) -> None:
        """The pool has given this block to somebody else."""
        if part in self._whose:
            self._forget(self._whose[part])
            self.evictions += 1

    def _forget(self, digest: bytes) -> None:
        parts = self._snapshots.pop(digest, [])
        for part in parts:
            del self._whose[part]
        self._pool.forget(parts)

    def _last(self, sequence: Sequence) -> int:
        """The end of the last full block before its last token."""
        size = self._pool.block_size
        return (len(sequence.tokens) - 1) // size * size
