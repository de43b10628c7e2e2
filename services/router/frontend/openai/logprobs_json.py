"""Log probabilities of a message's tokens, their JSON, and where each token is in the text."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from services.router.frontend.json_body import encode
from services.router.preprocess.tokenizer import Tokenizer
from tandem.v1 import common_pb2

MIN_LOGPROB = -9999.0  # log probability: JSON has no infinity
TOKENS_PER_SLICE = 32  # tokens whose log probabilities are encoded before the event loop runs again

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


class TokenTexts:
    """What each token of a text adds to it, and at which character. Of a letter that is made of several tokens the last
    one adds all of it, and the others nothing, as in vLLM: the texts of the tokens are the whole text."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool, begins: bool = False) -> None:
        """`special`: special tokens are in the text. `begins`: the first token begins a text, not an answer to one, and
        decoders such as Llama 2's take its space."""
        self.offset = 0  # of the next token
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_text = b"" if tokenizer.backend is None else tokenizer.known if special else tokenizer.shown
        self._begins = begins

    def of(self, token: int) -> str:
        """What the token would add here; the name of one that is not in the text."""
        if not self._has(token):
            return self._tokenizer.token(token)
        state = self._utf8.getstate()
        text = self._utf8.decode(self._bytes(token))
        self._utf8.setstate(state)
        return text

    def add(self, token: int) -> None:
        if self._has(token):
            self.offset += len(self._utf8.decode(self._bytes(token)))
            self._begins = False

    def _has(self, token: int) -> bool:
        return token < len(self._in_text) and bool(self._in_text[token])

    def _bytes(self, token: int) -> bytes:
        own = self._tokenizer.token_bytes(token)
        if self._begins and not self._tokenizer.decode([token]).startswith(" "):
            return own.removeprefix(b" ")
        return own


async def with_offsets(parts: Sequence[tuple[TokenTexts, Sequence[Scored]]], *, as_ids: bool) -> str:
    """The log probabilities of a completion as JSON, part by part. `as_ids`: tokens are shown by their ids."""
    tokens, offsets = list[str](), list[int]()

    def shown(texts: TokenTexts, token: int) -> str:
        return f"token_id:{token}" if as_ids else texts.of(token)

    def top(texts: TokenTexts, token: int, chosen: float | None, likely: dict[int, float]) -> dict[str, float] | None:
        """By text: of several tokens with the same text the chosen one is shown, or else the likeliest."""
        found = {shown(texts, other): value for other, value in reversed(likely.items())}
        tokens.append(shown(texts, token))
        offsets.append(texts.offset)
        texts.add(token)
        return None if chosen is None else found | {tokens[-1]: chosen}

    tops = [await joined_json(partial(top, texts), scored) for texts, scored in parts if scored]
    chosen = [chosen for _, scored in parts for _, chosen, _ in scored]
    fields = {"tokens": tokens, "token_logprobs": chosen, "text_offset": offsets}
    return f'{encode(fields)[:-1]},"top_logprobs":[{",".join(tops)}]}}'
