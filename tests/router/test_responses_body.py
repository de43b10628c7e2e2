"""Bodies of the Responses API: which chat they become, and what is refused by which name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from services.router.frontend.openai import openai_protocol, responses_items
from services.router.frontend.openai.responses_body import Responses
from services.router.frontend.openai.responses_items import SEALED, sealed
from services.router.frontend.openai.responses_tools import custom_input
from services.router.preprocess.chat.prompt import MAX_TOOLS
from services.router.preprocess.sampling_defaults import Defaults
from tandem.errors import InvalidRequest, NotFound
from tandem.v1 import generation_pb2

FUNCTION = {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}}
CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: PATCH"},
}
NAMESPACE = {
    "type": "namespace",
    "name": "mcp__docs",
    "description": "",
    "tools": [{"type": "function", "name": "get"}],
}
SEARCH = {"type": "web_search", "external_web_access": False}


def ids() -> Callable[[str], str]:
    count = iter(range(10**6))
    return lambda prefix: f"{prefix}_{next(count)}"


def request(history: list[Any] | None = None, **fields: Any) -> generation_pb2.GenerateRequest:
    """What a body with these fields becomes."""
    body = openai_protocol.parse(json.dumps({"input": "Hi", **fields}).encode(), Responses)
    body.begin(ids(), history or [])
    (made,) = openai_protocol.requests(body, "id", Defaults())
    return made


def messages(items: Any, **fields: Any) -> list[dict[str, Any]]:
    """The chat's messages without what they do not have; calls and contents as Python values."""
    found = []
    for message in request(input=items, **fields).chat.messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content.decode()}
        one |= {"reasoning": message.reasoning.decode()} if message.reasoning else {}
        one |= {"calls": json.loads(message.tool_calls)} if message.tool_calls else {}
        one |= {"answers": message.tool_call_id} if message.tool_call_id else {}
        found.append(one)
    return found


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        request(**fields)
    return refused.value


# ---- items


def test_a_turn_of_an_agent_is_one_message() -> None:
    """Reasoning, text and calls that an agent sends back as items join; outputs and later turns begin new messages."""
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look first."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"cmd": "ls"}'},
        {"type": "function_call", "call_id": "c2", "name": "get", "namespace": "mcp__docs", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "none"}]},
        {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "Done"},
    ]
    user, turn, first, second, patch, done = messages(items)
    assert (user["role"], user["content"]) == ("user", "Fix it")
    assert (turn["role"], turn["content"], turn["reasoning"]) == ("assistant", "I look.", "Look first.")
    assert [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in turn["calls"]] == [
        ("c1", "shell", {"cmd": "ls"}),
        ("c2", "mcp__docs__get", {}),
    ]
    assert [(one["role"], one["answers"], one["content"]) for one in (first, second, done)] == [
        ("tool", "c1", "a.py"),
        ("tool", "c2", "none"),
        ("tool", "c3", "Done"),
    ]
    assert patch["calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": "*** Begin"}}


def test_what_was_two_messages_stays_two() -> None:
    """Two texts, and reasoning after a text, are not joined; a call after a text is part of its message."""
    said = {"role": "assistant", "content": "One"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    found = messages([{"role": "user", "content": "x"}, said, {**said, "content": "Two"}, thought, called])
    assert [one["content"] for one in found] == ["x", "One", "Two", ""]
    assert found[-1]["reasoning"] == "Hm"
    assert len(found[-1]["calls"]) == 1


def test_instructions_and_what_directly_follows_are_one_system_message() -> None:
    """Many templates allow one system message only, and only at the beginning; a later one stays where it is."""
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "x"},
        {"role": "developer", "content": "Briefer."},
    ]
    found = messages(items, instructions="You are an agent.")
    assert [(one["role"], one["content"]) for one in found] == [
        ("system", "You are an agent.\n\nBe brief."),
        ("user", "x"),
        ("developer", "Briefer."),
    ]
    assert messages(items)[0] == {"role": "developer", "content": "Be brief."}


def test_the_previous_response_comes_first_and_its_instructions_do_not() -> None:
    """The stored items precede the new ones; the new instructions precede all."""
    history = responses_items.read_items(
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}], ids()
    )
    made = request(history=history, input="C", instructions="New")
    assert [(one.role, one.content) for one in made.chat.messages] == [
        ("system", b"New"),
        ("user", b"A"),
        ("assistant", b"B"),
        ("user", b"C"),
    ]


def test_broken_arguments_of_an_earlier_call_do_not_fail_the_request() -> None:
    """An agent whose model once wrote broken JSON must be able to go on: the template gets the text."""
    for broken in ('{"a": ', "[1]", "nonsense"):
        (call,) = messages([{"type": "function_call", "call_id": "c", "name": "f", "arguments": broken}])[0]["calls"]
        assert call["function"]["arguments"] == broken


