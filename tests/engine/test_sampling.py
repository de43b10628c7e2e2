"""Promises of sampling: a function of (request, position) alone, and of the right distribution."""

from __future__ import annotations

import math

import pytest
import torch

from engine.sampling import probabilities, sample, uniform
from engine.sequence import Sampling


def test_the_same_seed_and_position_give_the_same_token_whatever_else_is_in_the_batch() -> None:
    """Neither the row nor the neighbours matter."""
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
    draws = 20_000
    counts = [0] * 6
    for position in range(draws):
        counts[sample(logits, [how], [position])[0]] += 1
    expected = (probabilities(logits[0], how) * draws).tolist()
    chi2 = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert chi2 < 20.5  # 5 degrees of freedom


def test_uniform_numbers_are_uniform_and_independent_of_order() -> None:
    """Mean and variance of a million-free sample, and the same value whenever it is asked."""
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
    result = probabilities(probs.log(), how)
    assert int((result > 0).sum()) == kept
    assert math.isclose(float(result.sum()), 1.0)


def test_a_token_that_was_filtered_out_is_never_drawn() -> None:
    """Not even for a random number at either end."""
    logits = torch.full((100,), -1e4)
    logits[40] = 5.0
    for seed in range(200):
        assert sample(logits[None], [Sampling(temperature=1.0, top_k=1, seed=seed)], [0]) == [40]
