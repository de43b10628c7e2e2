"""The OpenAI API in terms of Generate: JSON bodies to GenerateRequests, their events to JSON. Decides nothing else;
every bound is checked where gRPC's are, in admit.py.

    body ─parse─▶ Completions or Chat ─requests─▶ one GenerateRequest for each prompt ─▶ events ─▶ Answer ─▶ JSON or SSE
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.router.text import Text
from tandem import answers
from tandem.errors import Busy, CheckpointRefused, InvalidRequest, TandemError, Unavailable
from tandem.v1 import common_pb2, generation_pb2

MAX_PROMPTS = 128
COMPLETION_TOKENS = 16  # what /v1/completions gives when max_tokens is absent, as OpenAI's does
REST_OF_CONTEXT = 2**31  # what /v1/chat/completions gives, likewise: admit takes the lesser of it and the room
LEAST = -9999.0  # log probability: JSON has no infinity
DONE = b"data: [DONE]\n\n"

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
UInt64 = Annotated[int, Field(ge=0, lt=2**64)]
TokenKey = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=False)]  # a JSON object's keys are strings

# Fields that are known and not served, and the values of them that ask for nothing. Any other field that is not in a
# model below is ignored, as OpenAI's own servers do; ignoring one of these would change the answer.
NOT_SERVED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ("", []),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "use_beam_search": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "priority": (0,),
    "kv_transfer_params": (),
}


# Fields that SamplingParams has under the same name.
SAME = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens"),
    *("stop_token_ids", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"),
)


class Defaults(BaseModel):
    """Sampling of requests that do not say: the checkpoint's generation_config.json, as vLLM takes it, then these."""

    model_config = ConfigDict(frozen=True)

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def load(cls, folder: Path) -> Defaults:
        """Raises CheckpointRefused for a file that cannot be read."""
        path = folder / "generation_config.json"
        try:
            return cls.model_validate_json(path.read_bytes()) if path.is_file() else cls()
        except (ValidationError, OSError) as error:
            raise CheckpointRefused(f"{path} cannot be read: {error}") from error


