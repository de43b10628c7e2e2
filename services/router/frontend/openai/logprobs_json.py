"""Log probabilities of a message's tokens, their JSON, and where each token is in the text."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from services.router.frontend.json_body import encode
from services.router.preprocess.tokenizer import Tokenizer
from tandem.errors import InvalidRequest
from tandem.sampling import LEAST_LOGPROB
from tandem.v1 import common_pb2, generation_pb2

MAX_SCORES = 2**20  # in an answer that is sent as a whole: of all its choices and tokens, 40 to 80 MB of JSON
MAX_RESPONSE_SCORES = 2**18  # in a response, whose last events repeat all of them several times
TOKENS_PER_SLICE = 32  # tokens whose log probabilities are encoded before the event loop runs again

Scored = tuple[int, float | None, dict[int, float]]  # a token, its log probability, and those of the likeliest ones


async def in_slices(scored: Iterable[Scored]) -> AsyncIterator[list[Scored]]:
    """Some at a time; between them other streams are relayed. Nothing has to hold all of them: of a prompt there may be
    hundreds of thousands."""
    left = iter(scored)
    while some := list(islice(left, TOKENS_PER_SLICE)):
        yield some
        await asyncio.sleep(0)


async def json_parts(make: Callable[..., Any], scored: Iterable[Scored]) -> list[bytes]:
    """The items as JSON with commas between them, made and encoded in slices. It may be many megabytes, so the parts
    are for one join: each copy of 14 MB takes the event loop 8 ms."""
    parts: list[bytes] = []
    async for some in in_slices(scored):
        comma = "," if parts else ""
        parts.append((comma + ",".join([encode(make(*score)) for score in some])).encode())
    return parts


async def joined_json(make: Callable[..., Any], scored: Iterable[Scored]) -> str:
    """Likewise, as one text, for a few items."""
    return b"".join(await json_parts(make, scored)).decode()


def scored_tokens(ids: Iterable[int], message: common_pb2.Logprobs) -> Iterator[Scored]:
    """For each token its id, its log probability, and those of the likeliest ones, likeliest first. Infinities,
    which only workers of an older version send, become LEAST_LOGPROB."""
    each = len(message.top_ids) // max(1, len(message.chosen))
    for place, (token, chosen) in enumerate(zip(ids, message.chosen, strict=True)):
        part = slice(place * each, (place + 1) * each)
        top = zip(message.top_ids[part], (max(value, LEAST_LOGPROB) for value in message.top[part]), strict=True)
        yield token, max(chosen, LEAST_LOGPROB), dict(top)


def answer_scores(delta: generation_pb2.Delta) -> Iterator[Scored]:
    """Likewise for the tokens of a delta, or of several that were merged."""
    return scored_tokens(delta.token_ids, delta.logprobs)


def check_scores(before: int, more: common_pb2.Logprobs, most: int, advice: str) -> int:
    """How many log probabilities an answer has with these. Raises InvalidRequest for too many."""
    count = before + len(more.chosen) + len(more.top)
    if count > most:
        raise InvalidRequest(
            f"the answer has more than {most} log probabilities, of its tokens and of the likeliest ones beside them",
            field="sampling.logprobs",
            bound=f"{most} in one answer: {advice}",
        )
    return count


def prompt_scores(message: generation_pb2.PromptLogprobs | None) -> Iterator[Scored]:
    """Likewise for a prompt, whose first token has no log probability; nothing without a message."""
    if message is not None:
        yield message.token_ids[0], None, {}
        yield from scored_tokens(islice(message.token_ids, 1, None), message.logprobs)


def of_prompt(tokenizer: Tokenizer, token: int, chosen: float | None, top: dict[int, float]) -> dict[str, Any] | None:
    """One token's item of `prompt_logprobs` in vLLM's format, except that the rank is unknown for a token that is not
    among the likeliest."""
    if chosen is None:
        return None
    ranks = {token_id: rank for rank, token_id in enumerate(top, 1)}
    return {
        str(token_id): {"logprob": value, "rank": ranks.get(token_id), "decoded_token": tokenizer.token(token_id)}
        for token_id, value in {token: chosen, **top}.items()
    }


def of_answer(
    tokenizer: Tokenizer, token: int, chosen: float | None, top: dict[int, float], *, as_ids: bool = False
) -> dict[str, Any]:
    """One token's item in chat completions and responses. `as_ids`: tokens are shown by their ids."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        text = f"token_id:{token}" if as_ids else tokenizer.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}

    return {**one(token, chosen), "top_logprobs": [one(*likely) for likely in top.items()]}


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


async def with_offsets(scores: Iterable[tuple[TokenTexts, Iterable[Scored]]], *, as_ids: bool) -> list[bytes]:
    """The log probabilities of a completion as JSON, in parts. `as_ids`: tokens are shown by their ids."""
    before = (b'{"tokens":[', b'],"token_logprobs":[', b'],"text_offset":[', b'],"top_logprobs":[')
    columns = [[opening] for opening in before]
    for texts, scored in scores:
        async for some in in_slices(scored):
            rows = [_row(texts, *score, as_ids=as_ids) for score in some]
            for parts, values in zip(columns, zip(*rows, strict=True), strict=True):
                comma = "," if len(parts) > 1 else ""
                parts.append((comma + encode(values)[1:-1]).encode())
    return [part for parts in columns for part in parts] + [b"]}"]


def _row(
    texts: TokenTexts, token: int, chosen: float | None, likely: dict[int, float], *, as_ids: bool
) -> tuple[str, float | None, int, dict[str, float] | None]:
    """The token, its log probability, its offset, and the likeliest ones by text: of several tokens with the same text
    the chosen one is shown, or else the likeliest."""

    def shown(token: int) -> str:
        return f"token_id:{token}" if as_ids else texts.of(token)

    found = {shown(other): value for other, value in reversed(likely.items())}
    text, offset = shown(token), texts.offset
    texts.add(token)
    return text, chosen, offset, None if chosen is None else found | {text: chosen}
