"""Odd but legal JSON, in any place of a body, is served or refused by its field: it is the client's error, not ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from services.router.frontend.anthropic import messages_body
from services.router.frontend.openai import openai_protocol
from services.router.frontend.openai.responses_body import Responses
from services.router.preprocess.sampling_defaults import Defaults
from tandem.errors import InvalidRequest, TandemError

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
NAMED = {"type": "function", "name": "f"}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "refusal", "refusal": "r"}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}], "reasoning": "r"},
        {"role": "tool", "tool_call_id": "1", "content": "x", "name": "f"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    "stop": ["a"],
    "logit_bias": {"1": 2.0},
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"a": 1},
    "documents": [{"a": 1}],
    "reasoning_effort": "low",
    "logprobs": True,
    "top_logprobs": 1,
}
ALLOWED = {
    "messages": [],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
    "structured_outputs": {"choice": ["a"]},
}
COMPLETIONS = {"prompt": ["a", [1, 2]], "suffix": None, "echo": True, "logprobs": 1, "max_tokens": 0, "n": 1}
RESPONSES = {
    "input": [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "ns"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "cu", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
    ],
    "tools": [
        {**NAMED, "parameters": SCHEMA},
        {"type": "custom", "name": "cu", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "ns", "tools": [NAMED]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
    "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
MESSAGES = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": "r"}]}],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}},
}
ODD: tuple[Any, ...] = (
    *(None, -1, 2**63, 1.5, "", "\ud800"),
    *([], {}, [None], [{}], {"\ud800": 1}, {"type": []}, {"name": "\ud800"}),
)


def chat(raw: bytes, kind: type[Any] = openai_protocol.Chat) -> None:
    openai_protocol.requests(openai_protocol.parse(raw, kind), "id", Defaults(), "", 1000)


def completions(raw: bytes) -> None:
    chat(raw, openai_protocol.Completions)


def responses(raw: bytes) -> None:
    body, number = openai_protocol.parse(raw, Responses), count()
    body.begin(lambda prefix: f"{prefix}_{next(number)}", [])
    openai_protocol.requests(body, "id", Defaults(), "", 1000)


def messages(raw: bytes) -> None:
    messages_body.parse(raw, messages_body.Messages).request("id", Defaults())


def odd(value: Any) -> Iterator[Any]:
    """The value with each part replaced by each odd one, and with each part left out."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield {other: one for other, one in value.items() if other != key}
            yield from ({**value, key: one} for one in odd(part))
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from ([*value[:place], one, *value[place + 1 :]] for one in odd(part))
    yield from ODD


@pytest.mark.parametrize(
    ("door", "body"),
    [(chat, CHAT), (chat, ALLOWED), (completions, COMPLETIONS), (responses, RESPONSES), (messages, MESSAGES)],
)
def test_no_value_in_any_place_of_a_body_is_an_error_of_ours(door: Callable[[bytes], None], body: Any) -> None:
    """Whatever is raised other than the errors for clients would be answered as "please report it", with status 500."""
    door(json.dumps(body).encode())
    refused = 0
    for one in odd(body):
        try:
            door(json.dumps(one).encode())
        except TandemError:
            refused += 1
        except Exception as error:
            error.add_note(json.dumps(one))
            raise
    assert refused > 100


SAID = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.mark.parametrize(
    ("door", "body", "field"),
    [
        (chat, {"messages": [{"role": "user", "content": [{"type": {}}]}]}, "messages[0].content[0]"),
        (responses, {"input": [{"role": "user", "content": [{"type": []}]}]}, "input[0].content[0].type"),
        (responses, {"input": [{**SAID, "call_id": "\ud800"}]}, "input[0].call_id"),
        (responses, {"input": "x", "tools": [{**NAMED, "name": "\ud800"}], "tool_choice": NAMED}, "tools[0].name"),
        (
            responses,
            {"input": "x", "tools": [{"type": "namespace", "name": "\ud800", "tools": [NAMED]}]},
            "tools[0].name",
        ),
    ],
)
def test_what_is_no_kind_and_no_unicode_is_refused_by_its_field(
    door: Callable[[bytes], None], body: Any, field: str
) -> None:
    """Python's dicts and sets do not take lists, nor does protobuf take lone surrogates."""
    with pytest.raises(InvalidRequest) as refused:
        door(json.dumps(body).encode())
    assert refused.value.field == field
