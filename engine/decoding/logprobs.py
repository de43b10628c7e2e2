"""Log probabilities of tokens. They are computed on the logits' device, and the host waits for all of them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import pairwise

import numpy as np
import torch

from engine.attention.forward_context import on_device
from engine.core.sequence import Logprob
from tandem.sampling import LEAST_LOGPROB

PASS_ELEMENTS = 2**20  # of a GPU's logits, whose order is found at a time by some 30 bytes for each


def logprobs(logits: torch.Tensor, tokens: Seq[int], tops: Seq[int]) -> list[Logprob]:
    """For each row its token's log probability, and those of its `tops` most likely tokens; of equally likely ones the
    lowest first, as greedy sampling chooses. Logits in 16 bits are often equal. LEAST_LOGPROB for an impossible
    token; NaN where the largest is not finite. Waits once for the device."""
    numbers = scores(logits, on_device(tokens, torch.int64, logits.device), tops)
    return named(logits, numbers.tolist(), tops)


def scores(logits: torch.Tensor, tokens: torch.Tensor, tops: Seq[int]) -> torch.Tensor:
    """The numbers of `logprobs` on the device, float64 [rows, 2 + 2 * wide]: of the row's token, of the `wide` most
    likely ones, their ids, and the last of their logits."""
    norm = logits.logsumexp(dim=-1, keepdim=True)  # [rows, 1]
    chosen = logits.gather(1, tokens[:, None]) - norm  # [rows, 1]
    best, ids = likeliest(logits, min(max(tops) + 1, logits.shape[-1]))  # the widest top and one more
    numbers = (*(each.clamp(min=LEAST_LOGPROB) for each in (chosen, best - norm)), ids, best[:, -1:])  # NaN stays
    return torch.cat([each.double() for each in numbers], dim=1)


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of each row and their ids, [rows, count]. Of equal ones topk takes any: on CPU `named` sees
    to it, elsewhere that would be another wait."""
    if logits.device.type == "cpu":
        found = logits.topk(count)
        return found.values, found.indices
    size = max(1, PASS_ELEMENTS // logits.shape[-1])
    ids = torch.cat([in_order(part, count) for part in torch.split(logits, size)])
    return logits.gather(1, ids), ids


def in_order(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of the largest logits, of equal ones the lowest: [rows, count]. By keys of 64 bits, of which the upper
    half has the order of the logits and the lower one that of the ids, backwards."""
    whole = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = torch.where(whole < 0, whole ^ 0x7FFFFFFF, whole).long()
    last = 2**32 - 1
    backwards = last - torch.arange(logits.shape[-1], device=logits.device)
    return last - (((order << 32) + backwards).topk(count).values & last)


def named(logits: torch.Tensor, rows: list[list[float]], tops: Seq[int]) -> list[Logprob]:
    """`logprobs` of the numbers of `scores`, on the host."""
    wide, on_cpu = len(rows[0]) // 2 - 1, logits.device.type == "cpu"
    found: list[Logprob] = []
    for at, (row, top) in enumerate(zip(rows, tops, strict=True)):
        values, ids = row[1 : 1 + wide], [int(token) for token in row[1 + wide : -1]]
        if on_cpu and any(one == other for one, other in pairwise(values[: top + 1])):
            ids = from_least(logits[at], row[-1])
        own = row[0] if not math.isnan(row[1]) else math.nan  # beside an infinity: LEAST_LOGPROB looks finite
        found.append(Logprob(own, ids[:top], values[:top]))
    return found


def from_least(logits: torch.Tensor, least: float) -> list[int]:
    """The tokens with a logit of `least` or more, the largest first; of equal ones the lowest, where `topk` takes any.
    In numpy: a few operators of torch over one row cost more than the row."""
    row = logits.numpy()
    tokens = np.flatnonzero(row >= least)
    ordered: list[int] = tokens[np.argsort(-row[tokens], kind="stable")].tolist()
    return ordered
