"""Calls are taken out of a model's text, whole or in pieces; what is no call stays text; what is forced is a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from services.router.answer.answer_format import AnswerFormat
from services.router.answer.call_formats.registry import NAMES, reader_of
from services.router.preprocess.chat.chat_template import ChatTemplate
from services.router.preprocess.chat.forced_calls import FORMATS, forced
from services.router.preprocess.tokenizer import Tokenizer
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2, generation_pb2
from tests.support.call_corpus import Seen, call, seen, text
from tests.support.templates import HERMES

TOOLS = [{"type": "function", "function": {"name": "höhe", "parameters": {"type": "object"}}}]
CALL = '{"name": "höhe", "arguments": {"berg": "Eiger", "n": [1, 2]}}'


EIGER = call("höhe", '{"berg": "Eiger", "n": [1, 2]}')
TEXTS: list[tuple[str, str, Seen]] = [
    ("hermes", "no call", text("no call")),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", EIGER),
    ("hermes", f"So. <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [*text("So. "), *EIGER, *EIGER]),
    ("hermes", f"<tool_call>{CALL}", EIGER),  # the end token came before the closing tag
    ("hermes", "<tool_call>" + "[" * 100_000, text("<tool_call>" + "[" * 100_000)),
    ("llama3", "no call {}", text("no call {}")),
    ("llama3", ' {"name": "f", "parameters": {"x": 1}}', call("f", '{"x": 1}')),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "g"}\n', [*call("f", "{}"), *call("g", "{}")]),
]


@pytest.mark.parametrize(("format", "said", "parts"), TEXTS)
def test_calls_are_found_whatever_the_names_and_sizes(format: str, said: str, parts: Seen) -> None:
    """Without the tools that were offered; nested too deep for a parser."""
    reader = reader_of(format)
    assert seen(reader.push(said) + reader.finish()) == parts


def tool(name: str, **function: Any) -> Any:
    return {"type": "function", "function": {"name": name, **function}}


OFFERED = [tool("höhe", parameters={"type": "object", "properties": {"of": {"enum": ["Eiger"]}}}), tool('"now"\\')]


def parts(grammar: common_pb2.Grammar) -> list[tuple[str, Any, str]]:
    return [(one.before.decode(), json.loads(one.arguments), one.after.decode()) for one in grammar.calls.any]


STYLES = {
    "qwen3_coder": "qwen_xml",
    "glm": "glm_xml",
    "hy_v3": "glm_xml",
    "minimax_m2": "minimax_xml",
    "deepseek_v32": "deepseek_xml",
    "deepseek_v4": "deepseek_xml",
}
BARE = {*STYLES, "deepseek_v3", "deepseek_v31", "kimi_k2", "functionary_v31", "functionary_v32"}  # names without quotes


@pytest.mark.parametrize("format", sorted({*NAMES} - {*STYLES}))
def test_what_is_forced_is_what_is_read(format: str) -> None:
    """Arguments between what stands around them are calls of that name, one after another. A name that is written as
    JSON may be anything."""
    quoted = format not in BARE
    offered = OFFERED if quoted else [OFFERED[0], tool("now")]
    several = forced(offered, generation_pb2.ToolChoice(several=True), format)
    (height, _, end), (now, _, _) = parts(several)
    calls = [f'{height}{{"of": 1}}{end}', f"{now}{{}}{end}"]
    reader = reader_of(format, offered)
    found = seen(reader.push(several.calls.separator.decode().join(calls * 2)) + reader.finish())
    assert found == [*call("höhe", '{"of": 1}'), *call('"now"\\' if quoted else "now", "{}")] * 2
    one = forced(offered, generation_pb2.ToolChoice(), format)
    assert parts(one) == parts(several)
    assert not one.calls.HasField("separator")
    assert parts(forced(offered, generation_pb2.ToolChoice(name="höhe"), format)) == parts(one)[:1]


def test_every_format_that_is_read_can_be_forced() -> None:
    """Those with tags by a style of the grammar."""
    assert set(FORMATS) == set(NAMES)
    assert {name: forced([tool("f")], generation_pb2.ToolChoice(), name).calls.style for name in FORMATS} == {
        **dict.fromkeys(FORMATS, ""), **STYLES
    }  # fmt: skip


@pytest.mark.parametrize("format", sorted(BARE))
def test_a_name_that_the_format_cannot_hold_is_refused(format: str) -> None:
    """A call of it could not be read: of the function, and where parameters are tags of a parameter."""
    good = tool("f", parameters={"type": "object", "properties": {"a b": {}}})
    assert forced([good], generation_pb2.ToolChoice(), format)
    for name in ("a b", "<f>", "", "f" * 300, "f=1"):
        with pytest.raises(InvalidRequest) as caught:
            forced([good, tool(name)], generation_pb2.ToolChoice(), format)
        assert caught.value.field == "chat.tools[1].function.name"
        assert caught.value.bound
        assert forced([good, tool(name)], generation_pb2.ToolChoice(name="f"), format)
    for name in ("", "a>", "<a", " a", "a\nb", "a" * 300):
        strange = tool("f", parameters={"type": "object", "properties": {name: {}}})
        if format not in STYLES:
            assert forced([strange], generation_pb2.ToolChoice(), format)
            continue
        with pytest.raises(InvalidRequest) as caught:
            forced([strange], generation_pb2.ToolChoice(), format)
        assert caught.value.field == "chat.tools[0].function.parameters.properties"


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


def test_tools_are_refused_where_the_model_does_not_see_them_or_nobody_reads_its_calls() -> None:
    """Passed over, they would give an answer of a model that never heard of them, or calls as text."""
    for source in ("{{ messages }}", "{{ tools }}{{ messages }}"):
        template = ChatTemplate(source, {})
        form = AnswerFormat.of_template(source, knows_tools=template.knows_tools)
        with pytest.raises(InvalidRequest) as caught:
            Tokenizer(None, template, form).render([{"role": "user", "content": "x"}], TOOLS)
        assert caught.value.field == "chat.tools"
