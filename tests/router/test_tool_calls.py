"""Calls are taken out of a model's text, whole or in pieces; what is no call stays text; what is forced is a call."""

from __future__ import annotations

import itertools
import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services.router.preprocess.tool_calls import CallReader, Format, forced, format_of
from transformers.utils.chat_template_utils import render_jinja_template

from services.router.preprocess.chat.chat_template import ChatTemplate
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2, generation_pb2
from tests.support.templates import HERMES, LLAMA

TOOLS = [{"type": "function", "function": {"name": "höhe", "parameters": {"type": "object"}}}]
CALL = '{"name": "höhe", "arguments": {"berg": "Eiger", "n": [1, 2]}}'


def read(format: Format, *pieces: str) -> tuple[str, list[tuple[str, Any]]]:
    reader = CallReader(format)
    text = "".join(map(reader.push, pieces)) + reader.finish()
    assert len({call.id for call in reader.calls}) == len(reader.calls)
    assert all(f"{call.name}{call.arguments}".encode() for call in reader.calls)
    return text, [(call.name, json.loads(call.arguments)) for call in reader.calls]


EIGER = ("höhe", {"berg": "Eiger", "n": [1, 2]})
TEXTS: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", "no call", "no call", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [EIGER]),
    ("hermes", f"I look. <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "I look. \n", [EIGER, EIGER]),
    ("hermes", f"<tool_call>{CALL}", "", [EIGER]),  # the end token came before the closing tag
    ("hermes", "<tool_call>{broken}</tool_call> after", "<tool_call>{broken}</tool_call> after", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}', []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "\\"</tool_call>"}}</tool_call> ',
        " ",
        [("f", {"x": '"</tool_call>'})],
    ),
    ("hermes", '<tool_call>{"f</tool_call> after', '<tool_call>{"f</tool_call> after', []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        [],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800é"}}</tool_call>', "", [("f", {"x": "\ud800é"})]),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', []),
    ("hermes", "<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
    ("llama3", "no call {}", "no call {}", []),
    ("llama3", ' {"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})]),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "g"}\n', "", [("f", {}), ("g", {})]),
    ("llama3", '{"name": "f"} and more', '{"name": "f"} and more', []),
    ("llama3", '{"x": 1}', '{"x": 1}', []),
    ("llama3", '{"name": "f"', '{"name": "f"', []),
    ("llama3", "  ", "  ", []),
]


@pytest.mark.parametrize(("format", "text", "shown", "calls"), TEXTS)
def test_calls_are_found_and_the_rest_is_text(format: Format, text: str, shown: str, calls: list[Any]) -> None:
    """Several, with text around them, unclosed, broken, nested too deep, of the wrong shape."""
    assert read(format, text) == (shown, calls)


@given(st.sampled_from([one for one in TEXTS if len(one[1]) < 1000]), st.lists(st.integers(0, 120), max_size=8))
def test_how_the_text_is_cut_changes_nothing(case: tuple[str, str, str, list[Any]], cuts: list[int]) -> None:
    """Also inside a tag."""
    format, text, shown, calls = case
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert read(cast(Format, format), *pieces) == (shown, calls)


def test_text_before_a_call_is_not_held_back() -> None:
    """Only what may be the beginning of a tag waits."""
    reader = CallReader("hermes")
    assert reader.push("I look <tool_") == "I look "
    assert reader.push("box") == "<tool_box"


def test_the_template_says_how_calls_are_written() -> None:
    """Neither, where it says nothing."""
    assert (format_of(HERMES), format_of(LLAMA), format_of("{{ messages }}")) == ("hermes", "llama3", None)


def tool(name: str, **function: Any) -> Any:
    return {"type": "function", "function": {"name": name, **function}}


OFFERED = [tool("höhe", parameters={"type": "object", "properties": {"of": {"enum": ["Eiger"]}}}), tool('"now"\\')]


def parts(grammar: common_pb2.Grammar) -> list[tuple[str, Any, str]]:
    return [(one.before.decode(), json.loads(one.arguments), one.after.decode()) for one in grammar.calls.any]


@pytest.mark.parametrize("format", ["hermes", "llama3"])
def test_what_is_forced_is_what_is_read(format: Format) -> None:
    """Arguments between what stands around them are calls of that name, one after another."""
    several = forced(OFFERED, generation_pb2.ToolChoice(several=True), format)
    (height, _, end), (now, _, _) = parts(several)
    calls = [f'{height}{{"of": 1}}{end}', f"{now}{{}}{end}"]
    text, found = read(format, several.calls.separator.decode().join(calls * 2))
    assert (text.strip(), found) == ("", [("höhe", {"of": 1}), ('"now"\\', {})] * 2)
    one = forced(OFFERED, generation_pb2.ToolChoice(), format)
    assert parts(one) == parts(several)
    assert not one.calls.HasField("separator")
    assert parts(forced(OFFERED, generation_pb2.ToolChoice(name="höhe"), format)) == parts(one)[:1]


def test_a_function_without_parameters_takes_an_empty_object() -> None:
    """However it says so. One that says nothing of its properties takes any object."""
    empty = {"type": "object", "properties": {}}
    choice = generation_pb2.ToolChoice()
    for function in ({}, {"parameters": None}, {"parameters": {}}, {"parameters": empty}):
        [(_, schema, _)] = parts(forced([tool("f", **function)], choice, "hermes"))
        assert schema == {**empty, "additionalProperties": False}
    for kept in ({"type": "object"}, {**empty, "additionalProperties": True}):
        assert parts(forced([tool("f", parameters=kept)], choice, "hermes"))[0][1] == kept


LARGE = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(100)}}
UNFIT: list[tuple[list[Any], dict[str, Any], str]] = [
    (OFFERED, {"name": "hoehe"}, "chat.tool_choice"),
    (OFFERED, {"name": ""}, "chat.tool_choice"),
    ([tool("f", parameters=[1])], {}, "chat.tools[0].function.parameters"),
    ([tool("f", parameters={"type": "string"})], {}, "chat.tools[0].function.parameters"),
    ([*OFFERED, tool("f", parameters={"type": "object", "not": {}})], {}, "chat.tools[2].function.parameters.not"),
    ([*OFFERED, tool("f", parameters={"not": {}})], {"name": "f"}, "chat.tools[2].function.parameters"),
    ([tool(f"f{index}", parameters=LARGE) for index in range(128)], {}, "chat.tools"),
]


