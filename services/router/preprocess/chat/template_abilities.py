"""Tests how a chat template treats messages on which templates differ, and adapts messages to it.

Templates drop a role that they do not know, concatenate a call's arguments as text or iterate them as an object, and
refuse values of `reasoning_effort`. `find` renders examples when the checkpoint is loaded, and searches their words in
the result; `fit` then gives each conversation the form that this template shows completely.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.router.preprocess.chat.compiled_template import FAILURES, CompiledTemplate, Messages
from tandem.errors import InvalidRequest

# Values of `reasoning_effort`, least first: OpenAI's, and `max` of DeepSeek.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
HARMONY_EFFORTS = ("low", "medium", "high")  # of gpt-oss, whose template accepts any word
# Names under which templates read a message's reasoning: Qwen, GLM, DeepSeek and most others; newer ones; gpt-oss.
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

_WORD = "qzvxsentinel"
_OBJECT = {"key": _WORD}
_USER = {"role": "user", "content": "x"}
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string", "description": "x"}}, "required": ["key"]}
_TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": _PARAMETERS}}
_CALL_ID = "abcdefghi"  # Mistral's templates require nine letters or digits

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Abilities:
    developer: bool  # it knows the role
    system: bool  # it shows a system message
    later_system: bool  # also one that is not the first message
    text_arguments: bool  # of calls, as text
    object_arguments: bool
    calls_without_content: bool  # calls are shown only if the message's content is none, not ""
    reasoning_beside_content: bool  # in a message with calls
    efforts: tuple[str, ...]  # the values that it accepts; empty: it does not read reasoning_effort
    call: str  # a rendered answer with a call, and the text after it; empty: it refuses calls
    shows_calls: bool


def find(template: CompiledTemplate, variables: Mapping[str, Any]) -> Abilities:
    # A template for tools may fail without tools.
    tools = None if _rendered(template, [_USER], variables) is not None else [_TOOL]

    def shows(*messages: Message) -> bool:
        text = _rendered(template, messages, variables, tools)
        return text is not None and _WORD in text and str(_OBJECT) not in text  # the object's Python repr

    def shows_calls(content: str | None) -> tuple[bool, bool]:
        return shows(*_with_call(_OBJECT, content)), shows(*_with_call(_WORD, content))

    empty, none = shows_calls(""), shows_calls(None)
    as_object, as_text = empty if any(empty) else none
    called = _OBJECT if as_object else _WORD
    reasoning = dict.fromkeys(REASONING_NAMES, "y")
    return Abilities(
        # A template that writes any role shows roles that its model may not know.
        developer="developer" in template.source and shows({"role": "developer", "content": _WORD}, _USER),
        system=shows({"role": "system", "content": _WORD}, _USER),
        later_system=shows(_USER, {"role": "assistant", "content": "x"}, {"role": "system", "content": _WORD}, _USER),
        text_arguments=as_text,
        object_arguments=as_object or not as_text,
        calls_without_content=not any(empty) and any(none),
        reasoning_beside_content=shows(*_with_call(called, "x", **reasoning)) or not shows(*_with_call(called, "x")),
        efforts=_efforts(template, variables, tools),
        call=_call(template, variables, called),
        shows_calls=as_object or as_text,
    )


def _rendered(
    template: CompiledTemplate, messages: Messages, variables: Mapping[str, Any], tools: list[Any] | None = None
) -> str | None:
    """None: the template refuses the messages."""
    try:
        return template.render(messages, variables, tools)
    except FAILURES:
        return None


def _with_call(arguments: object, content: str | None, **more: str) -> list[Message]:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        _USER,
        {"role": "assistant", "content": content, "tool_calls": [call], **more},
        {"role": "tool", "content": "x", "tool_call_id": _CALL_ID, "name": "f"},
    ]


def _call(template: CompiledTemplate, variables: Mapping[str, Any], arguments: object) -> str:
    user = {"role": "user", "content": _WORD}
    for content in ("", None):
        text = _rendered(template, [user, *_with_call(arguments, content)[1:]], variables, [_TOOL])
        if text is not None and text.count(_WORD) > 1:
            return text.partition(_WORD)[2]
    return ""


def _efforts(template: CompiledTemplate, variables: Mapping[str, Any], tools: list[Any] | None) -> tuple[str, ...]:
    if "reasoning_effort" not in template.reads:
        return ()
    if "<|channel|>analysis" in template.source:
        return HARMONY_EFFORTS
    return tuple(
        effort
        for effort in EFFORTS
        if _rendered(template, [_USER], {**variables, "reasoning_effort": effort}, tools) is not None
    )


# ---- messages in the form that the template shows


def fit(messages: Messages, abilities: Abilities) -> list[Message]:
    """Raises InvalidRequest for a developer's instructions where the template shows none at all."""
    fitted = [_fit_calls(dict(message), abilities) for message in messages]
    if abilities.developer or not any(message.get("role") == "developer" for message in fitted):
        return fitted
    return _as_system(fitted, abilities)


