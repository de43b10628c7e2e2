"""The owners of all KV blocks. Pure Python: no tensors, no clock, no sockets.

Every block is in exactly one of three states:

    free    on the heap, contents meaningless
    cached  without an owner, but its contents are a known prefix; evicted least recently used first
    held    in the table of at least one owner; a shared prefix block is in several tables

    free + cached + held = total, always; `check` recounts it from the tables.

An owner is a name (a sequence, a transfer, a probe of a link) with one table of blocks. This is the only record: no
other code stores block lists that could disagree with it.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Allocator and prefix cache over `total` blocks of `block_size` token places."""

    def __init__(self, total: int, block_size: int) -> None:
        if total < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: total={total}, block_size={block_size}")
        self.total = total
        self.block_size = block_size
        self._free = list(range(total))  # a heap: low numbers first, so that tables tend to be runs of neighbours
        self._holders = [0] * total  # number of tables that have a block
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # without an owner; oldest first
        self._tables: dict[str, list[int]] = {}
        self._news: list[tuple[bytes, bool]] | None = None  # None: there is no listener
        self.on_lost: Callable[[bytes], None] = lambda digest: None  # for each hash that is dropped

    # ---- questions

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.total - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def table(self, owner: str) -> list[int]:
        """The owner's blocks in order. This is the pool's own list: do not change it."""
        return self._tables[owner]

    def owners(self) -> list[str]:
        return list(self._tables)

    def owns(self, owner: str) -> bool:
        return owner in self._tables

    def match(self, hashes: Sequence[bytes]) -> int:
        """The number of leading hashes whose blocks are in the pool."""
        for count, digest in enumerate(hashes):
            if digest not in self._block_of:
                return count
        return len(hashes)

    def fits(self, hashes: Sequence[bytes], count: int) -> bool:
        """Whether `take` would give a table of `count` blocks now."""
        return self._reused(hashes, count) is not None

    # ---- changes; each is atomic

    def take(self, owner: str, hashes: Sequence[bytes], count: int) -> int | None:
        """Gives `owner` a table of `count` blocks; the leading ones are reused as far as `hashes` match.

        Returns the number of reused blocks, or None for "not now", without any change.
        """
        if owner in self._tables:
            raise ValueError(f"{owner} already owns blocks")
        reused = self._reused(hashes, count)
        if reused is None:
            return None
        for block in reused:
            self._hold(block)
        self._tables[owner] = reused + [self._fresh() for _ in range(count - len(reused))]
        return len(reused)

    def grow(self, owner: str, count: int) -> bool:
        """Extends the owner's table to `count` blocks. False for "not now", without any change."""
        table = self._tables[owner]
        missing = count - len(table)
        if missing > self.available:
            return False
        for _ in range(missing):
            table.append(self._fresh())
        return True

    def share(self, owner: str, blocks: Sequence[int]) -> None:
        """Gives `owner` a table of blocks that other owners hold; they become free when it has dropped them, too."""
        if owner in self._tables:
            raise ValueError(f"{owner} already owns blocks")
        for block in blocks:
            self._hold(block)
        self._tables[owner] = list(blocks)

    def publish(self, owner: str, index: int, digest: bytes) -> None:
        """The owner's block at `index` now holds the full, final KV with this hash; others may reuse it.

        If the same content is already here under another block, that one stays the cache's copy.
        """
        block = self._tables[owner][index]
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
            self._tell(digest, True)

    def distrust(self, owner: str) -> None:
        """The content of the owner's blocks is in doubt: removes their hashes from the cache."""
        for block in self._tables[owner]:
            if block in self._hash_of:
                self._forget(block)

    def drop(self, owner: str) -> None:
        """Drops the owner's blocks: known prefixes become cached, the rest free."""
        self._let_go(self._tables.pop(owner))

    def shorten(self, owner: str, count: int) -> None:
        """Drops the last `count` blocks of the owner's table, likewise."""
        table = self._tables[owner]
        kept = len(table) - count
        self._let_go(table[kept:])
        del table[kept:]

    def _let_go(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # the tail first, so that it is also evicted first
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                heapq.heappush(self._free, block)

    def find(self, hashes: Sequence[bytes]) -> list[int] | None:
        """The blocks with these hashes; None if one is missing. Their content is valid until the next change."""
        return [self._block_of[digest] for digest in hashes] if self.match(hashes) == len(hashes) else None

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Removes these hashes from the cache; their blocks without an owner become free."""
        for digest in hashes:
            if (block := self._block_of.get(digest)) is not None:
                if block in self._cached:
                    del self._cached[block]
                    heapq.heappush(self._free, block)
                self._forget(block)

    # ---- queries

    def listen(self) -> list[bytes]:
        """The hashes of all reusable blocks. From now on `news` returns the changes."""
        self._news = []
        return list(self._block_of)

    def news(self) -> list[tuple[bytes, bool]]:
        """The hashes added (True) or removed since the last call, in order."""
        if not self._news:
            return []
        news, self._news = self._news, []
        return news

    def unlisten(self) -> None:
        """Stops recording changes."""
        self._news = None

    # ---- the books

    def check(self, live: Iterable[str] | None = None) -> list[str]:
        """One sentence for each inconsistency; empty when the ledger balances.

        `live`: the owners that should exist; blocks of any other owner are leaked.
        """
        faults: list[str] = []
        held = Counter(block for table in self._tables.values() for block in table)
        for owner, table in self._tables.items():
            if len(set(table)) != len(table):
                faults.append(f"{owner} has a block twice in its table")
        for block, count in enumerate(self._holders):
            if count != held[block]:
                faults.append(f"block {block} counts {count} holders but is in {held[block]} tables")
        free, cached = set(self._free), set(self._cached)
        for block in sorted((free & cached) | (free & held.keys()) | (cached & held.keys())):
            faults.append(f"block {block} is in two states")
        if len(free) + len(cached) + len(held) != self.total:
            faults.append(f"free {len(free)} + cached {len(cached)} + held {len(held)} != total {self.total}")
        if live is not None:
            faults += [
                f"{owner} holds blocks but no longer exists" for owner in sorted(self._tables.keys() - set(live))
            ]
        return faults

    def _reused(self, hashes: Sequence[bytes], count: int) -> list[int] | None:
        """The leading blocks of a table of `count` that are here already; None if the others cannot be had."""
        reused = [self._block_of[digest] for digest in hashes[: min(self.match(hashes), count)]]
        idle = sum(1 for block in reused if self._holders[block] == 0)  # leave the cache without being evicted
        return reused if count - len(reused) <= self.available - idle else None

    def _fresh(self) -> int:
        block = heapq.heappop(self._free) if self._free else self._evict()
        self._holders[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        self._tell(digest, False)
        self.on_lost(digest)

    def _tell(self, digest: bytes, here: bool) -> None:
        if self._news is not None:
            self._news.append((digest, here))

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._cached[block]
        self._holders[block] += 1
