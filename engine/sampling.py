"""From logits to tokens. Randomness is a function of (seed, position) only, never of worker, batch or time.

The uniform number for a position picks from the cumulative distribution in the order of token ids. Any order would
do for the distribution; this one makes the choice robust: a rounding difference in the logits moves the borders by as
little, while an order by probability would swap neighbours of nearly equal probability.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence as Seq

import torch

from engine.sequence import Sampling


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) for the token at `position`: 53 bits of blake2b(seed, position)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8, person=b"tandem.sample")
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, sampling: Seq[Sampling], positions: Seq[int]) -> list[int]:
    """Choose a token for each row. `logits` is [rows, vocab] float32; `positions` are those of the new tokens."""
    chosen = logits.argmax(dim=-1)  # [rows]
    tokens: list[int] = chosen.tolist()
    for row, (how, position) in enumerate(zip(sampling, positions, strict=True)):
        if how.temperature > 0:
            tokens[row] = _draw(logits[row], how, uniform(how.seed, position))
    return tokens


def probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """The distribution that a token is drawn from: [vocab] float64. Order of filters: top-k, top-p, min-p."""
    scaled = logits.double() / how.temperature  # [vocab]
    if 0 < how.top_k < scaled.numel():
        kth = scaled.topk(how.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    probs = scaled.softmax(dim=-1)
    if how.top_p < 1.0:
        ordered, order = probs.sort(descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # mass in front of each token
        probs = probs.clone()
        probs[order[before >= how.top_p]] = 0.0  # the first token always stays
    if how.min_p > 0.0:
        probs = probs.masked_fill(probs < how.min_p * probs.max(), 0.0)
    return probs / probs.sum()


def _draw(logits: torch.Tensor, how: Sampling, u: float) -> int:
    cumulative = probabilities(logits, how).cumsum(dim=-1)  # [vocab]
    # `right`, and a target strictly below the total: a token of probability zero can not be chosen, whatever u is.
    total = float(cumulative[-1])
    target = min(u * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(cumulative, torch.tensor(target, dtype=cumulative.dtype), right=True))