# ---- what a client sends


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(BaseModel):
    """What both kinds of body have. null means absent, everywhere."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: UInt64 | None = None
    ignore_eos: bool | None = None
    min_tokens: Int64 | None = None
    stop_token_ids: list[Int64] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[TokenKey, float] | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    tandem_receipt: bool | None = None

    default_max_tokens: ClassVar[int]

    def sampling(self, defaults: Defaults) -> generation_pb2.SamplingParams:
        given = {name: value for name in SAME if (value := getattr(self, name)) is not None}
        usual = {"temperature": 1.0, **defaults.model_dump(exclude_none=True)}
        params = generation_pb2.SamplingParams(**{**usual, **given})
        if params.top_k == -1:  # how vLLM's clients say "off"
            params.top_k = 0
        return params

    def inputs(self) -> list[dict[str, Any]]:
        """For each prompt its part of a GenerateRequest."""
        raise NotImplementedError


class Completions(Sampled):
    """POST /v1/completions."""

    prompt: Any
    logprobs: Int64 | None = None

    default_max_tokens: ClassVar[int] = COMPLETION_TOKENS

    def sampling(self, defaults: Defaults) -> generation_pb2.SamplingParams:
        params = super().sampling(defaults)
        if self.logprobs is not None:
            params.logprobs = self.logprobs
        return params

    def inputs(self) -> list[dict[str, Any]]:
        """`prompt` is a text, a list of token ids, or a list of one of these."""
        prompts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if prompts and all(type(one) is int for one in prompts):  # not bool
            prompts = [prompts]
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise _wrong("prompt", f"{len(prompts)} prompts", f"1 to {MAX_PROMPTS} prompts")
        return [_prompt(one) for one in prompts]


class Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: str
    content: Any = None
    tool_calls: Any = None


class Chat(Sampled):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None

    default_max_tokens: ClassVar[int] = REST_OF_CONTEXT

    def sampling(self, defaults: Defaults) -> generation_pb2.SamplingParams:
        params = super().sampling(defaults)
        if self.max_completion_tokens is not None:
            params.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise _wrong("top_logprobs", str(self.top_logprobs), "absent unless logprobs is true")
        if self.logprobs:
            params.logprobs = self.top_logprobs or 0
        return params

    def inputs(self) -> list[dict[str, Any]]:
        messages = [
            generation_pb2.ChatMessage(role=_clean(one.role, f"messages[{index}].role"), content=_content(one, index))
            for index, one in enumerate(self.messages)
        ]
        return [{"chat": generation_pb2.Chat(messages=messages)}]


Kind = TypeVar("Kind", bound=BaseModel)


def parse(body: bytes, kind: type[Kind]) -> Kind:
    """Raises InvalidRequest, with nothing of the body's content in the message."""
    try:
        fields = json.loads(body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise _wrong("body", f"not UTF-8 at byte {error.start}", "JSON in UTF-8") from error
    except (ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else "a value is too long or nested too deep"
        raise _wrong("body", f"not readable JSON ({what})", "a JSON object") from error
    if not isinstance(fields, dict):
        raise _wrong("body", f"a JSON {type(fields).__name__}", "a JSON object")
    if issubclass(kind, Sampled):
        for name, harmless in NOT_SERVED.items():
            if (value := fields.get(name)) is not None and value not in harmless:
                bound = " or ".join(["absent", *map(_encode, harmless)])
                raise InvalidRequest(f"this value of {name} is not served; it must be {bound}", field=name, bound=bound)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{name}: {first['msg']}", field=name, bound=first["msg"]) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _wrong("body", "an object that has a key twice", "unambiguous")
    return fields


def _constant(name: str) -> None:
    raise _wrong("body", f"a number {name}", "JSON, which has no such number")


def _prompt(prompt: object) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": _bytes(prompt)}
    if isinstance(prompt, list) and all(type(one) is int and -(2**63) <= one < 2**63 for one in prompt):
        return {"token_ids": generation_pb2.TokenIds(ids=prompt)}
    raise InvalidRequest("prompt is of no known kind", field="prompt", bound="text, token ids, or a list of these")


def _content(message: Message, index: int) -> bytes:
    """A message's text: a string, or parts of type text."""
    where, content = f"messages[{index}].content", message.content
    if message.tool_calls:
        raise InvalidRequest("tool calls are not served", field=f"messages[{index}].tool_calls", bound="absent")
    if content is None or isinstance(content, str):
        return _bytes(content or "")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(parts):
        raise InvalidRequest(f"{where} is not text", field=where, bound="a string, or a list of parts of type text")
    return _bytes("".join(known))


def _bytes(text: str) -> bytes:
    """Lone surrogates, which JSON can spell, become invalid UTF-8, which admit refuses by field."""
    return text.encode("utf-8", "surrogatepass")


def _clean(text: str, where: str) -> str:
    """For fields that are strings in the proto. Raises InvalidRequest for lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _wrong(where, "no valid Unicode", "valid Unicode") from error
    return text


def _wrong(name: str, value: str, bound: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value}; it must be {bound}", field=name, bound=bound)


def new_id() -> str:
    return secrets.token_hex(8)


def requests(
    body: Sampled, request_id: str, defaults: Defaults, adapter: str = ""
) -> list[generation_pb2.GenerateRequest]:
    """One for each prompt. Raises InvalidRequest."""
    sampling, inputs = body.sampling(defaults), body.inputs()
    salt = _bytes(body.cache_salt or "")
    return [
        generation_pb2.GenerateRequest(
            request_id=request_id if len(inputs) == 1 else f"{request_id}-{index}",
            sampling=sampling,
            cache_salt=salt,
            adapter=adapter,
            **one,
        )
        for index, one in enumerate(inputs)
    ]


# ---- what it gets


Events = AsyncGenerator[tuple[int, generation_pb2.GenerateResponse], None]  # each with the index of its choice


@dataclass(slots=True)
class Choice:
    """One prompt's answer so far."""

    index: int
    prompt_tokens: int = 0
    tokens: int = 0
    letters: int = 0
    cached: int = 0
    begun: bool = False
    held: generation_pb2.Delta | None = None  # the last delta, which travels together with the reason for the end


@dataclass(slots=True)
class Piece:
    """What one message of a stream says about one choice; for an answer in one piece, all of it."""

    choice: Choice
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float, dict[int, float]]] = field(default_factory=list)  # id, its log probability, top
    finish: str | None = None
    stop_reason: int | None = None
    receipt: dict[str, Any] | None = None
    offset: int = 0  # of the text in the whole