def _as_system(messages: list[Message], abilities: Abilities) -> list[Message]:
    """Turns developer messages into system messages. Those at the beginning become one message, and later ones join it
    if the template does not show them: many templates drop or refuse a second one."""
    if not abilities.system:
        at = next(at for at, message in enumerate(messages) if message.get("role") == "developer")
        raise InvalidRequest(
            "the chat template of this model shows neither developer nor system messages; put the instructions into a"
            " user message",
            field=f"chat.messages[{at}].role",
            bound="user, assistant or tool with this model",
        )
    first: list[Message] = []
    rest: list[Message] = []
    for message in messages:
        role = message.get("role")
        if role == "developer":
            message = {**message, "role": "system"}
        leading = not rest and role in ("developer", "system")
        if leading or (role == "developer" and not abilities.later_system):
            first.append(message)
        else:
            rest.append(message)
    content = "\n\n".join(text for message in first if (text := message.get("content")))
    return [*([{**first[0], "content": content}] if first else []), *rest]


def _fit_calls(message: Message, abilities: Abilities) -> Message:
    if not (calls := message.get("tool_calls")):
        return message
    message["tool_calls"] = [_fit_arguments(call, abilities) for call in calls]
    reasoning, content = message.get(REASONING_NAMES[0]), message.get("content")
    if reasoning and content and not abilities.reasoning_beside_content:
        message |= {**dict.fromkeys(REASONING_NAMES, f"{reasoning}\n\n{content}"), "content": ""}
    if abilities.calls_without_content and not message.get("content"):
        message["content"] = None
    return message


def _fit_arguments(call: Message, abilities: Abilities) -> Message:
    """Arguments are an object, or text where they are not JSON."""
    if not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not abilities.text_arguments:
        arguments = {"arguments": arguments}
    elif isinstance(arguments, Mapping) and not abilities.object_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


# ---- variables


def fit_variables(variables: Mapping[str, Any], template: CompiledTemplate, abilities: Abilities) -> dict[str, Any]:
    """With `reasoning_effort`, reasoning is on unless that is "none"; a client that sets `enable_thinking` (or
    `thinking`, as DeepSeek's and Granite's templates name it) decides itself. An effort that the template refuses
    becomes the nearest accepted one, the higher of two."""
    fitted = dict(variables)
    effort = fitted.get("reasoning_effort")
    if not isinstance(effort, str) or effort not in EFFORTS:
        return fitted
    if "enable_thinking" not in fitted and "thinking" not in fitted:
        fitted |= {"enable_thinking": effort != "none", "thinking": effort != "none"}
    if not abilities.efforts or effort in abilities.efforts:
        return fitted
    if effort == "none" and template.reads & {"enable_thinking", "thinking"}:
        del fitted["reasoning_effort"]
        return fitted
    place = EFFORTS.index
    fitted["reasoning_effort"] = min(abilities.efforts, key=lambda one: (abs(place(one) - place(effort)), -place(one)))
    return fitted
