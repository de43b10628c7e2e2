"""A failed step costs only time: its sequences go on with the same tokens, and only the one at fault ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention.forward_context import Batch
from engine.core.block_pool import BlockPool
from engine.core.engine_config import EngineConfig
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.core.step_retries import GOOD_STEPS, MOST_GOOD_STEPS, Retries
from engine.decoding import new_tokens
from engine.decoding.speculative import Ask, Ngram, Speculation
from engine.engine import Engine
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from tandem.errors import StepFailed, TandemError, TooLarge
from tandem.sampling import Sampling

SIZE, NEW, COUNT = 4, 12, 6
POISON = 383  # a token that only one prompt has
HOW = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(repetition_penalty=1.3, prompt_logprobs=1, logprobs=2)]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=torch.device("cpu"))


def build(model: ModelRunner, **how: Any) -> Engine:
    return Engine(model, EngineConfig(num_blocks=128, block_size=SIZE, token_budget=64, max_running=8), **how)


def crowd() -> list[Sequence]:
    rng = random.Random(5)
    return [
        Sequence(f"s{number}", tokens := rng.choices(range(383), k=9 + 5 * number), len(tokens), len(tokens) + NEW,
                 sampling=HOW[number % len(HOW)])
        for number in range(COUNT)
    ]  # fmt: skip


def run(engine: Engine, sequences: list[Sequence]) -> dict[str, TandemError]:
    """Runs all to their ends. Returns the errors by sequence; fails if the ledger does not balance."""
    failed: dict[str, TandemError] = {}
    for one in sequences:
        engine.add(one)
    for _ in range(2000):
        if not engine.scheduler.has_work:
            break
        failed |= {item.sequence.id: item.error for item in engine.step() if item.error}
        assert engine.pool.check(live=engine.sequences) == []
    assert not engine.scheduler.has_work
    assert engine.pool.held == 0
    return failed


@pytest.fixture(scope="module")
def expected(model: ModelRunner) -> list[list[int]]:
    sequences = crowd()
    assert run(build(model), sequences) == {}
    return [one.tokens for one in sequences]


def failing(monkeypatch: pytest.MonkeyPatch, when: Callable[[int, Batch], Exception | None]) -> list[Batch]:
    """Makes forwards raise `when(number, batch)`, after they have written their KV. Returns the batches that failed."""
    forward, batches, failed = ModelRunner.forward, iter(range(10**9)), []

    def broken(self: ModelRunner, pages: Any, batch: Batch) -> torch.Tensor:
        logits = forward(self, pages, batch)
        if error := when(next(batches), batch):
            failed.append(batch)
            raise error
        return logits

    monkeypatch.setattr(ModelRunner, "forward", broken)
    return failed


@pytest.mark.parametrize("number", [0, 1, 2, 7])
@pytest.mark.parametrize("speculation", [False, True], ids=["plain", "drafts"])
def test_one_failed_step_changes_no_token(
    model: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, number: int, speculation: bool
) -> None:
    """Prompts, chunks, streams and drafts are computed again; no client notices."""
    failed = failing(monkeypatch, lambda at, _: RuntimeError("a bad moment") if at == number else None)
    sequences = crowd()
    assert run(build(model, speculation=Speculation(Ngram(), 4) if speculation else None), sequences) == {}
    assert len(failed) == 1
    assert [one.tokens for one in sequences] == expected
    assert all(len(one.prompt_logprobs) == one.prompt_len - 1 for one in sequences if one.sampling.prompt_logprobs)


def test_a_step_that_failed_on_a_gpu_asks_nothing_of_its_allocator(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a capture that CUDA gave up it may raise, which would end the engine in place of a retry. Control: a device
    whose context has ended is found."""
    engine = build(model)
    for one in crowd()[:2]:
        engine.add(one)
    plan, error = engine._plan(), RuntimeError("a bad moment")

    def raises(*_: object) -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", raises)
    monkeypatch.setattr(engine, "model", SimpleNamespace(device=torch.device("cuda")))
    assert engine._failed(plan, 0, [], error) == []
    assert engine.retries
    monkeypatch.setattr(torch.cuda, "synchronize", raises)
    with pytest.raises(RuntimeError):
        engine._failed(plan, 0, [], error)