class Answer:
    """Events of one HTTP request as JSON. A subclass knows the shapes of one endpoint."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(self, body: Sampled, request_id: str, model: str, text: Text, choices: int) -> None:
        self._body = body
        self._text = text
        self._choices = [Choice(index) for index in range(choices)]
        options = body.stream_options or StreamOptions()
        self._usage_at_end = bool(options.include_usage or options.continuous_usage_stats)
        self._usage_always = bool(options.continuous_usage_stats)
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "object": self.chunk_object if body.stream else self.whole_object,
            "created": int(time.time()),
            "model": model,
        }

    async def stream(self, events: Events) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one string of bytes for each write. Nothing before the first token."""
        left = len(self._choices)
        async for index, event in events:
            piece = self._piece(self._choices[index], event)
            if piece is None:
                continue
            message: dict[str, Any] = {**self._head, "choices": [self.chunk(piece)]}
            if self._usage_always:
                message["usage"] = self._usage()
            data = _sse(message)
            if piece.finish:
                left -= 1
                if left == 0:
                    if self._usage_at_end:
                        data += _sse({**self._head, "choices": [], "usage": self._usage()})
                    data += DONE
            yield data

    async def whole(self, events: Events) -> bytes:
        """One JSON object."""
        pieces = [Piece(choice) for choice in self._choices]
        async for index, event in events:
            piece = self._piece(self._choices[index], event)
            if piece is not None:
                whole = pieces[index]
                whole.text += piece.text
                whole.token_ids += piece.token_ids
                whole.logprobs += piece.logprobs
                whole.finish, whole.stop_reason, whole.receipt = piece.finish, piece.stop_reason, piece.receipt
        return _json({**self._head, "choices": [self.message(piece) for piece in pieces], "usage": self._usage()})

    def chunk(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def message(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, choice: Choice, event: generation_pb2.GenerateResponse) -> Piece | None:
        kind = event.WhichOneof("event")
        if kind == "started":
            choice.prompt_tokens = event.started.prompt_tokens
            return None
        piece = Piece(choice, offset=choice.letters)
        if kind == "delta":
            choice.tokens += len(event.delta.token_ids)
            if event.delta.last:
                choice.held = event.delta
                return None
            self._add(piece, event.delta)
        else:
            if choice.held:
                self._add(piece, choice.held)
            self._finish(piece, event.finished)
        choice.letters += len(piece.text)
        return piece

    def _add(self, piece: Piece, delta: generation_pb2.Delta) -> None:
        piece.text += delta.text
        if self._body.return_token_ids or delta.last:
            piece.token_ids += delta.token_ids
        if delta.HasField("logprobs"):
            piece.logprobs += _logprobs(delta.token_ids, delta.logprobs)

    def _finish(self, piece: Piece, finished: generation_pb2.Finished) -> None:
        piece.text += finished.text
        stopped = finished.reason == common_pb2.FINISH_REASON_STOP
        piece.finish = "stop" if stopped else "length"
        last = piece.token_ids[-1] if piece.token_ids else None
        if stopped and last in (self._body.stop_token_ids or ()):
            piece.stop_reason = last
        piece.choice.cached = finished.receipt.cached_tokens
        if self._body.tandem_receipt:
            piece.receipt = answers.receipt(finished.receipt).to_dict()

    def _extras(self, piece: Piece) -> dict[str, Any]:
        """Fields that OpenAI's API does not have, where they say something or were asked for."""
        extras: dict[str, Any] = {}
        if piece.finish:
            extras["stop_reason"] = piece.stop_reason
        if self._body.return_token_ids:
            extras["token_ids"] = piece.token_ids
        if piece.receipt:
            extras["tandem_receipt"] = piece.receipt
        return extras

    def _usage(self) -> dict[str, Any]:
        prompt = sum(choice.prompt_tokens for choice in self._choices)
        completion = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in self._choices)},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def _token(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._body.return_tokens_as_token_ids else self._text.token(token_id)


class CompletionsAnswer(Answer):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if piece.logprobs else None,
            "finish_reason": piece.finish,
            **self._extras(piece),
        }

    message = chunk

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        tokens = [self._token(token) for token, _, _ in piece.logprobs]
        offsets, at = [], piece.offset
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [chosen for _, chosen, _ in piece.logprobs],
            # by text, so that of several tokens with the same text the likeliest is shown; the chosen one always is
            "top_logprobs": [
                {
                    **{self._token(one): value for one, value in reversed(top.items())},
                    **({} if token in top else {self._token(token): chosen}),
                }
                for token, chosen, top in piece.logprobs
            ],
            "text_offset": offsets,
        }


