"""From logits to tokens. The next token is a function of the request and its tokens so far, never of worker, batch or
time: a worker that has the tokens continues exactly where another one stopped.

    logits ─┬─▶ logprobs      the model's own, before everything below
            └─▶ adjust ─▶ grammar ─▶ sample
                  │         │         └── greedy: argmax
                  │         │             else / temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ draw(seed, position)
                  │         └── only tokens that the grammar allows; a stop token only where the text is complete
                  └── + logit_bias ─▶ repetition ─▶ frequency and presence ─▶ no stop token before min_tokens
                      ─▶ only allowed_token_ids ─▶ no token that completes a bad word

Rules that exclude tokens are applied last, so no bias can make such tokens possible again. If no token is possible (a
grammar that is complete before min_tokens, one that needs a character which no token has, bad words that have all the
allowed tokens), the request fails.

The uniform number for a position picks from the cumulative distribution in the order of token ids. The distribution
does not depend on the order, but this one makes the choice robust: a rounding difference in the logits moves the
borders only slightly, while an order by probability would swap neighbours of nearly equal probability.

Rows that need the same work share a pass over one tensor; rows do not affect each other.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import struct
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from engine import kernels
from engine.attention.forward_context import on_device
from engine.core.sequence import Logprob, Sequence
from engine.decoding import structured_output
from engine.decoding.logprobs import logprobs, named, scores
from engine.decoding.no_token import dead_end, not_finite, nothing_allowed
from engine.gpu import sampling as gpu_sampling
from tandem.errors import InternalError, TandemError
from tandem.sampling import Sampling

# Elements of a float64 tensor while drawing, however large batch and vocabulary are: what a CPU's cache holds (more was
# three times slower), and what keeps a GPU busy without taking memory from the pages.
PASS_ELEMENTS = {"cpu": 2**17, "cuda": 2**22}
LIKELY = 1024  # likeliest tokens that top-p examines before it sorts the whole vocabulary
# In place of a token: the model's logits are not finite; the client's limits leave none, whatever the grammar says.
# `draw` says -1 where no token is left, too.
NOT_FINITE, STUCK = -2, -3


class Choice(NamedTuple):
    token: int | None  # None: no token is possible, see `error`
    logprob: Logprob | None  # if the sequence asks for it
    error: TandemError | None = None


@torch.inference_mode()
def choose(
    logits: torch.Tensor,
    sequences: Seq[Sequence],
    filling: structured_output.Filling | None = None,
    *,
    compiled: bool = True,
) -> list[Choice]:
    """The next token of each sequence. `logits` is [sequences, vocab] float32; it is overwritten. `filling`: the masks
    of sequences with a grammar. `compiled`: by the operator, if there is one."""
    asked = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
    tops = [sequences[row].sampling.logprobs or 0 for row in asked]
    raw = at = logits
    if asked:
        at = on_device(asked, torch.int64, logits.device)
        raw = logits[at]  # [asked, vocab], a copy
    finite = _finite(logits, sequences)
    adjust(logits, sequences)
    stuck = _stuck(logits, sequences) if filling else None
    if filling:
        filling.wait()
        structured_output.apply(logits, filling)
    how, positions = [s.sampling for s in sequences], [len(s.tokens) for s in sequences]
    chosen = draw(logits, how, positions, compiled=compiled)
    if stuck is not None:
        chosen = chosen.masked_fill(stuck, STUCK)
    if finite is not None:
        chosen = chosen.where(finite, NOT_FINITE)
    if not asked:
        tokens: list[int] = chosen.tolist()  # waits for the device
        return _choices(tokens, {}, sequences, filling)
    numbers = scores(raw, chosen[at].clamp(min=0), tops)  # [asked, width]
    told = torch.cat([chosen.double(), numbers.flatten()]).tolist()  # waits for the device
    tokens, width = [int(token) for token in told[: len(sequences)]], numbers.shape[1]
    rows = [told[at : at + width] for at in range(len(sequences), len(told), width)]
    return _choices(tokens, dict(zip(asked, named(raw, rows, tops), strict=True)), sequences, filling)


def _choices(
    tokens: list[int], known: dict[int, Logprob], sequences: Seq[Sequence], filling: structured_output.Filling | None
) -> list[Choice]:
    """What the host makes of the numbers that it has waited for; a token below 0 is none."""
    masked, failed = (filling.rows, filling.failed) if filling else ([], {})
    choices: list[Choice] = []
    for row, (token, sequence) in enumerate(zip(tokens, sequences, strict=True)):
        error = failed.get(row)
        if token in (NOT_FINITE, STUCK):
            error = not_finite(sequence) if token == NOT_FINITE else nothing_allowed(sequence)
        elif token < 0 and error is None:
            limited = nothing_allowed if sequence.sampling.restricts else not_finite
            error = (dead_end if row in masked else limited)(sequence)
        choices.append(Choice(None, None, error) if error is not None else Choice(token, known.get(row)))
    return choices


def _finite(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor | None:
    """Whether the largest logit of each row is finite, bool [rows]; None where `draw` sees the same logits. What
    changes them first may hide what is not finite: a penalty clamps an infinity, an excluded token may be the only NaN.
    """
    if not any(sequence.sampling.adjusts or sequence.sampling.grammar is not None for sequence in sequences):
        return None
    return logits.amax(dim=-1).isfinite()


def _stuck(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor | None:
    """Where the client's limits leave no token before a grammar is applied, bool [rows]; None without such rows."""
    both = [row for row, each in enumerate(sequences) if each.sampling.restricts and each.grammar is not None]
    if not both:
        return None
    at = on_device(both, torch.int64, logits.device)
    stuck = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    stuck[at] = logits[at].amax(dim=-1) == -torch.inf
    return stuck


