"""Promises of speculative decoding: the tokens are those of decoding without it, whatever the drafts; drafts cost no
other sequence a block or a turn; and drafting stops where it does not pay.

Verifying several positions at once rounds differently from computing them one by one, so on the plain PyTorch path two
logits that are equal up to the last bits could swap. In float32 with these models and seeds none do, and every
comparison is token by token.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.engine_config import EngineConfig
from engine.core.scheduler import Chunk
from engine.core.sequence import Finish, Sequence
from engine.decoding import new_tokens
from engine.decoding.speculative import EVERY, KNOWN, Ask, ModelDrafter, Ngram, Speculation, fit, worth
from engine.engine import Engine
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import make_checkpoint
from tandem.sampling import Sampling
from tests.support.oracle import weaken

SIZE, BUDGET, DRAFTS, NEW = 4, 48, 4, 40
PROMPT_LENGTHS = (5, 21, 1, 34)
CPU = torch.device("cpu")
GREEDY = Sampling()
EVERYTHING = Sampling(
    temperature=0.9,
    top_p=0.95,
    top_k=60,
    min_p=0.001,
    repetition_penalty=1.2,
    frequency_penalty=0.4,
    presence_penalty=-0.3,
    logit_bias=((3, 2.0), (11, 100.0)),
    min_tokens=30,
    logprobs=3,
)


SOME = tuple(range(0, 200, 3))
LIMITED = Sampling(allowed_token_ids=SOME, bad_words=(*((token, token) for token in SOME), (3,), (6, 9, 12)))


class Oracle:
    """Drafts the known continuation of a sequence, with deliberate errors."""

    def __init__(self, streams: list[list[int]], wrong: float) -> None:
        self._streams = streams
        self._wrong = wrong
        self._random = random.Random(5)
        self.busy = False

    def propose(self, asked: Seq[Ask]) -> list[list[int]]:
        return [self._future(ask.sequence.tokens, ask.most) for ask in asked]

    def verified(self, sequence: Sequence) -> None: ...

    def forget(self, sequence_id: str) -> None: ...

    def _future(self, tokens: list[int], most: int) -> list[int]:
        stream = next((one for one in self._streams if one[: len(tokens)] == tokens), [])
        draft = stream[len(tokens) : len(tokens) + most]
        return [token if self._random.random() >= self._wrong else (token + 1) % 384 for token in draft]


def speculation(drafter: Any, tokens: int = DRAFTS) -> Speculation:
    """With a stopped clock drafts are free, so that every sequence always drafts as much as it can."""
    return Speculation(drafter, tokens, clock=lambda: 0.0)


def build(
    model: ModelRunner,
    drafter: Any = None,
    *,
    blocks: int = 200,
    running: int = 8,
    tokens: int = DRAFTS,
    budget: int = BUDGET,
) -> Engine:
    return Engine(
        model,
        EngineConfig(num_blocks=blocks, block_size=SIZE, token_budget=budget, max_running=running),
        speculation=speculation(drafter, tokens) if drafter else None,
    )


def sequences(prompts: list[list[int]], how: Sampling = GREEDY, new: int = NEW, **kw: Any) -> list[Sequence]:
    return [
        Sequence(f"s{index}", list(prompt), len(prompt), len(prompt) + new, sampling=replace(how, seed=index), **kw)
        for index, prompt in enumerate(prompts)
    ]


def run(engine: Engine, work: list[Sequence]) -> dict[str, list[Any]]:
    """Runs until all have ended; returns the outputs of each, by id. The ledger balances after every step."""
    for one in work:
        engine.add(one)
    said: dict[str, list[Any]] = {one.id: [] for one in work}
    while engine.scheduler.has_work:
        for item in engine.step():
            said[item.sequence.id].append(item)
        assert engine.pool.check(live=list(engine.sequences)) == []
        assert all(one.num_computed < len(one.tokens) for one in engine.sequences.values())
    assert engine.pool.held == 0
    for one in work:
        tokens = [item for item in said[one.id] if item.token is not None]
        assert [item.token for item in tokens] == one.tokens[one.prompt_len :]
        assert [item.num_computed for item in tokens] == list(range(one.prompt_len, len(one.tokens))), (
            "each at its position"
        )
        assert [item.finish is None for item in tokens] == [True] * (len(tokens) - 1) + [False]
    return said


def tokens_of(said: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [item for item in items if item.token is not None] for name, items in said.items()}


def completions(engine: Engine, work: list[Sequence]) -> list[list[int]]:
    run(engine, work)
    return [one.tokens[one.prompt_len :] for one in work]


def random_prompts(vocab: int, lengths: Seq[int] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(vocab) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def llama(checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def similar(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A model that agrees with `llama` about half of the time: its weights with noise on them."""
    folder = tmp_path_factory.mktemp("similar") / "model"
    weaken(checkpoint("tiny-llama"), folder, noise=0.015)
    return load_model(str(folder), dtype=torch.float32, device=CPU)


