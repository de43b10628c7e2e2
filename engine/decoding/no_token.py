"""Why a sequence gets no token: the errors of the sampler."""

from __future__ import annotations

from engine.core.sequence import Sequence
from tandem.errors import InternalError, InvalidRequest


def nothing_allowed(sequence: Sequence) -> InvalidRequest:
    field = "allowed_token_ids" if sequence.sampling.allowed_token_ids else "bad_words"
    return InvalidRequest(
        f"allowed_token_ids, bad_words and min_tokens together leave no token after {sequence.generated} tokens",
        reason="NO_TOKEN_ALLOWED",
        field=f"sampling.{field}",
        bound="at least one possible token at every place",
    )


def dead_end(sequence: Sequence) -> InvalidRequest:
    if sequence.generated < sequence.sampling.min_tokens:
        return InvalidRequest(
            f"the grammar permits only the end after {sequence.generated} tokens",
            reason="GRAMMAR_DEAD_END",
            field="sampling.min_tokens",
            bound=f"at most {sequence.generated} with this grammar and seed",
        )
    if sequence.sampling.restricts:
        return InvalidRequest(
            f"allowed_token_ids and bad_words leave no token that fits the grammar after {sequence.generated} tokens",
            reason="GRAMMAR_DEAD_END",
            field="sampling.grammar",
            bound="a grammar that the tokens which are left can write",
        )
    return InvalidRequest(
        f"no token of this model's vocabulary fits the grammar after {sequence.generated} tokens",
        reason="GRAMMAR_DEAD_END",
        field="sampling.grammar",
        bound="a grammar whose every beginning can be completed",
    )


def not_finite(sequence: Sequence, after: int | None = None) -> InternalError:
    """The error for logits that are not finite (after all tokens, or that many): weights or KV have NaN or infinity, or
    a sum exceeds the type's range, so any token would be arbitrary."""
    return InternalError(
        f"the model's logits after {after or len(sequence.tokens)} tokens are not finite; the stream was stopped to"
        " keep it exact",
        reason="LOGITS_NOT_FINITE",
    )