def adjust(logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
    """Bias, penalties, min_tokens and excluded tokens, in place. Every entry is computed separately, so that neighbours
    do not matter."""
    adjusted = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.sampling.adjusts]
    if not adjusted:
        return
    bias = [(row, *pair) for row, s in adjusted for pair in s.sampling.logit_bias]
    if bias:
        rows, ids, amounts = zip(*bias, strict=True)
        at = _places(logits, rows, ids)
        logits[at] += on_device(amounts, logits.dtype, logits.device)
    penalised = [(row, sequence) for row, sequence in adjusted if sequence.sampling.penalises]
    if penalised:
        _penalise(logits, penalised)
    vocab = logits.shape[-1]
    early = [(row, s.stop_ids) for row, s in adjusted if s.generated < s.sampling.min_tokens]
    stops = [(row, token) for row, stop_ids in early for token in stop_ids if token < vocab]
    if stops:
        logits[_places(logits, *zip(*stops, strict=True))] = -torch.inf
    if restricted := [(row, sequence) for row, sequence in adjusted if sequence.sampling.restricts]:
        _restrict(logits, restricted)


def _restrict(logits: torch.Tensor, restricted: Seq[tuple[int, Sequence]]) -> None:
    allowed = [(row, s.sampling.allowed_token_ids) for row, s in restricted if s.sampling.allowed_token_ids]
    if allowed:
        at = _places(logits, *zip(*((row, token) for row, ids in allowed for token in ids), strict=True))
        kept = logits[at]
        logits[on_device([row for row, _ in allowed], torch.int64, logits.device)] = -torch.inf
        logits[at] = kept
    bad = [(row, token) for row, sequence in restricted for token in _completing(sequence)]
    if bad:
        logits[_places(logits, *zip(*bad, strict=True))] = -torch.inf


def _completing(sequence: Sequence) -> list[int]:
    """The tokens that would complete a bad word. Only generated tokens count as its beginning."""
    tokens, generated = sequence.tokens, sequence.generated
    return [
        word[-1]
        for word in sequence.sampling.bad_words
        if len(word) == 1
        or (len(word) <= generated + 1 and tokens[-1] == word[-2] and tuple(tokens[1 - len(word) :]) == word[:-1])
    ]