# ---- the tokens


# What a rejected draft leaves behind is in pages, which one attention function writes and reads for all families: plain
# heads, latents, windows with softcaps, sinks, chunks, positions as embeddings, and a window in every layer.
MECHANISMS = ("deepseek-v3", "gemma2", "gpt-oss", "gpt2", "llama", "llama4-text", "mistral")


@pytest.mark.parametrize("family", MECHANISMS)
def test_greedy_tokens_are_those_without_drafts(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each kind of attention, with drafts that are all right, partly wrong or all wrong; with verification
    switched off, the tokens differ."""
    model = load_model(str(checkpoint(f"tiny-{family}")), dtype=torch.float32, device=CPU)
    prompts = random_prompts(model.vocab_size)
    expected = completions(build(model), sequences(prompts))
    streams = [prompt + new for prompt, new in zip(prompts, expected, strict=True)]
    steps = []
    for wrong in (0.0, 0.3, 1.0):
        engine_, work = build(model, Oracle(streams, wrong)), sequences(prompts)
        assert completions(engine_, work) == expected, wrong
        drafted, accepted = (sum(getattr(one, name) for one in work) for name in ("drafted", "accepted"))
        assert drafted > 0
        assert accepted == drafted if wrong == 0.0 else accepted == 0 if wrong == 1.0 else 0 < accepted < drafted
        steps.append(engine_.steps)
    assert steps[0] < 0.5 * steps[2], "drafts that are right save steps"
    monkeypatch.setattr(new_tokens, "agrees", lambda draft, token: True)
    assert completions(build(model, Oracle(streams, 0.3)), sequences(prompts)) != expected


@pytest.mark.parametrize("drafts", ["itself", "similar"])
@pytest.mark.parametrize("how", [GREEDY, Sampling(temperature=0.7, top_p=0.9), EVERYTHING, LIMITED], ids=lambda how: "")
def test_a_draft_model_changes_no_token(llama: ModelRunner, similar: ModelRunner, drafts: str, how: Sampling) -> None:
    """Greedy, sampled, with penalties, bias, min_tokens and logprobs on, and with excluded tokens: a draft model, as
    good as the target or worse, gives the stream of the same seed, with the same log probabilities."""
    prompts = [prompt * 3 for prompt in random_prompts(llama.vocab_size)]
    stop = frozenset([11])
    work = sequences(prompts, how, stop_ids=stop)
    expected = run(build(llama), work)
    again = sequences(prompts, how, stop_ids=stop)
    model = llama if drafts == "itself" else similar
    drafter = ModelDrafter(model, num_blocks=200, block_size=SIZE, token_budget=BUDGET)
    said = run(build(llama, drafter), again)
    assert [one.tokens for one in again] == [one.tokens for one in work]
    for name, items in tokens_of(said).items():
        for one, other in zip(items, tokens_of(expected)[name], strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob and other.logprob:
                assert one.logprob.chosen == pytest.approx(other.logprob.chosen, abs=1e-4)
                assert one.logprob.top == pytest.approx(other.logprob.top, abs=1e-4)
    if how is LIMITED:
        new = [one.tokens[one.prompt_len :] for one in again]
        assert all(set(tokens) <= {*SOME} - {3} for tokens in new)
        assert not any(left == right for tokens in new for left, right in pairwise(tokens))
    drafted, accepted = (sum(getattr(one, name) for one in again) for name in ("drafted", "accepted"))
    print(f"{drafts}: {accepted} of {drafted}")
    if drafts == "itself" and not how.adjusts:
        assert accepted > 0.95 * drafted > 0, "the same model with the same random numbers guesses right"
    elif drafts == "similar" and not how.adjusts:
        assert 0.1 * drafted < accepted < 0.9 * drafted, "the test needs right and wrong drafts"


def test_drafts_without_verification_are_noticed(
    llama: ModelRunner, similar: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr(new_tokens, "agrees", lambda draft, token: True)
    prompts = random_prompts(llama.vocab_size)
    expected = completions(build(llama), sequences(prompts))
    drafter = ModelDrafter(similar, num_blocks=200, block_size=SIZE, token_budget=BUDGET)
    assert completions(build(llama, drafter), sequences(prompts)) != expected


def test_each_forward_of_a_draft_model_can_be_told_from_the_one_before(llama: ModelRunner) -> None:
    """A watchdog times each forward: several of the drafter in a step, of which the first may catch up with a prompt,
    and then the target's."""
    drafter = ModelDrafter(llama, num_blocks=200, block_size=SIZE, token_budget=BUDGET)
    seen: list[tuple[int, int, int]] = []

    class Watched:
        max_model_len = llama.max_model_len

        def forward(self, pages: Any, batch: Any) -> Any:
            seen.append((*drafter.under_way, len(batch.token_ids)))
            return llama.forward(pages, batch)

    drafter.model = Watched()  # type: ignore[assignment]
    prompt = random_prompts(llama.vocab_size, [2 * BUDGET + 5])[0]
    sequence = Sequence("s", prompt, len(prompt), len(prompt) + 9)
    for _ in range(3):  # steps
        drafter.propose([Ask(sequence, 2, list(range(len(prompt) // SIZE + 2)))])
    numbers = [number for number, _, _ in seen]
    assert len(seen) == 4
    assert len({*numbers, drafter.under_way.number}) == len(seen) + 1
    assert [told for _, told, _ in seen] == [count for _, _, count in seen] == [BUDGET, BUDGET, 5, 1]
    assert drafter.under_way.tokens == 0


DICE = 12  # tokens in the vocabulary of the model that is sampled
DRAWS = 2400


@pytest.fixture(scope="module")
def dice(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, ModelRunner]:
    """A target with few tokens and a flat distribution, and a drafter that agrees with it often and not always."""
    folder = tmp_path_factory.mktemp("dice")
    shape: dict[str, Any] = {"vocab_size": DICE, "dtype": "float32", "num_hidden_layers": 2}
    make_checkpoint(folder / "target", "tiny-llama", **shape)
    weaken(folder / "target", folder / "draft", noise=0.06)
    target, draft = (
        load_model(str(folder / name), dtype=torch.float32, device=CPU, max_model_len=128)
        for name in ("target", "draft")
    )
    return target, draft


@pytest.mark.parametrize("how", [GREEDY, Sampling(temperature=0.5), Sampling(repetition_penalty=1.05)], ids=str)
def test_prompt_lookup_changes_no_token(dice: tuple[ModelRunner, ModelRunner], how: Sampling) -> None:
    """Few tokens, so that the text repeats itself and nearly every step finds something to try."""
    prompts = random_prompts(DICE)
    expected = completions(build(dice[0]), sequences(prompts, how))
    work = sequences(prompts, how)
    assert completions(build(dice[0], Ngram()), work) == expected
    assert 0 < sum(one.accepted for one in work) < sum(one.drafted for one in work)


def exact_pairs(model: ModelRunner, prompt: list[int]) -> torch.Tensor:
    """The joint distribution of the second and third token after the prompt, sampled at temperature 1: [DICE, DICE]."""
    pages = model.allocate(1, 16)

    def following(*tokens: int) -> torch.Tensor:
        return model.forward(pages, pack([(prompt + list(tokens), 0, [0])]))[0].double().softmax(-1)

    result, firsts = torch.zeros(DICE, DICE, dtype=torch.float64), following()
    for first in range(DICE):
        seconds = following(first)
        for second in range(DICE):
            result[second] += firsts[first] * seconds[second] * following(first, second)
    return result


def chi_squared(dice: tuple[ModelRunner, ModelRunner]) -> tuple[float, float, float]:
    """Chi-squared of sampled second and third tokens against their exact distribution, its 0.1 % bound, and the share
    of accepted drafts. Drafts begin with the second token."""
    target, draft = dice
    prompt, together = [1, 2, 3, 4, 5], 40
    drafter = ModelDrafter(draft, num_blocks=200, block_size=SIZE, token_budget=BUDGET)
    engine_ = build(target, drafter, running=together, tokens=2, budget=4 * together)
    pairs: Counter[tuple[int, int]] = Counter()
    drafted = accepted = 0
    for seed in range(0, DRAWS, together):
        work = [
            Sequence(f"s{one}", list(prompt), 5, 5 + 5, sampling=Sampling(temperature=1.0, seed=one))
            for one in range(seed, seed + together)
        ]
        run(engine_, work)
        pairs.update((one.tokens[6], one.tokens[7]) for one in work)
        drafted += sum(one.drafted for one in work)
        accepted += sum(one.accepted for one in work)
    expected = (DRAWS * exact_pairs(target, prompt)).tolist()
    cells = [(expected[a][b], pairs[a, b]) for a in range(DICE) for b in range(DICE)]
    rare = [cell for cell in cells if cell[0] < 5]
    cells = [cell for cell in cells if cell[0] >= 5] + [(sum(e for e, _ in rare), sum(c for _, c in rare))]
    assert all(wanted >= 5 for wanted, _ in cells)
    free = len(cells) - 1
    bound = free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3  # Wilson and Hilferty
    return sum((seen - wanted) ** 2 / wanted for wanted, seen in cells), bound, accepted / drafted


def test_sampled_tokens_follow_the_targets_distribution(
    dice: tuple[ModelRunner, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-squared over pairs of neighbouring tokens stays below its 0.1 % bound, with drafts by another model; with the
    check switched off it is far above."""
    found, bound, share = chi_squared(dice)
    print(f"chi-squared {found:.0f}, bound {bound:.0f}, {share:.0%} of the drafts accepted")
    assert found < bound
    assert 0.1 < share < 0.9
    monkeypatch.setattr(new_tokens, "agrees", lambda draft, token: True)
    assert chi_squared(dice)[0] > 2 * bound


# ---- room, preemption, the end of a request


def test_small_pools_preempt_and_change_nothing(llama: ModelRunner) -> None:
    """With too few blocks for all sequences, and with drafts, each request still gives what it gives alone."""
    prompts = random_prompts(llama.vocab_size, [20] * 6)
    expected = [completions(build(llama), [one])[0] for one in sequences(prompts)]
    streams = [prompt + new for prompt, new in zip(prompts, expected, strict=True)]
    for drafter in (
        Oracle(streams, 0.3),
        ModelDrafter(llama, num_blocks=33, block_size=SIZE, token_budget=BUDGET),
    ):
        work = sequences(prompts)
        assert completions(build(llama, drafter, blocks=33), work) == expected
        assert sum(one.preemptions for one in work) > 0
        assert sum(one.accepted for one in work) > 0


@pytest.mark.parametrize("least", [0, 9])
def test_a_stop_token_inside_a_run_ends_it_there(llama: ModelRunner, least: int) -> None:
    """Drafts accepted after it are not part of the answer; min_tokens holds inside a run, too."""
    prompt = random_prompts(llama.vocab_size)[1]
    how = Sampling(min_tokens=least)
    free = completions(build(llama), sequences([prompt], how))[0]
    for place in range(4, 12):
        (plain,) = sequences([prompt], how, stop_ids=frozenset([free[place]]))
        run(build(llama), [plain])
        (one,) = sequences([prompt], how, stop_ids=frozenset([free[place]]))
        said = run(build(llama, Oracle([plain.tokens, prompt + free], 0.0), tokens=16), [one])[one.id]
        assert one.tokens == plain.tokens
        assert said[-1].finish is Finish.STOP or len(one.tokens) == one.max_len


@pytest.mark.parametrize("new", range(1, 12))
def test_no_run_goes_beyond_max_tokens(llama: ModelRunner, new: int) -> None:
    """The last token is the one that the limit allows, whatever was drafted."""
    prompt = random_prompts(llama.vocab_size)[1]
    free = completions(build(llama), sequences([prompt]))[0]
    (one,) = sequences([prompt], new=new)
    said = run(build(llama, Oracle([prompt + free], 0.0), tokens=8), [one])[one.id]
    assert one.tokens == prompt + free[:new]
    assert said[-1].finish is Finish.LENGTH


def cached_kv_is_right(engine_: Engine, tokens: list[int]) -> bool:
    """Whether the blocks that the prefix cache gives for these tokens hold what one forward over them computes."""
    blocks = len(tokens) // SIZE
    one = Sequence("looks", tokens, len(tokens), len(tokens) + 1)
    assert engine_.pool.take("looks", one.hashes(SIZE), blocks) == blocks, "all of them are cached"
    table = engine_.pool.table("looks")
    fresh = engine_.model.allocate(blocks, SIZE)
    engine_.model.forward(fresh, pack([(tokens[: blocks * SIZE], 0, list(range(blocks)))]))
    calls = range(len(engine_.model.facts))
    pairs = [(engine_.pages.k[call][table], fresh.k[call]) for call in calls]
    pairs += [(engine_.pages.v[call][table], fresh.v[call]) for call in calls]
    engine_.pool.drop("looks")
    return all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in pairs)


def test_published_blocks_hold_accepted_tokens_only(llama: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stream with wrong drafts the prefix cache holds the KV of its tokens, and a request that finds it goes on
    as one that computes everything. With the check switched off, the KV of drafts is found there."""
    prompt = random_prompts(llama.vocab_size)[1]
    expected = completions(build(llama), sequences([prompt]))[0]
    engine_ = build(llama, Oracle([prompt + expected], 0.5))
    (first,) = sequences([prompt])
    run(engine_, [first])
    assert 0 < first.accepted < first.drafted
    assert cached_kv_is_right(engine_, first.tokens[:-1])
    longer = prompt + expected[:30]
    (again,) = sequences([longer], new=10)
    assert completions(engine_, [again])[0] == expected[30:40]
    assert again.cached >= len(longer) - SIZE
    monkeypatch.setattr(new_tokens, "agrees", lambda draft, token: True)
    engine_ = build(llama, Oracle([prompt + expected], 0.5))
    (wrong,) = sequences([prompt])
    run(engine_, [wrong])
    assert not cached_kv_is_right(engine_, wrong.tokens[:-1])


# ---- prompt lookup


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 9, 2, 3], [4, 5, 9, 2]),
        ([1, 2, 3, 4, 7, 2, 3, 5, 8, 2, 3], [5, 8, 2, 3]),
        ([1, 2, 3, 4, 7, 9, 2, 3, 5, 8, 1, 2, 3], [4, 7, 9, 2]),
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([6, 6, 6], [6, 6, 6, 6]),
        ([1, 2, 3, 3], []),
        ([1, 2, 3], []),
        ([1], []),
    ],
    ids=["a repeated pair", "the latest", "the longest", "a period", "a period of one", "one token", "new", "first"],
)
def test_prompt_lookup_goes_on_as_the_text_did(tokens: list[int], draft: list[int]) -> None:
    """The longest match, the latest of those; a single token is no match."""
    drafter = Ngram()
    one = Sequence("s", tokens[:1], 1, 100)
    for token in tokens[1:]:
        drafter.propose([Ask(one, 4, [])])
        one.append(token)
    assert drafter.propose([Ask(one, 4, [])]) == [draft]


# ---- whether it pays


class Machine:
    """The times of an engine's steps: `each` is what a draft adds, `fixed` what a drafting stream adds besides, as
    shares of a token's time without drafts."""

    def __init__(self, streams: int, each: float, right: float, fixed: float = 0.0) -> None:
        self.now = 0.0
        self.policy = Speculation(Ngram(), 8, clock=lambda: self.now)
        self.work = [Sequence(f"s{index}", [1], 1, 10**6) for index in range(streams)]
        self._each, self._fixed, self._right, self._random = each, fixed, right, random.Random(1)

    def drafts(self, steps: int) -> int:
        """The number of drafts made in `steps` steps."""
        total = 0
        for _ in range(steps):
            plan = [Chunk(one, 1) for one in self.work]
            wanted = self.policy.wanted(plan)
            for one, count in zip(self.work, wanted, strict=True):
                right = next((at for at in range(count) if self._random.random() >= self._right), count)
                if count:
                    self.policy.verified(one, count, right)
            made = sum(wanted)
            extra = self._each * made + self._fixed * sum(map(bool, wanted))
            self.policy.took(plan, wanted, (1.0 + extra / len(plan)) * self._random.uniform(0.97, 1.03))
            total += made
        return total


def test_cheap_drafts_that_are_right_are_made() -> None:
    """With one stream and drafts that cost little, nearly every step carries as many as are allowed."""
    machine = Machine(1, 0.05, 0.95)
    machine.drafts(100)
    assert machine.drafts(320) > 0.8 * 8 * 320


def test_a_batch_in_which_drafts_cost_a_token_each_makes_none() -> None:
    """Where a draft costs what a token costs it cannot pay; it is tried now and then, to notice when that changes."""
    machine = Machine(16, 1.0, 0.8)
    machine.drafts(100)
    assert machine.drafts(320) <= 16 * 320 / EVERY


def test_a_request_whose_drafts_are_wrong_stops_and_the_others_go_on() -> None:
    """Each request has its own chance of acceptance."""
    machine = Machine(2, 0.2, 0.0)
    machine.drafts(200)
    assert machine.drafts(320) <= 2 * 320 / EVERY
    machine._right = 1.0
    assert machine.drafts(320) > 320, "and it begins again when they are right"


def test_a_stall_of_the_machine_changes_nothing() -> None:
    """A single step that took a thousand times as long is ignored."""
    machine = Machine(1, 0.05, 0.95)
    machine.drafts(100)
    before = machine.drafts(10 * EVERY)
    plan = [Chunk(one, 1) for one in machine.work]
    machine.policy.took(plan, [8], 1000.0)
    machine.policy.took(plan, [0], 1000.0)
    assert machine.drafts(10 * EVERY) > 0.9 * before


def test_nobody_drafts_beside_a_prompt_or_before_the_price_is_known() -> None:
    """A step with a prompt in it is bound by arithmetic; a price needs plain steps to compare with."""
    machine = Machine(1, 0.05, 0.95)
    assert machine.drafts(KNOWN) == 0
    prompt = Sequence("long", list(range(50)), 50, 60)
    assert machine.policy.wanted([Chunk(machine.work[0], 1), Chunk(prompt, 20)]) == [0, 0]


@pytest.mark.parametrize(
    ("chance", "fixed", "each", "count"),
    [
        (0.5, 0.0, 0.0, 16),
        (0.5, 0.0, 0.5, 1),
        (0.5, 0.0, 0.24, 2),
        (0.9, 0.0, 0.5, 6),
        (0.4, 0.0, 0.5, 0),
        (0.98, 0.0, 1.5, 0),
        (0.5, 0.9, 0.0, 16),
        (0.4, 0.9, 0.0, 0),
        (0.9, 1.0, 0.5, 6),
        (0.9, 1.3, 0.5, 0),
    ],
)
def test_drafts_pay_while_they_bring_more_than_they_cost(chance: float, fixed: float, each: float, count: int) -> None:
    """The j-th draft brings chance ** j of a token and costs `each`; drafting at all costs `fixed`."""
    assert worth(chance, fixed, each, 16) == count


def test_prices_are_found_from_steps_of_different_kinds() -> None:
    """What a stream adds and what a draft adds; if drafts per stream do not vary, all is the stream's."""
    assert fit([(1, 8, 0.9), (2, 4, 0.8), (1, 1, 0.2)]) == pytest.approx((0.1, 0.1), abs=0.12)
    assert fit([(m, d, 0.25 * m + 0.1 * d) for m, d in ((1, 8), (2, 4), (3, 3))]) == pytest.approx((0.25, 0.1))
    assert fit([(1, 8, 0.4), (2, 16, 0.8)]) == pytest.approx((0.4, 0.0))
    assert fit([(1, 8, -0.4), (1, 2, -0.1)]) == (0.0, 0.0)
    assert fit([(1, 2, 0.2), (1, 8, 0.9)]) == pytest.approx((0.0, 7.6 / 68))


def test_what_drafting_costs_at_all_is_learnt_soon() -> None:
    """A request that guesses badly stops after a few tries when trying costs a third of a step."""
    machine = Machine(1, 0.01, 0.0, fixed=0.35)
    machine.drafts(KNOWN)
    assert machine.drafts(EVERY - KNOWN) <= 8 * 6
