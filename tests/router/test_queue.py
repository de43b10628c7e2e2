"""The order of those who wait: begun, urgent, fair between tenants, short. Nobody's crowd keeps another one waiting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router.queue import Queue, Waiting


def filled(*waiting: Waiting) -> Queue[Waiting]:
    queue: Queue[Waiting] = Queue()
    for one in waiting:
        queue.add(one)
    return queue


def drained(queue: Queue[Waiting]) -> list[Waiting]:
    order: list[Waiting] = []
    while (one := queue.first()) is not None:
        queue.place(one)
        order.append(one)
    return order


def test_who_has_begun_comes_first_then_the_urgent_then_the_short() -> None:
    """A client in the middle of its answer waits for nobody who has not begun, whatever their priority."""
    long, short, urgent = Waiting(500), Waiting(10), Waiting(900, priority=-1)
    lazy, begun = Waiting(1, priority=7), Waiting(2000, begun=True, priority=9)
    assert drained(filled(long, lazy, short, urgent, begun)) == [begun, urgent, short, long, lazy]


def test_tenants_take_turns_by_what_they_had() -> None:
    """Ten prompts of one and two of another, of one size: the two do not wait for the ten."""
    crowd = [Waiting(100, "crowd") for _ in range(10)]
    few = [Waiting(100, "few") for _ in range(2)]
    order = drained(filled(*crowd, *few))
    assert max(order.index(one) for one in few) <= 3


def test_control_as_one_tenant_the_two_come_last() -> None:
    """So that the turns above are the counters' doing."""
    crowd, few = [Waiting(100) for _ in range(10)], [Waiting(100) for _ in range(2)]
    assert drained(filled(*crowd, *few))[-2:] == few


def test_what_a_tenant_generates_counts_too() -> None:
    """One that asks little and has much generated has had its share."""
    queue = filled()
    queue.had("writer", 1000)
    writer, reader = Waiting(10, "writer"), Waiting(100, "reader")
    queue.add(writer)
    queue.add(reader)
    queue.had("writer", 200)
    assert queue.first() is reader


def test_a_tenant_that_was_away_has_saved_nothing() -> None:
    """Else it could keep all others waiting until it had caught up."""
    queue = filled()
    queue.add(first := Waiting(100, "here"))
    queue.place(first)
    queue.had("here", 10_000)
    here = [Waiting(100, "here") for _ in range(3)]
    back = [Waiting(100, "back") for _ in range(3)]
    for one in (*here, *back):
        queue.add(one)
    order = drained(queue)
    assert order[:2] != back[:2]
    assert {one.tenant for one in order[:2]} == {"here", "back"}


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.lists(st.integers(1, 500), min_size=1, max_size=12))
def test_while_both_wait_no_tenant_gets_ahead_by_more_than_one_prompt(mine: list[int], yours: list[int]) -> None:
    """The bound of the virtual token counter."""
    queue = filled(*(Waiting(n, "mine") for n in mine), *(Waiting(n, "yours") for n in yours))
    had = {"mine": 0, "yours": 0}
    while {one.tenant for one in queue} == set(had):
        one = queue.first()
        assert one is not None
        queue.place(one)
        had[one.tenant] += one.tokens
        assert abs(had["mine"] - had["yours"]) <= max(*mine, *yours)


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from("abc"), st.integers(-1, 1)), min_size=1, max_size=20))
def test_everybody_who_waits_is_placed_once(asked: list[tuple[int, str, int]]) -> None:
    """Whatever their sizes, tenants and priorities."""
    waiting = [Waiting(tokens, tenant, priority) for tokens, tenant, priority in asked]
    order = drained(filled(*waiting))
    assert sorted(map(id, order)) == sorted(map(id, waiting))


def test_who_comes_before_whom_is_known_beforehand() -> None:
    """The estimate of a wait is made of it: of its tenant who is shorter, of others what is their turn meanwhile."""
    mine = [Waiting(tokens, "mine") for tokens in (100, 300, 200)]
    yours = [Waiting(150, "yours") for _ in range(9)]
    queue = filled(*mine, *yours)
    before = queue.before(mine[1])
    assert {id(one) for one in before if one.tenant == "mine"} == {id(mine[0]), id(mine[2])}
    assert 2 <= sum(one.tenant == "yours" for one in before) <= 3
    assert queue.before(Waiting(5, "mine", begun=True)) == []
