"""Where requests go: promises of the pure policy, for any snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.router.routing.placement import Begun, RoutingConfig, WorkerSnapshot
from tests.support.policy import place

SUMS = ("tile32", "pairs")
IDLE = WorkerSnapshot(
    worker_id="decode-0",
    incarnation="a",
    address="h:1",
    layout_hash="L",
    running=0,
    max_running=4,
    free_blocks=64,
    block_size=16,
    max_model_len=1024,
)


def workers(role: str) -> st.SearchStrategy[list[WorkerSnapshot]]:
    one = st.builds(
        replace,
        st.just(IDLE),
        layout_hash=st.sampled_from(["L", "M"]),
        running=st.integers(0, 5),
        free_blocks=st.integers(0, 64),
        max_model_len=st.sampled_from([16, 1024]),
        last_used=st.integers(0, 9),
        usable=st.booleans(),
    )
    return st.lists(one, max_size=5).map(
        lambda found: [replace(one, worker_id=f"{role}-{number}") for number, one in enumerate(found)]
    )


REQUESTS = st.tuples(st.integers(1, 1100), st.integers(0, 64))


def roomy(one: WorkerSnapshot, tokens: int, ahead: int) -> bool:
    fits = -(-(tokens + ahead) // one.block_size) <= one.free_blocks and tokens < one.max_model_len
    return one.usable and one.running < one.max_running and fits


def loaded(one: WorkerSnapshot) -> tuple[int, int]:
    """Fewer in progress, then more free blocks."""
    return one.running, -one.free_blocks


@given(workers("decode"), workers("prefill"), REQUESTS)
def test_it_goes_where_there_is_room_and_waits_only_if_there_is_none(
    decodes: list[WorkerSnapshot], prefills: list[WorkerSnapshot], request: tuple[int, int]
) -> None:
    """A decode worker that is full, unusable or too short is never chosen; with one that is not, nobody waits."""
    found = place(decodes, prefills, *request, RoutingConfig("never"))
    able = [one for one in decodes if roomy(one, *request)]
    assert (found is None) == (not able)
    if found:
        assert found.decode in able
        assert loaded(found.decode) == min(map(loaded, able))


@given(workers("decode"), workers("prefill"), REQUESTS)
def test_kv_only_moves_between_equal_layouts_and_local_has_its_reason(
    decodes: list[WorkerSnapshot], prefills: list[WorkerSnapshot], request: tuple[int, int]
) -> None:
    """Either a usable prefill worker of the same layout that takes the prompt, the least loaded of them, or words that
    say why not."""
    found = place(decodes, prefills, *request, RoutingConfig("never"))
    if found is None:
        return
    able = [one for one in prefills if one.usable and one.layout_hash == found.decode.layout_hash]
    able = [one for one in able if one.max_model_len > request[0]]
    assert (found.prefill is None) == (not able) == bool(found.why_local)
    if found.prefill:
        assert found.prefill in able
        assert loaded(found.prefill) == min(map(loaded, able))


@given(workers("decode"), workers("prefill"), REQUESTS, st.randoms(use_true_random=False))
def test_the_order_of_the_snapshot_does_not_matter(
    decodes: list[WorkerSnapshot], prefills: list[WorkerSnapshot], request: tuple[int, int], random: object
) -> None:
    """The same workers give the same placement, in whatever order the registry lists them."""
    found = place(decodes, prefills, *request, RoutingConfig("never"))
    for pool in (decodes, prefills):
        random.shuffle(pool)  # type: ignore[attr-defined]
    assert place(decodes, prefills, *request, RoutingConfig("never")) == found


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5))
def test_idle_workers_take_turns(decodes: int, prefills: int, rounds: int) -> None:
    """Requests that come one after another spread evenly over equals, instead of all going to the first."""
    pools = {
        "decode": [replace(IDLE, worker_id=f"decode-{number}") for number in range(decodes)],
        "prefill": [replace(IDLE, worker_id=f"prefill-{number}") for number in range(prefills)],
    }
    seen: Counter[str] = Counter()
    for placement in range(1, rounds * decodes * prefills + 1):
        found = place(pools["decode"], pools["prefill"], 10, 10, RoutingConfig())
        assert found
        assert found.prefill
        for role, chosen in (("decode", found.decode), ("prefill", found.prefill)):
            seen[chosen.worker_id] += 1
            pools[role][pools[role].index(chosen)] = replace(chosen, last_used=placement)
    assert {seen[one.worker_id] for one in pools["decode"]} == {rounds * prefills}
    assert {seen[one.worker_id] for one in pools["prefill"]} == {rounds * decodes}


def test_a_large_worker_takes_more_than_a_small_one() -> None:
    """What counts is the share of its places that are in use."""
    small, large = replace(IDLE, running=1), replace(IDLE, worker_id="decode-1", running=3, max_running=16)
    found = place([small, large], [], 8, 8, RoutingConfig("never"))
    assert found is not None
    assert found.decode is large
    found = place([small, replace(large, running=12)], [], 8, 8, RoutingConfig("never"))
    assert found is not None
    assert found.decode is small, "though the large one has more places left"


def test_a_snapshot_for_another_prompt_has_what_is_cached_of_that_one() -> None:
    """More, less and none; everything else stays."""
    for cached in (0, 8, 3, 3, 0):
        assert replace(IDLE, cached=5).with_cached(cached) == replace(IDLE, cached=cached)


def test_of_equally_busy_workers_the_one_with_more_free_blocks_is_chosen() -> None:
    """In both pools."""
    few, many = replace(IDLE, running=1, free_blocks=32), replace(IDLE, worker_id="decode-1", running=1)
    others = [replace(one, worker_id=one.worker_id.replace("decode", "prefill")) for one in (few, many)]
    found = place([few, many], others, 8, 8, RoutingConfig("never"))
    assert found is not None
    assert (found.decode, found.prefill) == (many, others[1])


def test_load_goes_before_turns() -> None:
    """A busy worker is not chosen because it was used long ago."""
    busy, idle = replace(IDLE, running=1), replace(IDLE, worker_id="decode-1", last_used=7)
    found = place([busy, idle], [], 10, 10, RoutingConfig())
    assert found
    assert found.decode is idle


@given(workers("decode"), workers("prefill"), REQUESTS, st.sampled_from(["", "tile32", "pairs", "chain8"]))
def test_a_stream_goes_on_where_sums_are_the_same_and_never_waits_for_that(
    decodes: list[WorkerSnapshot], prefills: list[WorkerSnapshot], request: tuple[int, int], wanted: str
) -> None:
    """The least loaded of those with room and the same bits; where none has room, the least loaded of all. One that
    nobody lost goes to the least loaded in any case."""
    decodes = [replace(one, layout_hash="L", sum_order=SUMS[number % 2]) for number, one in enumerate(decodes)]
    able = [one for one in decodes if roomy(one, *request)]
    alike = [one for one in able if one.sum_order == wanted]
    found = place(decodes, prefills, *request, RoutingConfig("never"), begun=Begun("", wanted))
    assert (found is None) == (not able)
    if found:
        assert loaded(found.decode) == min(map(loaded, alike or able))
        assert found.decode in (alike or able)


@given(workers("decode"), workers("prefill"), REQUESTS, st.sampled_from("XY"))
def test_a_stream_goes_on_only_where_the_checkpoint_and_the_type_of_kv_are_the_same(
    decodes: list[WorkerSnapshot], prefills: list[WorkerSnapshot], request: tuple[int, int], begun: str
) -> None:
    """Any other worker would give other tokens, even one with room. The tokens are not computed again by a prefill
    worker with another type of KV either."""
    decodes, prefills = (
        [replace(one, layout_hash="L", computes_with="XY"[number % 2]) for number, one in enumerate(pool)]
        for pool in (decodes, prefills)
    )
    able = [one for one in decodes if roomy(one, *request) and one.computes_with == begun]
    found = place(decodes, prefills, *request, RoutingConfig("never"), begun=Begun(begun))
    assert (found is None) == (not able)
    if found:
        assert found.decode in able
        assert found.prefill is None or found.prefill.computes_with == begun
        there = [
            one for one in prefills if one.usable and one.computes_with == begun and one.max_model_len > request[0]
        ]
        assert (found.prefill is None) == (not there)


def test_the_prefill_worker_is_chosen_whatever_its_sums_are() -> None:
    """Only what goes on with a stream is chosen by its order."""
    decode = replace(IDLE, sum_order="tile32")
    busy, idle = (replace(IDLE, worker_id=f"prefill-{number}", running=1 - number) for number in range(2))
    prefills = [replace(busy, sum_order="tile32"), idle]
    found = place([decode], prefills, 8, 8, RoutingConfig("never"), begun=decode.begun)
    assert found
    assert found.prefill is idle
