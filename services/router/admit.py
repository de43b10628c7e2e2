"""From a client's request to a Job, or to the error that names the field and its bound. Nothing is reserved before."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.router import json_body, structured, tools
from services.router.text import Text
from tandem.errors import InvalidRequest, NotFound
from tandem.v1 import common_pb2, generation_pb2

DEFAULT_MAX_TOKENS = 1024
MAX_TEMPERATURE = 100.0
MAX_STOP_IDS = 16
MAX_REQUEST_ID = 128
MAX_SALT_BYTES = 256
MAX_MESSAGES = 1024
MAX_TOOLS = 128
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 300
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**18  # prompt tokens x (1 + alternatives): some 2 MB, one message that any gRPC client takes
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_N = 16
LEAST_PRIORITY, DEFAULT_PRIORITY, MOST_PRIORITY = -1000, 0, 1000
MAX_TOKENS = "sampling.max_tokens"
OVER_CONTEXT = "CONTEXT_LENGTH_EXCEEDED"  # the reason of an error


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the workers say about the model that they serve."""

    name: str
    context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    adapters: tuple[str, ...] = ()
    layout_hash: str = ""  # of the KV: another one is another checkpoint, or another dtype


@dataclass(slots=True)
class Job:
    """One accepted request, and its journal: `tokens` is the prompt and everything already sent to the client."""

    request_id: str  # the client's
    internal_id: str  # unlike any other request's, also when two clients choose the same id
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    sampling: common_pb2.Sampling
    stop_ids: list[int]
    salt: bytes
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    choice: int = 0  # of `choices` completions of this prompt
    choices: int = 1
    stopped: bool = False  # by a stop string: the journal is complete
    adapter: str = ""  # its name; empty: the base model
    adapter_fingerprint: bytes = b""  # of the adapter that chose the tokens in the journal
    tenant: str = ""  # whose key it came with
    near: str = ""  # the decode worker that has the prompt's KV already
    priority: int = 0  # the smaller, the more urgent
    ttft_s: float | None = None  # a first token later than this is of no use to the client
    notes: list[str] = field(default_factory=list)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    def finish(self) -> common_pb2.FinishReason | None:
        """Why the journal is complete; None while it is not."""
        if self.stopped or (self.generated and self.tokens[-1] in self.stop_ids):
            return common_pb2.FINISH_REASON_STOP
        return common_pb2.FINISH_REASON_LENGTH if self.generated >= self.max_tokens else None

    def stop_after(self, generated: int) -> None:
        """A stop string is complete with that many tokens; what came after them never was."""
        del self.tokens[self.prompt_len + generated :]
        self.stopped = True

    def fan_out(self) -> list[Job]:
        """A job for each completion. Each is what its own seed alone gives, whatever becomes of the others."""
        return [self, *(self._sibling(choice) for choice in range(1, self.choices))]

    def _sibling(self, choice: int) -> Job:
        sampling = common_pb2.Sampling()
        sampling.CopyFrom(self.sampling)
        sampling.seed = seed_of(self.sampling.seed, choice)
        internal_id = f"{self.internal_id}-{choice}"
        return replace(
            self, internal_id=internal_id, tokens=list(self.tokens), sampling=sampling, choice=choice, notes=[]
        )


class Past:
    """What earlier lives of a job gave, by completion, and the weights of its adapter: of all its completions."""

    def __init__(self, events: Iterable[generation_pb2.GenerateResponse] = ()) -> None:
        self.deltas: dict[int, list[generation_pb2.Delta]] = defaultdict(list)
        self.ended: set[int] = set()
        self.adapter_fingerprint = b""
        for event in events:
            if event.HasField("delta"):
                self.deltas[event.delta.choice].append(event.delta)
                self.adapter_fingerprint = self.adapter_fingerprint or event.delta.adapter_fingerprint
            elif event.HasField("finished"):
                self.ended.add(event.finished.choice)


