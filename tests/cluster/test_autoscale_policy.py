"""How many workers are wanted: for any load within the limits, never fewer for more, and no going up and down."""

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
    """The verdicts one after another; what is wanted is had at the next look."""
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
    """Whatever is seen; so there is always a decode worker."""
    limits = {"prefill": (p, p + p_more), "decode": (d, d + d_more)}
    for verdicts in run(looks, replace(RULES, limits=limits)):
        for role, (least, most) in limits.items():
            assert least <= verdicts[role].wanted <= most
            assert verdicts[role].why


@given(LOOKS)
def test_constant_load_has_one_size(look: Look) -> None:
    """It may grow at first, while the rate of what arrives becomes known; it never goes down, and then it stays."""
    found = run([look] * 60)
    for role in LIMITS:
        sizes = sizes_of(found, role)
        assert sizes == sorted(sizes)
        assert len(set(sizes[10:])) == 1


@given(st.lists(LOOKS, max_size=60))
def test_a_pool_shrinks_only_after_the_hold(looks: list[Look]) -> None:
    """When it does, each look of so long was enough with what is left, as an autoscaler says that never shrinks. For a
    worker that the other pool gets at that moment, 15 s of looks."""
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
    """What each look needs by itself, within one that remembers only how much arrived."""
    needs: dict[str, list[int | None]] = {"prefill": [], "decode": []}
    autoscaler = AutoscalePolicy(RULES)
    for number, look in enumerate(looks):
        seen = replace(look, at=5.0 * number)
        for role, need in autoscaler.needs(seen).items():
            needs[role].append(need and need.workers)
    return needs


@given(LOOKS, st.floats(0, 20_000), st.integers(0, 5000), st.integers(0, 50), st.integers(0, 50))
def test_more_load_never_needs_fewer(look: Look, arriving: float, tokens: int, prompts: int, streams: int) -> None:
    """Of what comes and waits, prefill workers; of streams, KV and requests that wait, decode workers."""
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
    """20 streams on workers of 10 places need 3 workers from the first look on; after them 60 quiet seconds pass."""
    found = run([busy(20)] + [QUIET] * 15)
    assert sizes_of(found, "decode") == [3] * 13 + [1] * 3
    assert "20 requests" in found[0]["decode"].why
    assert "3 were needed 55 s ago, fewer after 60 s" in found[11]["decode"].why
    assert "no more than 1 for 60 s" in found[13]["decode"].why


def test_a_load_that_comes_and_goes_within_the_hold_moves_nothing() -> None:
    """Up once, and then it stays: no worker is started and drained by turns."""
    found = run(([busy(20)] + [QUIET] * 8) * 6)
    assert set(sizes_of(found, "decode")) == {3}


def test_what_is_not_known_is_no_quiet_time() -> None:
    """A look without a router says nothing: the pool keeps its size until a whole hold is known."""
    blind = replace(QUIET, routers=0)
    found = run([busy(20)] + [QUIET] * 6 + [blind] + [QUIET] * 13)
    assert sizes_of(found, "decode") == [3] * 20 + [1]
    assert "not enough is known" in found[7]["decode"].why


def test_after_a_gap_the_hold_begins_again() -> None:
    """A registry that did not answer for a while leaves nobody knowing what was needed meanwhile."""
    autoscaler = AutoscalePolicy(RULES)
    times = [0.0, 9.0, 18.0, 27.0, 58.0, 61.0]
    found = [autoscaler.judge(replace(QUIET, at=at), {"decode": 2})[0].wanted for at in times]
    assert found == [2] * 6
    steady = AutoscalePolicy(RULES)  # the control: the same without the gap
    assert [steady.judge(replace(QUIET, at=9.0 * i), {"decode": 2})[0].wanted for i in range(8)] == [2] * 7 + [1]


def test_prompts_that_would_wait_too_long_get_workers() -> None:
    """4000 tokens wait before a worker of 1000/s: 3 workers to be done in 1.5 s, 4 for an objective of 2 s. One prompt
    cannot be computed by two workers."""
    look = busy(backlog=4000, running=8)
    assert workers(need_prefill(look, 0.0, RULES)) == 3
    assert workers(need_prefill(look, 0.0, replace(RULES, ttft_s=2.0))) == 4
    assert workers(need_prefill(busy(backlog=4000, running=1), 0.0, RULES)) == 1


def test_a_burst_that_is_gone_before_a_worker_could_help_starts_none() -> None:
    """8000 tokens that wait for 4 s move nothing; for 6 s they bring all that may be had."""
    burst = busy(backlog=8000, running=20)
    assert set(sizes_of(run([QUIET] + [burst] * 4 + [QUIET] * 9, every_s=1.0), "prefill")) == {1}
    assert sizes_of(run([QUIET] + [burst] * 6, every_s=1.0), "prefill") == [1] * 6 + [4]


