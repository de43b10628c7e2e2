"""The few workers that a placement looks at, against the policy over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.routing.path_latency import PathLatencySnapshot, PathLatencyTracker, _Estimate
from services.router.routing.placement import Begun, Local, PathLatency, Placement, RoutingConfig, WorkerSnapshot
from services.router.routing.worker_pools import SHORTLIST_SIZE, DecodePool, PrefillPool
from services.router.routing.worker_selector import choose_decode, choose_prefill, queued_seconds
from tests.support.policy import place

WORKER = WorkerSnapshot(
    *("", "a", "h:1", "L"),
    running=0,
    max_running=4,
    free_blocks=100,
    block_size=16,
    max_model_len=2048,
    prompt_rate=1000.0,
    step_s=0.02,
    stream_s=0.001,
)
MANY = 3 * SHORTLIST_SIZE
COMPUTES = "XXY"
ORDERS = ["tile32", "tile32", "pairs", "chain8", ""]
RULESETS = [RoutingConfig(local, 3.0) for local in get_args(Local)]
RULESETS += [RoutingConfig("measured", tpot=0.021), RoutingConfig("measured", tpot=0.1, mixed_step_floor_s=0.08)]


def pool(role: str, prompts: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[list[WorkerSnapshot]]:
    one = st.builds(
        replace,
        st.just(WORKER),
        layout_hash=st.sampled_from("LLLM"),
        sum_order=st.sampled_from(ORDERS),
        computes_with=st.sampled_from(COMPUTES),
        running=st.sampled_from([0, 0, 1, 5]),
        streams=st.integers(0, 4),
        free_blocks=st.sampled_from([0, 40, 60, 100]),
        max_model_len=st.sampled_from([400, 2048]),
        prompts=prompts,
        prompt_rate=st.sampled_from([0.0, 1000.0, 1000.0]),
        last_used=st.integers(0, 9),
        usable=st.sampled_from([True, True, False]),
    )
    return (
        st.integers(0, MANY)
        .flatmap(lambda size: st.lists(one, min_size=size, max_size=size))
        .map(lambda found: [replace(one, worker_id=f"{role}-{number:02}") for number, one in enumerate(found)])
    )


PROMPTS = st.lists(st.integers(1, 2000), max_size=3).map(tuple)
IDLE_OR_ONE = st.lists(st.integers(1, 2000), max_size=1).map(tuple)
REQUEST = st.tuples(st.sampled_from([1, 100, 399, 640, 900, 960, 1500]), st.sampled_from([0, 60, 64]))
CACHED = st.dictionaries(st.integers(0, MANY - 1), st.integers(1, 1500), max_size=SHORTLIST_SIZE)


class Looked:
    """What a router decides that knows the workers by their pools."""

    def __init__(self, rules: RoutingConfig, decodes: list[WorkerSnapshot], prefills: list[WorkerSnapshot]) -> None:
        self.rules = rules
        self.decodes, self.prefills = DecodePool(rules), PrefillPool()
        for one in decodes:
            self.decodes.put(one)
        for one in prefills:
            self.prefills.put(one)

    def place(
        self, tokens: int, ahead: int, kv_holder: str = "", cached: Mapping[str, int] = {}, begun: Begun | None = None
    ) -> Placement | None:
        latencies = PathLatencyTracker().at(0.0)

        def has(worker_id: str) -> int:
            return cached.get(worker_id, 0)

        some = self.decodes.shortlist(tokens, ahead, kv_holder, cached, has)
        decode = choose_decode(some, tokens, ahead, self.rules, kv_holder, latencies, begun)
        if decode is None:
            return None
        prefills = self.prefills.shortlist(tokens, decode, latencies, cached, has)
        return choose_prefill(decode, prefills, tokens, self.rules, kv_holder, begun=begun)


def having(workers: list[WorkerSnapshot], cached: Mapping[str, int]) -> list[WorkerSnapshot]:
    return [one.with_cached(cached.get(one.worker_id, 0)) for one in workers]


def named(cached: Mapping[int, int]) -> dict[str, int]:
    return {f"{role}-{number:02}": tokens for number, tokens in cached.items() for role in ("decode", "prefill")}


@settings(max_examples=50)
@given(pool("decode", PROMPTS), pool("prefill", IDLE_OR_ONE), REQUEST, CACHED, st.sampled_from(RULESETS), st.data())
def test_a_few_workers_decide_as_all_of_them_do(
    decodes: list[WorkerSnapshot],
    prefills: list[WorkerSnapshot],
    request: tuple[int, int],
    cached: dict[int, int],
    rules: RoutingConfig,
    data: st.DataObject,
) -> None:
    """Exactly, where prefill workers have a prompt or none, whoever has the beginning of this one, and also for the
    decode worker that has its KV, and for a stream that was lost."""
    kv_holder = data.draw(st.sampled_from(["", *(one.worker_id for one in decodes)]))
    names = named(cached)
    prefills = [replace(one, prompt_rate=1000.0, computes_with="X") for one in prefills]
    begun = data.draw(st.none() | st.builds(Begun, st.sampled_from(COMPUTES), st.sampled_from(ORDERS)))
    found = Looked(rules, decodes, prefills).place(*request, kv_holder, names, begun)
    assert found == place(having(decodes, names), having(prefills, names), *request, rules, kv_holder, begun=begun)


@pytest.mark.parametrize("about", [{"layout_hash": "M"}, {"usable": False, "ready": False}])
def test_a_worker_that_only_has_the_beginning_does_not_change_the_reason(about: dict[str, Any]) -> None:
    """It cannot hand over, and those that can are too short for the prompt: the receipt says the second."""
    decode = WorkerSnapshot("decode-0", "a", "h:1", "L", 0, 9, 999, 16, 4096)
    short = replace(decode, worker_id="prefill-0", max_model_len=100)
    holder = replace(decode, worker_id="prefill-1", **about)
    rules = RoutingConfig()
    found = Looked(rules, [decode], [short, holder]).place(640, 10, "", {"prefill-1": 64})
    assert found == place([decode], having([short, holder], {"prefill-1": 64}), 640, 10, rules)
    assert found
    assert found.why_local == "no prefill worker takes a prompt of 640 tokens"


@settings(max_examples=50)
@given(pool("decode", PROMPTS), pool("prefill", PROMPTS), REQUEST, CACHED, st.sampled_from(RULESETS))
def test_the_decode_worker_is_always_the_same_and_the_prefill_worker_nearly_as_soon(
    decodes: list[WorkerSnapshot],
    prefills: list[WorkerSnapshot],
    request: tuple[int, int],
    cached: dict[int, int],
    rules: RoutingConfig,
) -> None:
    """Whatever the prefill workers have to do: the chosen one begins at most n times as late as the best, where
    SHORTLIST_SIZE workers have n prompts or fewer."""
    prefills = [replace(one, prompt_rate=1000.0, layout_hash="L") for one in prefills]
    rules = replace(rules, local="never")
    names = {name: tokens for name, tokens in named(cached).items() if name.startswith("decode")}
    found = Looked(rules, decodes, prefills).place(*request, "", names)
    best = place(having(decodes, names), prefills, *request, rules)
    assert (found and found.decode) == (best and best.decode)
    if best and best.prefill:
        assert found
        assert found.prefill
        able = sorted(len(one.prompts) for one in prefills if one.usable)
        prompts = max(1, able[min(SHORTLIST_SIZE, len(able)) - 1])
        assert queued_seconds(found.prefill, request[0]) <= prompts * queued_seconds(best.prefill, request[0]) + 1e-9


@settings(max_examples=50)
@given(pool("x", PROMPTS), pool("x", PROMPTS), st.lists(st.integers(0, MANY)), REQUEST)
def test_pools_that_were_changed_are_as_new_ones(
    first: list[WorkerSnapshot], then: list[WorkerSnapshot], gone: list[int], request: tuple[int, int]
) -> None:
    """Workers that changed and workers that left leave nothing behind, neither in the orders nor in the sums."""
    changed, rules = Looked(RoutingConfig(), first, first), RoutingConfig()
    left = {one.worker_id: one for one in (*first, *then)}
    for one in then:
        changed.decodes.put(one)
        changed.prefills.put(one)
    for number in gone:
        changed.decodes.drop(f"x-{number:02}")
        changed.prefills.drop(f"x-{number:02}")
        left.pop(f"x-{number:02}", None)
    new = Looked(rules, list(left.values()), list(left.values()))
    assert changed.place(*request) == new.place(*request)
    for one, other in (
        (changed.decodes.capacity, new.decodes.capacity),
        (changed.prefills.capacity, new.prefills.capacity),
    ):
        assert abs(one.rate - other.rate) < 1e-6
        assert one.queued_before(request[0]) == other.queued_before(request[0])
        assert list(one.fastest()) == list(other.fastest())
    assert changed.prefills.usable_count("L") == new.prefills.usable_count("L")


def test_a_short_prompt_finds_the_worker_with_one_long_one_among_many_with_several_short_ones() -> None:
    """Which computes it first, although it has more to do than all the others."""
    short = [replace(WORKER, worker_id=f"prefill-{number:02}", prompts=(60,) * 5) for number in range(MANY)]
    long = replace(WORKER, worker_id="prefill-99", prompts=(30_000,))
    found = Looked(RoutingConfig("never"), [replace(WORKER, worker_id="decode-0")], [*short, long]).place(64, 0)
    assert found
    assert found.prefill is long


def test_the_first_of_equals_is_looked_at() -> None:
    """Of more idle workers than a placement looks at, the one with the most free blocks, then the one that was used
    longest ago. A decode worker with exactly the room that is needed has it."""
    idle = [replace(WORKER, worker_id=f"prefill-{number:02}", last_used=number) for number in range(MANY)]
    free = replace(WORKER, worker_id="prefill-98", last_used=99, free_blocks=101)
    decode = replace(WORKER, worker_id="decode-0", free_blocks=5)
    for more, expected in (([], idle[0]), ([free], free)):
        found = Looked(RoutingConfig("never"), [decode], [*reversed(idle), *more]).place(64, 16)
        assert found
        assert found.prefill is expected


def test_a_worker_with_a_usual_way_is_looked_at_among_many_that_are_far() -> None:
    """All that have the least to do are far away; the first of the others is looked at besides them."""
    prefills = [replace(WORKER, worker_id=f"prefill-{number:02}") for number in range(MANY)]
    decode, far = replace(WORKER, worker_id="decode-0"), _Estimate(0.0)
    far.first_s = 1.0
    latencies = PathLatencySnapshot(
        {("decode-0", one.worker_id): far for one in prefills[:SHORTLIST_SIZE]}, {True: PathLatency(0.001)}, 0.0
    )
    some = Looked(RoutingConfig("never"), [decode], prefills).prefills.shortlist(1, decode, latencies, [], lambda _: 0)
    assert [one.worker_id for one in some] == [one.worker_id for one in prefills[: SHORTLIST_SIZE + 1]]


def test_of_many_that_have_the_beginning_those_that_are_named_and_the_least_loaded_are_looked_at() -> None:
    """The approximation, and its bound: 100 workers have it, eight are named, and the choice is no worse than the best
    of these and of the eight least loaded."""
    prefills = [replace(WORKER, worker_id=f"prefill-{number:03}", prompts=(number + 1,)) for number in range(100)]
    cached = {one.worker_id: 1000 for one in prefills[50:]}
    decode = replace(WORKER, worker_id="decode-0")
    looked = Looked(RoutingConfig("never"), [decode], prefills)
    holders = [one.worker_id for one in prefills[90:98]]
    some = looked.prefills.shortlist(1, decode, PathLatencyTracker().at(0.0), holders, lambda name: cached.get(name, 0))
    assert {one.worker_id for one in some} == {one.worker_id for one in (*prefills[:SHORTLIST_SIZE], *prefills[90:98])}
    chosen = choose_prefill(decode, some, 1200, RoutingConfig("never")).prefill
    assert chosen
    assert chosen.worker_id == "prefill-090"