def _penalise(logits: torch.Tensor, penalised: Seq[tuple[int, Sequence]]) -> None:
    tallies = [sequence.tally() for _, sequence in penalised]
    lengths = [len(tally.ids) for tally in tallies]

    def spread(values: Seq[float]) -> torch.Tensor:
        """A value of each row for each of its entries."""
        return on_device(np.repeat(np.array(values), lengths), torch.float64, logits.device)

    counts = np.concatenate([tally.counts for tally in tallies])
    generated = on_device(counts, torch.int64, logits.device)  # [entries] how often
    ids = np.concatenate([tally.ids for tally in tallies])
    at = _places(logits, np.repeat([row for row, _ in penalised], lengths), ids)
    how = [sequence.sampling for _, sequence in penalised]
    repetition = spread([sampling.repetition_penalty for sampling in how])
    values = logits[at].double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([sampling.frequency_penalty for sampling in how]) * generated
    values -= spread([sampling.presence_penalty for sampling in how]) * (generated > 0)
    largest = torch.finfo(logits.dtype).max  # a penalty near 0 must not make an infinity
    logits[at] = values.clamp(-largest, largest).to(logits.dtype)


def _places(
    logits: torch.Tensor, rows: Seq[int] | np.ndarray, ids: Seq[int] | np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    return on_device(rows, torch.int64, logits.device), on_device(ids, torch.int64, logits.device)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) for the token at `position`: 53 bits of blake2b(seed, position)."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8, person=b"tandem.sample")
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, sampling: Seq[Sampling], positions: Seq[int], *, compiled: bool = True) -> list[int]:
    """As `draw`, on the host, after waiting for the device."""
    tokens: list[int] = draw(logits, sampling, positions, compiled=compiled).tolist()
    return tokens


def draw(logits: torch.Tensor, sampling: Seq[Sampling], positions: Seq[int], *, compiled: bool = True) -> torch.Tensor:
    """Chooses a token for each row, int64 [rows] on the device; -1 where the largest logit is not finite. `logits` is
    [rows, vocab] float32; `positions` are those of the new tokens.

    `compiled`: by the operator, where there is one. It differs from plain PyTorch in the order of its sums, whose last
    bits decide a token in some 10^13. So does the kernel for CUDA, which serves where its trial went well.
    """
    if compiled and logits.device.type == "cuda" and kernel_problem(logits.device) is None:
        return gpu_sampling.sample(logits, sampling, _numbers(sampling, positions))
    if not compiled or kernels.serving(logits.device) == kernels.REFERENCE:
        return _sample(logits, sampling, positions)
    chosen: torch.Tensor = torch.ops.tandem.sample.default(
        logits.contiguous(),
        [how.temperature for how in sampling],
        [how.top_k for how in sampling],
        [how.top_p for how in sampling],
        [how.min_p for how in sampling],
        _numbers(sampling, positions),
    )
    return chosen


