"""A decode step that is queued before the tokens of the one before it are known changes no token and loses no block.
On a stand-in that computes as late as it may: no GPU has run this yet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import engine.run_ahead
from engine import kernels
from engine.attention.forward_context import Batch
from engine.core.block_pool import BlockPool
from engine.core.engine_config import EngineConfig
from engine.core.progress import Progress
from engine.core.sequence import Finish, Sequence
from engine.engine import Engine
from engine.engine_thread import EngineThread
from engine.loading.model_loader import load_model
from engine.run_ahead import RunAhead, Tokens
from engine.runner.captured_steps import operators
from engine.runner.model_runner import ModelRunner
from tandem.errors import InternalError, StepFailed, TandemError
from tandem.sampling import Sampling
from tests.engine.stand_ins import Lagging, LateTokens

CPU = torch.device("cpu")
SIZE, COUNT = 4, 6
PLAIN = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.2, top_k=20, top_p=0.9, seed=4)]
OTHER = Sampling(repetition_penalty=1.3, logprobs=1)
AT_ONCE: Callable[[], bool] = lambda: True  # noqa: E731
LATE: Callable[[], bool] = lambda: False  # noqa: E731
EARLY = pytest.mark.parametrize("early", [LATE, AT_ONCE], ids=["late", "at once"])


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU)


def build(model: ModelRunner, blocks: int = 128, spare: bool = False) -> Engine:
    config = EngineConfig(num_blocks=blocks, block_size=SIZE, token_budget=64, max_running=8, spare_block=spare)
    return Engine(model, config)


def sequence(number: int, new: int, how: Sampling | None = None) -> Sequence:
    tokens = random.Random(number).choices(range(383), k=5 + 2 * number)
    return Sequence(f"s{number}", tokens, len(tokens), len(tokens) + new, sampling=how or PLAIN[number % len(PLAIN)])


def crowd() -> list[Sequence]:
    """Of several lengths, some with a stop token that they reach (`stopping`)."""
    return [sequence(number, 6 + 5 * (number % 3)) for number in range(COUNT)]


def run(
    engine: Engine,
    sequences: list[Sequence],
    before_step: Callable[[int], None] = lambda _: None,
    at: Callable[[int], int] = lambda _: 0,
) -> dict[str, list[Progress]]:
    """Adds each before step `at(its index)` and runs all to their ends. Fails if the books do not balance or a token
    is told twice or never."""
    told: dict[str, list[Progress]] = {one.id: [] for one in sequences}
    lengths = [len(one.tokens) for one in sequences]
    left = dict(enumerate(sequences))
    for step in range(400):
        for index in [index for index in left if at(index) <= step]:
            engine.add(left.pop(index))
        before_step(step)
        for item in engine.step():
            told[item.sequence.id].append(item)
        assert engine.check(live=engine.sequences) == []
        if not left and not engine.has_work:
            break
    assert not engine.has_work
    assert engine.pool.held == 0
    for one, length in zip(sequences, lengths, strict=True):
        tokens = [item.token for item in told[one.id] if item.token is not None]
        assert one.tokens[length:] == tokens
        positions = [item.num_computed for item in told[one.id] if item.token is not None]
        assert positions == list(range(length, length + len(tokens)))
    return told


def stopping(sequences: list[Sequence], whole: list[list[int]]) -> list[Sequence]:
    """Every second one stops at a token that it has in the middle."""
    for one, tokens in list(zip(sequences, whole, strict=True))[::2]:
        one.stop_ids = frozenset([tokens[one.prompt_len + (one.max_len - one.prompt_len) // 2]])
    return sequences


@pytest.fixture(scope="module")
def whole(model: ModelRunner) -> list[list[int]]:
    """The tokens of the crowd without stop tokens."""
    sequences = crowd()
    run(build(model), sequences)
    return [one.tokens for one in sequences]


@pytest.fixture(scope="module")
def expected(model: ModelRunner, whole: list[list[int]]) -> list[list[int]]:
    sequences = stopping(crowd(), whole)
    run(build(model), sequences)
    assert [len(one.tokens) < one.max_len for one in sequences[::2]] == [True] * 3
    return [one.tokens for one in sequences]


@pytest.mark.parametrize("captured", [False, True], ids=["uncaptured", "captured"])
@EARLY
def test_tokens_are_those_of_steps_that_are_waited_for(
    model: ModelRunner,
    whole: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    captured: bool,
    early: Callable[[], bool],
) -> None:
    """Greedy and sampled, that end by length and by a stop token, in every mix of them."""
    if captured and kernels.serving(CPU) == kernels.REFERENCE:
        pytest.skip("not built: python -m engine.kernels.build")
    built = build(model, spare=captured)
    if captured:
        assert built.capture(operators).startswith("captured for")
    device = Lagging(monkeypatch, built, early)
    told = run(built, sequences := stopping(crowd(), whole))
    assert [one.tokens for one in sequences] == expected
    assert [told[one.id][-1].finish for one in sequences] == [Finish.STOP, Finish.LENGTH] * 3
    assert device.behind_another > 8


def test_control_a_step_that_does_not_read_the_tokens_before_it_gives_others(
    model: ModelRunner, whole: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above shows it."""
    built = build(model)
    Lagging(monkeypatch, built)
    queue = built.ahead._queue
    stale: list[LateTokens] = []

    def feeds_older(batch: Batch, sampling: list[Sampling], fed: Any) -> Any:
        if fed and len(stale) > 1 and len(stale[-2].host) > max(fed[1]):
            fed = (stale[-2], fed[1])
        stale.append(queue(batch, sampling, fed))
        return stale[-1]

    monkeypatch.setattr(built.ahead, "_queue", feeds_older)
    run(built, sequences := stopping(crowd(), whole))
    assert [one.tokens for one in sequences] != expected


