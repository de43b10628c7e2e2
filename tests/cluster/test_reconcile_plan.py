"""The plan of starts and stops, for any wanted sizes, any observation and any failures."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cluster.supervision.reconcile_plan import (
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    ROLES,
    STABLE_S,
    Backoff,
    LiveWorker,
    Phase,
    Plan,
    plan,
    role_of,
)

IDS = st.builds("{}-{}".format, st.sampled_from(ROLES), st.integers(0, 9))
SIZES = st.dictionaries(st.sampled_from(ROLES), st.integers(0, 6))
PHASES = st.dictionaries(IDS, st.sampled_from(Phase), max_size=15)
BACKOFFS = st.dictionaries(IDS, st.builds(Backoff, st.integers(1, 5), st.floats(0, 100)), max_size=6)


def seen(phases: dict[str, Phase], *, can_switch_role: bool = False) -> list[LiveWorker]:
    return [
        LiveWorker(worker_id, phase, can_switch_role and role_of(worker_id) != "router")
        for worker_id, phase in phases.items()
    ]


def carry_out(todo: Plan, phases: dict[str, Phase]) -> dict[str, Phase]:
    """The observed workers once everything that was begun has ended."""
    left = {worker_id: Phase.READY for worker_id, phase in phases.items() if phase is not Phase.STOPPING}
    gone, come = {one for one, _ in todo.switch} | {*todo.stop}, [place for _, place in todo.switch] + [*todo.start]
    return {key: value for key, value in left.items() if key not in gone} | dict.fromkeys(come, Phase.READY)


def serving(phases: dict[str, Phase]) -> Counter[str]:
    return Counter(role_of(key) for key, phase in phases.items() if phase is not Phase.STOPPING)


@given(SIZES, PHASES, BACKOFFS, st.floats(0, 100))
def test_a_plan_never_starts_more_than_wanted_and_never_one_id_twice(
    wanted: dict[str, int], phases: dict[str, Phase], backoffs: dict[str, Backoff], now: float
) -> None:
    """For any observation, a plan does not overshoot, and an id in use stays with its worker."""
    todo = plan(wanted, seen(phases), backoffs, now)
    assert len(set(todo.start)) == len(todo.start)
    assert not set(todo.start) & set(phases)
    assert set(todo.stop) <= {key for key, phase in phases.items() if phase is not Phase.STOPPING}
    after = serving(carry_out(todo, phases))
    assert all(after[role] <= size for role, size in wanted.items())


@given(SIZES, PHASES, st.booleans())
def test_without_failures_one_plan_reaches_what_is_wanted_and_the_next_is_empty(
    wanted: dict[str, int], phases: dict[str, Phase], can_switch_role: bool
) -> None:
    """Reconciling converges at once and may be repeated safely."""
    after = carry_out(plan(wanted, seen(phases, can_switch_role=can_switch_role), {}, now=0.0), phases)
    assert {role: serving(after)[role] for role in wanted} == wanted
    assert plan(wanted, seen(after, can_switch_role=can_switch_role), {}, now=0.0) == Plan()


@given(SIZES, PHASES, BACKOFFS, st.floats(0, 100))
def test_a_worker_turns_rather_than_that_one_is_started_and_another_stopped(
    wanted: dict[str, int], phases: dict[str, Phase], backoffs: dict[str, Backoff], now: float
) -> None:
    """A role switch replaces each pair of a start and a stop; otherwise the plan is the same as without role
    switches."""
    without, todo = (
        plan(wanted, seen(phases, can_switch_role=can_switch), backoffs, now) for can_switch in (False, True)
    )
    assert sorted([*todo.start, *(place for _, place in todo.switch)]) == sorted(without.start)
    assert sorted([*todo.stop, *(one for one, _ in todo.switch)]) == sorted(without.stop)
    assert all({role_of(one), role_of(place)} == {"prefill", "decode"} for one, place in todo.switch)
    left = [one for one in todo.stop if role_of(one) != "router" and phases[one] is Phase.READY]
    assert not (left and [one for one in todo.start if role_of(one) != "router"])


@given(SIZES, PHASES, BACKOFFS, st.floats(0, 100))
def test_a_plan_that_leaves_places_empty_says_when_to_look_again(
    wanted: dict[str, int], phases: dict[str, Phase], backoffs: dict[str, Backoff], now: float
) -> None:
    """A delayed start is never forgotten: it has a time in the future, at which it happens."""
    todo = plan(wanted, seen(phases), backoffs, now)
    after = serving(carry_out(todo, phases))
    if any(after[role] < size for role, size in wanted.items()):
        assert todo.retry_at is not None
        assert todo.retry_at > now
        assert len(plan(wanted, seen(phases), backoffs, todo.retry_at).start) > len(todo.start)
    else:
        assert todo.retry_at is None


def test_the_highest_numbers_go_first_and_the_lowest_free_number_is_taken() -> None:
    """Ids stay small and predictable: an operator who scales down knows which worker drains."""
    three = {f"decode-{number}": Phase.READY for number in range(3)}
    assert plan({"decode": 1}, seen(three), {}, 0.0).stop == ("decode-2", "decode-1")
    gap = {"decode-0": Phase.READY, "decode-2": Phase.READY}
    assert plan({"decode": 3}, seen(gap), {}, 0.0).start == ("decode-1",)


def test_only_who_serves_and_can_do_it_turns() -> None:
    """With a surplus decode worker and a missing prefill worker, a worker that is still starting, or whose engine
    cannot serve the other pool, ends, and another one is started."""
    two = {"decode-0": Phase.READY, "decode-1": Phase.READY}
    wanted = {"decode": 1, "prefill": 1}
    assert plan(wanted, seen(two, can_switch_role=True), {}, 0.0) == Plan(switch=(("decode-1", "prefill-0"),))
    assert plan(wanted, seen(two), {}, 0.0) == Plan(start=("prefill-0",), stop=("decode-1",))
    starting = {**two, "decode-1": Phase.STARTING}
    assert plan(wanted, seen(starting, can_switch_role=True), {}, 0.0) == Plan(start=("prefill-0",), stop=("decode-1",))
    failing = {"prefill-0": Backoff(3, retry_at=9.0)}
    assert plan(wanted, seen(two, can_switch_role=True), failing, 5.0) == Plan(stop=("decode-1",), retry_at=9.0)


def test_a_draining_worker_keeps_its_id_and_does_not_count() -> None:
    """Scaling up again during a drain starts a new worker under another id."""
    phases = {"decode-0": Phase.READY, "decode-1": Phase.STOPPING}
    assert plan({"decode": 2}, seen(phases), {}, 0.0).start == ("decode-2",)


def test_a_failing_place_is_not_evaded_through_a_higher_number() -> None:
    """Otherwise a crash loop would run at full speed under ever new ids."""
    todo = plan({"prefill": 1}, [], {"prefill-0": Backoff(3, retry_at=9.0)}, now=5.0)
    assert todo == Plan(retry_at=9.0)


def test_a_role_whose_size_is_unknown_is_left_alone() -> None:
    """A supervisor that has not read `wanted` yet, or a registry that lost it, stops no worker."""
    phases = {"decode-0": Phase.READY, "prefill-0": Phase.READY}
    assert plan({}, seen(phases), {}, 0.0) == Plan()
    assert plan({"decode": 1}, seen(phases), {}, 0.0) == Plan()


def test_unknown_roles_are_nobodys() -> None:
    """An unknown field in the registry starts nothing."""
    assert plan({"gpu": 3}, [], {}, 0.0) == Plan()


@given(st.lists(st.floats(0, STABLE_S, exclude_max=True), min_size=1, max_size=200))
def test_delays_grow_within_their_bounds(lives: list[float]) -> None:
    """Delays double from 0.2 s to 30 s, for a crash loop of any length."""
    backoff, last = Backoff(), 0.0
    for ready_for in lives:
        backoff = backoff.ended(0.0, ready_for)
        assert MIN_BACKOFF_S <= backoff.retry_at <= MAX_BACKOFF_S
        assert backoff.retry_at >= last
        last = backoff.retry_at


def test_a_stable_life_clears_the_failures() -> None:
    """A worker that dies once a day is restarted at once, every day."""
    assert Backoff(9, 0.0).ended(100.0, ready_for=STABLE_S) == Backoff(1, 100.0 + MIN_BACKOFF_S)


def test_a_worker_that_does_not_serve_yet_goes_before_one_that_does() -> None:
    """Scaling down to one while the other worker is still starting must not leave none that serves."""
    phases = {"decode-0": Phase.STARTING, "decode-1": Phase.READY}
    assert plan({"decode": 1}, seen(phases), {}, 0.0).stop == ("decode-0",)
