"""The first token of a sequence whose prompt another worker has computed: checked, then passed on to the router."""

from __future__ import annotations

from engine.core.sequence import Sequence
from tandem.errors import WorkerLost
from tandem.v1 import common_pb2, decode_pb2, prefill_pb2


def check(first: prefill_pb2.FirstToken, request: prefill_pb2.PrefillRequest, vocab_size: int) -> None:
    """Raises WorkerLost for what a working prefill worker never sends. Passed on, it would enter the journal, and the
    next worker would refuse the request as its client's fault."""
    if first.token_id >= vocab_size:
        raise WorkerLost(f"it sent token {first.token_id}, which the vocabulary does not have")
    asked = request.sampling
    _check_scores(first.logprobs, 1 if asked.HasField("logprobs") else 0, "log probabilities")
    prompt = request.prompt_tokens - 1 if asked.HasField("prompt_logprobs") else 0
    _check_scores(first.prompt_logprobs, prompt, "prompt log probabilities")


def _check_scores(scores: common_pb2.Logprobs, tokens: int, what: str) -> None:
    even = len(scores.top_ids) == len(scores.top) and len(scores.top) % max(tokens, 1) == 0
    if len(scores.chosen) != tokens or not even:
        raise WorkerLost(
            f"it sent {len(scores.chosen)} {what} and {len(scores.top)} likeliest ones for {tokens} tokens"
        )


def to_router(
    first: prefill_pb2.FirstToken, sequence: Sequence, started: float, reserved: float, now: float
) -> decode_pb2.DecodeResponse:
    timing = decode_pb2.FirstTokenTiming(
        total_seconds=now - started,
        admit_seconds=reserved - started,
        prefill=first.timing,
        path=common_pb2.PATH_DISAGGREGATED,
    )
    tokens = decode_pb2.Tokens(
        position=len(sequence.tokens),
        token_ids=[first.token_id],
        first=timing,
        logprobs=first.logprobs if first.HasField("logprobs") else None,
        prompt_logprobs=first.prompt_logprobs if first.HasField("prompt_logprobs") else None,
    )
    return decode_pb2.DecodeResponse(tokens=tokens)
