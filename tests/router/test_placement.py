"""Where a request goes: room first, then what costs everybody together the least time."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import step_time
from services.router.routing.local_or_remote import (
    LOCAL_COST_MARGIN,
    _keeps_objective,
    local_cost,
    prompt_share,
    remote_cost,
)
from services.router.routing.placement import Estimate, Local, PathLatency, Placement, RoutingConfig, WorkerSnapshot
from services.router.routing.worker_pools import DecodePool, PrefillPool, expected_wait
from services.router.routing.worker_selector import starts_late
from tests.support.policy import place

RULES = RoutingConfig("measured", decode_slowdown_limit=3.0)
DECODE = WorkerSnapshot("decode-0", "a", "h:1", "L", running=0, max_running=16, free_blocks=1000, block_size=16,
                   max_model_len=8192, prompt_rate=1000.0, step_s=0.020, stream_s=0.001)  # fmt: skip
PREFILL = replace(DECODE, worker_id="prefill-0", address="h:2")

candidates = st.builds(
    WorkerSnapshot,
    worker_id=st.sampled_from(["a", "b", "c", "d"]),
    incarnation=st.just("1"),
    address=st.just("h:1"),
    layout_hash=st.sampled_from(["L", "M"]),
    running=st.integers(0, 20),
    streams=st.integers(0, 20),
    max_running=st.integers(1, 16),
    free_blocks=st.integers(0, 200),
    block_size=st.just(16),
    max_model_len=st.integers(1, 4096),
    prompts=st.lists(st.integers(1, 10_000), max_size=8).map(tuple),
    prompt_rate=st.sampled_from([0.0, 1.0, 500.0, 1e6]),
    step_s=st.sampled_from([0.0, 0.001, 0.02]),
    stream_s=st.sampled_from([0.0, 0.001, 1.0]),
    usable=st.booleans(),
    cached=st.integers(0, 4096),
)

locals_ = st.sampled_from(get_args(Local))
RULESETS = [RoutingConfig(local, 3.0) for local in get_args(Local)] + [
    RoutingConfig("measured", tpot=0.1, mixed_step_floor_s=0.08)
]


def pool(role: str, most: int) -> st.SearchStrategy[list[WorkerSnapshot]]:
    """Workers of one role, each with a name of its own."""
    return st.lists(candidates, max_size=most).map(
        lambda found: [replace(one, worker_id=f"{role}-{number}") for number, one in enumerate(found)]
    )


def placed(
    decode: WorkerSnapshot, prefill: WorkerSnapshot, tokens: int = 500, config: RoutingConfig = RULES
) -> Placement:
    found = place([decode], [prefill], tokens, 64, config)
    assert found is not None
    return found


@given(st.lists(candidates), st.lists(candidates), st.integers(1, 4096), st.integers(0, 64), locals_)
def test_nothing_is_placed_where_it_cannot_run(
    decodes: list[WorkerSnapshot], prefills: list[WorkerSnapshot], tokens: int, ahead: int, local: Local
) -> None:
    """The decode worker has room and is usable, the prefill worker is usable and its blocks mean the same; without a
    prefill worker there is a reason. Nothing is placed only when no decode worker has room."""
    found = place(decodes, prefills, tokens, ahead, RoutingConfig(local, 3.0))
    roomy = [
        one
        for one in decodes
        if one.usable and one.running < one.max_running and one.free_blocks * 16 >= tokens + ahead
        and one.max_model_len > tokens
    ]  # fmt: skip
    if found is None:
        assert not roomy
        return
    assert found.decode in roomy
    if found.prefill is None:
        assert found.why_local
    else:
        assert found.prefill in prefills
        assert found.prefill.usable
        assert found.prefill.layout_hash == found.decode.layout_hash


@given(candidates, candidates, st.integers(1, 4096))
def test_never_weighing_uses_the_prefill_worker(decode: WorkerSnapshot, prefill: WorkerSnapshot, tokens: int) -> None:
    """With `local_prefill` never, only a missing or unfit prefill worker makes a decode worker compute prompts."""
    fit = replace(prefill, usable=True, layout_hash=decode.layout_hash, max_model_len=max(prefill.max_model_len, 4097))
    found = place([decode], [fit], tokens, 0, RoutingConfig("never"))
    assert found is None or found.prefill is not None


def test_an_idle_pair_disaggregates() -> None:
    """Equal rates and no queue: the decode worker stays free of prompts."""
    assert placed(DECODE, PREFILL).prefill is PREFILL


def test_a_queue_at_the_prefill_worker_sends_prompts_to_an_idle_decode_worker() -> None:
    """Two prompts before this one are 1.5 s there, and two that wait, against 0.5 s here, and a step either
    way: the receipt will say so."""
    found = placed(DECODE, replace(PREFILL, prompts=(500, 500)))
    assert found.prefill is None
    assert "0.52 s locally" in found.why_local
    assert "2.52 s on prefill-0" in found.why_local


def test_prompts_that_wait_on_a_decode_worker_lose_as_those_on_a_prefill_worker_do() -> None:
    """The same prompt, the same queue and the same rate: it costs the same on both, whoever waits for it."""
    for prompts in ((), (500,), (300, 2000, 10)):
        queue = replace(PREFILL, prompts=prompts)
        assert local_cost(replace(DECODE, prompts=prompts), 500, RULES) == pytest.approx(
            remote_cost(queue, DECODE, 500)
        )
    assert placed(replace(DECODE, prompts=(400, 400)), replace(PREFILL, prompts=(500, 500))).prefill is not None


def test_a_prompt_as_long_as_a_worker_can_hold_finds_no_place() -> None:
    """Not even its first token would fit; with one token less it does."""
    longest = replace(DECODE, max_model_len=500, free_blocks=10_000)
    assert place([longest], [PREFILL], 500, 1, RULES) is None
    assert place([longest], [PREFILL], 499, 1, RULES) is not None


def test_a_prompt_goes_to_no_prefill_worker_that_is_too_short_for_it() -> None:
    """It computes the prompt and one token. With none that is longer, the decode worker computes it: each refusal would
    be an attempt, and with as many such workers as attempts the request would fail."""
    short, long = replace(PREFILL, worker_id="short", max_model_len=500), replace(PREFILL, prompts=(500, 500))
    for tokens, worker in ((499, "short"), (500, "prefill-0")):
        found = place([DECODE], [short, long], tokens, 1, RoutingConfig("never"))
        assert found is not None
        assert found.prefill is not None
        assert found.prefill.worker_id == worker
    found = place([DECODE], [short], 500, 1, RoutingConfig("never"))
    assert found is not None
    assert found.prefill is None
    assert found.why_local == "no prefill worker takes a prompt of 500 tokens"


def test_streams_beside_it_count() -> None:
    """The same queue, but eight streams would lose half a second each: the prompt waits its turn."""
    assert placed(replace(DECODE, running=8, streams=8), replace(PREFILL, prompts=(500, 500))).prefill is not None


def test_a_prompt_beside_streams_takes_as_long_as_they_leave_it_time() -> None:
    """A step is bounded to 60 ms. One stream takes 20 of them, eleven take 30, sixty take 79 and all of them: there a
    step has the fewest tokens that one has. The router reckons as the engine does."""
    alone, beside = local_cost(DECODE, 300, RULES), {}
    for streams in (1, 11, 60):
        one = replace(DECODE, streams=streams)
        tokens = step_time.StepTime(one.step_s, one.stream_s, one.prompt_rate).prompt_tokens_beside(streams, 3.0)
        beside[streams] = local_cost(one, 300, RULES) - streams * 0.3
        step_s = 0.020 + 0.001 * (streams - 1) + tokens / 1000
        assert beside[streams] == pytest.approx(0.020 + 300 / tokens * step_s, rel=0.03)  # there are no parts of tokens
    assert alone == pytest.approx(0.32)
    assert beside[1] == pytest.approx(0.47, rel=0.03)
    assert beside[11] == pytest.approx(0.62, rel=0.03)


def test_streams_make_way_for_a_prompt_as_far_as_their_objective_is_kept() -> None:
    """A step of eight streams takes 27 ms, and may take 80: two thirds of the time are the prompt's, and nobody is the
    worse for it. Without an objective they would lose four seconds together, and the prompt waits its turn."""
    busy, queue = replace(DECODE, running=8, streams=8), replace(PREFILL, prompts=(500,))
    objective = RoutingConfig("measured", decode_slowdown_limit=2.0, tpot=0.1, mixed_step_floor_s=0.08)
    found = placed(busy, queue, config=objective)
    assert found.prefill is None
    assert found.estimate
    assert found.estimate.local_cost_s == pytest.approx(0.02 + 0.5 * 80 / 53, rel=0.01)
    assert found.estimate.compute_s == found.estimate.local_cost_s, "nobody is before it"
    found = placed(replace(busy, prompts=(500,)), queue, config=replace(objective, local="always"))
    assert found.estimate
    assert found.estimate.wait_s == pytest.approx(0.5 * 80 / 53, rel=0.01)
    assert placed(busy, queue, config=replace(objective, mixed_step_floor_s=0.0)).prefill is queue
    tight = replace(objective, tpot=0.03, mixed_step_floor_s=0.015)
    assert placed(busy, queue, config=tight).prefill is queue, "twice a step is more than that, and they would lose"
    tokens = step_time.StepTime(0.020, 0.001, 1000).prompt_tokens_beside(8, 2.0, 0.08)
    assert tokens == 53, "as the engine does"


def test_where_streams_make_way_a_prompt_is_expected_as_soon_as_either_pool_can_compute_it() -> None:
    """500 tokens before it at the prefill worker, and a decode worker with two thirds of a second in each."""
    busy, queue = replace(DECODE, running=8, streams=8), replace(PREFILL, prompts=(500,))
    objective = RoutingConfig("measured", decode_slowdown_limit=2.0, tpot=0.1, mixed_step_floor_s=0.08)
    wait_s, own_s = expected([busy], [queue], 500, 0, objective)
    assert (wait_s, own_s) == (pytest.approx(0.5 / (1 + 53 / 80), rel=0.01), pytest.approx(0.52))
    for config in (replace(objective, mixed_step_floor_s=0.0), replace(objective, local="never")):
        assert expected([busy], [queue], 500, 0, config) == (pytest.approx(0.5), pytest.approx(0.52))


def test_a_way_costs_what_it_cost_others() -> None:
    """Where moving 16 tokens takes longer than computing them they stay on the decode worker, and they go where the way
    is shorter. Ways that hardly differ decide nothing."""
    far, near = replace(PREFILL, worker_id="prefill-1"), replace(PREFILL, last_used=9)
    latencies = {
        ("decode-0", "prefill-1"): PathLatency(0.002, 0.005, 0.050),
        ("decode-0", "prefill-0"): PathLatency(0.002, 0.003, 0.001),
    }
    assert placed(DECODE, far, tokens=16).prefill is far
    found = place([DECODE], [far], 16, 64, RULES, latencies=latencies)
    assert found
    assert found.prefill is None
    assert found.estimate == Estimate(0.0, pytest.approx(0.036), pytest.approx(0.036), pytest.approx(0.093))
    found = place([DECODE], [far, near], 16, 64, RULES, latencies=latencies)
    assert found
    assert found.prefill is near
    latencies["decode-0", "prefill-1"] = PathLatency(0.002, 0.004, 0.001)
    found = place([DECODE], [far, near], 16, 64, RULES, latencies=latencies)
    assert found
    assert found.prefill is far


@given(candidates, candidates, st.integers(1, 4096))
def test_always_uses_no_prefill_worker(decode: WorkerSnapshot, prefill: WorkerSnapshot, tokens: int) -> None:
    """With `local_prefill` always, whatever it costs."""
    found = place([decode], [prefill], tokens, 0, RoutingConfig("always"))
    assert found is None or found.prefill is None


def test_unknown_rates_decide_nothing() -> None:
    """A worker that has not measured itself yet is not compared."""
    assert placed(replace(DECODE, prompt_rate=0.0), replace(PREFILL, prompts=(10**6,))).prefill is not None
    assert placed(DECODE, replace(PREFILL, prompts=(10**6,), prompt_rate=0.0)).prefill is not None


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """The worker computes it first, so it is worth going there, and eight streams are left in peace."""
    busy = replace(DECODE, running=8, streams=8)
    assert placed(busy, replace(PREFILL, prompts=(30_000,)), tokens=64).prefill is not None
    assert placed(busy, replace(PREFILL, prompts=(64,) * 8), tokens=64).prefill is None


queues = st.lists(st.integers(1, 10_000), max_size=8).map(tuple)


@given(st.integers(0, 15), st.integers(1, 4096), queues, queues)
def test_the_choice_is_monotone_in_load(
    running: int, tokens: int, queue: tuple[int, ...], more: tuple[int, ...]
) -> None:
    """More queue at the prefill worker never brings a prompt back to it; one more stream never sends one here."""
    decode, prefill = replace(DECODE, streams=running, free_blocks=10**6), replace(PREFILL, prompts=queue)
    here = placed(decode, prefill, tokens).prefill is None
    if here:
        assert placed(decode, replace(prefill, prompts=queue + more), tokens).prefill is None
    elif running < 15:
        assert placed(replace(decode, streams=running + 1), prefill, tokens).prefill is not None
    assert here == (local_cost(decode, tokens, RULES) < LOCAL_COST_MARGIN * remote_cost(prefill, decode, tokens))


def test_the_prefill_worker_that_begins_soonest_gets_the_prompt() -> None:
    """By seconds of its queue, not by its number of prompts."""
    slow = replace(PREFILL, worker_id="prefill-1", prompts=(1000,), prompt_rate=500.0, running=1)
    fast = replace(PREFILL, worker_id="prefill-2", prompts=(3000,), prompt_rate=8000.0, running=3)
    found = place([replace(DECODE, running=15, streams=15)], [slow, fast], 1000, 0, RULES)
    assert found is not None
    assert (found.decode, found.prefill) == (replace(DECODE, running=15, streams=15), fast)


@pytest.mark.parametrize(
    ("prefills", "why"),
    [
        ([], "there is no prefill worker"),
        ([replace(PREFILL, usable=False)], "no prefill worker is ready"),
        ([replace(PREFILL, layout_hash="M")], "no prefill worker has the KV layout of decode-0"),
    ],
)
def test_without_a_prefill_worker_the_reason_is_told(prefills: list[WorkerSnapshot], why: str) -> None:
    """None there, none ready, or none with the same layout."""
    found = place([DECODE], prefills, 10, 0, RoutingConfig("never"))
    assert found is not None
    assert found.why_local == why


def test_where_the_kv_is_the_request_goes_on() -> None:
    """Nothing moves, and only the new tokens need room; without that, the request goes where there is room."""
    holder = replace(DECODE, worker_id="decode-1", running=9, streams=9, free_blocks=5)
    for free_blocks, expected in ((5, "decode-1"), (4, "decode-0")):
        decodes = [DECODE, replace(holder, free_blocks=free_blocks)]
        found = place(decodes, [PREFILL], 500, 64, RULES, kv_holder="decode-1")
        assert found
        assert found.decode.worker_id == expected
        assert (found.prefill is None) is (expected == "decode-1")


@pytest.mark.parametrize(
    ("prompts", "rate", "late"),
    [((1000,), 1000.0, False), ((1000, 1000), 1000.0, True), ((200, 200), 1000.0, False), ((1000, 1000), 0.0, False)],
)
def test_a_prompt_is_kept_back_from_a_worker_that_has_two_and_half_a_second_of_work(
    prompts: tuple[int, ...], rate: float, late: bool
) -> None:
    """One prompt, or little work, and the worker might stand still; where no rate is known, nobody can tell."""
    assert starts_late(Placement(DECODE, replace(PREFILL, prompts=prompts, prompt_rate=rate)), 1000) is late


def test_the_prefill_worker_that_has_the_beginning_gets_the_prompt() -> None:
    """Unless its queue takes longer than compute_seconds the beginning again."""
    has = replace(PREFILL, worker_id="prefill-1", cached=400, last_used=9)
    for prompts, expected in (((), has), ((300,), has), ((2000,) * 5, PREFILL)):
        found = place([DECODE], [PREFILL, replace(has, prompts=prompts)], 500, 64, RoutingConfig("never"))
        assert found
        assert found.prefill
        assert found.prefill.worker_id == expected.worker_id


def test_rates_that_differ_do_not_decide_between_idle_workers() -> None:
    """Each measures its own, and one would get everything; they take turns."""
    used = replace(PREFILL, worker_id="prefill-1", prompt_rate=1100.0, last_used=9)
    found = place([DECODE], [used, PREFILL], 500, 64, RULES)
    assert found
    assert found.prefill is PREFILL


def test_a_decode_worker_that_has_nearly_all_computes_the_rest_itself() -> None:
    """The next turn of a conversation goes where the last one was generated, if that costs clearly less."""
    other = replace(DECODE, worker_id="decode-1", running=3, streams=3)
    found = place([DECODE, replace(other, cached=480)], [PREFILL], 500, 64, RULES)
    assert found
    assert (found.decode.worker_id, found.prefill) == ("decode-1", None)
    for cached, config in ((0, RULES), (480, RoutingConfig("never"))):
        found = place([DECODE, replace(other, cached=cached)], [PREFILL], 500, 64, config)
        assert found
        assert found.decode is DECODE


@given(st.lists(candidates, min_size=1, max_size=4), st.lists(candidates, max_size=4), st.integers(1, 4096))
def test_what_is_cached_never_takes_room_that_is_not_there(
    decodes: list[WorkerSnapshot], prefills: list[WorkerSnapshot], tokens: int
) -> None:
    """The same requests are placed with and without it; only where may differ."""
    found = place(decodes, prefills, tokens, 64, RULES)
    without = [[replace(one, cached=0) for one in pool] for pool in (decodes, prefills)]
    assert (found is None) == (place(*without, tokens, 64, RULES) is None)


def test_a_decode_worker_gets_no_stream_that_would_break_the_objective() -> None:
    """Steps of 20 ms and 1 ms for each further stream: five fit into 24 ms, and one always does."""
    for running, fits in ((0, True), (4, True), (5, False)):
        busy = replace(DECODE, running=running, streams=running)
        assert bool(place([busy], [], 10, 1, RoutingConfig(tpot=0.024))) is fits
        assert place([busy], [], 10, 1, RoutingConfig())
    assert place([DECODE], [], 10, 1, RoutingConfig(tpot=0.001))


def expected(
    decodes: list[WorkerSnapshot],
    prefills: list[WorkerSnapshot],
    tokens: int,
    queued: int,
    config: RoutingConfig = RULES,
) -> tuple[float, float]:
    pools = DecodePool(config), PrefillPool()
    cached = {one.worker_id: one.cached for one in (*decodes, *prefills)}
    for pool, workers in zip(pools, (decodes, prefills), strict=True):
        for one in workers:
            pool.put(replace(one, cached=0))
    best = [max(workers, key=lambda one: one.cached).worker_id for workers in (decodes, prefills) if workers]
    return expected_wait(*pools, tokens, queued, best, lambda worker_id: cached[worker_id])[:2]


@given(pool("decode", 3), pool("prefill", 3), st.integers(1, 2000), st.integers(0, 9999))
def test_the_expected_wait_grows_with_what_is_before_it(
    decodes: list[WorkerSnapshot], prefills: list[WorkerSnapshot], tokens: int, queued: int
) -> None:
    """And it is never negative, nor anything but a number."""
    wait, own = expected(decodes, prefills, tokens, queued)
    assert 0 <= wait < float("inf")
    assert 0 <= own < float("inf")
    assert expected(decodes, prefills, tokens, queued + 1000)[0] >= wait


@given(pool("decode", 5), pool("prefill", 5), st.integers(1, 2000), st.integers(0, 9999), st.sampled_from(RULESETS))
def test_the_expected_wait_is_that_of_adding_up_all_workers(
    decodes: list[WorkerSnapshot], prefills: list[WorkerSnapshot], tokens: int, queued: int, config: RoutingConfig
) -> None:
    """By the prefill workers, and by those decode workers whose streams make way; by all decode workers where there is
    no prefill worker."""
    decodes, prefills = ([replace(one, cached=0) for one in workers] for workers in (decodes, prefills))
    able = [(one, one.prompt_rate) for one in prefills if one.usable and one.prompt_rate]
    alone = not able
    for one in decodes:
        if one.usable and one.prompt_rate and (alone or (config.local == "measured" and _keeps_objective(one, config))):
            able.append((one, one.prompt_rate * prompt_share(one, config)))
    wait, own = expected(decodes, prefills, tokens, queued, config)
    if not able:
        assert (wait, own) == (0.0, 0.0)
        return
    rate = sum(rate for _, rate in able)
    assert wait == pytest.approx((queued + sum(one.queued_before(tokens) for one, _ in able)) / rate)
    least = min(one.step_s + tokens / each for one, each in able)
    assert least <= own * 1.000001
    assert own <= least + max(one.step_s for one, _ in able), "of the quickest; steps may differ"
