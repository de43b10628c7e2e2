"""The results of calls as plain values: completions, receipts, jobs.

Everything here is frozen, compares by value and turns into JSON with `to_dict()`. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, ClassVar, Literal, TypeVar

from tandem.errors import InternalError
from tandem.v1 import admin_pb2, common_pb2, generation_pb2, jobs_pb2

FinishReason = Literal["stop", "length"]
Path = Literal["disaggregated", "local", "unknown"]

_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}
_PATHS: dict[int, Path] = {common_pb2.PATH_DISAGGREGATED: "disaggregated", common_pb2.PATH_LOCAL: "local"}


class _Dict:
    """Adds `to_dict` to a dataclass."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for json.dumps."""
        return asdict(self)


Value = TypeVar("Value", bound=_Dict)


def from_message(kind: type[Value], message: Any, **others: Any) -> Value:
    """A value of the message's fields that it has under the same names, repeated ones as lists; `others` differ."""
    same = {
        name: getattr(message, name)
        for name in message.DESCRIPTOR.fields_by_name
        if name in kind.__dataclass_fields__ and name not in others
    }
    lists = {name: list(value) for name, value in same.items() if isinstance(value, MutableSequence)}
    return kind(**{**same, **lists, **others})


# ---- one request


@dataclass(frozen=True, slots=True)
class Transfer(_Dict):
    """One movement of a request's KV from its prefill worker to its decode worker."""

    transport: str
    """What carried the bytes, for example "nixl:ucx:cma" or "nixl:ucx:tcp"."""
    bytes: int
    blocks: int
    seconds: float
    """Time in which at least one read was under way."""
    exposed: float
    """Seconds of it that prefill compute did not hide."""


@dataclass(frozen=True, slots=True)
class Estimate(_Dict):
    """The router's estimate when it placed a request, in seconds."""

    wait: float
    """Until the worker begins with the prompt; the phase prefill_queue has the real time."""
    compute: float
    """Of computing what is not cached: prefill_compute."""
    here: float
    """The cost, to all requests, of computing the prompt on the decode worker; 0 where there was no choice."""
    there: float
    """The same on the prefill worker."""


@dataclass(frozen=True, slots=True)
class Receipt(_Dict):
    """The account of a finished request."""

    request_id: str
    model: str
    path: Path
    prefill_worker: str
    """Empty when the path is local."""
    decode_worker: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in a prefix cache."""
    seed: int
    ttft: float
    """From the request's arrival at the router until the first token is there for its client to read."""
    phases: dict[str, float]
    """The parts of `ttft` in their order; they add up to it."""
    tpot: float
    """Mean time per token after the first."""
    total: float
    transfer: Transfer | None
    attempts: int
    """1 when nothing went wrong."""
    notes: list[str]
    """A sentence for each resume and for each thing that did not run as configured."""
    preemptions: int
    drafted: int
    """Tokens that were guessed and verified in the attempts that ended; 0 without speculative decoding."""
    accepted: int
    """Drafts that were accepted: this many tokens needed no separate step."""
    choice: int
    """Which of the `choices` answers to the same prompt this is."""
    choices: int
    adapter: str
    """Empty: the base model."""
    client_ttft: float | None
    """From sending to the first token's arrival, measured by this client; None when no token came."""
    estimate: Estimate | None = None
    """None where a worker's rate was unknown."""
    ended_at: float = 0.0
    """Unix seconds on the router's clock."""
    trace_id: str = ""
    """Of its trace, where one was recorded."""


@dataclass(frozen=True, slots=True)
class TokenLogprob(_Dict):
    """How likely the model found a token, as natural logarithms: before bias, penalties, temperature and filters."""

    token_id: int
    logprob: float
    top: dict[int, float]
    """The most likely token ids at this place, best first; `token_id` need not be among them."""


@dataclass(frozen=True, slots=True)
class Piece(_Dict):
    """What one message of a stream adds. The last one has the finish reason and the receipt."""

    text: str
    """Whole code points only, and nothing that may become a stop string, so it may lag behind the ids."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    receipt: Receipt | None = None
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, if they were asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One for each token of the prompt but the first, in the first piece with tokens, if they were asked for."""
    choice: int = 0
    """Which of the n answers it belongs to."""


@dataclass(frozen=True, slots=True)
class Completion(_Dict):
    """A finished request."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    receipt: Receipt
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, if they were asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One for each token of the prompt but the first, which nothing precedes, if they were asked for."""