@pytest.mark.parametrize(("tools", "choice", "field"), UNFIT, ids=lambda value: str(value)[-40:])
def test_what_cannot_be_forced_is_refused_by_its_place(tools: list[Any], choice: dict[str, Any], field: str) -> None:
    """While a tool that is not asked for may have any schema: nobody has to keep it."""
    with pytest.raises(InvalidRequest) as caught:
        forced(tools, generation_pb2.ToolChoice(**choice), "hermes")
    assert caught.value.field == field
    assert caught.value.bound
    assert forced([*tools, tool("good")], generation_pb2.ToolChoice(name="good"), "hermes")


def test_a_template_is_rendered_as_by_transformers() -> None:
    """With tools, calls and their answers, loop controls and non-ASCII names."""
    call = {"id": "call_1", "type": "function", "function": {"name": "höhe", "arguments": {"berg": "Eiger"}}}
    messages = [
        {"role": "user", "content": "How high?"},
        {"role": "skip", "content": "not this"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3967", "tool_call_id": "call_1"},
    ]
    for tools in (None, TOOLS):
        (expected,), _ = render_jinja_template(
            [messages], tools=tools, chat_template=HERMES, add_generation_prompt=True
        )
        assert ChatTemplate(HERMES, {}).render(messages, tools) == expected
    assert "höhe" in expected


def test_tools_are_refused_where_the_template_knows_none() -> None:
    """Passed over, they would give an answer of a model that never heard of them."""
    for source in ("{{ messages }}", "{{ tools }}{{ messages }}"):
        with pytest.raises(InvalidRequest) as caught:
            ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], TOOLS)
        assert caught.value.field == "chat.tools"
