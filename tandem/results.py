"""The results of calls as plain values: completions, receipts, jobs.

Everything here is frozen, compares by value and turns into JSON with `to_dict()`. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from tandem.v1 import admin_pb2, common_pb2, generation_pb2, jobs_pb2

FinishReason = Literal["stop", "length"]
Path = Literal["disaggregated", "local", "unknown"]

FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}
PATHS: dict[int, Path] = {common_pb2.PATH_DISAGGREGATED: "disaggregated", common_pb2.PATH_LOCAL: "local"}


class _Dict:
    """Adds `to_dict` to a dataclass."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for json.dumps."""
        return asdict(self)


Value = TypeVar("Value", bound=_Dict)


def from_message(kind: type[Value], message: Any, **others: Any) -> Value:
    """A value of the message's fields, by their names without `_seconds`, repeated ones as lists; `others` differ."""
    same: dict[str, Any] = {}
    for own in message.DESCRIPTOR.fields_by_name:
        name = own.removesuffix("_seconds")
        if name in kind.__dataclass_fields__ and name not in others:
            value = getattr(message, own)
            same[name] = list(value) if isinstance(value, MutableSequence) else value
    return kind(**same, **others)


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
    why: str = ""
    """Why this transport, where the setting is auto."""
    converted: str = ""
    """What was done to blocks that the decode worker keeps in another form, such as "int8 to fp8"."""


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
    """Prompt tokens that were found in a prefix cache; of a model with recurrent layers, those up to the state from
    which the prompt was resumed."""
    seed: int
    ttft: float
    """From the request's arrival at the router until the first token is there for its client to read."""
    phases: dict[str, float]
    """The parts of `ttft` in their order; they add up to it."""
    tpot: float
    """Mean time per token after the first; of a job that went on, of the tokens since then. 0.0: one token."""
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
    prefill_tp: int = 1
    """Ranks of the prefill worker (tensor parallelism); 0 when the path is local."""
    decode_tp: int = 1
    ended_at: float = 0.0
    """Unix seconds on the router's clock."""
    trace_id: str = ""
    """Of its trace, where one was recorded."""
    unresumed_tokens: int = 0
    """Prompt tokens whose KV was found after the cached ones, but no copy of the recurrent states behind them."""
    reasoning_tokens: int = 0
    """Completion tokens before the end of the model's reasoning, its markers included."""


@dataclass(frozen=True, slots=True)
class TokenLogprob(_Dict):
    """How likely the model found a token, as natural logarithms: before bias, penalties, temperature and filters.
    -9999 is that of an impossible token."""

    token_id: int
    logprob: float
    top: dict[int, float]
    """The most likely token ids at this place, best first; `token_id` need not be among them."""


@dataclass(frozen=True, slots=True)
class ToolCall(_Dict):
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it: nobody has checked it, unless the call was forced."""


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
    reasoning: str = ""
    """In the answer to a chat, what the model thinks; it is not in `text`."""
    calls: tuple[ToolCall, ...] = ()
    """In the answer to a chat with tools. One with a name begins a call; one without has more arguments of the last."""


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
    reasoning: str = ""
    """In the answer to a chat, what the model thought; it is not in `text`."""
    calls: tuple[ToolCall, ...] = ()
    """In the answer to a chat with tools, the calls that the model made."""


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
    models: list[str] = field(default_factory=list)
    """All models of the cluster."""


def model_info(answer: generation_pb2.GetModelInfoResponse) -> ModelInfo:
    return from_message(ModelInfo, answer)


def job(answer: jobs_pb2.Job) -> Job:
    return from_message(Job, answer, state=_STATES.get(answer.state, "open"))


def receipt(receipt: generation_pb2.Receipt, client_ttft: float | None = None) -> Receipt:
    """`client_ttft` is the time to first token as measured by the client, if it did."""
    return from_message(
        Receipt,
        receipt,
        path=PATHS.get(receipt.path, "unknown"),
        phases={phase.name: phase.seconds for phase in receipt.phases},
        transfer=from_message(Transfer, receipt.transfer) if receipt.HasField("transfer") else None,
        choices=max(1, receipt.choices),
        client_ttft=client_ttft,
        estimate=from_message(Estimate, receipt.estimate) if receipt.HasField("estimate") else None,
    )


def receipts(answer: admin_pb2.ListReceiptsResponse) -> list[Receipt]:
    return [receipt(message) for message in answer.receipts]