JobState = Literal["open", "finished", "failed", "cancelled"]
_STATES: dict[int, JobState] = {
    jobs_pb2.JOB_STATE_OPEN: "open",
    jobs_pb2.JOB_STATE_FINISHED: "finished",
    jobs_pb2.JOB_STATE_FAILED: "failed",
    jobs_pb2.JOB_STATE_CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class Job(_Dict):
    """A request whose tokens are kept."""

    job_id: str
    state: JobState
    tokens: int
    """Kept so far."""
    takeovers: int
    """How often a router went on with it because the one before was gone."""
    error: str
    """Why it failed; empty if it did not."""


@dataclass(frozen=True, slots=True)
class ModelInfo(_Dict):
    model: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: list[int]
    has_tokenizer: bool
    has_chat_template: bool
    adapters: list[str]
    """What a request may name as its adapter."""


class StreamReader:
    """Turns the events of one Generate call into pieces, and refuses a stream with a gap or without an end.

    A stream that lost or repeated a message must never look like a shorter or longer answer. Create it when the request
    is sent: the time to the first token counts from then.
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
        """Whether a restarted stream has delivered all of the event before."""
        if event.HasField("finished"):
            return event.finished.choice in self._finished
        if not event.HasField("delta"):
            return False
        delta = event.delta
        return delta.choice < len(self._tokens) and delta.index + len(delta.token_ids) <= self._tokens[delta.choice]

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
        return Piece(event.finished.text, [], _reason(event.finished.reason), account, choice=choice)

    def _delta(self, delta: generation_pb2.Delta) -> Piece:
        choice, due = delta.choice, self._tokens[delta.choice]
        if due == self._from and delta.index <= due < delta.index + len(delta.token_ids):
            due = self._tokens[choice] = delta.index
        if delta.index != due:
            raise InternalError(f"the stream has a gap: expected token {due}, received token {delta.index}")
        if delta.token_ids and choice not in self._first_token:
            self._first_token[choice] = perf_counter() - self._sent
        self._tokens[choice] += len(delta.token_ids)
        return Piece(
            delta.text,
            list(delta.token_ids),
            logprobs=_logprobs(delta.logprobs, delta.token_ids) if delta.HasField("logprobs") else None,
            prompt_logprobs=_prompt_logprobs(delta.prompt_logprobs) if delta.HasField("prompt_logprobs") else None,
            choice=choice,
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
    """The pieces of one answer as one value. The last one has the receipt (StreamReader saw to it)."""
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
    )


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


def model_info(answer: generation_pb2.GetModelInfoResponse) -> ModelInfo:
    return from_message(ModelInfo, answer)


def job(answer: jobs_pb2.Job) -> Job:
    return Job(answer.job_id, _STATES.get(answer.state, "open"), answer.tokens, answer.takeovers, answer.error)


def _reason(reason: int) -> FinishReason:
    if reason not in _REASONS:
        raise InternalError(f"the stream ended for reason {reason}, which this client does not know; upgrade it")
    return _REASONS[reason]


def receipt(receipt: generation_pb2.Receipt, client_ttft: float | None = None) -> Receipt:
    """`client_ttft` is the time to first token as measured by the client, if it did."""
    return from_message(
        Receipt,
        receipt,
        path=_PATHS.get(receipt.path, "unknown"),
        ttft=receipt.ttft_seconds,
        phases={phase.name: phase.seconds for phase in receipt.phases},
        tpot=receipt.tpot_seconds,
        total=receipt.total_seconds,
        transfer=_transfer(receipt.transfer) if receipt.HasField("transfer") else None,
        choices=max(1, receipt.choices),
        client_ttft=client_ttft,
        estimate=_estimate(receipt.estimate) if receipt.HasField("estimate") else None,
    )


def _estimate(message: generation_pb2.Estimate) -> Estimate:
    return Estimate(message.wait_seconds, message.compute_seconds, message.here_seconds, message.there_seconds)


def receipts(answer: admin_pb2.ListReceiptsResponse) -> list[Receipt]:
    return [receipt(message) for message in answer.receipts]


def _transfer(report: common_pb2.TransferReport) -> Transfer:
    return Transfer(report.transport, report.bytes, report.blocks, report.seconds, report.exposed_seconds)


# ---- the cluster
