"""Promises of sampling: a function of (request, position) alone, and of the right distribution."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import RepetitionPenaltyLogitsProcessor

from engine import kernels
from engine.core.sequence import Sequence
from engine.decoding import logprobs, sampler
from engine.decoding.logprobs import in_order
from engine.decoding.sampler import adjust, choose, sample, uniform, weights
from tandem.errors import InternalError, InvalidRequest
from tandem.sampling import LEAST_LOGPROB, GrammarSpec, Sampling
from tests.engine.stand_ins import Asked


def probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """[rows, vocab] from [rows, vocab], each row sampled in the same way."""
    result = weights(logits, [how] * len(logits))
    return result / result.sum(dim=-1, keepdim=True)


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every promise is kept by the operator and by plain PyTorch."""
    if request.param == "plain":
        monkeypatch.setattr(kernels, "serving", lambda device: kernels.REFERENCE)
    elif kernels.serving(torch.device("cpu")) == kernels.REFERENCE:
        pytest.skip("not built: python -m engine.kernels.build")
    return str(request.param)


def test_the_same_seed_and_position_give_the_same_token_whatever_else_is_in_the_batch() -> None:
    """Neither the row's index nor the other rows matter."""
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    how = Sampling(temperature=0.9, top_p=0.95, seed=7)
    alone = sample(logits[2:3], [how], [33])
    others = [Sampling(), Sampling(temperature=2.0, seed=1), how, Sampling(), Sampling(temperature=0.1)]
    assert sample(logits, others, [1, 2, 33, 4, 5])[2] == alone[0]


def test_rounding_noise_does_not_change_the_choice() -> None:
    """Logits that differ as two batch shapes make them differ choose the same tokens."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(400, 300, generator=generator)
    noisy = logits + 1e-6 * torch.randn(400, 300, generator=generator)
    how = [Sampling(temperature=1.0, seed=seed) for seed in range(400)]
    assert sample(logits, how, [9] * 400) == sample(noisy, how, [9] * 400)


def test_drawn_tokens_follow_the_distribution() -> None:
    """Chi-squared over 20,000 draws of different positions stays below its 0.1 % bound."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -2.0]])
    how = Sampling(temperature=1.0, seed=3)
    draws, rows = 20_000, 1000
    counts = [0] * 6
    for first in range(0, draws, rows):
        for token in sample(logits.repeat(rows, 1), [how] * rows, list(range(first, first + rows))):
            counts[token] += 1
    expected = (probabilities(logits, how)[0] * draws).tolist()
    chi2 = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert chi2 < 20.5  # 5 degrees of freedom


def test_uniform_numbers_are_uniform_and_independent_of_order() -> None:
    """Mean and variance of 20,000 values, and the same value in any order of calls."""
    values = [uniform(11, position) for position in range(20_000)]
    assert math.isclose(sum(values) / len(values), 0.5, abs_tol=0.01)
    assert math.isclose(sum((v - 0.5) ** 2 for v in values) / len(values), 1 / 12, abs_tol=0.005)
    assert uniform(11, 5) == values[5]
    assert all(0 <= value < 1 for value in values)


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (Sampling(temperature=1.0, top_k=2), 2),
        (Sampling(temperature=1.0, top_p=0.5), 1),
        (Sampling(temperature=1.0, top_p=0.8), 3),
        (Sampling(temperature=1.0, min_p=0.4), 2),
        (Sampling(temperature=1.0), 4),
    ],
)
def test_filters_keep_what_they_should(how: Sampling, kept: int) -> None:
    """top-k counts, top-p is the smallest set of that mass, min-p is relative to the most likely token."""
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    result = probabilities(probs.log()[None], how)[0]
    assert int((result > 0).sum()) == kept
    assert math.isclose(float(result.sum()), 1.0)


