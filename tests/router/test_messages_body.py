"""Bodies of Anthropic's Messages API: what Claude Code and the SDK send becomes the chat that they mean."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from services.router.frontend.anthropic import messages_body, messages_errors
from services.router.frontend.anthropic.messages_body import Messages, Prompt
from services.router.preprocess.chat.prompt import MAX_MESSAGES, MAX_TOOLS
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.validation import MAX_STOPS, over_context
from tandem.errors import (
    Busy,
    Cancelled,
    InternalError,
    InvalidRequest,
    NotFound,
    NoWorker,
    ResumeFailed,
    TandemError,
    TooLarge,
)
from tandem.v1 import generation_pb2
from tests.support.stopwatch import ThreadTime

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "height", "description": "Of a peak.", "input_schema": {"type": "object", "properties": {"of": {}}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "height", "input": {"of": "Eiger"}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def request(**body: Any) -> generation_pb2.GenerateRequest:
    raw = json.dumps({"model": "m", "max_tokens": 50, "messages": HI, **body}).encode()
    return messages_body.parse(raw, Messages).request("id", Defaults(top_p=0.9))


def chat(messages: list[Any], **body: Any) -> list[dict[str, Any]]:
    """The messages of the chat, without fields that are empty."""
    told = []
    for message in request(messages=messages, **body).chat.messages:
        fields = {field.name: value for field, value in message.ListFields()}
        fields |= {name: value.decode() for name, value in fields.items() if isinstance(value, bytes)}
        if "tool_calls" in fields:
            fields["tool_calls"] = json.loads(fields["tool_calls"])
        told.append(fields)
    return told


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_a_turn_of_an_agent_becomes_what_templates_expect() -> None:
    """System blocks, thinking, a call with an object of arguments, its answer before the user's next words; what only
    Anthropic understands (cache_control, redacted thinking, signatures) has no effect."""
    messages = [
        {"role": "user", "content": [text("One"), {**text("two"), **CACHED}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm. ", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                text("I "),
                text("look."),
                {**CALL, **CACHED},
            ],
        },
        {
            "role": "user",
            "content": [
                text("And now?"),
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("3967"), text("m")]},
                {"type": "tool_result", "tool_use_id": "toolu_9", "content": "no", "is_error": True},
                {"type": "tool_result", "tool_use_id": "toolu_9"},
            ],
        },
    ]
    function = {"name": "height", "arguments": {"of": "Eiger"}}
    assert chat(messages, system=[{**text("Be brief."), **CACHED}, text("Be kind.")]) == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "One\ntwo"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm. ",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "3967\nm", "tool_call_id": "toolu_1", "name": "height"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "toolu_9"},
        {"role": "tool", "tool_call_id": "toolu_9"},
        {"role": "user", "content": "And now?"},
    ]


def test_a_later_system_message_stays_in_its_turn() -> None:
    """Claude Code 2.1 sends them. The prompt before it is the same as without it, so that its KV is used again, and no
    template sees a second system message. Those before the first turn are part of the system prompt."""
    first = [{"role": "system", "content": "First."}, *HI]
    later = [*first, {"role": "system", "content": [text("Agents: one.")]}, {"role": "user", "content": "Go."}]
    marked = "<system-reminder>\nAgents: one.\n</system-reminder>"
    assert chat(later, system="Zero.") == [
        {"role": "system", "content": "Zero.\nFirst."},
        {"role": "user", "content": f"Hi\n{marked}\nGo."},
    ]
    after = [*HI, {"role": "assistant", "content": "Yes?"}, {"role": "system", "content": "Agents: one."}]
    assert chat(after)[2] == {"role": "user", "content": marked}


def test_claude_codes_line_that_differs_in_every_request_is_not_in_the_prompt() -> None:
    """It would change the beginning of each prompt, and no KV could be used again."""
    line = "x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch=fa690;"
    for system in ([text(line), text("You are.")], f"{line}\nYou are.", [text(f"{line}\nYou are.")]):
        assert chat(HI, system=system)[0] == {"role": "system", "content": "You are."}
    assert chat(HI, system=[text(line)])[0]["role"] == "user"
    assert line in chat([{"role": "user", "content": line}])[0]["content"]


def test_adjacent_messages_of_one_side_are_one_turn() -> None:
    """As in Anthropic's API; an empty one is still a turn."""
    said = [("user", "a"), ("user", ""), ("assistant", "b"), ("assistant", "c"), ("user", "")]
    told = chat([{"role": role, "content": content} for role, content in said])
    assert [(one["role"], one.get("content", "")) for one in told] == [
        ("user", "a\n"),
        ("assistant", "bc"),
        ("user", ""),
    ]
    assert chat([{"role": "user", "content": []}]) == [{"role": "user"}]


