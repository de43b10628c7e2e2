"""Promises of the slots of recurrent states: each has one owner or none, and only what runs has one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.state_slots import StateSlots


@given(total=st.integers(1, 6), moves=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=60))
def test_free_and_held_slots_are_always_all(total: int, moves: list[tuple[str, bool]]) -> None:
    """Whatever is taken and dropped, in any order: no slot has two owners, and none is lost."""
    slots, owners = StateSlots(total), set[str]()
    for owner, takes in moves:
        if takes and owner not in owners:
            room = len(owners) < total
            assert slots.take(owner) == room
            owners |= {owner} if room else set()
        else:
            slots.drop(owner)
            owners.discard(owner)
        assert slots.check(owners, owners) == []
        assert slots.free + slots.held == total
        assert len({slots.slot(each) for each in owners}) == len(owners)


def test_what_does_not_balance_is_said() -> None:
    """A slot of a sequence that does not run, a sequence without one, and a slot that two have."""
    slots = StateSlots(3)
    assert slots.take("a")
    assert slots.check([], []) == ["a has a state slot but no longer exists"]
    assert slots.check(["a", "b"], ["a", "b"]) == ["b runs without a state slot"]
    slots._slot_of["b"] = slots.slot("a")
    assert any("each once" in fault for fault in slots.check(["a", "b"], ["a", "b"]))