def test_control_tokens_that_are_read_before_their_event_are_garbage(
    model: ModelRunner, whole: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in computes nothing before it is waited for."""
    built = build(model)
    Lagging(monkeypatch, built)
    monkeypatch.setattr(LateTokens, "read", lambda tokens: tokens.host)
    run(built, sequences := stopping(crowd(), whole))
    assert [one.tokens for one in sequences] != expected


def test_the_next_step_is_queued_when_the_tokens_of_one_are_told(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the host tells them the device has work; at the last token by length it has none left."""
    built = build(model)
    device = Lagging(monkeypatch, built)
    built.add(sequence(1, 5))
    behind = []
    while built.has_work:
        built.step()
        behind.append(len(device.queued))
    assert behind == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_between_steps_changes_no_token(
    model: ModelRunner, whole: list[list[int]], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Sequences come while steps are queued, are cancelled at any moment, are preempted for lack of blocks, have
    penalties that need the last token; the device is late or not."""
    rng = random.Random(seed)
    built = build(model, blocks=rng.choice([14, 18, 128]))
    device = Lagging(monkeypatch, built, lambda: rng.random() < 0.3)
    sequences = stopping(crowd(), whole)
    cancelled = {rng.choice(sequences).id: rng.randrange(1, 25) for _ in range(rng.randrange(3))}
    if seed % 2:
        sequences.append(sequence(COUNT, 9, OTHER))
        built.add(plain := sequence(COUNT, 9, OTHER))
        while built.has_work:
            built.step()
        expected = [*expected, plain.tokens]
        cancelled.pop(plain.id, None)

    def cancel(step: int) -> None:
        for one in sequences:
            if cancelled.get(one.id) == step:
                built.drop(one.id)

    starts = [rng.randrange(12) for _ in sequences]
    run(built, sequences, cancel, at=lambda index: starts[index])
    for one, tokens in zip(sequences, expected, strict=True):
        assert one.tokens == (tokens[: len(one.tokens)] if one.id in cancelled else tokens)
    assert device.behind_another > 0


def test_blocks_run_out_as_they_do_without(
    model: ModelRunner, whole: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step ahead takes no block from anybody; the one after it preempts."""
    built = build(model, blocks=20)
    Lagging(monkeypatch, built)
    run(built, sequences := crowd())
    assert [one.tokens for one in sequences] == whole
    assert built.scheduler.preemptions > 0


@EARLY
@pytest.mark.parametrize("number", range(1, 16))
def test_a_step_that_fails_loses_nothing(
    model: ModelRunner,
    whole: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    early: Callable[[], bool],
) -> None:
    """Whether it fails as it is queued, before the one in front of it has been waited for, or when it is waited for."""
    built, calls = build(model), iter(range(10**9))
    forward = ModelRunner.forward

    def broken(self: ModelRunner, pages: Any, batch: Batch) -> torch.Tensor:
        logits = forward(self, pages, batch)
        if next(calls) == number:
            raise RuntimeError("a bad moment")
        return logits

    monkeypatch.setattr(ModelRunner, "forward", broken)
    Lagging(monkeypatch, built, early)
    company = [sequence(number, 20) for number in (6, 7)]  # who fails alone ends, here and elsewhere
    told = run(built, [*(sequences := stopping(crowd(), whole)), *company])
    assert [one.tokens for one in sequences] == expected
    assert [item.error for items in told.values() for item in items if item.error] == []
    assert built.failures == 1


def test_blocks_of_one_that_ends_by_a_failure_are_free_when_the_device_is_done(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in front of the one that could not be queued is still under way then."""
    built = build(model)
    device = Lagging(monkeypatch, built)
    queue = built.ahead._queue

    def breaks(batch: Batch, sampling: list[Sampling], fed: Any) -> Any:
        if fed:
            raise RuntimeError("no more can be queued")
        return queue(batch, sampling, fed)

    monkeypatch.setattr(built.ahead, "_queue", breaks)
    built.add(sequence(0, 30))
    built.step()
    freed, drop = [], BlockPool.drop
    monkeypatch.setattr(BlockPool, "drop", lambda pool, owner: (freed.append(len(device.queued)), drop(pool, owner))[1])
    [ended] = built.step()
    assert isinstance(ended.error, StepFailed)
    assert freed
    assert set(freed) == {0}
    assert built.pool.held == 0


def test_blocks_are_told_when_no_queued_step_writes_to_them(
    model: ModelRunner, whole: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others read a published block at once. What is published behind queued steps is right: sequences that begin with
    it go on with the same tokens."""
    built = build(model)
    device = Lagging(monkeypatch, built)
    publish, with_queue = BlockPool.publish, []

    def watched(pool: BlockPool, owner: str, index: int, digest: bytes) -> None:
        with_queue.append(len(device.queued))
        assert pool.table(owner)[index] not in device.writes(SIZE)
        publish(pool, owner, index, digest)

    monkeypatch.setattr(BlockPool, "publish", watched)
    run(built, crowd())
    assert sum(with_queue) > 10
    again = crowd()
    for one, tokens in zip(again, whole, strict=True):
        one.tokens = tokens[: one.max_len - 3]
    run(built, again)
    assert [one.tokens for one in again] == whole
    assert sum(one.cached > one.prompt_len for one in again) >= 3


def stopped_early(built: Engine, one: Sequence) -> None:
    """By a stop token, which the step behind it has not seen."""
    while built.sequences.get(one.id) is one:
        built.step()


def cancelled(built: Engine, one: Sequence) -> None:
    while len(one.tokens) < one.prompt_len + 4:
        built.step()
    built.drop(one.id)


WAYS = pytest.mark.parametrize("end", [stopped_early, cancelled])


def written_late(
    model: ModelRunner, whole: list[list[int]], patch: pytest.MonkeyPatch, end: Callable[[Engine, Sequence], None]
) -> bool:
    """Whether the step that was queued when a sequence ended writes to a block that somebody else has by then, who
    writes outside of the device's queue."""
    built = build(model)
    device = Lagging(patch, built)
    one, other = sequence(0, 11), sequence(1, 40)
    one.stop_ids = frozenset([whole[0][one.prompt_len + 4]])
    built.reserve(other, 40, arrives=False)
    built.join(other, None)
    built.add(one)
    end(built, one)
    assert device.queued
    assert other.id in built.sequences
    built.pool.take("transfer", [], built.pool.available)
    taken = built.pages.buffer[built.pool.table("transfer")]
    taken = torch.randint(0, 255, taken.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    built.pages.buffer[built.pool.table("transfer")] = taken
    assert built.check(live=[*built.sequences, "transfer"]) == []
    built.step()
    built.step()
    return not torch.equal(built.pages.buffer[built.pool.table("transfer")], taken)


@WAYS
def test_a_block_that_a_queued_step_writes_to_is_nobody_elses(
    model: ModelRunner,
    whole: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Engine, Sequence], None],
) -> None:
    """A transfer writes to its blocks outside of the device's queue."""
    assert not written_late(model, whole, monkeypatch, end)


@WAYS
def test_control_blocks_that_are_freed_at_once_are_written_late(
    model: ModelRunner,
    whole: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Engine, Sequence], None],
) -> None:
    """The stand-in detects it."""
    share = BlockPool.share
    monkeypatch.setattr(BlockPool, "share", lambda pool, owner, blocks: share(pool, owner, []))
    assert written_late(model, whole, monkeypatch, end)


