"""Turns the prompt of a request (text, token ids or a chat) into the model's tokens."""

from __future__ import annotations

import json
from typing import Any

from services.router.preprocess import json_limits
from services.router.preprocess.served_model import ModelFacts
from services.router.preprocess.tokenizer import Tokenizer
from services.router.preprocess.validation import out_of_bounds, over_context, token_ids, utf8
from tandem.errors import InvalidRequest
from tandem.v1 import generation_pb2

MAX_MESSAGES = 1024
MAX_TOOLS = 128


def prompt_tokens(
    message: generation_pb2.GenerateRequest, tokenizer: Tokenizer, model: ModelFacts, *, fixed: bool = False
) -> list[int]:
    """`fixed`: the router has replaced the prompt by its tokens, so a suffix is among them."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("a request needs text, token_ids or chat", field="input", bound="exactly one of them")
    if message.suffix and kind != "text" and not fixed:
        raise InvalidRequest("a suffix needs a prompt that is text", field="suffix", bound="absent without text")
    if kind == "token_ids":
        if len(message.token_ids.ids) >= model.context:
            raise over_context(model.context, len(message.token_ids.ids), kind)
        known = model.vocab_size if tokenizer.backend is None else min(model.vocab_size, tokenizer.known_ids)
        tokens = token_ids(message.token_ids.ids, kind, known)
    elif message.suffix:
        tokens = _around_gap(message, tokenizer, model)
    else:
        chat = kind == "chat"
        text = (
            tokenizer.render(_messages(message.chat), tools_of(message.chat.tools))
            if chat
            else utf8(message.text, "text", "at least one character")
        )
        if least := tokenizer.at_least(text, model.context):
            raise over_context(model.context, least, kind, counted=False)
        tokens = tokenizer.encode(text, special=not chat)  # a template writes the special tokens itself
    if not tokens:
        raise InvalidRequest(f"{kind} is empty", field=kind, bound="at least one token")
    if len(tokens) >= model.context:
        raise over_context(model.context, len(tokens), kind)
    return tokens


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
    return tokenizer.infilling.encode(before, after)


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
        if message.tool_calls:
            fields["tool_calls"] = _functions(message.tool_calls, f"{where}.tool_calls")
        fields |= {name: value for name in ("tool_call_id", "name") if (value := getattr(message, name))}
        messages.append(fields)
    return messages


def tools_of(tools: bytes) -> list[Any] | None:
    return _functions(tools, "chat.tools") if tools else None


def _functions(encoded: bytes, name: str) -> list[Any]:
    """Tools or tool calls: objects that have a function with a name. The template interprets the rest."""
    bound = f"a list of 1 to {MAX_TOOLS} functions, each with a name"
    json_limits.check(encoded, name=name)
    try:
        functions = json.loads(encoded)
        json.dumps(functions, ensure_ascii=False).encode()  # an escape may be a lone surrogate, which is not text
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not readable JSON", field=name, bound=bound) from error
    if not isinstance(functions, list) or not 1 <= len(functions) <= MAX_TOOLS:
        raise InvalidRequest(f"{name} is not a list of functions, or too long", field=name, bound=bound)
    for index, entry in enumerate(functions):
        function = entry.get("function") if isinstance(entry, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{name}[{index}] is not a named function", field=f"{name}[{index}]", bound=bound)
    return functions
