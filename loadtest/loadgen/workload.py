"""The requests of a load: the time of each, the lengths of its prompt and answer, and the prompt's tokens.

Pure: no clock, no files, no servers (loadtest/loadgen/traces.py reads files).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tandem.errors import SettingsError

BLOCK = 512
"""Tokens of a block in a trace with block ids, before its lengths are divided."""
FIRST_ID = 32
"""Prompts have token ids from here on, so that they miss the special tokens that most vocabularies begin with."""
LAST_GAP_S = 3.0
"""What is spread over the time until the next request, and has no next one, is spread over so many seconds."""


@dataclass(frozen=True, slots=True)
class Request:
    """`at` is in seconds since the load began, lengths are tokens. Equal ids in `blocks` are equal tokens."""

    at: float
    input: int
    output: int
    blocks: tuple[int, ...] = ()


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Independent arrival times (Poisson). At another rate the same seed gives the same pattern, faster or slower."""
    chance, at, times = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(1.0) / rate) < seconds:
        times.append(at)
    return times


def by_chance(rate: float, seconds: float, seed: int, lengths: Sequence[tuple[int, int]]) -> list[Request]:
    """Poisson arrivals; lengths (input, output) in turn, from the first again after the last."""
    times = poisson(rate, seconds, seed)
    return [Request(at, *lengths[place % len(lengths)]) for place, at in enumerate(times)]


def mean_rate(requests: Sequence[Request]) -> float:
    """Requests a second. Raises SettingsError where all come at once."""
    span = requests[-1].at - requests[0].at if requests else 0.0
    if span <= 0:
        raise SettingsError("the trace has no two requests at different times", field="trace")
    return (len(requests) - 1) / span


def faster(requests: Iterable[Request], speed: float) -> list[Request]:
    """All gaps divided by `speed`."""
    return [replace(request, at=request.at / speed) for request in requests]


def scaled(requests: Iterable[Request], factor: int) -> list[Request]:
    """Lengths divided by `factor` and rounded up, so that prompts share blocks of BLOCK / factor tokens exactly as they
    shared blocks before. Raises SettingsError where blocks do not divide."""
    shorter = [
        replace(request, input=-(-request.input // factor), output=-(-request.output // factor)) for request in requests
    ]
    if BLOCK % factor and any(request.blocks for request in shorter):
        raise SettingsError(
            f"blocks of {BLOCK} tokens do not divide by {factor}", field="scale", bound=f"a divisor of {BLOCK}"
        )
    return shorter


def spread(requests: Iterable[Request]) -> list[Request]:
    """Those that have the same time come one after another, evenly, until the next time."""
    groups = [list(same) for _, same in groupby(requests, key=lambda request: request.at)]
    spread_out = []
    for place, same in enumerate(groups):
        gap = groups[place + 1][0].at - same[0].at if place + 1 < len(groups) else LAST_GAP_S
        spread_out += [
            replace(request, at=request.at + gap * number / len(same)) for number, request in enumerate(same)
        ]
    return spread_out


def fitting(requests: Iterable[Request], context: int | None) -> tuple[list[Request], int]:
    """Those whose prompt and answer fit into `context` tokens, and how many others there were."""
    all_requests = list(requests)
    short_enough = [request for request in all_requests if context is None or request.input + request.output <= context]
    return short_enough, len(all_requests) - len(short_enough)


def tokens(request: Request, number: int, salt: int, factor: int = 1, vocab: int = 256) -> list[int]:
    """The prompt of the `number`th request. Another salt gives another prompt, so that no cache has it."""
    if not request.blocks:
        return _random(f"{salt}/{number}", request.input, vocab)
    size = BLOCK // factor
    needed = request.blocks[: math.ceil(request.input / size)]
    return [token for block in needed for token in _random(f"{salt}:{block}", size, vocab)][: request.input]


def _random(seed: str, count: int, vocab: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_ID, vocab), k=count)
