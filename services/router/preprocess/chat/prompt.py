"""Turns the prompt of a request (text, token ids or a chat) into the model's tokens."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from services.router.preprocess import json_limits
from services.router.preprocess.chat.chat_template import Rendering
from services.router.preprocess.chat.template_abilities import REASONING_NAMES
from services.router.preprocess.json_limits import out_of_bounds
from services.router.preprocess.served_model import ModelFacts
from services.router.preprocess.tokenizer import Tokenizer
from services.router.preprocess.validation import over_context, token_ids, utf8
from tandem.errors import InvalidRequest
from tandem.v1 import generation_pb2

MAX_MESSAGES = 1024
MAX_TOOLS = 128
MAX_TEMPLATE_BYTES = 64 * 1024
END_CHARACTERS = 256


class PromptTokens(NamedTuple):
    tokens: list[int]
    # The last END_CHARACTERS of a rendered chat and, if its last message is continued, all of that message, whose
    # beginning shows whether it is reasoning. Empty for text and token ids.
    rendered_end: str


def prompt_tokens(
    message: generation_pb2.GenerateRequest, tokenizer: Tokenizer, model: ModelFacts, *, fixed: bool = False
) -> PromptTokens:
    """`fixed`: the router has replaced the prompt by its tokens, which include a suffix. Raises InvalidRequest."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("a request needs text, token_ids or chat", field="input", bound="exactly one of them")
    if message.suffix and kind != "text" and not fixed:
        raise InvalidRequest("a suffix needs a prompt that is text", field="suffix", bound="absent without text")
    rendered_end = ""
    if kind == "token_ids":
        if len(message.token_ids.ids) >= model.context:
            raise over_context(model.context, len(message.token_ids.ids), kind)
        known = model.vocab_size if tokenizer.backend is None else min(model.vocab_size, tokenizer.known_ids)
        tokens = token_ids(message.token_ids.ids, kind, known)
    elif message.suffix:
        tokens = _around_gap(message, tokenizer, model)
    else:
        chat = kind == "chat"
        if chat:
            text = tokenizer.render(_messages(message.chat), tools_of(message.chat.tools), _rendering(message.chat))
            last = message.chat.messages[-1]
            continued = len((last.content or last.reasoning).decode()) if message.chat.continue_last_message else 0
            rendered_end = text[-END_CHARACTERS - continued :]
        else:
            text = utf8(message.text, "text", "at least one character")
        if least := tokenizer.at_least(text, model.context):
            raise over_context(model.context, least, kind, counted=False)
        tokens = tokenizer.encode(text, special=_adds_special(message, not chat))  # a template writes its own
    if not tokens:
        raise InvalidRequest(f"{kind} is empty", field=kind, bound="at least one token")
    if len(tokens) >= model.context:
        raise over_context(model.context, len(tokens), kind)
    return PromptTokens(tokens, rendered_end)


def _adds_special(message: generation_pb2.GenerateRequest, default: bool) -> bool:
    return bool(message.add_special_tokens) if message.HasField("add_special_tokens") else default


def _rendering(chat: generation_pb2.Chat) -> Rendering:
    template = utf8(chat.template, "chat.template", None) or None
    if len(chat.template) > MAX_TEMPLATE_BYTES:
        raise out_of_bounds("chat.template", f"{len(chat.template)} bytes", f"at most {MAX_TEMPLATE_BYTES} bytes")
    return Rendering(
        variables=_variables(chat.template_variables),
        continue_last=chat.continue_last_message,
        generation_prompt=not chat.without_generation_prompt,
        template=template,
    )


def _variables(encoded: bytes) -> dict[str, Any]:
    name, bound = "chat.template_variables", "a JSON object"
    variables = _json(encoded, name, bound) if encoded else {}
    if not isinstance(variables, dict):
        raise InvalidRequest(f"{name} is not an object", field=name, bound=bound)
    return variables


def _around_gap(message: generation_pb2.GenerateRequest, tokenizer: Tokenizer, model: ModelFacts) -> list[int]:
    """The prompt for a completion between `text` and `suffix`."""
    if tokenizer.infilling is None:
        raise InvalidRequest(
            "this model's tokenizer has no tokens for a prompt, a suffix and the gap between them",
            field="suffix",
            bound="absent with this model",
        )
    before, after = utf8(message.text, "text", None), utf8(message.suffix, "suffix", None)
    if least := tokenizer.at_least(before + after, model.context):
        raise over_context(model.context, least, "text", counted=False)
    return tokenizer.infilling.encode(before, after, special=_adds_special(message, True))


def _messages(chat: generation_pb2.Chat) -> list[dict[str, Any]]:
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise out_of_bounds("chat.messages", f"{len(chat.messages)} messages", f"1 to {MAX_MESSAGES} messages")
    messages = []
    for index, message in enumerate(chat.messages):
        where = f"chat.messages[{index}]"
        if not message.role:
            raise InvalidRequest("a message has no role", field=f"{where}.role", bound="not empty")
        fields: dict[str, Any] = {
            "role": message.role,
            "content": utf8(message.content, f"{where}.content", None),
        }
        if message.reasoning:
            fields |= dict.fromkeys(REASONING_NAMES, utf8(message.reasoning, f"{where}.reasoning", None))
        if message.tool_calls:
            calls = _functions(message.tool_calls, f"{where}.tool_calls")
            fields["tool_calls"] = [_with_object(call) for call in calls]
        fields |= {name: value for name in ("tool_call_id", "name") if (value := getattr(message, name))}
        messages.append(fields)
    return messages


def tools_of(tools: bytes, name: str = "chat.tools") -> list[Any] | None:
    return _functions(tools, name) if tools else None


def _functions(encoded: bytes, name: str) -> list[Any]:
    """Tools or tool calls: objects that have a function with a name. The template interprets the rest."""
    bound = f"a list of 1 to {MAX_TOOLS} functions, each with a name"
    functions = _json(encoded, name, bound)
    if not isinstance(functions, list) or not 1 <= len(functions) <= MAX_TOOLS:
        raise InvalidRequest(f"{name} is not a list of functions, or too long", field=name, bound=bound)
    for index, entry in enumerate(functions):
        function = entry.get("function") if isinstance(entry, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{name}[{index}] is not a named function", field=f"{name}[{index}]", bound=bound)
    return functions


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A call in the form that templates expect: its arguments as an object instead of OpenAI's JSON text. Text that is
    not a JSON object remains text, because a model may write anything and the conversation must continue."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            value = _json(arguments.encode(), "arguments", "an object") if arguments.strip() else {}
        except InvalidRequest:
            value = None
        arguments = value if isinstance(value, dict) else arguments
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _json(encoded: bytes, name: str, bound: str) -> Any:
    """Parses JSON. Raises InvalidRequest if it is too large, not JSON or not text."""
    json_limits.check(encoded, name=name)
    try:
        value = json.loads(encoded)
        json.dumps(value, ensure_ascii=False).encode()  # an escape may be a lone surrogate, which is not text
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not readable JSON", field=name, bound=bound) from error
    return value
