"""Promises of the scheduler: streams advance in every step, prompts are chunked, a lack of blocks loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.block_pool import BlockPool
from engine.core.scheduler import EXTRA_LOGITS, Scheduler
from engine.core.sequence import Sequence
from tandem.sampling import Sampling

SIZE = 4


def sequence(name: str, prompt: int, new: int = 8, first: int = 0, **kw: object) -> Sequence:
    return Sequence(name, list(range(first, first + prompt)), prompt, prompt + new, **kw)  # type: ignore[arg-type]


def run_step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Executes a plan as the engine does, without a model: every new token is 7. Planned sequences have blocks."""
    plan = scheduler.plan()
    pool = scheduler.pool
    assert all(len(pool.table(one.id)) >= pool.blocks_for(one.num_computed + count) for one, count in plan)
    for one, count in plan:
        one.num_computed += count
        if one.num_uncomputed == 0 and one.append(7) is not None:
            scheduler.remove(one)
            if not one.handoff:
                scheduler.pool.drop(one.id)
    return [(one.id, count) for one, count in plan]


def test_a_stream_advances_in_every_step_while_a_long_prompt_is_chunked() -> None:
    """The budget goes to decode tokens first; a prompt gets the rest, in chunks."""
    scheduler = Scheduler(BlockPool(64, SIZE), token_budget=8, max_running=4)
    scheduler.add(sequence("stream", 2))
    assert run_step(scheduler) == [("stream", 2)]
    scheduler.add(sequence("long", 20, first=50))
    assert [run_step(scheduler) for _ in range(3)] == [
        [("stream", 1), ("long", 7)],
        [("stream", 1), ("long", 7)],
        [("stream", 1), ("long", 6)],
    ]


def test_prompts_beside_streams_get_a_smaller_budget() -> None:
    """It holds for all prompts of the step together, running or new, and only while streams advance."""
    scheduler = Scheduler(BlockPool(64, SIZE), token_budget=32, max_running=4)
    scheduler.add(sequence("a", 10, first=10))
    assert [(chunk.sequence.id, chunk.tokens) for chunk in scheduler.plan(beside=lambda _: 4)] == [("a", 10)]
    scheduler.add(stream := sequence("stream", 2))
    stream.num_computed = 1
    scheduler.running.append(scheduler.waiting.pop())
    scheduler.pool.take("stream", [], 2)
    scheduler.running[0].num_computed = 7
    scheduler.add(sequence("b", 10, first=50))
    plan = scheduler.plan(beside=lambda _: 4)
    assert [(chunk.sequence.id, chunk.tokens) for chunk in plan] == [("stream", 1), ("a", 3), ("b", 1)]


def test_prompts_are_packed_into_one_step() -> None:
    """Several short prompts share a step."""
    scheduler = Scheduler(BlockPool(64, SIZE), token_budget=16, max_running=4)
    for name in "abc":
        scheduler.add(sequence(name, 5, first=ord(name) * 10))
    assert run_step(scheduler) == [("a", 5), ("b", 5), ("c", 5)]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """It comes next, however much of the long one is left, which gets the rest of the budget."""
    scheduler = Scheduler(BlockPool(64, SIZE), token_budget=8, max_running=4)
    scheduler.add(sequence("long", 40, new=1))
    assert run_step(scheduler) == [("long", 8)]
    scheduler.add(sequence("short", 5, new=1, first=50))
    assert run_step(scheduler) == [("short", 5), ("long", 3)]


def test_a_long_prompt_is_overtaken_by_no_more_than_its_own_length() -> None:
    """An endless series of short prompts comes in between, and the long one still gets its turn."""
    scheduler = Scheduler(BlockPool(64, SIZE), token_budget=8, max_running=4)
    scheduler.add(long := sequence("long", 40, new=1, first=1000))
    before = 0
    for number in range(100):
        scheduler.add(sequence(f"short-{number}", 6, new=1, first=7 * number))
        before += sum(count for name, count in run_step(scheduler) if name != "long")
        if long.num_computed == 40:
            break
    assert long.num_computed == 40
    assert 20 < before <= 40 + 8  # the control: they did come before it


def test_only_those_that_came_later_overtake() -> None:
    """Work on an earlier prompt does not let a later one come before a shorter one."""
    scheduler = Scheduler(BlockPool(64, SIZE), token_budget=10, max_running=4)
    for index, prompt in enumerate((20, 24)):
        scheduler.add(sequence(f"p{index}", prompt, new=1, first=100 * index))
    assert run_step(scheduler) == [("p0", 10)]
    scheduler.add(sequence("p2", 20, new=1, first=200))
    assert [run_step(scheduler) for _ in range(3)] == [[("p0", 10)], [("p2", 10)], [("p2", 10)]]


