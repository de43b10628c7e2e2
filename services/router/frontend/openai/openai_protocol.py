"""Translates JSON bodies of the OpenAI API to GenerateRequests. Bounds are checked as for gRPC, in
services/router/preprocess.

    body ─parse─▶ Completions or Chat ─requests─▶ one GenerateRequest for each prompt
    JSON or SSE ◀─ Answer (openai_answers.py) ◀─ events
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from services.router.frontend import json_body
from services.router.frontend.json_body import Kind, encode
from services.router.frontend.openai.openai_sampling import GRAMMAR_FIELD, Defaults, Int64, List, Sampled, to_bytes
from services.router.preprocess import json_limits
from services.router.preprocess.grammar_schema import MAX_CHOICES
from services.router.preprocess.json_limits import MAX_NUMBERS, wrong
from services.router.preprocess.prompt import MAX_MESSAGES, MAX_TOOLS
from services.router.preprocess.validation import MAX_BIASES, MAX_REQUEST_ID, MAX_STOP_IDS, MAX_STOPS, over_context
from tandem.errors import InvalidRequest, TandemError
from tandem.v1 import generation_pb2, sampling_pb2

MAX_PROMPTS = 128
DEFAULT_COMPLETION_TOKENS = 16  # max_tokens of /v1/completions when absent, as in OpenAI's API
REST_OF_CONTEXT = 2**31  # likewise of /v1/chat/completions: validation reduces it to the rest of the context
# Maximum lengths of lists in a body. The bounds are those of preprocess; checked here, no item need be parsed.
MAX_ITEMS = {
    "messages": MAX_MESSAGES,
    "tools": MAX_TOOLS,
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_IDS,
    "logit_bias": MAX_BIASES,
    "guided_choice": MAX_CHOICES,
}


# Fields that are not supported, with the values that have no effect. Other unknown fields are ignored, as OpenAI's own
# servers do; ignoring one of these would change the answer.
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


class Completions(Sampled):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    logprobs: Int64 | None = None

    default_max_tokens: ClassVar[int] = DEFAULT_COMPLETION_TOKENS
    input_name: ClassVar[str] = "prompt"

    @classmethod
    def most_numbers(cls, context: int) -> int:
        return MAX_NUMBERS + MAX_PROMPTS * context

    def sampling(self, defaults: Defaults) -> sampling_pb2.SamplingParams:
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
        return [_prompt(prompt, context) for prompt in prompts]


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

    def sampling(self, defaults: Defaults) -> sampling_pb2.SamplingParams:
        params = super().sampling(defaults)
        if self.max_completion_tokens is not None:
            params.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", str(self.top_logprobs), "absent unless logprobs is true")
        if self.logprobs:
            params.logprobs = self.top_logprobs or 0
        return params

    def inputs(self, context: int) -> list[dict[str, Any]]:
        messages = [_message(message, f"messages[{index}]") for index, message in enumerate(self.messages)]
        tools = to_bytes(encode(self.tools)) if self.offers_tools else b""
        return [{"chat": generation_pb2.Chat(messages=messages, tools=tools, tool_choice=self.forced())}]

    def named(self, error: TandemError) -> TandemError:
        if error.field is not None and error.field.startswith(GRAMMAR_FIELD) and self.forced() is not None:
            error.message = error.message.replace(f"{GRAMMAR_FIELD}.calls", "tools")
            error.field = "tools"
        return super().named(error)

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def names_tool(self) -> bool:
        return isinstance(self.tool_choice, dict)

    def forced(self) -> generation_pb2.ToolChoice | None:
        """The calls that the answer must consist of; None if no call is forced. A named tool is called once, as in
        OpenAI's API."""
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
        raise wrong("tool_choice", "of an unknown kind", kinds)


def parse(body: bytes, kind: type[Kind], most_numbers: int = MAX_NUMBERS) -> Kind:
    """Parses a body. Raises InvalidRequest for the first error; the message contains none of the body's content."""
    fields = json_body.read(body, most_numbers)
    if issubclass(kind, Sampled):
        _check_fields(fields)
    return json_body.validated(fields, kind)


def _check_fields(fields: dict[str, Any]) -> None:
    """Refuses unsupported fields, and lists that are too long before their items are parsed."""
    for name, harmless in NOT_SERVED.items():
        if (value := fields.get(name)) is not None and value not in harmless:
            bound = " or ".join(["absent", *map(encode, harmless)])
            raise InvalidRequest(f"this value of {name} is not served; it must be {bound}", field=name, bound=bound)
    for name, most in MAX_ITEMS.items():
        if isinstance(value := fields.get(name), list | dict) and len(value) > most:
            raise wrong(name, f"{len(value)} long", f"at most {most}")


def _prompt(prompt: object, context: int) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": to_bytes(prompt)}
    if isinstance(prompt, list):
        if len(prompt) > context:
            raise over_context(context, len(prompt), "token_ids")
        if all(type(token) is int and -(2**63) <= token < 2**63 for token in prompt):  # not bool
            return {"token_ids": generation_pb2.TokenIds(ids=prompt)}
    raise InvalidRequest("prompt is of an unknown kind", field="prompt", bound="text, token ids, or a list of these")


def _message(message: Message, where: str) -> generation_pb2.ChatMessage:
    calls = [_with_object(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())]
    return generation_pb2.ChatMessage(
        role=_clean(message.role, f"{where}.role"),
        content=_content(message.content, f"{where}.content"),
        tool_calls=to_bytes(encode(calls)) if calls else b"",
        tool_call_id=_clean(message.tool_call_id or "", f"{where}.tool_call_id"),
        name=_clean(message.name or "", f"{where}.name"),
    )


def _with_object(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call in the form that templates expect: its arguments as an object, where OpenAI's API has JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    where = f"{where}.function.arguments"
    json_limits.check(to_bytes(text), name=where)
    try:
        arguments = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise wrong(where, "not readable JSON", "JSON") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _content(content: Any, where: str) -> bytes:
    """A message's text: a string, or parts of type text."""
    if content is None or isinstance(content, str):
        return to_bytes(content or "")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(parts):
        raise InvalidRequest(f"{where} is not text", field=where, bound="a string, or a list of parts of type text")
    return to_bytes("".join(known))


def _clean(text: str, where: str) -> str:
    """For fields that are strings in the proto. Raises InvalidRequest for lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(where, "not valid Unicode", "valid Unicode") from error
    return text


def requests(
    body: Sampled, request_id: str, defaults: Defaults, adapter: str = "", context: int = REST_OF_CONTEXT
) -> list[generation_pb2.GenerateRequest]:
    """One request for each prompt. Raises InvalidRequest."""
    try:
        sampling, inputs = body.sampling(defaults), body.inputs(context)
    except RecursionError as error:  # it was parsed at a smaller depth of the call stack
        raise wrong("body", "nested too deep", "a JSON object of fewer levels") from error
    salt = to_bytes(body.cache_salt or "")
    return [
        generation_pb2.GenerateRequest(
            request_id=request_id if len(inputs) == 1 else f"{request_id[: MAX_REQUEST_ID - 4]}-{index}",
            sampling=sampling,
            cache_salt=salt,
            adapter=adapter,
            priority=body.priority or 0,
            ttft_slo_seconds=body.ttft_slo_seconds,
            **fields,
        )
        for index, fields in enumerate(inputs)
    ]