def test_an_assistants_last_message_is_continued() -> None:
    """And no other: also a user's turn without text comes after it."""
    begun = [*HI, {"role": "assistant", "content": "It is"}]
    assert request(messages=begun).chat.continue_last_message
    assert not request(messages=[*begun, *HI]).chat.continue_last_message
    assert not request().chat.continue_last_message


def test_what_a_tool_showed_that_is_no_text_is_told_to_the_model() -> None:
    """A refusal would be repeated for the rest of the agent's conversation, which keeps the answer."""
    shown = [{"type": "image", "source": {}}, {"type": "tool_reference", "tool_name": "depth"}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": shown}
    content = chat([*HI, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}])[2]["content"]
    assert "'image'" in content
    assert "The tool depth is available now." in content


def test_tools_and_choices_become_openais() -> None:
    """And a deferred tool is there once a tool_reference names it."""
    (offered,) = json.loads(request(tools=[{**TOOL, **CACHED, "type": "custom"}]).chat.tools)
    function = {"name": "height", "description": "Of a peak.", "parameters": TOOL["input_schema"]}
    assert offered == {"type": "function", "function": function}
    (bare,) = json.loads(request(tools=[{"name": "now", "input_schema": {}}]).chat.tools)
    assert bare["function"] == {"name": "now", "parameters": {"type": "object"}}
    deferred = [TOOL, {**TOOL, "name": "depth", "defer_loading": True}, {**TOOL, "name": "x", "defer_loading": True}]
    assert [one["function"]["name"] for one in json.loads(request(tools=deferred).chat.tools)] == ["height"]
    found = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "depth"}]}
    later = json.loads(request(tools=deferred, messages=[*HI, {"role": "user", "content": [found]}]).chat.tools)
    assert [one["function"]["name"] for one in later] == ["height", "depth"]
    forced = {
        "any": {"several": True},
        "tool": {"name": "height"},
    }
    for kind, fields in forced.items():
        for one in (False, True):
            choice = {"type": kind, "name": "height", "disable_parallel_tool_use": one}
            made = request(tools=[TOOL], tool_choice=choice).chat
            expected = generation_pb2.ToolChoice(**{**fields, **({"several": False} if one else {})})
            assert made.tool_choice == expected
            assert (made.HasField("parallel_calls"), made.parallel_calls) == (one, False)
    free = request(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).chat
    assert free.tools
    assert not free.HasField("tool_choice")
    assert free.HasField("parallel_calls")
    assert not request(tools=[TOOL], tool_choice={"type": "none"}).chat.tools


@pytest.mark.parametrize(
    ("body", "variables"),
    [
        ({}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"output_config": {"effort": "medium"}}, {"reasoning_effort": "medium"}),
        ({"output_config": {"effort": "xhigh"}}, {"reasoning_effort": "high"}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "thinking": False},
        ),
    ],
)
def test_thinking_and_effort_are_variables_of_the_template(body: dict[str, Any], variables: Any) -> None:
    """Without either the template decides."""
    encoded = request(**body).chat.template_variables
    assert (json.loads(encoded) if encoded else None) == variables


def test_sampling_is_anthropics_where_it_says_something() -> None:
    """Otherwise the checkpoint's, and temperature 1. max_tokens is no field of the request: an answer may end with the
    context."""
    params = request().sampling
    assert (params.temperature, params.top_p, params.HasField("top_k"), params.HasField("max_tokens")) == (
        1,
        0.9,
        False,
        False,
    )
    given = request(temperature=0, top_p=0.5, top_k=7, stop_sequences=["a", "b"], seed=3).sampling
    assert (given.temperature, given.top_p, given.top_k, list(given.stop), given.seed) == (0, 0.5, 7, [b"a", b"b"], 3)
    schema = {"type": "object", "properties": {}}
    output = {"type": "json_schema", "schema": schema}
    for body in ({"output_config": {"format": output}}, {"output_format": output}):
        assert json.loads(request(**body).sampling.grammar.json_schema) == schema


