"""The recurrent states of an engine's sequences: their slots, and copies of them in blocks.

A copy moves to another worker in the last blocks of the sequence's table, so it shares the owner, the ticket, the
transfer and the digest of the sequence's KV.

A *snapshot* is a copy of the state at the end of a block, with which a later sequence begins. It is in separate blocks,
which the pool finds by the hashes of that state. It is copied into the sequence's slot and never shared. KV is reused
up to the deepest snapshot only. Snapshots are kept at intervals whose KV takes SHARE times their memory, and at a
prompt's last full block; in total they take at most 1 / SHARE of the pool, and the least recently used ones are dropped
first. The pool evicts their blocks like others; a snapshot that loses a block is dropped.
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

SHARE = 4  # snapshots take at most one in SHARE blocks
SNAPSHOT = "snapshot"  # owner of its blocks while they are written or read


class SequenceStates:
    def __init__(self, pages: KvCache, pool: BlockPool) -> None:
        """The last slot of `pages` is not for sequences."""
        assert pages.states is not None, "this model keeps no states"
        self._pages, self._memory, self._pool = pages, pages.states, pool
        self.blocks = pages.layout.state_blocks  # of one copy
        self.slots = StateSlots(pages.states.slots - 1)
        if pool.total <= self.blocks:
            what = f"a copy of one sequence's recurrent states needs {self.blocks} blocks, there are {pool.total}"
            raise TooLarge(f"{what}; raise kv_blocks", field="kv_blocks", bound=f"> {self.blocks}")
        self._most = pool.total // SHARE // self.blocks
        self._interval = SHARE * self.blocks * pool.block_size  # tokens
        self._snapshots: OrderedDict[bytes, list[bytes]] = OrderedDict()  # hash of the block that ends -> of the state
        self._whose: dict[bytes, bytes] = {}  # the inverse
        self.evictions = 0  # snapshots evicted for lack of room
        pool.on_lost = self._lost

    def __str__(self) -> str:
        state = self._pages.layout.state_bytes
        return f", {self.slots.total} slots of {state / 2**20:.1f} MiB for recurrent states"

    @property
    def snapshots(self) -> int:
        """The number of stored snapshots."""
        return len(self._snapshots)

    def check(self, running: Iterable[str], live: Iterable[str]) -> list[str]:
        """One sentence for each inconsistency of slots (see StateSlots.check) and snapshots."""
        lost = sum(self._pool.find(parts) is None for parts in self._snapshots.values())
        faults = [f"{lost} snapshots of recurrent states lack blocks"] if lost else []
        return faults + self.slots.check(running, live)

    def commit(self) -> bool:
        """Makes the states of the last forward those of the slots; always True."""
        self._memory.commit()
        return True

    def save(self, owner: str, table: Seq[int]) -> None:
        """Copies the owner's state into the last blocks of its table. A transfer may read them when it returns."""
        self._pages.save_state(self.slots.slot(owner), table[-self.blocks :])
        device_done(self._pages.buffer.device)

    def load(self, owner: str, table: Seq[int]) -> None:
        """The inverse of `save`. A transfer may write to the blocks when it returns."""
        self._pages.load_state(self.slots.slot(owner), table[-self.blocks :])
        device_done(self._pages.buffer.device)

    def resume(self, sequence: Sequence, blocks: int) -> list[bytes] | None:
        """Gives the sequence a slot with the deepest snapshot within its cached blocks, and returns the hashes of the
        blocks up to that snapshot, an empty list without a snapshot. Returns None, and copies nothing, if no slot is
        free or the pool cannot allocate `blocks` blocks: a waiting sequence asks again in every step."""
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
        """How many of the next `count` tokens to compute: up to the position of the next snapshot."""
        done = sequence.num_computed
        places = (self._last(sequence), done // self._interval * self._interval + self._interval)
        return min([count, *(place - done for place in places if place > done)]) if self._most else count

    def keep(self, sequence: Sequence, count: int) -> None:
        """Called after a step with `count` of its tokens: stores a snapshot if the position is one for snapshots."""
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
        """Removes the snapshots of all of the sequence's prefixes, because its states are in doubt."""
        for digest in sequence.hashes(self._pool.block_size):
            self._forget(digest)

    def _begin_with(self, digest: bytes, sequence: Sequence) -> None:
        """Copies a snapshot into the sequence's slot, and marks it as the most recently used one."""
        self._snapshots.move_to_end(digest)
        self._pool.take(SNAPSHOT, self._snapshots[digest], self.blocks)
        self.load(sequence.id, self._pool.table(SNAPSHOT))
        self._pool.drop(SNAPSHOT)

    def _lost(self, part: bytes) -> None:
        """Called when the pool has evicted this block."""
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
