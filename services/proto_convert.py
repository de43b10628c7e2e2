"""Conversions between wire messages and internal types."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import fields
from itertools import chain

from engine.core.sequence import Logprob, LoraSlot, Sequence
from kvtransfer.types import Peer, ReadyBlock
from tandem.errors import InvalidRequest
from tandem.sampling import GrammarSpec, ReasoningTokens, Sampling
from tandem.v1 import common_pb2, prefill_pb2, sampling_pb2

_INTERNAL_ID = re.compile(r"(.+)\.[0-9a-f]{8}(?:-\d+)?(?:/\d+)?")


def client_request_id(internal_id: str) -> str:
    """The client's request id, for log lines: of `ID.RANDOM`, `ID.RANDOM-CHOICE`, `ID.RANDOM-CHOICE/ATTEMPT`
    (services/router/preprocess/request.py, services/decode/remote_prefill.py). Anything else is returned unchanged."""
    found = _INTERNAL_ID.fullmatch(internal_id)
    return found[1] if found else internal_id


def sequence_tokens(token_ids: Iterable[int], prompt_tokens: int, vocab_size: int) -> list[int]:
    """The tokens of an internal request. The router has validated them; this check stops a caller's bug before the
    engine, where it would break every stream. Raises InvalidRequest."""
    tokens = list(token_ids)
    if not 0 < prompt_tokens <= len(tokens):
        raise InvalidRequest(
            f"{prompt_tokens} prompt tokens of {len(tokens)}", field="prompt_tokens", bound=f"1 to {len(tokens)}"
        )
    _in_vocabulary(tokens, "token_ids", vocab_size)
    return tokens


def sampling_from(message: sampling_pb2.Sampling, vocab_size: int) -> Sampling:
    """Raises InvalidRequest, as above."""
    _in_vocabulary(message.logit_bias, "sampling.logit_bias", vocab_size)
    _in_vocabulary(message.allowed_token_ids, "sampling.allowed_token_ids", vocab_size)
    for word in message.bad_words:
        if not word.token_ids:
            raise InvalidRequest("a bad word has no token", field="sampling.bad_words", bound="at least one token each")
        _in_vocabulary(word.token_ids, "sampling.bad_words", vocab_size)
    values = {field.name: value for field, value in message.ListFields()}  # without fields that are 0 or absent
    values["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    values["allowed_token_ids"] = tuple(message.allowed_token_ids)
    values["bad_words"] = tuple(tuple(word.token_ids) for word in message.bad_words)
    if message.HasField("grammar"):
        values["grammar"] = _grammar_from(message.grammar)
    if message.HasField("before_grammar"):
        values["before_grammar"] = _reasoning_from(message.before_grammar, vocab_size)
    return Sampling(**values)


def _grammar_from(message: common_pb2.Grammar) -> GrammarSpec:
    kind = message.WhichOneof("kind")
    if kind is None:  # from a newer router; without its grammar the text would be unconstrained
        raise InvalidRequest(
            "a grammar of unknown kind", field="sampling.grammar", bound="a kind that this worker knows"
        )
    try:
        if kind == "choice":
            return GrammarSpec(kind, json.dumps([text.decode() for text in message.choice.texts]))
        if kind == "calls":
            separator = message.calls.separator.decode() if message.calls.HasField("separator") else None
            calls = [
                [part.decode() for part in (call.before, call.arguments, call.after)] for call in message.calls.any
            ]
            style = [message.calls.style] if message.calls.HasField("style") else []
            return GrammarSpec(kind, json.dumps([separator, calls, *style]))
        return GrammarSpec(kind, "" if kind == "json" else getattr(message, kind).decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest("not UTF-8", field=f"sampling.grammar.{kind}", bound="valid UTF-8") from error


def _reasoning_from(message: sampling_pb2.ReasoningTokens, vocab_size: int) -> ReasoningTokens:
    opening = message.open if message.HasField("open") else None
    headers = tuple(tuple(header.token_ids) for header in message.headers)
    _in_vocabulary([*message.close, opening or 0, *chain(*headers)], "sampling.before_grammar", vocab_size)
    if not message.close:
        raise InvalidRequest("reasoning without an end", field="sampling.before_grammar.close", bound="a token or more")
    return ReasoningTokens(opening, tuple(message.close), headers)


def adapter_to(name: str, adapter: LoraSlot | None) -> common_pb2.Adapter | None:
    return common_pb2.Adapter(name=name, fingerprint=adapter.fingerprint) if adapter else None


def logprobs_to(tokens: Iterable[Logprob | None]) -> common_pb2.Logprobs | None:
    """The log probabilities of one message's tokens, in order; None if the request did not ask for them."""
    known = [logprob for logprob in tokens if logprob is not None]
    return _logprobs(known) if known else None


def prompt_logprobs_to(sequence: Sequence) -> common_pb2.Logprobs:
    """The log probabilities of a computed prompt's tokens except the first. May take some 100 ms."""
    return _logprobs(sequence.prompt_logprobs)


def _logprobs(known: list[Logprob]) -> common_pb2.Logprobs:
    message = common_pb2.Logprobs(chosen=[logprob.chosen for logprob in known])
    for logprob in known:
        message.top_ids.extend(logprob.top_ids)
        message.top.extend(logprob.top)
    return message


def _in_vocabulary(ids: Collection[int], name: str, vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(
            f"token id {max(ids)} is outside the vocabulary", field=name, bound=f"0 to {vocab_size - 1}"
        )


def peer_to(peer: Peer) -> prefill_pb2.Peer:
    return prefill_pb2.Peer(**{field.name: getattr(peer, field.name) for field in fields(Peer)})


def peer_from(message: prefill_pb2.Peer) -> Peer:
    values = {field.name: getattr(message, field.name) for field in fields(Peer)}
    return Peer(**values | {"also": tuple(message.also)})


def ready_to(blocks: list[ReadyBlock], *, last: bool) -> prefill_pb2.Ready:
    return prefill_pb2.Ready(
        blocks=[
            prefill_pb2.ReadyBlock(index=block.index, block=block.remote_block, digest=block.digest) for block in blocks
        ],
        last=last,
    )


def ready_from(message: prefill_pb2.Ready) -> list[ReadyBlock]:
    return [ReadyBlock(block.index, block.block, block.digest) for block in message.blocks]