def test_the_backlog_is_every_prompt_token_that_is_left() -> None:
    """Of waiting and of running prompts, the shortest included; a stream's next token does not count."""
    scheduler = Scheduler(BlockPool(64, SIZE), token_budget=6, max_running=4)
    scheduler.add(sequence("a", 1))
    assert scheduler.backlog == 0
    scheduler.add(sequence("b", 2, first=10))
    scheduler.add(sequence("c", 20, first=20))
    assert scheduler.backlog == 22
    run_step(scheduler)
    assert scheduler.backlog == 20 - 3


def test_one_that_waits_can_be_removed() -> None:
    """And is never planned."""
    scheduler = Scheduler(BlockPool(64, SIZE), token_budget=8, max_running=4)
    scheduler.add(one := sequence("a", 4))
    scheduler.remove(one)
    assert not scheduler.has_work
    assert scheduler.plan() == []


def test_a_preempted_one_comes_before_shorter_ones_that_wait() -> None:
    """It had its turn before they came, and has lost what was computed."""
    scheduler = Scheduler(BlockPool(64, SIZE), token_budget=12, max_running=4)
    scheduler.add(long := sequence("long", 12, new=4))
    run_step(scheduler)
    scheduler.preempt(long)
    scheduler.add(sequence("short", 4, first=100))
    assert run_step(scheduler) == [("long", 12)]


def test_prompts_alone_have_a_budget_of_their_own() -> None:
    """So that a step of prompts is short; it does not apply alongside streams."""
    scheduler = Scheduler(BlockPool(64, SIZE), token_budget=32, max_running=4)
    scheduler.add(sequence("a", 20))
    assert [chunk.tokens for chunk in scheduler.plan(beside=lambda _: 4, alone=10)] == [10]


def test_a_cached_prefix_is_not_computed_again_but_one_token_always_is() -> None:
    """A prompt that is wholly cached still computes its last block, for the logits."""
    pool = BlockPool(16, SIZE)
    scheduler = Scheduler(pool, token_budget=32, max_running=4)
    scheduler.add(one := sequence("a", 8, new=1))
    assert scheduler.plan()[0].tokens == 8
    for index, digest in enumerate(one.hashes(SIZE)):
        pool.publish("a", index, digest)
    scheduler.remove(one)
    pool.drop("a")
    scheduler.add(again := sequence("b", 8, new=1))
    assert scheduler.plan()[0].tokens == 4
    assert again.cached == 4


def test_the_youngest_is_preempted_and_finishes_later_with_all_its_tokens() -> None:
    """When blocks run out the oldest go on; the victim keeps its tokens and comes back first."""
    pool = BlockPool(6, SIZE)
    scheduler = Scheduler(pool, token_budget=32, max_running=4)
    old, young = sequence("old", 8, new=12, first=0), sequence("young", 8, new=12, first=100)
    scheduler.add(old)
    scheduler.add(young)
    steps = 0
    while scheduler.has_work:
        run_step(scheduler)
        assert pool.check(live=["old", "young"]) == []
        steps += 1
        assert steps < 200
    assert young.preemptions > 0
    assert old.preemptions == 0
    assert old.tokens[8:] == young.tokens[8:] == [7] * 12
    assert pool.held == 0


def test_blocks_that_were_promised_to_another_worker_are_never_preempted() -> None:
    """A hand-off's blocks may have been announced; taking them back would break the fence."""
    pool = BlockPool(5, SIZE)
    scheduler = Scheduler(pool, token_budget=6, max_running=4)
    stream = sequence("stream", 3, new=9)
    scheduler.add(stream)
    run_step(scheduler)
    handoff = sequence("handoff", 15, new=1, first=50, handoff=True)
    scheduler.add(handoff)
    for _ in range(12):
        run_step(scheduler)
    assert handoff.preemptions == 0
    assert stream.preemptions > 0
    assert len(handoff.tokens) == 16


def test_who_comes_behind_a_preempted_stream_goes_on_in_the_same_step() -> None:
    """A preempted stream loses its turn; a hand-off that came later keeps its blocks, and its turn."""
    pool = BlockPool(5, SIZE)
    scheduler = Scheduler(pool, token_budget=32, max_running=4)
    for name, owned, done in (("old", 1, 4), ("young", 2, 5), ("handoff", 2, 7)):
        one = sequence(name, done + 1, first=100 * owned + done, handoff=name == "handoff")
        pool.take(name, [], owned)
        one.num_computed = done
        scheduler.add(one)
    assert run_step(scheduler) == [("old", 1), ("handoff", 1)]
    assert [one.id for one in scheduler.waiting] == ["young"]