@functools.cache
def kernel_problem(device: torch.device) -> str | None:
    """Why the sampling kernel does not serve on this device; None if it does. Tried once, at load."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton"
    return kernel_trial(device)


def kernel_trial(device: torch.device) -> str | None:
    """Compares the sampling kernel with plain PyTorch on this device; returns what is wrong, or None."""
    return gpu_sampling.problem(device, _sample, uniform)


def _sample(logits: torch.Tensor, sampling: Seq[Sampling], positions: Seq[int]) -> torch.Tensor:
    """In plain PyTorch. The device is waited for once in each pass that filters by top-p."""
    tokens = logits.argmax(dim=-1)  # [rows], of NaN where there is one
    known = logits.gather(1, tokens[:, None])[:, 0].isfinite()  # [rows]
    drawn = [row for row, how in enumerate(sampling) if how.temperature > 0]
    size = max(1, PASS_ELEMENTS[logits.device.type] // logits.shape[-1])
    for start in range(0, len(drawn), size):
        rows = drawn[start : start + size]
        how = [sampling[row] for row in rows]
        numbers = _numbers(how, [positions[row] for row in rows])
        at = on_device(rows, torch.int64, logits.device)
        some = logits[at].where(known[at][:, None], 0.0)  # the token drawn there is discarded
        tokens[at] = _draw(weights(some, how), numbers)
    return tokens.where(known, -1)


def _numbers(sampling: Seq[Sampling], positions: Seq[int]) -> list[float]:
    return [uniform(how.seed, at) if how.temperature > 0 else 0.0 for how, at in zip(sampling, positions, strict=True)]


def weights(logits: torch.Tensor, sampling: Seq[Sampling]) -> torch.Tensor:
    """Unnormalised probabilities of the tokens: [rows, vocab] float64, 1 for the most likely. Tokens of equal
    probability are kept or filtered out together."""

    def column(values: Seq[float]) -> torch.Tensor:
        return on_device(values, torch.float64, logits.device)[:, None]  # [rows, 1]

    # The largest is taken off first: however small a temperature is, nothing overflows.
    result = logits.double()  # [rows, vocab]
    result.sub_(logits.amax(dim=-1, keepdim=True)).div_(column([how.temperature for how in sampling])).exp_()
    vocab = logits.shape[-1]
    if rows := [row for row, how in enumerate(sampling) if 0 < how.top_k < vocab]:
        counts = [sampling[row].top_k for row in rows]
        best = rows_of(result, rows).topk(max(counts)).values
        last = on_device([count - 1 for count in counts], torch.int64, logits.device)[:, None]  # [rows, 1]
        _filter(result, rows, best.gather(1, last))
    if rows := [row for row, how in enumerate(sampling) if how.top_p < 1.0]:
        _filter(result, rows, _nucleus(rows_of(result, rows), column([sampling[row].top_p for row in rows])))
    if rows := [row for row, how in enumerate(sampling) if how.min_p > 0.0]:
        _filter(result, rows, column([sampling[row].min_p for row in rows]))
    return result


def _filter(result: torch.Tensor, rows: list[int], least: torch.Tensor) -> None:
    """Removes everything below `least` ([rows, 1])."""
    kept = rows_of(result, rows)
    kept.masked_fill_(kept < least, 0.0)
    if kept is not result:
        result[on_device(rows, torch.int64, result.device)] = kept


def rows_of(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows; a copy unless they are all. (Indices in a list would be copied to the device with a wait.)"""
    return logits if len(rows) == len(logits) else logits[on_device(rows, torch.int64, logits.device)]


def _nucleus(result: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest weight in the smallest set of that mass: [rows, 1]. The most likely token is always in it."""
    mass = top_p * result.sum(dim=-1, keepdim=True)  # [rows, 1]
    best = result.topk(min(LIKELY, result.shape[-1])).values  # [rows, likely], descending
    if bool((best.sum(dim=-1, keepdim=True) < mass).any()):
        best = result.sort(dim=-1, descending=True).values  # [rows, vocab]
    before = best.cumsum(dim=-1) - best  # mass in front of each token
    inside = (before < mass).sum(dim=-1, keepdim=True)  # [rows, 1], at least 1
    return best.gather(1, inside - 1)


def _draw(weighted: torch.Tensor, numbers: Seq[float]) -> torch.Tensor:
    """A token for each row, [rows]; `numbers` are in [0, 1)."""
    cumulative = weighted.cumsum(dim=-1)  # [rows, vocab]
    # `right`, and a target strictly below the total: a token of weight zero can not be chosen, whatever the number is.
    total = cumulative[:, -1:].contiguous()
    wanted = total * on_device(numbers, torch.float64, weighted.device)[:, None]
    target = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def score_prompt(sequence: Sequence, positions: range, logits: torch.Tensor) -> InternalError | None:
    """Log probabilities of the prompt tokens after these positions. `logits` is [positions, vocab]. Returns the error
    if some are not finite."""
    top = sequence.sampling.prompt_logprobs or 0
    follow = [sequence.tokens[position + 1] for position in positions]
    found = logprobs(logits, follow, [top] * len(follow))
    sequence.prompt_logprobs += found
    ill = (position for position, one in zip(positions, found, strict=True) if math.isnan(one.chosen))
    return next((not_finite(sequence, position + 1) for position in ill), None)