@pytest.mark.parametrize("place", range(COUNT))
def test_the_prompt_that_fails_every_step_ends_alone(
    model: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """At any place in the batch; the engine keeps serving."""
    failing(monkeypatch, lambda _, batch: RuntimeError("bad luck") if POISON in batch.token_ids else None)
    sequences, engine = crowd(), build(model)
    sequences[place].tokens[3] = POISON
    failed = run(engine, sequences)
    assert failed.keys() == {f"s{place}"}
    assert isinstance(failed[f"s{place}"], StepFailed)
    others = [number for number in range(COUNT) if number != place]
    assert [sequences[number].tokens for number in others] == [expected[number] for number in others]
    assert run(engine, again := crowd()) == {}
    assert [one.tokens for one in again] == expected


def test_a_step_that_runs_out_of_memory_is_made_smaller(
    model: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As small as necessary; later, larger ones are tried again."""
    most = 10
    failed = failing(monkeypatch, lambda _, batch: torch.OutOfMemoryError() if len(batch.token_ids) > most else None)
    sequences, engine = crowd(), build(model)
    assert run(engine, sequences) == {}
    assert [one.tokens for one in sequences] == expected
    tried = len(failed)
    assert 0 < tried < 20
    assert engine.retries.tokens < 64
    monkeypatch.undo()
    stream = Sequence("stream", [1, 2, 3], 3, 3 + 4 * MOST_GOOD_STEPS)
    assert run(engine, [stream]) == {}
    assert engine.retries.tokens == 64


def test_only_the_request_that_never_fits_is_refused_for_memory(
    model: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even alone and one token at a time its context is too long."""
    failing(monkeypatch, lambda _, batch: torch.OutOfMemoryError() if max(batch.context_lens) > 70 else None)
    sequences = crowd()
    long = Sequence("long", random.Random(1).choices(range(383), k=100), 100, 110)
    failed = run(build(model), [*sequences, long])
    assert failed.keys() == {"long"}
    assert isinstance(failed["long"], TooLarge)
    assert failed["long"].reason == "OUT_OF_MEMORY"
    assert [one.tokens for one in sequences] == expected


class Guesses(Ngram):
    def _continue(self, sequence: Sequence, most: int) -> list[int]:
        return [0] * most


def test_a_stream_that_fits_is_not_refused_for_its_drafts(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is kept small has no drafts beyond that; they are tried again later, less and less often."""
    plain, one = (Sequence("one", [1, 2, 3], 3, 43) for _ in range(2))
    assert run(build(model), [plain]) == {}

    def drafted(_: int, batch: Batch) -> Exception | None:
        return torch.OutOfMemoryError() if batch.positions[0] >= 3 and len(batch.token_ids) > 1 else None

    failed = failing(monkeypatch, drafted)
    assert run(build(model, speculation=Speculation(Guesses(), 4)), [one]) == {}
    assert one.tokens == plain.tokens
    assert 0 < len(failed) < 8


class Starved(Ngram):
    """There is no memory for it, nor for the forward behind it."""

    lacking: Exception | None = None

    def propose(self, asked: Seq[Ask]) -> list[list[int]]:
        self.lacking = torch.OutOfMemoryError()
        raise self.lacking


def test_a_request_is_not_refused_for_the_memory_of_a_draft_model(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failure is none of the two that a request has alone with a single token."""
    plain, one = (Sequence("one", [1, 2, 3], 3, 43) for _ in range(2))
    assert run(build(model), [plain]) == {}
    drafter = Starved()

    def behind_it(*_: Any) -> Exception | None:
        lacking, drafter.lacking = drafter.lacking, None
        return lacking

    failed = failing(monkeypatch, behind_it)
    assert run(build(model, speculation=Speculation(drafter, 4)), [one]) == {}
    assert one.tokens == plain.tokens
    assert 0 < len(failed) < 8


def test_an_engine_that_can_compute_nothing_any_more_breaks(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own test step fails as well, so no request is at fault; `step` raises the failure."""
    failing(monkeypatch, lambda at, _: RuntimeError("the device is gone") if at > 3 else None)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(build(model), crowd())


def test_books_that_do_not_balance_break_the_engine(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after a failed step must be known."""
    monkeypatch.setattr("engine.core.block_pool.BlockPool.check", lambda pool, live=None: ["block 3 is in two states"])
    failing(monkeypatch, lambda at, _: RuntimeError("a bad moment") if at == 2 else None)
    built = build(model)
    for one in crowd():
        built.add(one)
    with pytest.raises(RuntimeError, match="a bad moment"):
        for _ in range(10):
            built.step()


def test_a_failure_while_tokens_are_chosen_changes_no_token(
    model: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward is over by then; its scores are computed again."""
    choose, calls = new_tokens.choose, iter(range(10**9))

    def once_broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls) in (0, 3):
            raise torch.OutOfMemoryError
        return choose(*args, **kwargs)

    monkeypatch.setattr(new_tokens, "choose", once_broken)
    sequences = crowd()
    assert run(build(model), sequences) == {}
    assert [one.tokens for one in sequences] == expected
    assert all(len(one.prompt_logprobs) == one.prompt_len - 1 for one in sequences if one.sampling.prompt_logprobs)


@pytest.mark.parametrize("error", [ZeroDivisionError, torch.OutOfMemoryError])
def test_sequences_that_took_tokens_from_a_failed_step_end(
    model: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """These tokens were not sent: the requests must be placed again, with the tokens that were. None is refused for
    memory, which no single one of them may need."""
    publish = Engine._publish

    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Engine, "_publish", broken)
    sequences, built = crowd(), build(model)
    for one in sequences:
        built.add(one)
    failed = {item.sequence.id: item.error for item in built.step() if item.error}
    assert failed
    assert all(isinstance(one, StepFailed) for one in failed.values())
    assert built.pool.check(live=built.sequences) == []
    monkeypatch.setattr(Engine, "_publish", publish)
    assert run(built, []) == {}
    again = crowd()
    assert run(built, again) == {}
    assert [one.tokens for one in again] == expected


def test_the_blocks_of_a_handoff_stay_until_it_is_dropped(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ticket is revoked first: announced blocks get no other owner before that."""
    built = build(model)
    handoff = Sequence("handoff", list(range(40)), 40, 41, handoff=True)
    built.add(handoff)
    failing(monkeypatch, lambda _, __: RuntimeError("bad luck"))
    monkeypatch.setattr(Engine, "_prove", lambda *_: None)
    [ended] = built.step()
    assert isinstance(ended.error, StepFailed)
    assert not built.scheduler.has_work
    assert built.pool.owns("handoff")
    built.drop("handoff")
    assert built.pool.held == 0


def test_a_failed_step_waits_for_its_masks(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar's thread may still be filling when the forward fails."""
    waited: list[bool] = []

    class Slow:
        def wait(self) -> None:
            waited.append(True)

    built = build(model)
    monkeypatch.setattr(built.masks, "begin", lambda *_: Slow())
    failing(monkeypatch, lambda _, __: RuntimeError("a bad moment"))
    built.add(crowd()[0])
    built.add(crowd()[1])
    assert built.step() == []
    assert waited == [True]


def test_every_part_of_a_failed_step_is_tried() -> None:
    """Halved recursively; sequences that have ended meanwhile are left out."""
    retries = Retries(token_budget=100)
    assert not retries.failed(["a", "b", "c", "d", "e"], 50, out_of_memory=False)
    assert retries.next({"a", "b", "c", "d"}) == (("a", "b"), 100)
    assert not retries.failed(["a", "b"], 20, out_of_memory=False)
    assert retries.next({"b", "c", "d"}) == (("b",), 100)
    assert retries.failed(["b"], 10, out_of_memory=False)
    assert retries.next({"c", "d"}) == (("c", "d"), 100)
    assert retries.next({"c", "d"}) is None
    assert not retries


def test_a_part_that_ran_out_of_memory_gets_fewer_tokens_down_to_one() -> None:
    """Then its sequence is at fault."""
    retries = Retries(token_budget=100)
    assert not retries.failed(["a"], 8, out_of_memory=True)
    for tokens in (4, 2):
        assert retries.next({"a"}) == (("a",), tokens)
        assert not retries.failed(["a"], tokens, out_of_memory=True)
    for last in (False, True):  # memory that another process had may be free by now
        assert retries.next({"a"}) == (("a",), 1)
        assert retries.failed(["a"], 1, out_of_memory=True) is last
    retries.succeeded()  # another part's step; a later shortage is a new one
    assert not retries.failed(["a"], 1, out_of_memory=True)


def test_steps_stay_smaller_for_a_while_after_running_out_of_memory() -> None:
    """Never below one token, or nothing could run; then doubled after GOOD_STEPS good ones, up to the budget."""
    retries = Retries(8)
    assert not retries.failed(["a"], 1, out_of_memory=True)
    assert retries.tokens == 1
    for wanted in (2, 4, 8):
        for _ in range(GOOD_STEPS):
            assert retries.tokens == wanted // 2
            retries.succeeded()
        assert retries.tokens == wanted
    assert not retries.failed(["a"], 2, out_of_memory=True)
    for _ in range(GOOD_STEPS - 1):
        retries.succeeded()
    assert not retries.failed(["b", "c"], 1, out_of_memory=False)  # whatever failed: good steps are counted anew
    retries.succeeded()
    assert retries.tokens == 1


def test_memory_that_runs_out_again_and_again_is_tried_less_often() -> None:
    """A failed step costs more than it may gain where memory stays short. After a time without, growth is quick
    again."""
    retries = Retries(8)

    def steps_until_doubled() -> int:
        before = retries.tokens
        for step in range(1, 1000):
            retries.succeeded()
            if retries.tokens > before:
                return step
        raise AssertionError("it stays small")

    retries.failed(["a", "b"], 8, out_of_memory=True)
    waits = []
    for _ in range(5):
        waits.append(steps_until_doubled())
        retries.failed(["a", "b"], 8, out_of_memory=True)
    assert waits == [8, 16, 32, 64, 64]
    steps_until_doubled()
    for _ in range(MOST_GOOD_STEPS):
        retries.succeeded()
    retries.failed(["a", "b"], 8, out_of_memory=True)
    assert steps_until_doubled() == GOOD_STEPS


def advanced(model: ModelRunner, streams: int, steps: int) -> tuple[set[str], int]:
    """Which streams advance in that many steps after one request has run out of memory, and by which step a new prompt
    has begun (0: it has not)."""
    built = build(model)
    for number in range(streams):
        built.add(Sequence(f"s{number}", [1, 2, 3], 3, 200))
    while any(one.num_uncomputed > 1 or not one.generated for one in built.sequences.values()):
        built.step()
    prompt, before = Sequence("prompt", [5] * 30, 30, 40), {one.id: len(one.tokens) for one in built.scheduler.running}
    built.add(prompt)
    built.retries.failed(["x"], 1, out_of_memory=True)
    began = 0
    for step in range(1, steps + 1):
        built.step()
        began = began or (step if prompt.num_computed else 0)
    return {name for name, length in before.items() if len(built.sequences[name].tokens) > length}, began


def test_steps_of_few_tokens_are_everyone_s_in_turn(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one request has run out of memory, each stream goes on and a prompt begins within one round. The control:
    in the order of the batch, the first stream has every step."""
    everyone = {"s0", "s1", "s2", "s3"}
    assert advanced(model, 4, 5) == (everyone, 5)
    monkeypatch.setattr(Retries, "turn", lambda *_: None)
    assert advanced(model, 4, 5) == ({"s0"}, 0)


def test_a_turn_is_of_those_that_had_theirs_longest_ago() -> None:
    """Streams that come later stand behind the others, those that end leave the line, and prompts have one turn
    together, in the scheduler's order. Where there is a token for each, there are no turns."""
    scheduler, retries = Scheduler(BlockPool(40, 4), token_budget=64, max_running=8), Retries(64)
    streams = [Sequence(f"s{number}", [1], 1, 90) for number in range(4)]
    prompts = [Sequence(f"p{number}", [1] * 20, 20, 90) for number in range(2)]

    def turn(*running: Sequence, waiting: list[Sequence] | None = None) -> set[str] | None:
        return retries.turn(running, prompts if waiting is None else waiting)

    assert turn(*streams) is None, "memory has not run out"
    retries.failed(["x"], 4, out_of_memory=True)
    assert retries.tokens == 2
    assert turn(*streams) == {"s0", "s1"}
    assert turn(*streams) == {"s2", "s3"}
    late = Sequence("late", [1], 1, 90)
    assert turn(*streams[1:], late) == {"p0", "p1", "s1"}
    assert turn(*streams[1:], late) == {"s2", "s3"}
    assert turn(*streams[1:], late) == {"late", "p0", "p1"}
    assert turn(*streams[:2], waiting=[]) is None
    for one in (*streams, *prompts):
        scheduler.add(one)
    assert [chunk.sequence.id for chunk in scheduler.plan(most=2, only={"p0", "p1", "s1"})] == ["s1", "p0"]


def test_the_turn_of_prompts_without_room_passes_on(model: ModelRunner) -> None:
    """No step is empty while streams could run."""
    built = Engine(model, EngineConfig(num_blocks=6, block_size=SIZE, token_budget=64, max_running=8))
    for number in range(2):
        built.add(Sequence(f"s{number}", [1, 2, 3], 3, 8))
    while any(one.num_uncomputed > 1 or not one.generated for one in built.sequences.values()):
        built.step()
    built.add(Sequence("prompt", [5] * 20, 20, 22))
    built.retries.failed(["x"], 1, out_of_memory=True)
    for _ in range(5):
        assert [chunk.sequence.id for chunk in (built.step(), built.plan)[1]] in (["s0"], ["s1"])


def test_a_stream_that_gives_its_blocks_back_takes_nobody_else_s_turn(model: ModelRunner) -> None:
    """Its turn passes on, and so does that of the prompts, which find no room either: an older stream runs. (An empty
    step lets the engine's thread sleep until it is called.)"""
    built = Engine(model, EngineConfig(num_blocks=3, block_size=SIZE, token_budget=64, max_running=8))
    for name, prompt in (("s0", [1, 2, 3]), ("s1", [7, 8, 9])):
        built.add(Sequence(name, prompt, 3, 12))
    while any(one.num_uncomputed > 1 or not one.generated for one in built.sequences.values()):
        built.step()
    built.add(Sequence("prompt", [5] * 8, 8, 10))
    built.retries.failed(["x"], 1, out_of_memory=True)
    steps = [[chunk.sequence.id for chunk in (built.step(), built.plan)[1]] for _ in range(4)]
    assert steps == [["s0"], ["s1"], ["s0"], ["s0"]]
    assert built.scheduler.preemptions == 1


@pytest.mark.parametrize("seed", range(6))
def test_no_step_is_empty_while_something_could_run(model: ModelRunner, seed: int) -> None:
    """In whatever order requests arrive, take turns and run out of blocks: with hand-offs, equal beginnings, and
    streams that give no block back, because others share them."""
    rng = random.Random(seed)
    built = Engine(model, EngineConfig(num_blocks=10, block_size=SIZE, token_budget=64, max_running=8))
    left: list[Sequence] = []
    for number in range(14):
        prompt, handoff = [number % 2] * rng.randint(1, 20), rng.random() < 0.3
        left.append(Sequence(f"s{number}", prompt, len(prompt), len(prompt) + (1 if handoff else 19), handoff=handoff))
    while left or built.has_work:
        if left and (rng.random() < 0.3 or not built.has_work):
            built.add(left.pop())
        if rng.random() < 0.1:
            built.retries.failed(["x"], rng.randint(1, 5), out_of_memory=True)
        ended = [item.sequence.id for item in built.step() if item.finish]
        assert built.plan, f"waiting: {built.scheduler.waiting}, running: {built.scheduler.running}"
        for sequence_id in ended:  # a hand-off's blocks have been read
            built.drop(sequence_id)
    assert built.pool.held == 0
