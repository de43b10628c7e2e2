"""Translates JSON bodies of the OpenAI API to GenerateRequests. Bounds are checked as for gRPC, in
services/router/preprocess.

    body ─parse─▶ Completions or Chat ─requests─▶ one GenerateRequest for each prompt
    JSON or SSE ◀─ Answer (openai_answers.py) ◀─ events
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from services.router.frontend import json_body
from services.router.frontend.json_body import Kind, NotServed, check_lengths, check_served, clean, encode
from services.router.frontend.openai.openai_sampling import GRAMMAR_FIELD, Int64, List, Sampled, to_bytes
from services.router.preprocess.chat.prompt import MAX_MESSAGES, MAX_TOOLS
from services.router.preprocess.chat.template_abilities import EFFORTS
from services.router.preprocess.grammar_schema import MAX_CHOICES
from services.router.preprocess.json_limits import MAX_NUMBERS, out_of_bounds
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.tokenizer import Tokenizer
from services.router.preprocess.validation import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_PROMPT_LOGPROBS,
    MAX_REQUEST_ID,
    MAX_STOP_IDS,
    MAX_STOPS,
    check_prompt_logprobs,
    over_context,
)
from tandem.errors import InvalidRequest, TandemError
from tandem.v1 import generation_pb2, sampling_pb2

MAX_PROMPTS = 128
MAX_DOCUMENTS = 1024
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
    "documents": MAX_DOCUMENTS,
    "allowed_token_ids": MAX_ALLOWED_IDS,
    "bad_words": MAX_BAD_WORDS,
}
# The body's names for fields of the proto's Chat; other names are the same.
CHAT_FIELDS = {
    "chat.template_variables.documents": "documents",
    "chat.template_variables": "chat_template_kwargs",
    "chat.continue_last_message": "continue_final_message",
    "chat.template": "chat_template",
}


# Fields that are not supported, with the values that have no effect. Other unknown fields are ignored, as OpenAI's own
# servers do; ignoring one of these would change the answer.
NOT_SERVED: NotServed = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "web_search_options": (),
    "moderation": (),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "logprob_token_ids": ([],),
    "watermarking": (False,),
}


# Parts of a message that are not text, in OpenAI's API and vLLM's.
OTHER_MEDIA = {
    *("image_url", "image_embeds", "input_image", "input_audio", "audio_url", "video_url"),
    *("file", "input_file"),
}


class Completions(Sampled):
    """POST /v1/completions."""

    prompt: Any
    suffix: str | None = None
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
                    raise out_of_bounds("prompt_logprobs", str(self.prompt_logprobs), "absent or logprobs, with echo")
                params.prompt_logprobs = self.logprobs
        if self.only_echo:
            params.max_tokens = 1  # generated, since a request ends with a token, and not shown
        return params

    @property
    def only_echo(self) -> bool:
        """Whether the prompt is scored and nothing else, as evaluation harnesses request it."""
        return bool(self.echo) and self.max_tokens == 0

    def inputs(self, context: int) -> list[dict[str, Any]]:
        """`prompt` is a text, a list of token ids, or a list of one of these."""
        prompts = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if prompts and type(prompts[0]) is int:
            prompts = [prompts]
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise out_of_bounds("prompt", f"{len(prompts)} prompts", f"1 to {MAX_PROMPTS} prompts")
        if self.suffix and self.echo:
            raise out_of_bounds("suffix", "set with echo", "absent with echo")
        suffix = {"suffix": to_bytes(self.suffix)} if self.suffix else {}
        return [{**_prompt(prompt, context), **suffix} for prompt in prompts]


class Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: str
    content: Any = None
    tool_calls: List[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as newer vLLM and OpenRouter name it


class Chat(Sampled):
    """POST /v1/chat/completions."""

    messages: List[Message]
    tools: List[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    documents: List[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    default_max_tokens: ClassVar[int] = REST_OF_CONTEXT
    input_name: ClassVar[str] = "messages"
    not_served: ClassVar[NotServed] = {"echo": (False,)}

    def sampling(self, defaults: Defaults) -> sampling_pb2.SamplingParams:
        params = super().sampling(defaults)
        if self.max_completion_tokens is not None:
            params.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise out_of_bounds("top_logprobs", str(self.top_logprobs), "absent unless logprobs is true")
        if self.logprobs:
            params.logprobs = self.top_logprobs or 0
        return params

    def inputs(self, context: int) -> list[dict[str, Any]]:
        messages = [_message(message, f"messages[{index}]") for index, message in enumerate(self.messages)]
        offered = self.offered()
        tools = to_bytes(encode(offered)) if offered else b""
        if self.continue_final_message and self.add_generation_prompt:
            raise out_of_bounds("add_generation_prompt", "true with continue_final_message", "absent or false with it")
        variables = self.template_variables()
        chat = generation_pb2.Chat(
            messages=messages,
            tools=tools,
            tool_choice=self.forced(),
            template_variables=to_bytes(encode(variables)) if variables else b"",
            continue_last_message=bool(self.continue_final_message),
            without_generation_prompt=self.add_generation_prompt is False,
            template=to_bytes(self.chat_template or ""),
        )
        if self.parallel_tool_calls is False:
            chat.parallel_calls = False
        return [{"chat": chat}]

    def template_variables(self) -> dict[str, Any]:
        """The template's variables as in vLLM; `chat_template_kwargs` takes precedence."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            if self.reasoning_effort not in EFFORTS:
                raise out_of_bounds("reasoning_effort", "of an unknown kind", f"one of {', '.join(EFFORTS)}")
            variables["reasoning_effort"] = self.reasoning_effort
        if self.documents:
            variables["documents"] = self.documents
        return variables | (self.chat_template_kwargs or {})

    def named(self, error: TandemError) -> TandemError:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        own = {"sampling.max_tokens": limit, "sampling.logprobs": "top_logprobs"}
        for ours, theirs in (CHAT_FIELDS | own).items():
            if error.field is not None and (error.field == ours or error.field.startswith(f"{ours}.")):
                error.message = error.message.replace(ours, theirs)
                error.field = theirs + error.field.removeprefix(ours)
                break
        if error.field is not None and error.field.startswith(GRAMMAR_FIELD) and self.forced() is not None:
            error.message = error.message.replace(f"{GRAMMAR_FIELD}.calls", "tools")
            error.field = "tools"
        return super().named(error)

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def names_tool(self) -> bool:
        return isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "function"

    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call. Raises InvalidRequest if tool_choice allows an unknown one."""
        tools = (self.tools or []) if self.tool_choice != "none" else []
        match self.tool_choice:
            case {"type": "allowed_tools", "allowed_tools": {"tools": list(allowed)}}:
                names = {name for tool in tools if (name := _function_name(tool)) is not None}
                chosen = [_function_name(tool) for tool in allowed]
                if not chosen or not names.issuperset(chosen):
                    raise out_of_bounds(
                        "tool_choice.allowed_tools.tools", "empty or unknown", "a list of functions in tools"
                    )
                return [tool for tool in tools if _function_name(tool) in chosen]
        return tools

    def forced(self) -> generation_pb2.ToolChoice | None:
        """The calls that the answer must consist of; None if no call is forced. A named tool is called once, as in
        OpenAI's API."""
        parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case None | "none" | "auto" | {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": list()}}:
                return None
            case "required" | {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": list()}}:
                return generation_pb2.ToolChoice(several=parallel)
            case {"type": "function", "function": {"name": str(name)}}:
                return generation_pb2.ToolChoice(name=clean(name, "tool_choice"))
        kinds = 'none, auto, required, {"type": "function", "function": {"name": ...}} or allowed_tools'
        raise out_of_bounds("tool_choice", "of an unknown kind", kinds)


def parse(body: bytes, kind: type[Kind], most_numbers: int = MAX_NUMBERS) -> Kind:
    """Parses a body. Raises InvalidRequest for the first error; the message contains none of the body's content."""
    fields = json_body.read(body, most_numbers)
    if issubclass(kind, Sampled):
        check_served(fields, NOT_SERVED | kind.not_served)
        check_lengths(fields, MAX_ITEMS)
    return json_body.validated(fields, kind)


def page_limit(value: str | None, most: int, default: int) -> int:
    """The query parameter `limit` of a list. Raises InvalidRequest."""
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) <= 5 and 1 <= int(value) <= most):
        raise out_of_bounds("limit", "out of bounds", f"1 to {most}")
    return int(value)


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
    return generation_pb2.ChatMessage(
        role=clean(message.role, f"{where}.role"),
        content=_content(message.content, f"{where}.content"),
        tool_calls=to_bytes(encode(message.tool_calls)) if message.tool_calls else b"",
        tool_call_id=clean(message.tool_call_id or "", f"{where}.tool_call_id"),
        name=clean(message.name or "", f"{where}.name"),
        reasoning=to_bytes(message.reasoning_content or message.reasoning or ""),
    )