def test_sealed_reasoning_comes_back_as_reasoning() -> None:
    """Clients that keep `encrypted_content` only; what another server has sealed is refused."""
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed("Grübeln")}
    assert messages([item, {"role": "user", "content": "x"}])[0]["reasoning"] == "Grübeln"
    for foreign in ("tandem.1.é漢", "gAAAAAB", SEALED + "&", SEALED + "/w==", 3):
        error = refusal(input=[{**item, "encrypted_content": foreign}])
        assert error.field == "input[0].encrypted_content"


def test_every_item_has_an_id_and_keeps_its_own() -> None:
    """`after` of a page of items needs one; a client's null is none."""
    body = openai_protocol.parse(
        json.dumps(
            {
                "input": [
                    {"role": "user", "content": "x", "id": None},
                    {"type": "reasoning", "id": "rs_mine", "summary": []},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                ]
            }
        ).encode(),
        Responses,
    )
    found = [item["id"] for item in body.begin(ids(), [])]
    assert found[1] == "rs_mine"
    assert [one.partition("_")[0] for one in found] == ["msg", "rs", "fc"]
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (3, "input[0]"),
        ({"content": "x"}, "input[0].type"),
        ({"type": "item_reference"}, "input[0].id"),
        ({"type": "web_search_call", "id": "ws_1"}, "input[0].type"),
        ({"role": "critic", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": 3}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "input[0].arguments"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[0].input"),
        ({"type": "reasoning", "content": [{"type": "image"}]}, "input[0].content"),
    ],
)
def test_an_item_that_cannot_be_served_is_refused_by_its_place(item: Any, field: str) -> None:
    """With the kinds that are served in the bound."""
    assert refusal(input=[item]).field == field


@pytest.mark.parametrize("value", [None, [], {}, 3, [3] * (responses_items.MAX_ITEMS + 1)])
def test_input_is_text_or_a_bounded_list(value: Any) -> None:
    """Checked before any item is parsed."""
    assert refusal(input=value).field == "input"


def test_a_reference_stands_for_a_stored_item_once() -> None:
    """A second one is refused: short references must not stand for text without a bound."""
    stored = {"msg_1": {"id": "msg_1", "type": "message", "role": "user", "content": [{"text": "stored"}]}}
    reference = {"type": "item_reference", "id": "msg_1"}
    new = {"role": "user", "content": "new"}
    assert responses_items.read_items([reference, new], ids(), stored)[0] is stored["msg_1"]
    for items, known in (([reference, new, reference], stored), ([new, new, reference], {})):
        with pytest.raises(NotFound) as unknown:
            responses_items.read_items(items, ids(), known)
        assert (unknown.value.field, unknown.value.reason) == ("input[2].id", "NO_SUCH_ITEM")


# ---- tools


def test_tools_of_a_coding_agent_become_functions() -> None:
    """As the Codex CLI sends them: functions, a free-form tool, a namespace, and a search that is left out."""
    body = openai_protocol.parse(
        json.dumps({"input": "x", "tools": [FUNCTION, CUSTOM, NAMESPACE, SEARCH]}).encode(), Responses
    )
    body.begin(ids(), [])
    (made,) = openai_protocol.requests(body, "id", Defaults())
    functions = [tool["function"] for tool in json.loads(made.chat.tools)]
    assert [one["name"] for one in functions] == ["shell", "apply_patch", "mcp__docs__get"]
    assert functions[1]["parameters"]["required"] == ["input"]
    assert "start: PATCH" in functions[1]["description"]
    assert body.tools_read.by_name["mcp__docs__get"].namespace == "mcp__docs"
    assert body.tools_read.by_name["apply_patch"].custom
    assert body.shown("m", made.sampling)["tools"] == [FUNCTION, CUSTOM, NAMESPACE]


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([SEARCH], "tools[0].type"),
        ([FUNCTION, {"type": "mcp", "server_label": "x"}], "tools[1].type"),
        ([{"type": "file_search"}], "tools[0].type"),
        ([{"type": "code_interpreter"}], "tools[0].type"),
        ([{"type": "image_generation"}], "tools[0].type"),
        ([{"type": "local_shell"}], "tools[0].type"),
        ([{"name": "f"}], "tools[0].type"),
        ([{"type": "function", "function": {"name": "f"}}], "tools[0].name"),
        ([FUNCTION, FUNCTION], "tools[1].name"),
        ([{**NAMESPACE, "tools": [NAMESPACE]}], "tools[0].tools[0].type"),
        ([{**NAMESPACE, "tools": {}}], "tools[0].tools"),
        ([{**FUNCTION, "name": f"f{number}"} for number in range(MAX_TOOLS + 1)], "tools"),
        ("shell", "tools"),
    ],
)
def test_a_tool_that_the_server_would_have_to_run_is_refused(tools: Any, field: str) -> None:
    """By its place, also one in a namespace."""
    assert refusal(tools=tools).field == field


