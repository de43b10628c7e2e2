"""Promises of the block pool: every block has one state, nothing leaks, a shared prefix is really shared."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.core import block_hash
from engine.core.block_pool import BlockPool
from tests.support.faults import forget_cached

SIZE = 4


def hashes(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    return block_hash.chain(tokens, SIZE, salt)


def test_a_dropped_prefix_is_found_again_and_costs_nothing() -> None:
    """After a sequence ends, one with the same leading tokens reuses its full blocks."""
    pool = BlockPool(8, SIZE)
    tokens = list(range(10))
    assert pool.take("a", hashes(tokens), 3) == 0
    for index, digest in enumerate(hashes(tokens)):
        pool.publish("a", index, digest)
    first = list(pool.table("a"))
    pool.drop("a")
    assert (pool.free, pool.cached, pool.held) == (6, 2, 0)
    assert pool.take("b", hashes(tokens), 3) == 2
    assert pool.table("b")[:2] == first[:2]


def test_another_salt_or_another_earlier_token_finds_nothing() -> None:
    """Cached KV is found only for the same tenant and the same whole prefix."""
    pool = BlockPool(8, SIZE)
    tokens = list(range(8))
    pool.take("a", hashes(tokens), 2)
    for index, digest in enumerate(hashes(tokens)):
        pool.publish("a", index, digest)
    assert pool.match(hashes(tokens)) == 2
    assert pool.match(hashes(tokens, b"tenant")) == 0
    assert pool.match(hashes([9, *tokens[1:]])) == 0
    assert pool.match(hashes([*tokens[:4], 9, 9, 9, 9])) == 1


def test_a_shared_block_is_free_when_all_its_owners_have_given_it_up() -> None:
    """In any order; until then nobody else gets it."""
    for first, last in (("a", "step"), ("step", "a")):
        pool = BlockPool(4, SIZE)
        pool.take("a", [], 3)
        block = pool.table("a")[2]
        pool.share("step", [block])
        assert (pool.free, pool.held, pool.check(live=["a", "step"])) == (1, 3, [])
        pool.drop(first)
        assert block not in pool._free
        assert pool.check(live=[last]) == []
        pool.drop(last)
        assert (pool.free, pool.check(live=[])) == (4, [])


def test_an_owner_of_shared_blocks_has_no_others() -> None:
    """Its table would be lost."""
    pool = BlockPool(4, SIZE)
    pool.take("a", [], 1)
    with pytest.raises(ValueError, match="already owns"):
        pool.share("a", [0])


def test_not_now_changes_nothing() -> None:
    """A request that does not fit leaves the pool as it was."""
    pool = BlockPool(4, SIZE)
    pool.take("a", [], 3)
    before = (pool.free, pool.cached, pool.held, list(pool.table("a")))
    assert pool.take("b", [], 2) is None
    assert not pool.grow("a", 5)
    assert not pool.owns("b")
    assert (pool.free, pool.cached, pool.held, list(pool.table("a"))) == before


def test_reused_blocks_are_not_counted_as_room_for_new_ones() -> None:
    """Blocks that a request reuses cannot also be evicted to make room for it."""
    pool = BlockPool(2, SIZE)
    tokens = list(range(8))
    pool.take("a", hashes(tokens), 2)
    for index, digest in enumerate(hashes(tokens)):
        pool.publish("a", index, digest)
    pool.drop("a")
    assert pool.take("b", hashes(tokens), 3) is None
    assert pool.check() == []


def test_the_least_recently_used_prefix_is_evicted_first_and_its_tail_before_its_head() -> None:
    """Eviction takes old prefixes from their end, so that the remaining blocks can still be found."""
    pool = BlockPool(4, SIZE)
    old, new = list(range(8)), list(range(100, 108))
    for name, tokens in (("old", old), ("new", new)):
        pool.take(name, hashes(tokens), 2)
        for index, digest in enumerate(hashes(tokens)):
            pool.publish(name, index, digest)
    pool.drop("old")
    pool.drop("new")
    pool.take("c", [], 1)
    assert pool.match(hashes(old)) == 1
    assert pool.match(hashes(new)) == 2


def test_the_check_finds_what_does_not_add_up() -> None:
    """The ledger's check finds a leaked owner, a lost block and a wrong count."""
    pool = BlockPool(4, SIZE)
    pool.take("a", [], 2)
    assert pool.check(live=["a"]) == []
    assert any("no longer exists" in fault for fault in pool.check(live=[]))
    pool._free.pop()
    assert any("total" in fault for fault in pool.check())
    block = pool.table("a")[1]
    pool._free.append(block)
    assert f"block {block} is in two states" in pool.check()
    pool._holders[pool.table("a")[0]] += 1
    assert any("holders" in fault for fault in pool.check())