def seed_of(seed: int, choice: int) -> int:
    """The seed of a completion: the request's own for the first, 64 bits of blake2b(seed, choice) for the others."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, choice), digest_size=8, person=b"tandem.choice")
    return int.from_bytes(digest.digest(), "little")


def admit(
    request: generation_pb2.GenerateRequest,
    text: Text,
    model: ModelFacts,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
    fixed: bool = False,
) -> Job:
    """`fixed`: it was admitted before, and its grammar may be one that only the router makes. Raises InvalidRequest,
    NotFound for an adapter that there is not."""
    request_id = checked_request_id(request.request_id)
    if request.adapter and request.adapter not in model.adapters:
        names = ", ".join(sorted(model.adapters)) or "none"
        raise NotFound(
            f"there is no adapter {request.adapter!r:.140}; there are: {names}", field="adapter", bound=names
        )
    if len(request.cache_salt) > MAX_SALT_BYTES:
        raise _out_of_bounds("cache_salt", f"{len(request.cache_salt)} bytes", f"at most {MAX_SALT_BYTES} bytes")
    sampling = _sampling(request.sampling, model.vocab_size)
    tokens = _prompt(request, text, model)
    max_tokens = _max_tokens(request.sampling, len(tokens), model.context, default_max_tokens)
    if not 0 <= request.sampling.min_tokens <= max_tokens:
        raise _out_of_bounds("sampling.min_tokens", str(request.sampling.min_tokens), f"0 to max_tokens ({max_tokens})")
    if request.sampling.HasField("prompt_logprobs"):
        _check_prompt_logprobs(request.sampling.prompt_logprobs, len(tokens))
    stop_ids = _ids(request.sampling.stop_token_ids, "sampling.stop_token_ids", model.vocab_size)
    if len(stop_ids) > MAX_STOP_IDS:
        raise _out_of_bounds("sampling.stop_token_ids", f"{len(stop_ids)} ids", f"at most {MAX_STOP_IDS} ids")
    if not request.sampling.ignore_eos:
        stop_ids += model.eos_token_ids
    if (grammar := _grammar(request, text, stop_ids, fixed)) is not None:
        sampling.grammar.CopyFrom(grammar)
    n = request.sampling.n if request.sampling.HasField("n") else 1
    if not 1 <= n <= MAX_N:
        raise _out_of_bounds("sampling.n", str(n), f"1 to {MAX_N}")
    if not LEAST_PRIORITY <= request.priority <= MOST_PRIORITY:
        raise _out_of_bounds("priority", str(request.priority), f"{LEAST_PRIORITY} to {MOST_PRIORITY}")
    ttft_s = request.ttft_slo_seconds if request.HasField("ttft_slo_seconds") else None
    if ttft_s is not None and not 0 < ttft_s < math.inf:
        raise _out_of_bounds("ttft_slo_seconds", str(ttft_s), "over 0")
    return Job(
        request_id=request_id,
        internal_id=f"{request_id}.{secrets.token_hex(4)}",
        tokens=tokens,
        prompt_len=len(tokens),
        max_tokens=max_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        salt=request.cache_salt,
        stops=_stops(request.sampling, text),
        include_stop=request.sampling.include_stop,
        choices=n,
        adapter=request.adapter,
        priority=request.priority,
        ttft_s=ttft_s,
    )


def _grammar(
    request: generation_pb2.GenerateRequest, text: Text, stop_ids: list[int], fixed: bool
) -> common_pb2.Grammar | None:
    """What the answer must fit, in a client's words or because it must be a call."""
    given, calls = request.sampling, request.WhichOneof("input") == "chat" and request.chat.HasField("tool_choice")
    if not given.HasField("grammar") and not calls:
        return None
    if text.tokenizer is None:
        raise InvalidRequest(
            "this checkpoint has no tokenizer.json, so no text can fit a grammar",
            field="sampling.grammar",
            bound="no grammar with this model",
        )
    if given.ignore_eos or not stop_ids:
        raise InvalidRequest(
            "with a grammar the text must be able to end where the grammar does",
            field="sampling.ignore_eos",
            bound="false with a grammar, and a model with an end-of-sequence token or a stop token id",
        )
    if not calls:
        if not fixed:
            structured.check(given.grammar)
        return given.grammar
    if given.HasField("grammar"):
        raise InvalidRequest(
            "the answer must be a call, so it can have no grammar or response format as well",
            field="chat.tool_choice",
            bound="absent beside a grammar",
        )
    offered = _tools(request.chat.tools)
    if not offered or text.calls is None:
        raise InvalidRequest(
            "a call is asked for and no tool is offered", field="chat.tool_choice", bound="absent without tools"
        )
    return tools.forced(offered, request.chat.tool_choice, text.calls)