def test_tool_choice_says_what_is_offered_and_what_is_forced() -> None:
    """Each kind of OpenAI's; parallel_tool_calls false allows one call."""
    tools = [FUNCTION, CUSTOM]
    assert not request(tools=tools, tool_choice="none").chat.tools
    assert not request(tools=tools).chat.HasField("tool_choice")
    assert request(tools=tools, tool_choice="required").chat.tool_choice.several
    one = request(tools=tools, tool_choice="required", parallel_tool_calls=False).chat
    assert not one.tool_choice.several
    assert one.parallel_calls is False
    assert request(tools=tools, tool_choice={"type": "function", "name": "shell"}).chat.tool_choice.name == "shell"
    named = {"type": "custom", "name": "apply_patch"}
    assert request(tools=tools, tool_choice=named).chat.tool_choice.name == "apply_patch"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "shell"}]}
    some = request(tools=tools, tool_choice=allowed).chat
    assert [tool["function"]["name"] for tool in json.loads(some.tools)] == ["shell"]
    assert some.tool_choice.several
    for wrong in ("any", {"type": "web_search"}, {"type": "function", "name": "other"}, 3):
        assert refusal(tools=tools, tool_choice=wrong).field == "tool_choice"


def test_the_input_of_a_custom_call_is_what_the_model_wrote_for_it() -> None:
    """Unpacked from its argument; anything else is passed on for the client to judge."""
    assert custom_input('{"input": "*** Begin\\n"}') == "*** Begin\n"
    for other in ("*** Begin", '{"input": 3}', '{"patch": "x"}', '{"input": "cut', '{"input": "\\ud83d"}'):
        assert custom_input(other) == other


# ---- fields


def test_sampling_fields_have_their_own_names() -> None:
    """`text.format` is the grammar, `max_output_tokens` the bound, `include` asks for log probabilities."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    params = request(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.5,
        top_logprobs=2,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}, "verbosity": "low"},
    ).sampling
    assert (params.max_tokens, params.temperature, params.top_p, params.logprobs) == (7, 0.5, 0.5, 2)
    assert json.loads(params.grammar.json_schema) == schema
    assert request(text={"format": {"type": "json_object"}}).sampling.grammar.json
    assert not request(text={"format": {"type": "text"}}).sampling.HasField("grammar")
    assert request(include=["message.output_text.logprobs"]).sampling.logprobs == 0
    assert request(include=["message.output_text.logprobs"]).sampling.HasField("logprobs")
    assert not request().sampling.HasField("logprobs")


def test_effort_is_a_variable_of_the_template() -> None:
    """Beside those that the client sets itself, which prevail."""
    assert json.loads(request(reasoning={"effort": "high", "summary": "auto"}).chat.template_variables) == {
        "reasoning_effort": "high"
    }
    both = request(reasoning={"effort": "none"}, chat_template_kwargs={"enable_thinking": True})
    assert json.loads(both.chat.template_variables) == {"reasoning_effort": "none", "enable_thinking": True}
    assert request(reasoning={}).chat.template_variables == b""
    for unknown in (3, "much", []):
        assert refusal(reasoning={"effort": unknown}).field == "reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": 3}}, "metadata.a"),
        ({"user": "x" * 513}, "user"),
        ({"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
        ({"safety_identifier": "x" * 513}, "safety_identifier"),
        ({"include": ["x"] * 17}, "include"),
        ({"max_output_tokens": "7"}, "max_output_tokens"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    """And so is one that is out of its bound."""
    assert refusal(**fields).field == field


def test_fields_without_an_effect_are_accepted() -> None:
    """What SDKs and agents send along, with values that mean nothing here."""
    request(
        background=False,
        truncation="disabled",
        store=False,
        service_tier="auto",
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        max_tool_calls=3,
        client_metadata={"a": "b"},
        stream_options={"include_obfuscation": False},
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        metadata={"a": "b"},
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("chat.messages[3].content", "input"),
        ("chat.tools[1]", "tools"),
        ("chat.tool_choice", "tool_choice"),
        ("sampling.max_tokens", "max_output_tokens"),
        ("sampling.logprobs", "top_logprobs"),
        ("sampling.grammar.json_schema.pattern", "text.format.json_schema.pattern"),
        ("sampling.top_p", "sampling.top_p"),
    ],
)
def test_errors_of_the_router_have_the_names_of_this_body(ours: str, theirs: str) -> None:
    """The rest of the renaming is openai_errors'."""
    body = openai_protocol.parse(
        json.dumps({"input": "x", "text": {"format": {"type": "json_object"}}}).encode(), Responses
    )
    assert body.named(InvalidRequest("x", field=ours)).field == theirs