def test_a_block_that_is_twice_in_a_table_is_found() -> None:
    """Two positions of one sequence would overwrite each other's KV."""
    pool = BlockPool(4, SIZE)
    pool.take("a", [], 2)
    pool._tables["a"][1] = pool._tables["a"][0]
    assert "a has a block twice in its table" in pool.check()


def test_every_block_that_is_shared_is_given_up_by_each_owner() -> None:
    """Including the first to leave, whose blocks the other owners still use."""
    pool, tokens = BlockPool(6, SIZE), list(range(12))
    for owner, shared in (("a", 3), ("b", 2), ("c", 1)):
        pool.take(owner, hashes(tokens[: shared * SIZE]), shared)
        for index, digest in enumerate(hashes(tokens[: shared * SIZE])):
            pool.publish(owner, index, digest)
    assert pool.held == 3
    for owner, held in (("a", 2), ("b", 1), ("c", 0)):
        pool.drop(owner)
        assert (pool.held, pool.check()) == (held, [])


def test_what_is_in_doubt_is_found_by_nobody() -> None:
    """Neither a published nor an unpublished block; other owners' blocks stay known, and the listener is notified."""
    pool = BlockPool(4, SIZE)
    pool.listen()
    for owner, digest in (("a", b"1"), ("b", b"2")):
        pool.take(owner, [], 2)
        pool.publish(owner, 0, digest)
    pool.distrust("a")
    assert (pool.match([b"1"]), pool.match([b"2"])) == (0, 1)
    assert pool.news() == [(b"1", True), (b"2", True), (b"1", False)]
    pool.drop("a")
    assert (pool.free, pool.cached, pool.check(live=["b"])) == (2, 0, [])


@pytest.mark.parametrize(("total", "size"), [(0, SIZE), (4, 0)])
def test_a_pool_has_blocks_and_a_block_has_places(total: int, size: int) -> None:
    """A setting of zero is refused, not served."""
    with pytest.raises(ValueError, match="a pool needs blocks"):
        BlockPool(total, size)


def test_an_owner_takes_once() -> None:
    """A second table for one owner would leave the first one unaccounted for."""
    pool = BlockPool(4, SIZE)
    pool.take("a", [], 1)
    with pytest.raises(ValueError, match="already owns"):
        pool.take("a", [], 1)


class PoolMachine(RuleBasedStateMachine):
    """Random operations of random owners on a small pool; the ledger must balance after every step."""

    @initialize(total=st.integers(1, 12))
    def start(self, total: int) -> None:
        self.pool = BlockPool(total, SIZE)
        self.told = set(self.pool.listen())
        self.tokens: dict[str, list[int]] = {}
        self.names = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), salt=st.sampled_from([b"", b"x"]))
    def take(self, tokens: list[int], salt: bytes) -> None:
        self.names += 1
        name = f"s{self.names}"
        known = hashes(tokens, salt)
        matched = self.pool.match(known)
        reused = self.pool.take(name, known, self.pool.blocks_for(len(tokens)))
        assert self.pool.owns(name) == (reused is not None)
        if reused is not None:
            assert reused == matched
            self.tokens[name] = tokens
            for index, digest in enumerate(known):
                self.pool.publish(name, index, digest)

    @rule(data=st.data(), more=st.integers(0, 3))
    def grow(self, data: st.DataObject, more: int) -> None:
        if self.tokens:
            name = data.draw(st.sampled_from(sorted(self.tokens)))
            count = len(self.pool.table(name)) + more
            room = self.pool.available
            assert self.pool.grow(name, count) == (more <= room)

    @rule(data=st.data(), fewer=st.integers(1, 3))
    def shorten(self, data: st.DataObject, fewer: int) -> None:
        if self.tokens:
            name = data.draw(st.sampled_from(sorted(self.tokens)))
            table = list(self.pool.table(name))
            self.pool.shorten(name, min(fewer, len(table)))
            assert self.pool.table(name) == table[: max(0, len(table) - fewer)]

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.tokens:
            name = data.draw(st.sampled_from(sorted(self.tokens)))
            del self.tokens[name]
            self.pool.drop(name)

    @rule()
    def forget(self) -> None:
        forget_cached(self.pool)
        assert self.pool.cached == 0

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.check(live=self.tokens) == []
            assert self.pool.free + self.pool.cached + self.pool.held == self.pool.total

    @invariant()
    def who_listens_knows_what_is_there(self) -> None:
        if hasattr(self, "pool"):
            for digest, here in self.pool.news():
                assert (digest in self.told) != here
                (self.told.add if here else self.told.remove)(digest)
            assert self.told == set(self.pool._block_of)
            assert self.pool.news() == []


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