def _stops(given: generation_pb2.SamplingParams, text: Text) -> tuple[str, ...]:
    if given.stop and text.tokenizer is None:
        raise InvalidRequest(
            "this checkpoint has no tokenizer.json, so there is no text to find a stop string in",
            field="sampling.stop",
            bound="stop_token_ids instead",
        )
    if len(given.stop) > MAX_STOPS:
        raise _out_of_bounds("sampling.stop", f"{len(given.stop)} strings", f"at most {MAX_STOPS} strings")
    stops = [
        _utf8(value, f"sampling.stop[{index}]", "at least one character") for index, value in enumerate(given.stop)
    ]
    for index, stop in enumerate(stops):
        if len(stop) > MAX_STOP_CHARACTERS:
            bound = f"at most {MAX_STOP_CHARACTERS} characters"
            raise _out_of_bounds(f"sampling.stop[{index}]", f"{len(stop)} characters long", bound)
    return tuple(stops)


def checked_request_id(given: str) -> str:
    """The client's, or a new one. Raises InvalidRequest."""
    if not given:
        return secrets.token_hex(8)
    if len(given) > MAX_REQUEST_ID or not (given.isascii() and given.isprintable()):
        raise _out_of_bounds("request_id", f"{len(given)} characters", f"at most {MAX_REQUEST_ID} printable ASCII ones")
    return given


def _prompt(request: generation_pb2.GenerateRequest, text: Text, model: ModelFacts) -> list[int]:
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("a request needs text, token_ids or chat", field="input", bound="exactly one of them")
    if kind == "token_ids":
        if len(request.token_ids.ids) >= model.context:
            raise over_context(model.context, len(request.token_ids.ids), kind)
        known = model.vocab_size if text.tokenizer is None else min(model.vocab_size, text.known_ids)
        tokens = _ids(request.token_ids.ids, kind, known)
    else:
        chat = kind == "chat"
        given = (
            text.render(_messages(request.chat), _tools(request.chat.tools))
            if chat
            else _utf8(request.text, "text", "at least one character")
        )
        if least := text.at_least(given, model.context):
            raise over_context(model.context, least, kind, counted=False)
        tokens = text.encode(given, special=not chat)  # a template writes the special tokens itself
    if not tokens:
        raise InvalidRequest(f"{kind} is empty", field=kind, bound="at least one token")
    if len(tokens) >= model.context:
        raise over_context(model.context, len(tokens), kind)
    return tokens


def over_context(context: int, prompt: int, field: str, max_tokens: int = 1, *, counted: bool = True) -> InvalidRequest:
    """Prompt and answer together have more tokens than the model's context holds. Clients look for the words
    "maximum context length". Not `counted`: the prompt has more than `prompt` tokens."""
    about = f"{prompt} in the prompt, {max_tokens} in the completion"
    requested = f"{prompt + max_tokens} tokens ({about})" if counted else f"over {prompt} tokens in the prompt"
    room = context - (prompt if field == MAX_TOKENS else 1)
    return InvalidRequest(
        f"This model's maximum context length is {context} tokens. However, you requested {requested}.",
        reason=OVER_CONTEXT,
        field=field,
        bound=f"at most {room} {'after this prompt' if field == MAX_TOKENS else 'tokens'}",
    )


def _messages(chat: generation_pb2.Chat) -> list[dict[str, Any]]:
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise _out_of_bounds("chat.messages", f"{len(chat.messages)} messages", f"1 to {MAX_MESSAGES} messages")
    messages = []
    for index, message in enumerate(chat.messages):
        where = f"chat.messages[{index}]"
        if not message.role:
            raise InvalidRequest("a message has no role", field=f"{where}.role", bound="not empty")
        given: dict[str, Any] = {
            "role": message.role,
            "content": _utf8(message.content, f"{where}.content", None),
        }
        if message.tool_calls:
            given["tool_calls"] = _functions(message.tool_calls, f"{where}.tool_calls")
        given |= {name: value for name in ("tool_call_id", "name") if (value := getattr(message, name))}
        messages.append(given)
    return messages


def _tools(given: bytes) -> list[Any] | None:
    return _functions(given, "chat.tools") if given else None


def _functions(given: bytes, name: str) -> list[Any]:
    """Tools, or calls of them: objects that have a function with a name. The rest is the template's business."""
    bound = f"a list of 1 to {MAX_TOOLS} functions, each with a name"
    json_body.check(given, name=name)
    try:
        found = json.loads(given)
        json.dumps(found, ensure_ascii=False).encode()  # an escape may spell half a character, which is no text
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is no readable JSON", field=name, bound=bound) from error
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_TOOLS:
        raise InvalidRequest(f"{name} is no list of functions, or too long", field=name, bound=bound)
    for index, one in enumerate(found):
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{name}[{index}] is no function with a name", field=f"{name}[{index}]", bound=bound)
    return found


