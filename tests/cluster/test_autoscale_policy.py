"""The wanted number of workers: within the limits for any load, never fewer for more load, and without oscillation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscale_policy import (
    AutoscalePolicy,
    Look,
    Need,
    Pool,
    Rules,
    Verdict,
    need_decode,
    need_prefill,
)
from tandem.linear_fit import places

LIMITS = {"prefill": (1, 4), "decode": (1, 4)}
RULES = Rules(LIMITS, hold_s=60.0)
PREFILL = Pool(workers=1, places=64, blocks=1000, rate=1000.0)
DECODE = Pool(workers=1, places=10, blocks=1000, rate=1000.0)
QUIET = Look(at=0.0, routers=1, block_size=16, pools={"prefill": PREFILL, "decode": DECODE})

LOOKS = st.builds(
    lambda arrived, queued, tokens, prompts, backlog, streams, held, router, rate: Look(
        at=0.0,
        routers=router,
        arrived=arrived,
        queued=queued,
        queued_tokens=queued * tokens,
        block_size=16,
        pools={
            "prefill": replace(PREFILL, running=prompts, backlog=backlog, rate=rate),
            "decode": replace(DECODE, running=streams, held=held),
        },
    ),
    arrived=st.integers(0, 20_000),
    queued=st.integers(0, 50),
    tokens=st.integers(1, 3000),
    prompts=st.integers(0, 50),
    backlog=st.integers(0, 50_000),
    streams=st.integers(0, 60),
    held=st.integers(0, 5000),
    router=st.sampled_from([1, 1, 1, 0]),
    rate=st.sampled_from([1000.0, 1000.0, 300.0, 0.0]),
)


def busy(streams: int = 0, **prefill: int) -> Look:
    pools = {"prefill": replace(PREFILL, **prefill), "decode": replace(DECODE, running=streams, held=streams)}  # type: ignore[arg-type]
    return replace(QUIET, pools=pools)


def run(looks: list[Look], rules: Rules = RULES, every_s: float = 5.0) -> list[dict[str, Verdict]]:
    """The decisions one after another; the wanted size is reached by the next evaluation."""
    autoscaler, sizes, found = AutoscalePolicy(rules), {role: least for role, (least, _) in rules.limits.items()}, []
    for number, look in enumerate(looks):
        verdicts = autoscaler.judge(replace(look, at=every_s * number), sizes)
        found.append({verdict.role: verdict for verdict in verdicts})
        sizes = {verdict.role: verdict.wanted for verdict in verdicts}
    return found


def sizes_of(found: list[dict[str, Verdict]], role: str) -> list[int]:
    return [verdicts[role].wanted for verdicts in found]


def workers(need: Need | None) -> int:
    assert need is not None
    return need.workers


@given(st.lists(LOOKS, max_size=40), st.integers(0, 2), st.integers(0, 3), st.integers(1, 2), st.integers(0, 3))
def test_sizes_stay_within_the_limits(looks: list[Look], p: int, p_more: int, d: int, d_more: int) -> None:
    """The sizes stay within the limits for any observation, so there is always a decode worker."""
    limits = {"prefill": (p, p + p_more), "decode": (d, d + d_more)}
    for verdicts in run(looks, replace(RULES, limits=limits)):
        for role, (least, most) in limits.items():
            assert least <= verdicts[role].wanted <= most
            assert verdicts[role].why


@given(LOOKS)
def test_constant_load_has_one_size(look: Look) -> None:
    """Under constant load the size may grow at first, until the arrival rate is known; it never shrinks, and then stays
    the same."""
    found = run([look] * 60)
    for role in LIMITS:
        sizes = sizes_of(found, role)
        assert sizes == sorted(sizes)
        assert len(set(sizes[10:])) == 1


@given(st.lists(LOOKS, max_size=60))
def test_a_pool_shrinks_only_after_the_hold(looks: list[Look]) -> None:
    """A pool shrinks only if, for the whole hold time, each evaluation needed at most the remaining workers, by a
    policy that never shrinks. For a worker that the other pool gets at that moment, 15 s are enough."""
    found = run(looks)
    needed = run_needs(looks)
    for role in LIMITS:
        for after, (before, now) in enumerate(pairwise(sizes_of(found, role)), 1):
            if now < before:
                looked = 3 if "with the weights" in found[after][role].why else 12
                window = needed[role][max(0, after - looked) : after + 1]
                assert len(window) == looked + 1, "looks each 5 s"
                assert all(one is not None and one <= now for one in window)


def run_needs(looks: list[Look]) -> dict[str, list[int | None]]:
    """The need of each evaluation by itself, with a policy that remembers only arrivals."""
    needs: dict[str, list[int | None]] = {"prefill": [], "decode": []}
    autoscaler = AutoscalePolicy(RULES)
    for number, look in enumerate(looks):
        seen = replace(look, at=5.0 * number)
        for role, need in autoscaler.needs(seen).items():
            needs[role].append(need and need.workers)
    return needs


@given(LOOKS, st.floats(0, 20_000), st.integers(0, 5000), st.integers(0, 50), st.integers(0, 50))
def test_more_load_never_needs_fewer(look: Look, arriving: float, tokens: int, prompts: int, streams: int) -> None:
    """More arriving or waiting prompts never need fewer prefill workers; more streams, KV or waiting requests never
    need fewer decode workers."""
    look = replace(look, routers=1)
    prefill, decode = look.pool("prefill"), look.pool("decode")
    more = replace(prefill, backlog=prefill.backlog + tokens, running=prefill.running + prompts)
    harder = replace(look, pools={"prefill": more, "decode": decode})
    assert workers(need_prefill(harder, arriving * 1.5, RULES)) >= workers(need_prefill(look, arriving, RULES))
    fuller = replace(
        look,
        queued=look.queued + prompts,
        queued_tokens=look.queued_tokens + tokens,
        pools={"decode": replace(decode, running=decode.running + streams, held=decode.held + tokens)},
    )
    assert workers(need_decode(fuller, RULES)) >= workers(need_decode(look, RULES))


def test_up_comes_at_once_and_down_after_the_hold() -> None:
    """20 streams on workers with 10 places need 3 workers at the first evaluation; the pool shrinks 60 quiet seconds
    later."""
    found = run([busy(20)] + [QUIET] * 15)
    assert sizes_of(found, "decode") == [3] * 13 + [1] * 3
    assert "20 requests" in found[0]["decode"].why
    assert "3 were needed 55 s ago, fewer after 60 s" in found[11]["decode"].why
    assert "no more than 1 for 60 s" in found[13]["decode"].why


def test_a_load_that_comes_and_goes_within_the_hold_moves_nothing() -> None:
    """The pool grows once and keeps its size: no worker is started and drained in turn."""
    found = run(([busy(20)] + [QUIET] * 8) * 6)
    assert set(sizes_of(found, "decode")) == {3}


def test_what_is_not_known_is_no_quiet_time() -> None:
    """An evaluation without a router's record does not count as quiet: the pool keeps its size until a whole hold time
    is known."""
    blind = replace(QUIET, routers=0)
    found = run([busy(20)] + [QUIET] * 6 + [blind] + [QUIET] * 13)
    assert sizes_of(found, "decode") == [3] * 20 + [1]
    assert "not enough is known" in found[7]["decode"].why


def test_after_a_gap_the_hold_begins_again() -> None:
    """After a time without answers from the registry the need of that time is unknown, so the hold starts again."""
    autoscaler = AutoscalePolicy(RULES)
    times = [0.0, 9.0, 18.0, 27.0, 58.0, 61.0]
    found = [autoscaler.judge(replace(QUIET, at=at), {"decode": 2})[0].wanted for at in times]
    assert found == [2] * 6
    steady = AutoscalePolicy(RULES)  # the control: the same without the gap
    assert [steady.judge(replace(QUIET, at=9.0 * i), {"decode": 2})[0].wanted for i in range(8)] == [2] * 7 + [1]


def test_prompts_that_would_wait_too_long_get_workers() -> None:
    """4000 waiting tokens at 1000/s per worker need 3 workers to be done in 1.5 s, and 4 for an objective of 2 s. A
    single prompt needs no second worker, because two cannot share it."""
    look = busy(backlog=4000, running=8)
    assert workers(need_prefill(look, 0.0, RULES)) == 3
    assert workers(need_prefill(look, 0.0, replace(RULES, ttft_s=2.0))) == 4
    assert workers(need_prefill(busy(backlog=4000, running=1), 0.0, RULES)) == 1


def test_a_burst_that_is_gone_before_a_worker_could_help_starts_none() -> None:
    """8000 tokens that wait for 4 s start no worker; if they wait for 6 s, they start as many as permitted."""
    burst = busy(backlog=8000, running=20)
    assert set(sizes_of(run([QUIET] + [burst] * 4 + [QUIET] * 9, every_s=1.0), "prefill")) == {1}
    assert sizes_of(run([QUIET] + [burst] * 6, every_s=1.0), "prefill") == [1] * 6 + [4]


def test_what_arrives_keeps_prefill_workers_busy_at_most_so_much() -> None:
    """1400 tokens/s are 70 % of two workers with 1000/s, before anything waits."""
    assert workers(need_prefill(QUIET, 1400.0, RULES)) == 2
    assert workers(need_prefill(QUIET, 1401.0, RULES)) == 3


def test_a_burst_gets_workers_while_it_comes() -> None:
    """With 2500 tokens per second, refused ones included, for workers with 1000/s: in 4 s as much has arrived as one
    worker computes in 12 s at 70 %, and in 10 s as much as three; the mean over 30 s would need that many only
    later."""
    looks = [QUIET] * 30 + [replace(QUIET, arrived=2500.0)] * 20
    sizes = sizes_of(run(looks, replace(RULES, ttft_s=4.0), every_s=1.0), "prefill")[30:]
    assert sizes[:3] == [1] * 3
    assert sizes[3] == 2
    assert sizes[9] == 3
    assert sizes_of(run(looks[:31] + [QUIET] * 20, replace(RULES, ttft_s=4.0), every_s=1.0), "prefill") == [1] * 51


def test_who_waits_at_the_router_counts_where_the_lack_is() -> None:
    """Requests that wait at the router count for the decode pool if it is full, otherwise for the prefill pool, and
    never for both."""
    waits = replace(busy(2), queued=20, queued_tokens=6000)
    assert (workers(need_prefill(waits, 0.0, RULES)), workers(need_decode(waits, RULES))) == (4, 1)
    full = replace(busy(10), queued=20, queued_tokens=6000)
    assert (workers(need_prefill(full, 0.0, RULES)), workers(need_decode(full, RULES))) == (0, 4)


def flips(found: list[dict[str, Verdict]]) -> list[int]:
    """The evaluations that moved a worker from one pool to the other."""
    return [at for at, verdicts in enumerate(found) if any("with the weights" in one.why for one in verdicts.values())]


PROMPTS = busy(backlog=8000, running=20)


def test_a_pool_that_goes_up_gets_what_the_other_has_to_spare() -> None:
    """With two surplus decode workers and prompts that need three more prefill workers, two come from the decode pool,
    which would have kept them for another 35 s, and one is started."""
    found = run([busy(20)] + [QUIET] * 4 + [PROMPTS] * 3)
    assert sizes_of(found, "decode") == [3] * 6 + [1] * 2
    assert sizes_of(found, "prefill") == [1] * 6 + [4] * 2
    assert flips(found) == [6]
    assert "2 to spare for 15 s: to prefill, with the weights" in found[6]["decode"].why
    assert "2 from decode, for a drain and no start" in found[6]["prefill"].why


def test_what_was_needed_just_now_is_not_to_spare() -> None:
    """Control of the test above: the decode pool needed its workers 10 s ago, and keeps them."""
    found = run([busy(20), busy(20), PROMPTS, PROMPTS])
    assert sizes_of(found, "decode") == [3] * 4
    assert sizes_of(found, "prefill")[-1] == 4
    assert flips(found) == []


def test_no_worker_goes_back_and_forth() -> None:
    """With prompts and streams in turn, 30 s each, and six places for both, each hold has at most one flip and one
    back, while the load changes sides twenty times."""
    turns = ([QUIET] * 4 + [PROMPTS] * 2 + [QUIET] * 4 + [busy(30)] * 2) * 10
    assert len(flips(run([busy(30), *turns], replace(RULES, hold_s=700.0)))) <= 2


@given(st.lists(LOOKS, max_size=60))
def test_what_one_pool_gives_the_other_one_gains(looks: list[Look]) -> None:
    """A flip changes both sizes in the same evaluation, and no pool falls below its minimum."""
    found = run(looks)
    for at in flips(found):
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            one, its = found[at][role], found[at][other]
            if "with the weights" in one.why:
                assert LIMITS[role][0] <= one.wanted < one.size
                assert its.wanted - its.size >= one.size - one.wanted


@pytest.mark.parametrize(("tpot_s", "expected"), [(None, 64), (0.1, 64), (0.03, 11), (0.02, 1), (0.001, 1)])
def test_places_are_those_that_keep_the_objective(tpot_s: float | None, expected: int) -> None:
    """A step with one stream takes 20 ms, each further stream adds 1 ms; one stream may run in any case."""
    assert places(64, 0.02, 0.001, tpot_s) == expected


def test_without_prefill_workers_the_decode_workers_rates_say_how_many_are_needed() -> None:
    """A prefill pool that has shrunk to zero can grow again, by the decode workers' rates."""
    none = replace(busy(2), pools={"prefill": Pool(), "decode": DECODE})
    assert workers(need_prefill(none, 1000.0, RULES)) == 2