def test_a_token_that_was_filtered_out_is_never_drawn() -> None:
    """Not even for a random number at either end."""
    logits = torch.full((100,), -1e4)
    logits[40] = 5.0
    for seed in range(200):
        assert sample(logits[None], [Sampling(temperature=1.0, top_k=1, seed=seed)], [0]) == [40]


@pytest.mark.parametrize("vocab", [50, 5000])
def test_filters_agree_with_their_definition(vocab: int) -> None:
    """Rows with any mix of filters, in one pass, have the distribution that a plain loop in float64 gives."""
    generator = random.Random(vocab)
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    how = [
        Sampling(
            temperature=generator.choice([0.3, 1.0, 5.0]),
            top_k=generator.choice([0, 1, 7, 2000, 10**9]),
            top_p=generator.choice([1.0, 0.999, 0.9, 0.5, 1e-9]),
            min_p=generator.choice([0.0, 0.01, 0.3, 1.0]),
        )
        for _ in range(40)
    ]
    together = weights(logits, how)
    result = together / together.sum(dim=-1, keepdim=True)
    for row, one in enumerate(how):
        expected = torch.tensor(_expected(logits[row].tolist(), one), dtype=torch.float64)
        torch.testing.assert_close(result[row].double(), expected, rtol=1e-9, atol=1e-15, msg=str(one))
        assert torch.equal(weights(logits[row : row + 1], [one])[0], together[row])


def _expected(logits: list[float], how: Sampling) -> list[float]:
    largest = max(logits)
    mass = [math.exp((logit - largest) / how.temperature) for logit in logits]
    order = sorted(range(len(mass)), key=lambda token: -mass[token])
    if 0 < how.top_k < len(order):
        order = order[: how.top_k]
    total, before, kept = sum(mass[token] for token in order), 0.0, []
    for token in order:
        if before < how.top_p * total or how.top_p == 1.0:
            kept.append(token)
        before += mass[token]
    kept = [token for token in kept if mass[token] >= how.min_p * mass[order[0]]]
    total = sum(mass[token] for token in kept)
    return [mass[token] / total if token in kept else 0.0 for token in range(len(mass))]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("how", [Sampling(logprobs=2), Sampling(temperature=1.0), Sampling(temperature=0.5, top_p=0.9)])
def test_no_token_is_chosen_where_a_logit_is_no_number(bad: float, how: Sampling) -> None:
    """The request fails, and its neighbours do not."""
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    alone = [choose(logits[row : row + 1].clone(), [sequence([1, 2], [], how)])[0] for row in range(3)]
    logits[1, 300] = bad
    choices = choose(logits, [sequence([1, 2], [], how) for _ in range(3)])
    assert [choices[0], choices[2]] == [alone[0], alone[2]]
    assert choices[1].token is None
    assert isinstance(choices[1].error, InternalError)
    assert choices[1].error.reason == "LOGITS_NOT_FINITE"


NAN, INF = math.nan, math.inf
HIDDEN: list[tuple[str, dict[int, float], float, Sampling]] = [  # (name, logits of tokens, those of all others, how)
    ("an infinity that a penalty clamps", {5: INF}, 0.0, Sampling(repetition_penalty=1.1)),
    ("likewise of a generated token", {6: INF}, 0.0, Sampling(presence_penalty=0.5, temperature=1.0, seed=1)),
    ("a bad word", {7: NAN}, 0.0, Sampling(bad_words=((7,),))),
    ("an infinite bad word", {7: INF}, 0.0, Sampling(bad_words=((7,),), temperature=1.0)),
    ("a token that is not allowed", {7: NAN}, 0.0, Sampling(allowed_token_ids=(1, 2))),
    ("a stop token before min_tokens", {0: NAN}, 0.0, Sampling(min_tokens=3)),
    ("nothing is a number", {}, NAN, Sampling(allowed_token_ids=(1, 2), logprobs=2)),
    ("nothing is possible, and tokens are allowed", {}, -INF, Sampling(allowed_token_ids=(1, 2))),
    ("nothing is possible, and a word is bad", {}, -INF, Sampling(bad_words=((9,),))),
    ("nothing is possible, and a penalty clamps it", {}, -INF, Sampling(repetition_penalty=1.1)),
]