def _content(content: Any, where: str) -> bytes:
    """A message's text: a string, or parts of type text or refusal."""
    if content is None or isinstance(content, str):
        return to_bytes(content or "")
    bound = "a string, or a list of parts of type text"
    if not isinstance(content, list):
        return to_bytes(_part(content, where, bound))
    return to_bytes("".join(_part(part, f"{where}[{index}]", bound) for index, part in enumerate(content)))


def _part(part: Any, where: str, bound: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "refusal") and isinstance(text := part.get(kind), str):
        return text
    if isinstance(kind, str) and kind in OTHER_MEDIA:
        about = f"{where} is of type {kind}; this server serves text only, and its model would not see it"
        raise InvalidRequest(about, field=where, bound=bound)
    raise InvalidRequest(f"{where} is not text", field=where, bound=bound)


def _function_name(tool: object) -> str | None:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
    return None


def requests(
    body: Sampled, request_id: str, defaults: Defaults, adapter: str = "", context: int = REST_OF_CONTEXT
) -> list[generation_pb2.GenerateRequest]:
    """One request for each prompt. Raises InvalidRequest."""
    try:
        sampling, inputs = body.sampling(defaults), body.inputs(context)
    except RecursionError as error:  # it was parsed at a smaller depth of the call stack
        raise out_of_bounds("body", "nested too deep", "a JSON object of fewer levels") from error
    salt = to_bytes(body.cache_salt or "")
    return [
        generation_pb2.GenerateRequest(
            request_id=request_id if len(inputs) == 1 else f"{request_id[: MAX_REQUEST_ID - 4]}-{index}",
            sampling=sampling,
            cache_salt=salt,
            adapter=adapter,
            priority=body.priority or 0,
            ttft_slo_seconds=body.ttft_slo_seconds,
            add_special_tokens=body.add_special_tokens,
            **fields,
        )
        for index, fields in enumerate(inputs)
    ]


