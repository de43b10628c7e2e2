"""The events of one Generate call as pieces, and pieces as completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import perf_counter

from tandem.errors import InternalError, Unavailable
from tandem.results import FINISH_REASONS, Completion, FinishReason, Piece, TokenLogprob, ToolCall, receipt
from tandem.v1 import common_pb2, generation_pb2


class StreamReader:
    """Turns the events of one Generate call into pieces, and refuses a stream with a gap or without an end.

    A stream that lost or repeated a message must never look like a shorter or longer answer. Create it when the request
    is sent, because the time to the first token counts from then.
    """

    def __init__(self, from_token: int = 0) -> None:
        """`from_token`: the first wanted token; a piece that contains it may begin before it."""
        self._sent = perf_counter()
        self._first_token: dict[int, float] = {}  # by choice: seconds after sending
        self._tokens: list[int] = [from_token]  # of each choice so far
        self._from = from_token
        self._finished: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether all answers have ended."""
        return len(self._finished) == len(self._tokens)

    @property
    def tokens(self) -> int:
        """The number of tokens so far."""
        return sum(self._tokens)

    @property
    def due(self) -> int:
        """The lowest position of a token that is missing in any answer."""
        return min(count for choice, count in enumerate(self._tokens) if choice not in self._finished)

    def has(self, event: generation_pb2.GenerateResponse) -> bool:
        """Whether a restarted stream has delivered all of the event before. Raises Unavailable if it has delivered a
        part of it."""
        if event.HasField("finished"):
            return event.finished.choice in self._finished
        if not event.HasField("delta"):
            return False
        delta = event.delta
        if delta.choice >= len(self._tokens):
            return False
        due, end = self._tokens[delta.choice], delta.index + len(delta.token_ids)
        if delta.index < due < end and due != self._from:  # its text cannot be cut at a token
            raise Unavailable("the registry lost tokens that had been sent: watch the job from its beginning")
        return end <= due

    def read(self, event: generation_pb2.GenerateResponse) -> Piece | None:
        """The piece in this event, or None if it has none. Raises InternalError on a gap."""
        kind = event.WhichOneof("event")
        if kind == "started" and event.started.choices > len(self._tokens):
            self._tokens = [self._from] * event.started.choices
        if kind not in ("delta", "finished"):
            if len(self._finished) == len(self._tokens):
                raise InternalError("the server sent more after the end of the stream")
            return None  # started, or an event of a newer server
        choice = event.delta.choice if kind == "delta" else event.finished.choice
        if choice in self._finished:
            raise InternalError("the server sent more after the end of the stream")
        if choice >= len(self._tokens):
            raise InternalError(f"the server sent answer index {choice} of {len(self._tokens)} answers")
        if kind == "delta":
            return self._delta(event.delta)
        self._finished.add(choice)
        account = receipt(event.finished.receipt, self._first_token.get(choice))
        finished = event.finished
        reasoning, calls = _parts(finished.parts)
        return Piece(
            finished.text, [], _reason(finished.reason), account, choice=choice, reasoning=reasoning, calls=calls
        )

    def _delta(self, delta: generation_pb2.Delta) -> Piece:
        choice, due = delta.choice, self._tokens[delta.choice]
        if due == self._from and delta.index <= due < delta.index + len(delta.token_ids):
            due = self._tokens[choice] = delta.index
        if delta.index != due:
            raise InternalError(f"the stream has a gap: expected token {due}, received token {delta.index}")
        if delta.token_ids and choice not in self._first_token:
            self._first_token[choice] = perf_counter() - self._sent
        self._tokens[choice] += len(delta.token_ids)
        reasoning, calls = _parts(delta.parts)
        return Piece(
            delta.text,
            list(delta.token_ids),
            logprobs=_logprobs(delta.logprobs, delta.token_ids) if delta.HasField("logprobs") else None,
            prompt_logprobs=_prompt_logprobs(delta.prompt_logprobs) if delta.HasField("prompt_logprobs") else None,
            choice=choice,
            reasoning=reasoning,
            calls=calls,
        )

    def end(self) -> None:
        """The stream is over. Raises InternalError if an answer has no end."""
        if len(self._finished) < len(self._tokens):
            raise InternalError("the stream ended without a receipt, so the text may be cut")


def completions(pieces: list[Piece]) -> list[Completion]:
    """A whole stream as its answers, in their order."""
    count = max(piece.choice for piece in pieces) + 1
    return [completion([piece for piece in pieces if piece.choice == choice]) for choice in range(count)]


def completion(pieces: list[Piece]) -> Completion:
    """The pieces of one answer as one value. The last one has the receipt, which StreamReader ensures."""
    reason, receipt = pieces[-1].finish_reason, pieces[-1].receipt
    assert reason is not None
    assert receipt is not None
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        finish_reason=reason,
        receipt=receipt,
        logprobs=[logprob for piece in pieces for logprob in piece.logprobs or ()]
        if any(p.logprobs for p in pieces)
        else None,
        prompt_logprobs=next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=_whole(call for piece in pieces for call in piece.calls),
    )


def _parts(parts: Iterable[generation_pb2.Part]) -> tuple[str, tuple[ToolCall, ...]]:
    """The reasoning, and the calls, among the parts of one message."""
    reasoning, calls = "", []
    for part in parts:
        kind = part.WhichOneof("part")
        if kind == "reasoning":
            reasoning += part.reasoning
        elif kind == "call":
            calls.append(ToolCall(part.call.id, part.call.name, ""))
        elif kind == "arguments":
            calls.append(ToolCall("", "", part.arguments))
    return reasoning, _whole(calls)


def _whole(pieces: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """The pieces of calls, those of one call joined."""
    calls: list[tuple[ToolCall, list[str]]] = []
    for piece in pieces:
        if piece.name or not calls:
            calls.append((piece, []))
        calls[-1][1].append(piece.arguments)
    return tuple(replace(call, arguments="".join(arguments)) for call, arguments in calls)


def _prompt_logprobs(message: generation_pb2.PromptLogprobs) -> list[TokenLogprob]:
    return _logprobs(message.logprobs, message.token_ids[1:])


def _logprobs(message: common_pb2.Logprobs, token_ids: Sequence[int]) -> list[TokenLogprob]:
    count = len(token_ids)
    width = len(message.top_ids) // max(1, count)
    if len(message.chosen) != count or len(message.top) != len(message.top_ids) or len(message.top) != width * count:
        raise InternalError(f"{len(message.chosen)} log probabilities do not fit {count} tokens")
    ranges = [slice(width * place, width * (place + 1)) for place in range(count)]
    return [
        TokenLogprob(token, chosen, dict(zip(message.top_ids[at], message.top[at], strict=True)))
        for token, chosen, at in zip(token_ids, message.chosen, ranges, strict=True)
    ]


def _reason(reason: int) -> FinishReason:
    if reason not in FINISH_REASONS:
        raise InternalError(f"the stream ended for reason {reason}, which this client does not know; upgrade it")
    return FINISH_REASONS[reason]
