"""The order of those who wait: begun, urgent, fair between tenants, short. Nobody's crowd keeps another one waiting."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.router.routing.fair_queue import FairQueue, Waiting
from services.router.routing.size_histogram import SizeHistogram


def filled(*waiting: Waiting) -> FairQueue[Waiting]:
    queue: FairQueue[Waiting] = FairQueue()
    for one in waiting:
        queue.add(one)
    return queue


def drained(queue: FairQueue[Waiting]) -> list[Waiting]:
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
    queue.charge("writer", 1000)
    writer, reader = Waiting(10, "writer"), Waiting(100, "reader")
    queue.add(writer)
    queue.add(reader)
    queue.charge("writer", 200)
    assert queue.first() is reader


def test_a_tenant_that_was_away_has_saved_nothing() -> None:
    """Else it could keep all others waiting until it had caught up."""
    queue = filled()
    queue.add(first := Waiting(100, "here"))
    queue.place(first)
    queue.charge("here", 10_000)
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
    while queue._waiting.keys() == had.keys():
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


def test_those_who_left_are_in_nobodys_way_when_more_come() -> None:
    """Room is made anew for those who are left, in the order of their arrival."""
    waiting = [Waiting(100 + number) for number in range(40)]
    queue = filled(*waiting[:8])
    for one in waiting[1:5]:
        queue.remove(one)
    for one in waiting[8:]:
        queue.add(one)
    left = [waiting[0], *waiting[5:]]
    assert all(one in queue._classes[True, 0].lines[""] for one in left)
    assert drained(queue) == left


def test_who_comes_before_whom_is_known_beforehand() -> None:
    """The estimate of a wait is made of it: of its tenant who is shorter, of others what is their turn meanwhile."""
    mine = [Waiting(tokens, "mine") for tokens in (100, 300, 200)]
    yours = [Waiting(150, "yours") for _ in range(9)]
    queue = filled(*mine, *yours)
    assert queue.before(mine[1]) == (2 + 3, 300 + 3 * 150)
    assert queue.before(Waiting(5, "mine", begun=True)) == (0, 0)
    urgent = Waiting(40, "third", priority=-1)
    queue.add(urgent)
    assert queue.before(mine[1]) == (1 + 2 + 3, 40 + 300 + 3 * 150)


def test_of_many_tenants_a_sample_says_what_comes_before() -> None:
    """Of 1,000 tenants with one prompt each, all that are not behind come first."""
    queue = filled(*(Waiting(100, f"tenant-{number}") for number in range(1000)))
    count, tokens = queue.before(Waiting(100, "tenant-1000"))
    assert (count, tokens) == (1000, 100_000)


class Plain:
    """The order by its definition, which looks at everybody each time."""

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self.had: dict[str, float] = {}
        self.overtaken: dict[int, int] = {}
        self.latest = 0.0

    def add(self, one: Waiting) -> None:
        """After the queue, which gives it its number."""
        tenants = {other.tenant for other in self.waiting}
        if one.tenant not in tenants:
            least = min((self.had[tenant] for tenant in tenants), default=self.latest)
            self.had[one.tenant] = max(self.had.get(one.tenant, 0.0), least)
        self.overtaken[one.number] = 0
        self.waiting.append(one)

    def place(self, one: Waiting) -> None:
        self.waiting.remove(one)
        for other in self.waiting:
            if other.number < one.number and (other.tenant, other.priority) == (one.tenant, one.priority):
                self.overtaken[other.number] += one.tokens
        self.had[one.tenant] += one.tokens
        self.latest = self.had[one.tenant]

    def first(self) -> Waiting | None:
        return min(self.waiting, key=self._turn, default=None)

    def _turn(self, one: Waiting) -> tuple[bool, int, float, int, int]:
        left = one.tokens - self.overtaken[one.number]
        return not one.begun, one.priority, self.had[one.tenant], left, one.number


REQUEST = st.tuples(st.integers(1, 60), st.sampled_from("abc"), st.sampled_from([0, 0, 0, 1]), st.booleans())
STEPS = st.one_of(
    st.tuples(st.just("add"), REQUEST),
    st.tuples(st.sampled_from(["place", "leave", "place out of turn"]), st.integers(0, 100)),
    st.tuples(st.just("place the first"), st.none()),
    st.tuples(st.sampled_from(["had", "give back"]), st.tuples(st.sampled_from("abc"), st.integers(1, 90))),
)


@given(st.lists(REQUEST, max_size=30), st.lists(STEPS, max_size=60))
def test_the_order_is_the_one_of_its_definition(begin: list[Any], steps: list[Any]) -> None:
    """Whoever comes, leaves, is placed, in its turn or not, and whatever the tenants had meanwhile."""
    queue, plain = filled(), Plain()
    for do, about in [*(("add", one) for one in begin), *steps]:
        some = plain.waiting[about % len(plain.waiting)] if isinstance(about, int) and plain.waiting else None
        if do == "add":
            tokens, tenant, priority, begun = about
            queue.add(one := Waiting(tokens, tenant, priority, begun))
            plain.add(one)
        elif do == "leave" and some:
            queue.remove(some)
            queue.remove(some)
            plain.waiting.remove(some)
        elif do.startswith("place"):
            one = plain.first() if do == "place the first" else some
            if one:
                queue.place(one)
                plain.place(one)
        elif do == "had":
            queue.charge(*about)
            plain.had[about[0]] = plain.had.get(about[0], 0.0) + about[1]
        elif do == "give back":
            queue.give_back(*about)
            plain.had[about[0]] = max(0.0, plain.had.get(about[0], 0.0) - about[1])
        assert queue.first() is plain.first()
        assert (len(queue), queue.tokens) == (len(plain.waiting), sum(one.tokens for one in plain.waiting))
        lines = [line for group in queue._classes.values() for line in group.lines.values()]
        left = {id(one) for line in lines for one in line._requests if one is not None}
        assert left == set(map(id, plain.waiting))


@given(st.lists(st.integers(1, 50), max_size=40), st.lists(st.integers(1, 50), max_size=10), st.integers(1, 60))
def test_sums_are_what_adding_up_gives(sizes: list[int], gone: list[int], bound: int) -> None:
    """Of what was added and not taken back."""
    sums = SizeHistogram()
    for size in [*sizes, *gone]:
        sums.add(size)
    for size in gone:
        sums.add(size, -1)
    below = [size for size in sizes if size <= bound]
    assert sums.up_to(bound) == (len(below), sum(below))
    assert sums.each_at_most(bound) == sum(min(size, bound) for size in sizes)