def test_what_arrives_keeps_prefill_workers_busy_at_most_so_much() -> None:
    """1400 tokens/s are 70 % of two workers of 1000/s, before anything waits."""
    assert workers(need_prefill(QUIET, 1400.0, RULES)) == 2
    assert workers(need_prefill(QUIET, 1401.0, RULES)) == 3


def test_a_burst_gets_workers_while_it_comes() -> None:
    """2500 tokens in each second, refused ones included, for workers of 1000/s: in 4 s as much has come as one worker
    computes in 12 s at 70 %, and in 10 s as three compute; the mean over 30 s asks for so many only later."""
    looks = [QUIET] * 30 + [replace(QUIET, arrived=2500.0)] * 20
    sizes = sizes_of(run(looks, replace(RULES, ttft_s=4.0), every_s=1.0), "prefill")[30:]
    assert sizes[:3] == [1] * 3
    assert sizes[3] == 2
    assert sizes[9] == 3
    assert sizes_of(run(looks[:31] + [QUIET] * 20, replace(RULES, ttft_s=4.0), every_s=1.0), "prefill") == [1] * 51


def test_who_waits_at_the_router_counts_where_the_lack_is() -> None:
    """With the decode pool full it is that pool's, else the prefill pool's; never both."""
    waits = replace(busy(2), queued=20, queued_tokens=6000)
    assert (workers(need_prefill(waits, 0.0, RULES)), workers(need_decode(waits, RULES))) == (4, 1)
    full = replace(busy(10), queued=20, queued_tokens=6000)
    assert (workers(need_prefill(full, 0.0, RULES)), workers(need_decode(full, RULES))) == (0, 4)


def flips(found: list[dict[str, Verdict]]) -> list[int]:
    """Which looks have moved a worker from pool to pool."""
    return [at for at, verdicts in enumerate(found) if any("with the weights" in one.why for one in verdicts.values())]


PROMPTS = busy(backlog=8000, running=20)


def test_a_pool_that_goes_up_gets_what_the_other_has_to_spare() -> None:
    """Two decode workers too many and prompts that need three more prefill workers: two come from the decode pool, of
    which nothing else would have gone for another 35 s, and one is started."""
    found = run([busy(20)] + [QUIET] * 4 + [PROMPTS] * 3)
    assert sizes_of(found, "decode") == [3] * 6 + [1] * 2
    assert sizes_of(found, "prefill") == [1] * 6 + [4] * 2
    assert flips(found) == [6]
    assert "2 to spare for 15 s: to prefill, with the weights" in found[6]["decode"].why
    assert "2 from decode, for a drain and no start" in found[6]["prefill"].why


def test_what_was_needed_just_now_is_not_to_spare() -> None:
    """The control to the test above: the decode pool needed its workers 10 s ago, and keeps them."""
    found = run([busy(20), busy(20), PROMPTS, PROMPTS])
    assert sizes_of(found, "decode") == [3] * 4
    assert sizes_of(found, "prefill")[-1] == 4
    assert flips(found) == []


def test_no_worker_goes_back_and_forth() -> None:
    """Prompts and streams in turn, 30 s each, with six places for both: one flip and one back in each hold at most,
    where the load changes sides twenty times."""
    turns = ([QUIET] * 4 + [PROMPTS] * 2 + [QUIET] * 4 + [busy(30)] * 2) * 10
    assert len(flips(run([busy(30), *turns], replace(RULES, hold_s=700.0)))) <= 2


@given(st.lists(LOOKS, max_size=60))
def test_what_one_pool_gives_the_other_one_gains(looks: list[Look]) -> None:
    """In the same look, and no pool gives below its least."""
    found = run(looks)
    for at in flips(found):
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            one, its = found[at][role], found[at][other]
            if "with the weights" in one.why:
                assert LIMITS[role][0] <= one.wanted < one.size
                assert its.wanted - its.size >= one.size - one.wanted


@pytest.mark.parametrize(("tpot_s", "expected"), [(None, 64), (0.1, 64), (0.03, 11), (0.02, 1), (0.001, 1)])
def test_places_are_those_that_keep_the_objective(tpot_s: float | None, expected: int) -> None:
    """A step of one stream takes 20 ms, each further one adds 1 ms; one stream may run in any case."""
    assert places(64, 0.02, 0.001, tpot_s) == expected


def test_without_prefill_workers_the_decode_workers_rates_say_how_many_are_needed() -> None:
    """A pool that has shrunk to nothing can grow again."""
    none = replace(busy(2), pools={"prefill": Pool(), "decode": DECODE})
    assert workers(need_prefill(none, 1000.0, RULES)) == 2