def test_when_all_are_cancelled_the_queued_step_lands_and_its_blocks_are_free(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has work until then; a newcomer is not held up by it."""
    built = build(model)
    device = Lagging(monkeypatch, built)
    for number in range(2):
        built.add(sequence(number, 9))
    for _ in range(3):
        built.step()
    for number in range(2):
        built.drop(f"s{number}")
    assert device.queued
    assert not built.scheduler.has_work
    assert built.has_work
    assert built.pool.held == 2
    newcomer = sequence(2, 9)
    built.add(newcomer)
    [progress] = built.step()
    assert progress.sequence is newcomer
    built.drop(newcomer.id)
    built.step()
    assert not built.has_work
    assert built.pool.held == 0


@pytest.mark.parametrize("stops", [False, True], ids=["cancelled", "stopped"])
async def test_an_engines_thread_lands_a_queued_step_that_all_have_left(
    model: ModelRunner, whole: list[list[int]], stops: bool
) -> None:
    """It does not sleep while blocks are held for it."""

    def make() -> Engine:
        built = build(model)
        built.ahead.on = True
        return built

    loop = EngineThread(make)
    await loop.built()
    one = sequence(0, 400)
    if stops:
        one.stop_ids = frozenset(whole[0][one.prompt_len + 4 :])
    watch = await loop.add(one)
    async with asyncio.timeout(60):
        while loop.engine.ahead._launched < 5:
            await watch.next()
        if not stops:
            await loop.drop("s0")
        while loop.engine.pool.held:  # noqa: ASYNC110 - the thread tells nobody
            await asyncio.sleep(0)
    assert not loop.engine.has_work
    loop.stop()


def test_the_row_of_one_that_left_is_not_anothers_with_its_name(
    model: ModelRunner, whole: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may come again under the same id while the step with its first try is queued."""
    built = build(model)
    device = Lagging(monkeypatch, built)
    built.add(sequence(0, 6))
    for _ in range(3):
        built.step()
    built.drop("s0")
    assert device.queued
    run(built, [again := sequence(0, 6)])
    assert again.tokens == whole[0]


@pytest.mark.parametrize("moved", [False, True], ids=["a prompt", "its KV has arrived"])
def test_a_newcomer_waits_for_one_more_step_at_most(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """It takes part in the step after the one that is queued."""
    built = build(model)
    Lagging(monkeypatch, built)
    built.add(sequence(0, 30))
    for _ in range(4):
        built.step()
    newcomer = sequence(1, 30)
    if moved:
        built.reserve(newcomer, 8)
        built.join(newcomer, 5)
    else:
        built.add(newcomer)
    took_part = [{item.sequence.id for item in built.step()} for _ in range(2)]
    assert took_part == [{"s0"}, {"s0", "s1"}]


def test_a_hand_off_is_in_no_queued_step(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its blocks after its last token, and others read them."""
    built = build(model)
    Lagging(monkeypatch, built)
    built.add(one := Sequence("one", [5], 1, 2, handoff=True))
    [progress] = built.step()
    assert progress.finish is Finish.LENGTH
    assert built.ahead._launched == 0
    assert built.pool.owners() == [one.id]


def test_a_sequence_whose_logits_are_not_finite_ends_and_the_step_behind_it_reads_no_such_token(
    model: ModelRunner, whole: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """-1 stands for no token, and an embedding of it would end a GPU's context. The others go on; nobody finds its
    blocks."""
    built, one = build(model), sequence(0, 6)
    Lagging(monkeypatch, built)
    draw = engine.run_ahead.draw

    def nothing_at_last(logits: torch.Tensor, how: list[Sampling], positions: list[int], **more: Any) -> torch.Tensor:
        tokens = draw(logits, how, positions, **more)
        return torch.where(torch.tensor(positions) == one.prompt_len + 3, -1, tokens)

    monkeypatch.setattr(engine.run_ahead, "draw", nothing_at_last)
    told = run(built, [one, other := sequence(4, 6)])
    assert isinstance(told["s0"][-1].error, InternalError)
    assert one.tokens == whole[0][: one.prompt_len + 3]
    assert other.tokens == sequence(4, 6).tokens + whole[4][other.prompt_len :][:6]
    assert built.pool.match(one.hashes(SIZE)) == 0


def test_tokens_on_their_way_are_what_was_chosen() -> None:
    """The host gets all of them; the next step has a row of the embedding for each."""
    tokens = Tokens(torch.tensor([5, -1, 0]))
    assert tokens.read() == [5, -1, 0]
    assert tokens.on_device.tolist() == [5, 0, 0]


@pytest.mark.parametrize(
    "how",
    [
        Sampling(logprobs=0),
        Sampling(frequency_penalty=0.1),
        Sampling(bad_words=((3, 4),)),
        Sampling(min_tokens=2),
        Sampling(logit_bias=((3, 1.0),)),
        Sampling(allowed_token_ids=(3,)),
    ],
)
def test_steps_that_need_more_than_logits_and_a_seed_are_waited_for(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch, how: Sampling
) -> None:
    """With all that are in them."""
    built = build(model)
    device = Lagging(monkeypatch, built)
    run(built, [sequence(0, 6), sequence(1, 6, how)])
    assert device.behind_another == 0


def test_nothing_runs_ahead_on_cpu(model: ModelRunner) -> None:
    """One thread computes and plans there."""
    built = build(model)
    run(built, crowd())
    assert built.ahead._launched == 0


@pytest.mark.parametrize("but", [{}, {"device": CPU}, {"size": 2}, {"lora": True}, {"states": True}, {"drafts": True}])
def test_steps_are_queued_where_nothing_changes_between_them_but_pages(but: dict[str, Any]) -> None:
    """By one rank on CUDA, without adapters, recurrent states and drafts."""
    facts = {"device": torch.device("cuda"), "size": 1, "lora": None, "states": None, "drafts": False, **but}
    about: Any = SimpleNamespace(**facts, pool=None)
    assert RunAhead(about, about, about, drafts=facts["drafts"]).on is not bool(but)


def test_our_own_error_while_a_step_is_queued_is_not_retried(
    model: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in any step."""
    built = build(model)
    Lagging(monkeypatch, built)

    def wrong(_ahead: RunAhead, _sequence: Sequence) -> bool:
        raise InternalError("the books are wrong")

    monkeypatch.setattr(RunAhead, "_grow", wrong)
    built.add(sequence(0, 6))
    built.step()
    with pytest.raises(TandemError, match="the books are wrong"):
        built.step()