def test_what_has_no_meaning_here_is_ignored() -> None:
    """All that Claude Code 2.1 sends beyond the conversation."""
    extra = {
        "metadata": {"user_id": "x"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "mcp_servers": [],
        "container": None,
        "anthropic_beta": ["x"],
    }
    assert request(**extra) == request()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [text("x"), IMAGE]}]}, "messages.0.content.1.type"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": ["x"]}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "assistant", "content": [IMAGE]}, *HI]}, "messages.0.content.0.type"),
    ({"messages": [*HI, {"role": "assistant", "content": [CALL]}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": [{**CALL, "input": "x"}]}, *HI]}, "messages.0.content.0.input"),
    ({"messages": [{"role": "assistant", "content": [{**CALL, "id": 7}]}, *HI]}, "messages.0.content.0.id"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content.text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{}] * (MAX_MESSAGES + 1)}, "messages"),
    ({"system": 7}, "system"),
    ({"system": [IMAGE]}, "system.0.type"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"top_k": 2**70}, "top_k"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
    ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": "\ud800", "input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{}] * (MAX_TOOLS + 1)}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"stop_sequences": ["x"] * (MAX_STOPS + 1)}, "stop_sequences"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED)
def test_what_cannot_be_served_is_refused_by_its_place(body: dict[str, Any], field: str) -> None:
    """And what cannot be meant."""
    with pytest.raises(InvalidRequest) as caught:
        request(**body)
    assert caught.value.field == field
    assert field.removesuffix(".type") in caught.value.message


def test_a_prompt_is_counted_without_max_tokens() -> None:
    """count_tokens has the same body otherwise."""
    raw = json.dumps({"model": "m", "messages": HI, "tools": [TOOL], "thinking": {"type": "disabled"}}).encode()
    assert messages_body.parse(raw, Prompt).chat() == request(tools=[TOOL], thinking={"type": "disabled"}).chat


def error(raised: TandemError) -> dict[str, Any]:
    body = json.loads(messages_errors.error_body(raised, "id"))
    assert (body.keys(), body["type"], body["request_id"]) == ({"type", "error", "request_id"}, "error", "id")
    return dict(body["error"])


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (InvalidRequest("x"), "invalid_request_error"),
        (Cancelled("x"), "invalid_request_error"),
        (ResumeFailed("x"), "api_error"),
        (NotFound("x"), "not_found_error"),
        (Busy("x"), "rate_limit_error"),
        (TooLarge("x"), "request_too_large"),
        (NoWorker("x"), "overloaded_error"),
        (InternalError("x"), "api_error"),
    ],
)
def test_each_error_has_anthropics_type(raised: TandemError, kind: str) -> None:
    """On which its clients decide."""
    assert error(raised) == {"type": kind, "message": "x"}


def test_an_error_names_the_bodys_fields() -> None:
    """Not those of gRPC, which validates them."""
    named = {
        "sampling.stop[0] is empty": "stop_sequences[0] is empty",
        "sampling.top_p is 2": "top_p is 2",
        "sampling.grammar.x": "output_config.format.schema.x",
        "chat.template_variables.tools is x": "chat_template_kwargs.tools is x",
        "chat.tools[1].function.parameters.x": "tools[1].input_schema.x",
    }
    assert {ours: error(InvalidRequest(ours))["message"] for ours in named} == named


def test_a_prompt_over_the_context_has_the_words_on_which_claude_code_compacts() -> None:
    """With both numbers, whether the prompt's tokens were counted or only bounded."""
    expected = "prompt is too long: 70000 tokens > 32767 maximum"
    for counted in (True, False):
        assert error(over_context(32768, 70000, "chat", counted=counted))["message"] == expected


SIZE = 4 * 1024 * 1024
CPU_S = 0.15


def filled(before: str, item: str, after: str) -> bytes:
    """As many items as fit into a body."""
    count = (SIZE - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * count) + after).encode()


BLOCKS = '{"max_tokens":1,"messages":[{"role":"user","content":['
HOSTILE = {
    **{f"messages of {item}": filled('{"max_tokens":1,"messages":[', item, "]}") for item in ("0", "{}", '""')},
    **{f"blocks of {item}": filled(BLOCKS, item, "]}]}") for item in ("0", "{}", '""', "[[]]")},
    "blocks of text": BLOCKS.encode() + b",".join([b'{"type":"text","text":""}'] * 5000) + b"]}]}",
    "system": filled('{"max_tokens":1,"messages":[],"system":[', "{}", "]}"),
    "tools": filled('{"max_tokens":1,"messages":[],"tools":[', "{}", "]}"),
    "stop sequences": filled('{"max_tokens":1,"messages":[],"stop_sequences":[', '"a"', "]}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_is_made_to_cost_costs_little(name: str) -> None:
    """It is parsed and translated, or refused, in a moment."""
    with ThreadTime() as taken, suppress(InvalidRequest):
        messages_body.parse(HOSTILE[name], Messages).request("id", Defaults())
    assert taken.seconds < CPU_S