def _utf8(value: bytes, name: str, least: str | None) -> str:
    if least is not None and not value:
        raise InvalidRequest(f"{name} is empty", field=name, bound=least)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} is not UTF-8: byte {error.start} is invalid", field=name, bound="valid UTF-8"
        ) from error


def _ids(ids: Iterable[int], name: str, vocab_size: int) -> list[int]:
    values = list(ids)
    if values and not 0 <= min(values) <= max(values) < vocab_size:
        index, value = next((index, one) for index, one in enumerate(values) if not 0 <= one < vocab_size)
        raise _out_of_bounds(f"{name}[{index}]", str(value), f"0 to {vocab_size - 1}")
    return values


def _sampling(given: generation_pb2.SamplingParams, vocab_size: int) -> common_pb2.Sampling:
    temperature = given.temperature if given.HasField("temperature") else 0.0
    if not 0.0 <= temperature <= MAX_TEMPERATURE:  # NaN fails every comparison
        raise _out_of_bounds("sampling.temperature", str(temperature), f"0 to {MAX_TEMPERATURE:g}")
    top_p = given.top_p if given.HasField("top_p") else 1.0
    if not 0.0 < top_p <= 1.0:
        raise _out_of_bounds("sampling.top_p", str(top_p), "over 0, at most 1")
    if not 0 <= given.top_k <= 2**31 - 1:
        raise _out_of_bounds("sampling.top_k", str(given.top_k), "0 (off) to 2147483647")
    if not 0.0 <= given.min_p <= 1.0 or math.isnan(given.min_p):
        raise _out_of_bounds("sampling.min_p", str(given.min_p), "0 to 1")
    seed = given.seed if given.HasField("seed") else secrets.randbits(63)
    repetition = given.repetition_penalty if given.HasField("repetition_penalty") else 1.0
    if not 0.0 < repetition <= MAX_REPETITION_PENALTY:
        raise _out_of_bounds(
            "sampling.repetition_penalty", str(repetition), f"over 0, at most {MAX_REPETITION_PENALTY:g}"
        )
    for name in ("frequency_penalty", "presence_penalty"):
        if not abs(value := getattr(given, name)) <= MAX_PENALTY:
            raise _out_of_bounds(f"sampling.{name}", str(value), f"{-MAX_PENALTY:g} to {MAX_PENALTY:g}")
    for name in ("logprobs", "prompt_logprobs"):
        if not 0 <= (value := getattr(given, name)) <= MAX_LOGPROBS:
            raise _out_of_bounds(f"sampling.{name}", str(value), f"0 to {MAX_LOGPROBS}")
    return common_pb2.Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        seed=seed,
        repetition_penalty=repetition,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        logit_bias=_logit_bias(given.logit_bias, vocab_size),
        min_tokens=min(max(0, given.min_tokens), 2**32 - 1),  # judged once max_tokens is known
        logprobs=given.logprobs if given.HasField("logprobs") else None,
        prompt_logprobs=given.prompt_logprobs if given.HasField("prompt_logprobs") else None,
    )


def _check_prompt_logprobs(alternatives: int, prompt: int) -> None:
    if prompt * (1 + alternatives) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"sampling.prompt_logprobs is {alternatives} for a prompt of {prompt} tokens",
            field="sampling.prompt_logprobs",
            bound=f"prompt tokens x (1 + prompt_logprobs) <= {MAX_PROMPT_LOGPROBS}",
        )


def _logit_bias(given: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    if len(given) > MAX_BIASES:
        raise _out_of_bounds("sampling.logit_bias", f"{len(given)} ids", f"at most {MAX_BIASES} ids")
    for token, bias in given.items():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"sampling.logit_bias names token {token}, which the vocabulary does not have",
                field=f"sampling.logit_bias[{token}]",
                bound=f"ids 0 to {vocab_size - 1}",
            )
        if not abs(bias) <= MAX_BIAS:
            raise _out_of_bounds(f"sampling.logit_bias[{token}]", str(bias), f"{-MAX_BIAS:g} to {MAX_BIAS:g}")
    return dict(given)


def _max_tokens(given: generation_pb2.SamplingParams, prompt: int, context: int, default: int) -> int:
    room = context - prompt
    if not given.HasField("max_tokens"):
        return min(default, room)
    if given.max_tokens < 1:
        raise _out_of_bounds(MAX_TOKENS, str(given.max_tokens), "at least 1")
    if given.max_tokens > room:
        raise over_context(context, prompt, MAX_TOKENS, given.max_tokens)
    return int(given.max_tokens)


def _out_of_bounds(name: str, value: str, bound: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value}; it must be {bound}", field=name, bound=bound)