def hidden(places: dict[int, float], others: float, how: Sampling) -> list[Any]:
    """The choices for a row with these logits between two good ones."""
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    logits[1] = logits[1] + others
    for token, value in places.items():
        logits[1, token] = value
    return choose(logits, [sequence([5, 8], [6], how, (0,)) for _ in range(3)])


@pytest.mark.parametrize(("places", "others", "how"), [case[1:] for case in HIDDEN], ids=[case[0] for case in HIDDEN])
def test_what_changes_logits_does_not_hide_that_they_are_no_numbers(
    places: dict[int, float], others: float, how: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token comes of them, and the client's limits are not to blame. The control: the test of what is drawn from
    does not see it."""
    first, ill, last = hidden(places, others, how)
    assert ill.token is None
    assert ill.error.reason == "LOGITS_NOT_FINITE"
    well = hidden({}, 0.0, how)
    assert [first, last] == [well[0], well[2]]
    monkeypatch.setattr(sampler, "_finite", lambda *_: None)
    unseen = hidden(places, others, how)[1].error
    assert unseen is None or unseen.reason == "NO_TOKEN_ALLOWED" or others != 0.0


def test_nothing_is_left_of_a_row_that_is_masked_whole() -> None:
    """No token is chosen."""
    assert sample(torch.full((1, 9), -torch.inf), [Sampling(temperature=1.0)], [3]) == [-1]


def test_a_tiny_temperature_is_greedy() -> None:
    """However small it is; nothing overflows."""
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(5))
    for temperature in (1e-6, 1e-300, 5e-324):
        assert sample(logits, [Sampling(temperature=temperature)] * 20, [3] * 20) == logits.argmax(-1).tolist()


# ---- bias, penalties and min_tokens


def sequence(prompt: list[int], generated: list[int], how: Sampling, stop_ids: Any = ()) -> Sequence:
    """A sequence that arrives with its generated tokens, as after a resume."""
    return Sequence("s", prompt + generated, len(prompt), 10_000, frozenset(stop_ids), how)


def _adjusted(logits: list[float], prompt: list[int], generated: list[int], how: Sampling, stop: Any) -> list[float]:
    """The definitions, one token after the other, in float64."""
    result = list(logits)
    for token, bias in how.logit_bias:
        result[token] += bias
    for token in set(prompt + generated):
        result[token] *= how.repetition_penalty if result[token] <= 0 else 1 / how.repetition_penalty
    for token, count in Counter(generated).items():
        result[token] -= how.frequency_penalty * count + how.presence_penalty
    if len(generated) < how.min_tokens:
        for token in stop:
            result[token] = -math.inf
    if how.allowed_token_ids:
        result = [logit if token in how.allowed_token_ids else -math.inf for token, logit in enumerate(result)]
    for *before, last in how.bad_words:
        if generated[len(generated) - len(before) :] == before:
            result[last] = -math.inf
    return result


MIXED = [
    Sampling(),
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.5, temperature=0.7),
    Sampling(frequency_penalty=0.7, presence_penalty=-1.5),
    Sampling(logit_bias=((3, 40.0), (9, -100.0))),
    Sampling(min_tokens=6),
    Sampling(min_tokens=5),
    Sampling(repetition_penalty=1.2, frequency_penalty=-2.0, logit_bias=((0, 1.0), (7, -3.5)), min_tokens=99),
    Sampling(allowed_token_ids=(2, 3, 5, 7, 11, 13), min_tokens=6),
    Sampling(bad_words=((4,), (6, 8), (1, 2, 3, 4, 5, 6, 7)), repetition_penalty=1.1),
    Sampling(allowed_token_ids=tuple(range(3, 20)), bad_words=((5,), (5, 6)), logit_bias=((5, 100.0), (29, 100.0))),
]


def test_adjusted_logits_agree_with_the_definitions() -> None:
    """Rows with different options in one batch, each as if it were alone; plain rows stay bit for bit."""
    generator = random.Random(0)
    raw = torch.randn(len(MIXED), 60, generator=torch.Generator().manual_seed(2)) * 3
    prompts = [[generator.randrange(60) for _ in range(30)] for _ in MIXED]
    outputs = [[generator.randrange(20) for _ in range(5)] for _ in MIXED]
    stop = {7, 11, 10**6}  # an end-of-sequence id outside of the vocabulary is ignored
    rows = [sequence(p, o, how, stop) for p, o, how in zip(prompts, outputs, MIXED, strict=True)]
    batch = raw.clone()
    adjust(batch, rows)
    for row, how in enumerate(MIXED):
        expected = _adjusted(raw[row].tolist(), prompts[row], outputs[row], how, stop - {10**6})
        assert batch[row].tolist() == pytest.approx(expected, rel=1e-6), how
        alone = raw[row : row + 1].clone()
        adjust(alone, rows[row : row + 1])
        assert torch.equal(alone[0], batch[row])
    assert torch.equal(batch[0], raw[0])
    assert torch.equal(batch[6], raw[6]), "five tokens are there"


def test_the_repetition_penalty_is_the_one_of_transformers() -> None:
    """Also with extreme values, which must stay finite."""
    raw = torch.randn(1, 80, generator=torch.Generator().manual_seed(4))
    tokens = [1, 2, 3, 1, 50, 50]
    for penalty in (0.1, 0.9, 1.5, 10.0):
        batch = raw.clone()
        adjust(batch, [sequence(tokens[:4], tokens[4:], Sampling(repetition_penalty=penalty))])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), raw.clone())
        assert torch.allclose(batch, expected)
    batch = raw.clone()
    adjust(batch, [sequence(tokens, [], Sampling(repetition_penalty=5e-324, temperature=1.0))])
    assert bool(batch.isfinite().all())


@pytest.mark.parametrize("how", MIXED)
def test_a_resumed_sequence_chooses_what_the_undisturbed_one_chose(how: Sampling) -> None:
    """A sequence rebuilt from its tokens at any point goes on like the one that grew token by token."""
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(6)) * 2
    how = replace(how, temperature=how.temperature or 0.9, seed=3, logit_bias=how.logit_bias[:1])
    prompt, stop = [4, 5, 6, 4], {2, 3}
    grown = sequence(prompt, [], how, stop)
    for step in range(40):
        resumed = sequence(prompt, grown.tokens[len(prompt) :], how, stop)
        neighbour = sequence([1], [], Sampling(temperature=2.0, logit_bias=((1, 5.0),), presence_penalty=1.0))
        batch = torch.stack([logits[step], logits[39 - step]])
        (chosen,) = choose(logits[step : step + 1].clone(), [grown])
        assert choose(batch, [resumed, neighbour])[0] == chosen
        grown.append(chosen.token)


def test_min_tokens_keeps_stop_tokens_away_and_then_lets_them_come() -> None:
    """Greedy and sampled, where the stop token is by far the most likely one."""
    logits = torch.zeros(1, 10)
    logits[0, 4] = 50.0
    for temperature in (0.0, 1.0):
        one = sequence([1], [], Sampling(temperature=temperature, min_tokens=3), {4, 5})
        for _ in range(4):
            one.append(choose(logits.clone(), [one])[0].token)
        assert not {4, 5} & set(one.tokens[1:4])
        assert one.tokens[4] == 4


def test_only_allowed_tokens_are_chosen_and_no_bad_word_is_completed() -> None:
    """However likely the others are, with any temperature. A word whose beginning is in the prompt is not completed by
    the first token."""
    logits = torch.zeros(1, 12)
    logits[0, 9], logits[0, 4], logits[0, 5] = 90.0, 60.0, 50.0
    how = {"allowed_token_ids": (1, 4, 5), "bad_words": ((4, 5), (4, 4), (5, 4, 1))}
    for temperature in (0.0, 1.0):
        one = sequence([4], [], Sampling(temperature=temperature, **how))
        for _ in range(9):
            one.append(choose(logits.clone(), [one])[0].token)
        assert one.tokens[1] == 4, "the prompt's 4 does not count"
        assert one.tokens[1:] == [4, 1, 4, 1, 4, 1, 4, 1, 4]
    free = sequence([4], [], Sampling())
    assert choose(logits.clone(), [free])[0].token == 9, "the control"


@pytest.mark.parametrize("alone", [False, True])
def test_limits_that_leave_no_token_fail_their_request_only(alone: bool) -> None:
    """With a status that says so, not as a fault of the weights."""
    logits = torch.zeros(2, 12)
    stuck = sequence([1], [], Sampling(allowed_token_ids=(3, 4), bad_words=((3,),), min_tokens=1), {4})
    rows = [stuck] if alone else [stuck, sequence([1], [], Sampling(allowed_token_ids=(7,)))]
    first, *others = choose(logits[: len(rows)].clone(), rows)
    assert first.token is None
    assert isinstance(first.error, InvalidRequest)
    assert (first.error.reason, first.error.field) == ("NO_TOKEN_ALLOWED", "sampling.allowed_token_ids")
    assert [one.token for one in others] == [7] * (not alone)


def test_why_no_token_is_left_is_told_apart() -> None:
    """The client's limits alone, whatever the grammar says; the grammar beside them; a grammar that failed. Rows with
    tokens left are not touched."""
    limits, grammar = {"allowed_token_ids": (3, 4)}, GrammarSpec("regex", "a")
    asked: list[dict[str, Any]] = [limits | {"bad_words": ((3,), (4,))}, limits, {}, {}]
    rows = [Sequence("s", [1], 1, 100, sampling=Sampling(grammar=grammar, **one), grammar=grammar) for one in asked]
    bits = torch.tensor([[-1], [7], [0], [8]], dtype=torch.int32)  # all tokens; 0 to 2; none; 3
    failed = InvalidRequest("too slow", reason="GRAMMAR_TOO_COMPLEX", field="", bound="")
    filling: Any = SimpleNamespace(bits=bits, rows=[0, 1, 2, 3], failed={0: failed, 2: failed}, wait=lambda: None)
    choices = choose(torch.zeros(4, 12), rows, filling)
    reasons = [each.error and each.error.reason for each in choices]
    assert reasons == ["NO_TOKEN_ALLOWED", "GRAMMAR_DEAD_END", "GRAMMAR_TOO_COMPLEX", None]
    assert choices[3].token == 3


@pytest.mark.parametrize("beside", [0, 1, 7, 20])
def test_equally_likely_tokens_come_in_the_order_of_their_ids(beside: int) -> None:
    """Also where only some of them are asked for, and whatever the other requests of a step ask for: the first one is
    the token that greedy sampling chooses."""
    generator = torch.Generator().manual_seed(2)
    raw = (torch.randn(2, 5000, generator=generator) * 4).round() / 4
    for top in range(8):
        tops = [Sampling(logprobs=top), Sampling(logprobs=beside)]
        choice, _ = choose(raw.clone(), [sequence([1], [], how) for how in tops])
        assert choice.logprob is not None
        expected = raw[0].argsort(descending=True, stable=True)[:top].tolist()
        assert choice.logprob.top_ids == expected
        assert expected[:1] in ([], [choice.token])
        assert choice.logprob.top == (raw[0][expected] - raw[0].logsumexp(-1)).tolist()
    assert len(raw[0].topk(7).values.unique()) < 6, "without equal ones this shows nothing"


def test_a_device_finds_equally_likely_tokens_in_the_order_of_their_ids() -> None:
    """As a stable sort on the host, for negative numbers, zeros of both signs and infinities, too; in parts of a few
    rows. Control: topk takes any of them."""
    raw = (torch.randn(5, 3000, generator=torch.Generator().manual_seed(2)) * 4).round() / 4
    raw[0, ::2], raw[0, 1::2] = 0.0, -0.0
    raw[1, 50:] = -math.inf
    raw[2, 7] = math.inf
    ids = torch.cat([in_order(part, 60) for part in raw.split(2)])
    expected = raw.argsort(descending=True, stable=True)[:, :60]
    assert torch.equal(ids, expected)
    assert not torch.equal(raw.topk(60).indices, expected)


def test_logprobs_are_the_models_own() -> None:
    """log_softmax of the raw logits, whatever bias, penalty or temperature chose the token, and only on request."""
    raw = torch.randn(5, 50, generator=torch.Generator().manual_seed(8)) * 3
    how = [
        Sampling(),
        Sampling(logprobs=0),
        Sampling(logprobs=5, temperature=1.0, logit_bias=((9, 100.0),)),
        Sampling(logprobs=20, repetition_penalty=2.0),
        Sampling(logprobs=3, allowed_token_ids=(2, 3)),
    ]
    choices = choose(raw.clone(), [sequence(list(range(50)), [1], one) for one in how])
    expected = raw.double().log_softmax(-1)
    assert choices[0].logprob is None
    assert choices[2].token == 9
    for row, choice in list(enumerate(choices))[1:]:
        assert choice.logprob is not None
        count = how[row].logprobs or 0
        best = expected[row].topk(count)
        assert choice.logprob.chosen == pytest.approx(float(expected[row, choice.token]), abs=1e-5)
        assert choice.logprob.top_ids == best.indices.tolist()
        assert choice.logprob.top == pytest.approx(best.values.tolist(), abs=1e-5)
    (few,) = choose(raw[:1, :3].clone(), [sequence([1], [], Sampling(logprobs=20))])
    assert few.logprob is not None
    assert len(few.logprob.top) == 3


def test_an_impossible_token_has_a_log_probability() -> None:
    """JSON has no infinity. What is no number stays none, for the request must end."""
    [one] = logprobs.logprobs(torch.tensor([[1.0, -math.inf]]), [1], [2])
    assert (one.chosen, one.top_ids, one.top) == (LEAST_LOGPROB, [0, 1], [0.0, LEAST_LOGPROB])
    for bad in (math.nan, math.inf):
        [one] = logprobs.logprobs(torch.tensor([[1.0, bad]]), [0], [1])
        assert math.isnan(one.chosen)


def unwatched_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler's own inputs come without a wait; on a device they are copied behind other work."""

    def unwatched(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with _disable_current_modes():
            return torch.tensor(values, dtype=dtype, device=device)

    monkeypatch.setattr(sampler, "on_device", unwatched)


def test_a_draw_waits_for_the_device_once_and_once_more_for_top_p(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain PyTorch, as on a GPU: no value is read from the device before the tokens; top-p reads whether the
    likely tokens suffice."""

    if path == "compiled":
        pytest.skip("the operator waits for no device")

    unwatched_inputs(monkeypatch)
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(9))
    how = [Sampling(), *(Sampling(temperature=1.0, seed=seed, top_k=seed, min_p=0.01) for seed in range(5))]
    for last, waits in ((how[-1], []), (replace(how[-1], top_p=0.9), ["aten._local_scalar_dense.default"])):
        with Asked() as asked:
            sample(logits.clone(), [*how[:-1], last], [5] * 6)
        assert asked.names == waits


def test_whether_logits_are_numbers_is_read_with_the_tokens(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of rows with penalties waits for the device no more often than one without."""
    if path == "compiled":
        pytest.skip("the operator waits for no device")

    unwatched_inputs(monkeypatch)
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(9))
    with Asked() as asked:
        choose(logits, [sequence([5], [6], Sampling(repetition_penalty=1.2))] * 2)
    assert asked.names == []
