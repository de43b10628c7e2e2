"""Log probabilities of a message's tokens, and their JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.router.frontend.json_body import encode
from tandem.v1 import common_pb2

MIN_LOGPROB = -9999.0  # log probability: JSON has no infinity
TOKENS_PER_SLICE = 32  # tokens whose log probabilities become JSON between two looks at the event loop

Scored = tuple[int, float | None, dict[int, float]]  # a token, its log probability, and those of the likeliest ones


async def joined_json(make: Callable[..., Any], scored: Sequence[Scored]) -> str:
    """The items as JSON, joined by commas; encoded in slices, so that other streams are relayed meanwhile."""
    parts = []
    for at in range(0, len(scored), TOKENS_PER_SLICE):
        parts += [encode(make(*score)) for score in scored[at : at + TOKENS_PER_SLICE]]
        await asyncio.sleep(0)
    return ",".join(parts)


def scored_tokens(ids: Sequence[int], message: common_pb2.Logprobs) -> Iterator[Scored]:
    """For each token its id, its log probability, and those of the likeliest ones, likeliest first."""
    each = len(message.top_ids) // max(1, len(message.chosen))
    for place, (token, chosen) in enumerate(zip(ids, message.chosen, strict=True)):
        part = slice(place * each, (place + 1) * each)
        top = zip(message.top_ids[part], (max(value, MIN_LOGPROB) for value in message.top[part]), strict=True)
        yield token, max(chosen, MIN_LOGPROB), dict(top)
