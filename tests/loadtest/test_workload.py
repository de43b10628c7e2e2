"""Arrivals and lengths are what was asked for; a trace stays what it was: its gaps, its order and what it shares."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.loadgen import traces, workload
from loadtest.loadgen.plan import Plan
from loadtest.loadgen.workload import BLOCK, Request
from tandem.errors import SettingsError

# ---- arrivals


def test_arrivals_by_chance_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    """10 a second for 1,000 s: 10,000 of them, give or take; gaps as long as they vary."""
    times = workload.poisson(10.0, 1000.0, seed=3)
    gaps = [b - a for a, b in pairwise(times)]
    middle = mean(gaps)
    deviation = mean((gap - middle) ** 2 for gap in gaps) ** 0.5
    assert len(times) == pytest.approx(10_000, rel=0.05)
    assert deviation / middle == pytest.approx(1.0, abs=0.05)


@given(st.floats(0.1, 50), st.floats(0.1, 30), st.integers(0, 2**32))
def test_the_same_seed_is_the_same_pattern_at_every_rate(rate: float, seconds: float, seed: int) -> None:
    """Both sides of a comparison get the same arrivals; twice the rate is the same arrivals in half the time."""
    times = workload.poisson(rate, seconds, seed)
    assert times == sorted(times) == workload.poisson(rate, seconds, seed)
    assert all(0 < at < seconds for at in times)
    assert workload.poisson(2 * rate, seconds / 2, seed) == pytest.approx([at / 2 for at in times])


moments = st.lists(st.integers(0, 40), min_size=2, max_size=40).map(sorted)


@given(moments)
def test_equal_times_are_spread_and_no_one_is_overtaken(times: list[int]) -> None:
    """No two are sent at once any more; everybody stays between its moment and the next."""
    before = [Request(float(at), number, 1) for number, at in enumerate(times)]
    after = workload.spread(before)
    assert [one.input for one in after] == [one.input for one in before]
    assert all(a.at < b.at for a, b in pairwise(after))
    for one, other in zip(before, after, strict=True):
        following = min((at for at in times if at > one.at), default=one.at + workload.LAST_GAP_S)
        assert one.at <= other.at < following


# ---- lengths


@given(st.integers(1, 200_000), st.sampled_from([1, 2, 4, 8, 16, 32, 64, 512]))
def test_divided_lengths_still_fill_the_same_blocks(length: int, factor: int) -> None:
    """What a prompt shares with others stays a number of whole blocks, and nothing becomes empty."""
    blocks = tuple(range(-(-length // BLOCK)))
    [one] = workload.scaled([Request(0.0, length, 3, blocks)], factor)
    assert one.input >= 1
    assert one.output >= 1
    assert -(-one.input // (BLOCK // factor)) == len(blocks)


def test_blocks_that_do_not_divide_are_refused() -> None:
    """By 3 the blocks would no longer be blocks; lengths alone divide by anything."""
    with pytest.raises(SettingsError, match="do not divide by 3"):
        workload.scaled([Request(0.0, 600, 1, (0, 1))], 3)
    assert workload.scaled([Request(0.0, 600, 1)], 3)[0].input == 200


def test_equal_ids_are_equal_tokens_and_a_new_salt_is_a_new_prompt() -> None:
    """What the trace shares is shared to the token; what one load has put into a cache helps no other load."""
    one, other = Request(0.0, 40, 1, (7, 8, 9)), Request(0.0, 33, 1, (7, 8, 4))
    a, b = (workload.tokens(request, number, 5, 32) for number, request in enumerate((one, other)))
    assert (len(a), len(b)) == (40, 33)
    assert a[:32] == b[:32]
    assert a[32] != b[32] or a[32:] != b[32:]
    assert workload.tokens(one, 0, 6, 32)[:32] != a[:32]
    plain = [workload.tokens(Request(0.0, 20, 1), number, 5) for number in range(2)]
    assert plain[0] != plain[1]
    assert all(workload.FIRST_ID <= token < 256 for token in plain[0])


# ---- traces

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,3180,0\n"
)
SERVEGEN = "arrival_s,input_tokens,output_tokens,client_id\n0.3954,272,690,48\n2.3954,728,826,17\n"
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [0]}\n'
)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        (AZURE, [(4808, 10), (3180, 1)]),
        (SERVEGEN, [(272, 690), (728, 826)]),
        (MOONCAKE, [(600, 5), (512, 7)]),
    ],
    ids=["azure", "servegen", "mooncake"],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_is_told_by_its_columns(
    text: str, lengths: list[tuple[int, int]], zipped: bool, tmp_path: Path
) -> None:
    """Times from 0, two seconds apart in each of these; an answer has a token at least."""
    path = tmp_path / ("trace.gz" if zipped else "trace")
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    found = traces.read(path)
    assert [(one.input, one.output) for one in found] == lengths
    assert [one.at for one in found] == pytest.approx([0.0, 2.0])
    assert [len(one.blocks) for one in found] == ([2, 1] if text == MOONCAKE else [0, 0])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no requests"),
        ("a,b\n1,2\n", "line 1.*none of Azure's"),
        (AZURE + "yesterday,1,2\n", "line 4"),
        (SERVEGEN + "3.0,1\n", "line 4"),
        (MOONCAKE + '{"timestamp": 1}\n', "line 3"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_line(text: str, why: str, tmp_path: Path) -> None:
    """Nothing is guessed, and nothing is left out."""
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(SettingsError, match=why):
        traces.read(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        traces.read(tmp_path / "nowhere")


# ---- a plan


def trace_of(folder: Path, count: int = 41) -> Path:
    path = folder / "trace.csv"
    rows = [f"{number / 2},{100 * (number + 1)},40" for number in range(count)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    return path


def test_a_trace_is_replayed_at_the_rate_that_was_asked_for(tmp_path: Path) -> None:
    """Recorded at 2 a second: at 4 the gaps are halved, and what the context does not hold is counted."""
    plan = Plan(trace=trace_of(tmp_path), scale=10, seconds=4.0, warmup=1.0)
    found, rate, said = plan.requests(4.0, None)
    assert rate == pytest.approx(4.0)
    assert [one.at for one in found] == pytest.approx([number / 4 for number in range(20)])
    assert [one.input for one in found[:2]] == [10, 20]
    _, rate, _ = plan.requests(None, None)
    assert rate == pytest.approx(2.0)
    found, _, said = plan.requests(None, 204)
    assert max(one.input + one.output for one in found) <= 204
    assert any("21 of its 41 requests do not fit into 204 tokens" in line for line in said)


def test_a_load_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """No rate, a trace that is over too soon, a prompt that never fits."""
    with pytest.raises(SettingsError, match="there must be a rate"):
        Plan().requests(None, None)
    with pytest.raises(SettingsError, match=r"lasts 10\.0 s"):
        Plan(trace=trace_of(tmp_path)).requests(4.0, None)
    with pytest.raises(SettingsError, match="over 100"):
        Plan(input=90, output=20).requests(1.0, 100)