class ChatAnswer(Answer):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def chunk(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text}
        if not piece.choice.begun:
            piece.choice.begun = True
            delta = {"role": "assistant", **delta}
        return {"index": piece.choice.index, "delta": delta, **self._rest(piece)}

    def message(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text}
        return {"index": piece.choice.index, "message": message, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        logprobs = {"content": [self._logprob(*one) for one in piece.logprobs]} if piece.logprobs else None
        return {"logprobs": logprobs, "finish_reason": piece.finish, **self._extras(piece)}

    def _logprob(self, token: int, chosen: float, top: dict[int, float]) -> dict[str, Any]:
        return {**self._scored(token, chosen), "top_logprobs": [self._scored(*one) for one in top.items()]}

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def answer(body: Sampled, request_id: str, model: str, text: Text, choices: int) -> Answer:
    kind = ChatAnswer if isinstance(body, Chat) else CompletionsAnswer
    return kind(body, request_id, model, text, choices)


def _logprobs(ids: Sequence[int], message: common_pb2.Logprobs) -> Iterator[tuple[int, float, dict[int, float]]]:
    """For each token its id, its log probability, and those of the likeliest ones, likeliest first."""
    each = len(message.top_ids) // len(message.chosen)
    for place, (token, chosen) in enumerate(zip(ids, message.chosen, strict=True)):
        part = slice(place * each, (place + 1) * each)
        top = zip(message.top_ids[part], (max(value, LEAST) for value in message.top[part]), strict=True)
        yield token, max(chosen, LEAST), dict(top)


# ---- errors


def error_body(error: TandemError) -> bytes:
    return _json(_error(error))


def _error(error: TandemError) -> dict[str, Any]:
    """OpenAI's shape. `code` is the stable reason, `param` the field."""
    kind = "server_error" if error.http >= 500 else "rate_limit_error" if error.http == 429 else "invalid_request_error"
    message = error.message.removeprefix("sampling.")
    return {"error": {"message": message, "type": kind, "param": _param(error.field), "code": error.reason}}


def error_event(error: TandemError) -> bytes:
    """For a stream that has begun. No [DONE] follows it: what came is not the whole answer."""
    return _sse(_error(error))


def error_headers(error: TandemError) -> dict[str, str]:
    """Whether and when to try again, in the words that HTTP and OpenAI's own clients know."""
    again = isinstance(error, Busy | Unavailable)
    headers = {"x-should-retry": "true" if again else "false"}
    if again:
        seconds = error.retry_after or 1.0
        headers |= {"retry-after": str(max(1, round(seconds))), "retry-after-ms": str(round(seconds * 1000))}
    return headers


def _param(name: str | None) -> str | None:
    """The body's name for one of GenerateRequest's fields."""
    if name is None:
        return None
    name = name.removeprefix("sampling.").removeprefix("chat.")
    for ours, theirs in (("text", "prompt"), ("token_ids", "prompt"), ("chat", "messages")):
        if name == ours or name.startswith(f"{ours}["):
            return theirs + name.removeprefix(ours)
    return name


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _json(value: object) -> bytes:
    return _encode(value).encode()


def _sse(value: object) -> bytes:
    return f"data: {_encode(value)}\n\n".encode()