def check_scores(requests: Sequence[generation_pb2.GenerateRequest], tokenizer: Tokenizer) -> None:
    """Raises InvalidRequest if the prompts of a body have more scores together than one may have: all are in one
    answer. Texts are tokenised for this, so it belongs on a thread."""
    params, tokens = requests[0].sampling, 0
    if len(requests) == 1 or not params.HasField("prompt_logprobs"):
        return  # preprocess checks each prompt
    for request in requests:
        tokens += _tokens(request, tokenizer)
        check_prompt_logprobs(params, tokens, len(requests))


def _tokens(request: generation_pb2.GenerateRequest, tokenizer: Tokenizer) -> int:
    """How many tokens the prompt of a completion has, without special ones; a lower bound above MAX_PROMPT_LOGPROBS."""
    if request.WhichOneof("input") == "token_ids":
        return len(request.token_ids.ids)
    if tokenizer.backend is None:
        return 0  # preprocess refuses it
    text = (request.text + request.suffix).decode(errors="replace")
    return tokenizer.at_least(text, MAX_PROMPT_LOGPROBS) or len(tokenizer.encode(text, special=False))


def prompt_text(request: generation_pb2.GenerateRequest, tokenizer: Tokenizer) -> str:
    """The prompt of a completion. Raises InvalidRequest for token ids without a tokenizer."""
    if request.WhichOneof("input") == "text":
        return request.text.decode(errors="replace")
    try:
        return tokenizer.decode(request.token_ids.ids)
    except OverflowError:  # an id that no vocabulary has; the request will be refused
        return ""
