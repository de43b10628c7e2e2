"""The OpenAI API in terms of Generate: JSON bodies to GenerateRequests, and errors to JSON. Decides nothing else; every
bound is checked where gRPC's are, in admit.py.

    body ─parse─▶ Completions or Chat ─requests─▶ one GenerateRequest for each prompt
    JSON or SSE ◀─ Answer (openai_answers.py) ◀─ events
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.router import json_body
from services.router.admit import (
    MAX_BIASES,
    MAX_MESSAGES,
    MAX_REQUEST_ID,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOOLS,
    OVER_CONTEXT,
    over_context,
)
from services.router.json_body import MAX_NUMBERS, wrong
from services.router.structured import MAX_CHOICES
from tandem.errors import Busy, CheckpointRefused, InvalidRequest, TandemError, Unavailable
from tandem.status import NAME_BYTES, shown
from tandem.v1 import common_pb2, generation_pb2

MAX_PROMPTS = 128
COMPLETION_TOKENS = 16  # what /v1/completions gives when max_tokens is absent, as OpenAI's does
REST_OF_CONTEXT = 2**31  # what /v1/chat/completions gives, likewise: admit takes the lesser of it and the room
GRAMMAR = "sampling.grammar"
CODES = {OVER_CONTEXT: "context_length_exceeded"}  # of OpenAI's, which clients switch on
# Items of the lists that a body may have. The bounds are admit's; here they spare the look at each item.
MOST = {
    "messages": MAX_MESSAGES,
    "tools": MAX_TOOLS,
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_IDS,
    "logit_bias": MAX_BIASES,
    "guided_choice": MAX_CHOICES,
}

Item = TypeVar("Item")
List = Annotated[list[Item], Field(fail_fast=True)]  # pydantic would make an error of every item
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
UInt64 = Annotated[int, Field(ge=0, lt=2**64)]
TokenKey = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=False)]  # a JSON object's keys are strings

# Fields that are known and not served, and the values of them that ask for nothing. Any other field that is not in a
# model below is ignored, as OpenAI's own servers do; ignoring one of these would change the answer.
NOT_SERVED: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
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
    "kv_transfer_params": (),
}


# Fields that SamplingParams has under the same name.
SAME = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens", "n"),
    *("stop_token_ids", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"),
    "prompt_logprobs",
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


class Structured(BaseModel):
    """`structured_outputs`, as vLLM has it: one of these. Nothing else that it may hold is ignored."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # an alias, because a model has a method of that name
    schema_: Any = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None


class Sampled(BaseModel, ABC):
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
    n: Int64 | None = None
    best_of: Int64 | None = None
    stop: str | List[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: List[Int64] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[TokenKey, float] | None = None
    prompt_logprobs: Int64 | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Structured | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    ttft_slo_seconds: float | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    tandem_receipt: bool | None = None

    default_max_tokens: ClassVar[int]
    input_name: ClassVar[str]

    @classmethod
    def most_numbers(cls, context: int) -> int:
        """Values that a body may have, for a context of so many tokens."""
        return MAX_NUMBERS

    def sampling(self, defaults: Defaults) -> generation_pb2.SamplingParams:
        given = {name: value for name in SAME if (value := getattr(self, name)) is not None}
        usual = {"temperature": 1.0, **defaults.model_dump(exclude_none=True)}
        params = generation_pb2.SamplingParams(**{**usual, **given})
        if params.top_k == -1:  # how vLLM's clients say "off"
            params.top_k = 0
        if self.best_of not in (None, self.n or 1):
            raise wrong("best_of", str(self.best_of), "absent or n: all completions are given, none is chosen")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "asked for in a stream", "absent with stream")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        params.stop.extend(_bytes(stop) for stop in stops if stop or len(stops) > 1)  # "" alone says nothing
        params.include_stop = bool(self.include_stop_str_in_output)
        if (found := self.grammar()) is not None:
            params.grammar.CopyFrom(found[1])
        return params

    def grammar(self) -> tuple[str, common_pb2.Grammar] | None:
        """What the text must fit, and the field that says so. Raises InvalidRequest if two do."""
        structured = self.structured_outputs or Structured()
        given = {
            "response_format": _of_format(self.response_format or {"type": "text"}),
            "structured_outputs.json": _of_schema(structured.schema_),
            "structured_outputs.json_object": common_pb2.Grammar(json=True) if structured.json_object else None,
            "structured_outputs.regex": _of_regex(structured.regex),
            "structured_outputs.choice": _of_choice(structured.choice),
            "structured_outputs.grammar": _of_rules(structured.grammar),
            "guided_json": _of_schema(self.guided_json),
            "guided_regex": _of_regex(self.guided_regex),
            "guided_choice": _of_choice(self.guided_choice),
            "guided_grammar": _of_rules(self.guided_grammar),
        }
        found = [(name, grammar) for name, grammar in given.items() if grammar is not None]
        if not found:
            return None
        (name, grammar), *others = found
        if others:
            raise wrong(others[0][0], f"given beside {name}", "the only one")
        return name.partition(".")[0], grammar

    def named(self, error: TandemError) -> TandemError:
        """The same error, with this body's own name for what the text must fit, and for what the context must hold."""
        if error.reason == OVER_CONTEXT:
            error.field = self.input_name
        if error.field is not None and error.field.startswith(GRAMMAR) and (found := self.grammar()) is not None:
            error.field = found[0] + error.field.removeprefix(GRAMMAR)
        return error

    @abstractmethod
    def inputs(self, context: int) -> list[dict[str, Any]]:
        """For each prompt its part of a GenerateRequest; `context` in tokens. Raises InvalidRequest."""