def test_drafts_take_only_what_is_left_over() -> None:
    """Budget, rows of logits, the limit of a sequence, and free blocks; never a block in use."""
    pool = BlockPool(6, SIZE)
    scheduler = Scheduler(pool, token_budget=10, max_running=4)
    for index, prompt in enumerate((6, 5)):
        scheduler.add(one := sequence(f"s{index}", prompt, new=12, first=10 * index))
        scheduler.plan()
        one.num_computed = prompt
        one.append(7)
    plan = scheduler.plan()
    assert [chunk.tokens for chunk in plan] == [1, 1]
    assert [len(pool.table(name)) for name in ("s0", "s1")] == [2, 2]
    assert scheduler.lend(plan, [6, 6]) == [6, 2], "8 tokens are left of the budget"
    assert [len(pool.table(name)) for name in ("s0", "s1")] == [4, 2]
    pool.take("somebody", [], pool.free)
    assert scheduler.lend(plan, [8, 0]) == [8, 0]
    assert scheduler.lend(plan, [0, 8]) == [0, 2], "no block is free, two places are"
    assert scheduler.lend(plan, [8, 8], 3) == [1, 0], "memory allows this step 3 tokens"
    assert scheduler.preemptions == 0
    plan[0].sequence.max_len = len(plan[0].sequence.tokens) + 2
    assert scheduler.lend(plan, [8, 0]) == [1, 0], "the step itself gives one token"


def test_drafts_and_tokens_together_keep_to_the_budget() -> None:
    """With blocks for all of them."""
    pool = BlockPool(64, SIZE)
    scheduler = Scheduler(pool, token_budget=10, max_running=4)
    for index in range(2):
        scheduler.add(one := sequence(f"s{index}", 5, new=40, first=10 * index))
        scheduler.plan()
        one.num_computed = 5
        one.append(7)
    assert scheduler.lend(scheduler.plan(), [6, 6]) == [6, 2]


def test_a_sequence_that_owns_blocks_goes_on_at_once() -> None:
    """Its KV came from another worker; it needs no admission."""
    pool = BlockPool(8, SIZE)
    scheduler = Scheduler(pool, token_budget=8, max_running=4)
    one = sequence("here", 6)
    pool.take("here", [], 2)
    one.num_computed = 5
    scheduler.add(one)
    assert (scheduler.running, list(scheduler.waiting)) == ([one], [])
    assert run_step(scheduler) == [("here", 1)]


def test_nobody_is_admitted_into_a_step_that_is_full() -> None:
    """Blocks are taken in the step that computes something into them."""
    pool = BlockPool(8, SIZE)
    scheduler = Scheduler(pool, token_budget=8, max_running=4)
    scheduler.add(sequence("first", 8))
    scheduler.add(second := sequence("second", 12, first=50))
    assert run_step(scheduler) == [("first", 8)]
    assert list(scheduler.waiting) == [second]
    assert not pool.owns("second")


def test_a_prompt_is_scored_as_far_as_rows_of_logits_go() -> None:
    """The rest of it is computed and scored in the next step, and two prompts share the rows."""
    scheduler = Scheduler(BlockPool(128, SIZE), token_budget=512, max_running=4)
    scored = Sampling(prompt_logprobs=0)
    scheduler.add(sequence("a", EXTRA_LOGITS + 20, sampling=scored))
    scheduler.add(sequence("b", EXTRA_LOGITS + 30, first=500, sampling=scored))
    first = run_step(scheduler)
    assert first == [("a", EXTRA_LOGITS)]
    for one in scheduler.running:
        one.prompt_logprobs += [None] * one.num_computed  # type: ignore[list-item]
    assert run_step(scheduler) == [("a", 20), ("b", EXTRA_LOGITS - 19)]  # the last token of a prompt is not scored


def test_what_was_preempted_is_to_be_computed_again() -> None:
    """All its tokens are pending work, including the generated ones."""
    scheduler = Scheduler(BlockPool(8, SIZE), token_budget=8, max_running=4)
    scheduler.add(one := sequence("a", 6))
    run_step(scheduler)
    assert scheduler.backlog == 0
    scheduler.preempt(one)
    assert scheduler.backlog == one.num_uncomputed == 7
    assert scheduler.pool.held == 0


def test_a_budget_below_the_number_of_streams_is_refused() -> None:
    """Every stream must be able to advance in every step."""
    with pytest.raises(ValueError, match="token_budget"):
        Scheduler(BlockPool(4, SIZE), token_budget=3, max_running=4)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=10),
    blocks=st.integers(11, 30),
    budget=st.integers(4, 40),
)
def test_everything_that_fits_alone_finishes(lengths: list[tuple[int, int]], blocks: int, budget: int) -> None:
    """Whatever the load, every sequence gets all its tokens, within the budget, and no block is left behind."""
    pool = BlockPool(blocks, SIZE)
    scheduler = Scheduler(pool, token_budget=budget, max_running=4)
    sequences = [sequence(f"s{i}", prompt, new, first=100 * i) for i, (prompt, new) in enumerate(lengths)]
    for one in sequences:
        scheduler.add(one)
    steps = 0
    while scheduler.has_work:
        assert 0 < sum(count for _, count in run_step(scheduler)) <= budget
        assert pool.check() == []
        steps += 1
        assert steps < 5000
    assert all(len(one.tokens) == one.max_len for one in sequences)
    assert pool.held == 0