class Completions(Sampled):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    logprobs: Int64 | None = None

    default_max_tokens: ClassVar[int] = COMPLETION_TOKENS
    input_name: ClassVar[str] = "prompt"

    @classmethod
    def most_numbers(cls, context: int) -> int:
        return MAX_NUMBERS + MAX_PROMPTS * context

    def sampling(self, defaults: Defaults) -> generation_pb2.SamplingParams:
        params = super().sampling(defaults)
        if self.logprobs is not None:
            params.logprobs = self.logprobs
            if self.echo:
                if self.prompt_logprobs not in (None, self.logprobs):
                    raise wrong("prompt_logprobs", str(self.prompt_logprobs), "absent or logprobs, with echo")
                params.prompt_logprobs = self.logprobs
        return params

    def inputs(self, context: int) -> list[dict[str, Any]]:
        """`prompt` is a text, a list of token ids, or a list of one of these."""
        prompts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if prompts and type(prompts[0]) is int:
            prompts = [prompts]
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise wrong("prompt", f"{len(prompts)} prompts", f"1 to {MAX_PROMPTS} prompts")
        return [_prompt(one, context) for one in prompts]


class Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: str
    content: Any = None
    tool_calls: List[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Chat(Sampled):
    """POST /v1/chat/completions."""

    messages: List[Message]
    tools: List[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None

    default_max_tokens: ClassVar[int] = REST_OF_CONTEXT
    input_name: ClassVar[str] = "messages"

    def sampling(self, defaults: Defaults) -> generation_pb2.SamplingParams:
        params = super().sampling(defaults)
        if self.max_completion_tokens is not None:
            params.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", str(self.top_logprobs), "absent unless logprobs is true")
        if self.logprobs:
            params.logprobs = self.top_logprobs or 0
        return params

    def inputs(self, context: int) -> list[dict[str, Any]]:
        messages = [_message(one, f"messages[{index}]") for index, one in enumerate(self.messages)]
        tools = _bytes(encode(self.tools)) if self.offers_tools else b""
        return [{"chat": generation_pb2.Chat(messages=messages, tools=tools, tool_choice=self.forced())}]

    def named(self, error: TandemError) -> TandemError:
        if error.field is not None and error.field.startswith(GRAMMAR) and self.forced() is not None:
            error.message = error.message.replace(f"{GRAMMAR}.calls", "tools")
            error.field = "tools"
        return super().named(error)

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def names_tool(self) -> bool:
        return isinstance(self.tool_choice, dict)

    def forced(self) -> generation_pb2.ToolChoice | None:
        """The calls that the answer must be; None: it may be anything. A named tool is called once, as OpenAI's API
        has it."""
        parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case None | "none" | "auto":
                if not parallel:
                    raise wrong("parallel_tool_calls", "false", "absent or true unless tool_choice forces a call")
                return None
            case "required":
                return generation_pb2.ToolChoice(several=parallel)
            case {"type": "function", "function": {"name": str(name)}}:
                return generation_pb2.ToolChoice(name=_clean(name, "tool_choice"))
        kinds = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise wrong("tool_choice", "of no known kind", kinds)


Kind = TypeVar("Kind", bound=BaseModel)


def parse(body: bytes, kind: type[Kind], most_numbers: int = MAX_NUMBERS) -> Kind:
    """Raises InvalidRequest at the first thing that is wrong, with nothing of the body's content in the message."""
    fields = json_body.read(body, most_numbers)
    if issubclass(kind, Sampled):
        _check_fields(fields)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{name}: {first['msg']}", field=name, bound=first["msg"]) from error


def _check_fields(fields: dict[str, Any]) -> None:
    """What is not served, and lists that are too long, before a look at each of their items."""
    for name, harmless in NOT_SERVED.items():
        if (value := fields.get(name)) is not None and value not in harmless:
            bound = " or ".join(["absent", *map(encode, harmless)])
            raise InvalidRequest(f"this value of {name} is not served; it must be {bound}", field=name, bound=bound)
    for name, most in MOST.items():
        if isinstance(value := fields.get(name), list | dict) and len(value) > most:
            raise wrong(name, f"{len(value)} long", f"at most {most}")


def _prompt(prompt: object, context: int) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": _bytes(prompt)}
    if isinstance(prompt, list):
        if len(prompt) > context:
            raise over_context(context, len(prompt), "token_ids")
        if all(type(one) is int and -(2**63) <= one < 2**63 for one in prompt):  # not bool
            return {"token_ids": generation_pb2.TokenIds(ids=prompt)}
    raise InvalidRequest("prompt is of no known kind", field="prompt", bound="text, token ids, or a list of these")


def _message(one: Message, where: str) -> generation_pb2.ChatMessage:
    calls = [_with_object(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(one.tool_calls or ())]
    return generation_pb2.ChatMessage(
        role=_clean(one.role, f"{where}.role"),
        content=_content(one.content, f"{where}.content"),
        tool_calls=_bytes(encode(calls)) if calls else b"",
        tool_call_id=_clean(one.tool_call_id or "", f"{where}.tool_call_id"),
        name=_clean(one.name or "", f"{where}.name"),
    )


def _with_object(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call as templates want it: its arguments are an object, where OpenAI's API has them as JSON."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    where = f"{where}.function.arguments"
    json_body.check(_bytes(text), name=where)
    try:
        arguments = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise wrong(where, "no readable JSON", "JSON") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _content(content: Any, where: str) -> bytes:
    """A message's text: a string, or parts of type text."""
    if content is None or isinstance(content, str):
        return _bytes(content or "")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(parts):
        raise InvalidRequest(f"{where} is not text", field=where, bound="a string, or a list of parts of type text")
    return _bytes("".join(known))


def _of_format(given: dict[str, Any]) -> common_pb2.Grammar | None:
    """OpenAI's response_format. A schema holds whether it says `strict` or not."""
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return common_pb2.Grammar(json=True)
        case "json_schema":
            inner = given.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if schema is None:
                raise wrong("response_format.json_schema.schema", "absent", "a JSON schema")
            return _of_schema(schema)
    raise wrong("response_format.type", "of no known kind", "text, json_object or json_schema")


def _of_schema(given: Any) -> common_pb2.Grammar | None:
    """A JSON schema, or one as text."""
    if given is None:
        return None
    return common_pb2.Grammar(json_schema=_bytes(given if isinstance(given, str) else encode(given)))


def _of_regex(given: str | None) -> common_pb2.Grammar | None:
    return None if given is None else common_pb2.Grammar(regex=_bytes(given))


def _of_choice(given: list[str] | None) -> common_pb2.Grammar | None:
    return None if given is None else common_pb2.Grammar(choice=common_pb2.Choices(texts=map(_bytes, given)))


def _of_rules(given: str | None) -> common_pb2.Grammar | None:
    return None if given is None else common_pb2.Grammar(ebnf=_bytes(given))


def _bytes(text: str) -> bytes:
    """Lone surrogates, which JSON can spell, become invalid UTF-8, which admit refuses by field."""
    return text.encode("utf-8", "surrogatepass")


def _clean(text: str, where: str) -> str:
    """For fields that are strings in the proto. Raises InvalidRequest for lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(where, "no valid Unicode", "valid Unicode") from error
    return text


def new_id() -> str:
    return secrets.token_hex(8)


def requests(
    body: Sampled, request_id: str, defaults: Defaults, adapter: str = "", context: int = REST_OF_CONTEXT
) -> list[generation_pb2.GenerateRequest]:
    """One for each prompt. Raises InvalidRequest."""
    try:
        sampling, inputs = body.sampling(defaults), body.inputs(context)
    except RecursionError as error:  # it was read where fewer calls were under way
        raise wrong("body", "nested too deep", "a JSON object of some levels") from error
    salt = _bytes(body.cache_salt or "")
    return [
        generation_pb2.GenerateRequest(
            request_id=request_id if len(inputs) == 1 else f"{request_id[: MAX_REQUEST_ID - 4]}-{index}",
            sampling=sampling,
            cache_salt=salt,
            adapter=adapter,
            priority=body.priority or 0,
            ttft_slo_seconds=body.ttft_slo_seconds,
            **one,
        )
        for index, one in enumerate(inputs)
    ]


def _id_of(request_id: str, index: int) -> str:
    """Of one of several prompts, within the bound of an id. Ids need not be unique: Job.internal_id is."""
    suffix = f"-{index}"
    return request_id[: MAX_REQUEST_ID - len(suffix)] + suffix


# ---- errors


def error_body(error: TandemError) -> bytes:
    return to_json(_error(error))


def _error(error: TandemError) -> dict[str, Any]:
    """OpenAI's shape. `code` is the stable reason, `param` the field."""
    kind = "server_error" if error.http >= 500 else "rate_limit_error" if error.http == 429 else "invalid_request_error"
    message, param = shown(error.message.removeprefix("sampling.").removeprefix("chat.")), _param(error.field)
    return {"error": {"message": message, "type": kind, "param": param, "code": CODES.get(error.reason, error.reason)}}


def error_event(error: TandemError) -> bytes:
    """For a stream that has begun. No [DONE] follows it: what came is not the whole answer."""
    return to_sse(_error(error))


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
    name = shown(name, NAME_BYTES).removeprefix("sampling.").removeprefix("chat.")
    for ours, theirs in (("text", "prompt"), ("token_ids", "prompt"), ("chat", "messages")):
        if name == ours or name.startswith(f"{ours}["):
            return theirs + name.removeprefix(ours)
    return name


encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_json(value: object) -> bytes:
    return encode(value).encode()


def to_sse(value: object) -> bytes:
    return f"data: {encode(value)}\n\n".encode()
