"""Promises of answers: the chat template tells how a model writes; reasoning, text and calls are read in one pass."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.answer.answer_format import FORMATS, PLAIN, AnswerFormat
from services.router.answer.answer_reader import AnswerReader
from services.router.answer.call_formats import registry
from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning, Text, joined
from services.router.preprocess.chat.chat_template import ChatTemplate
from tandem.errors import SettingsError
from tests.support.examples import examples
from tests.support.reasoning_templates import DEEPSEEK, EXAONE_DEEP, GLM, GPT_OSS, GRANITE, HUNYUAN, MAGISTRAL, QWEN3
from tests.support.templates import HERMES, LLAMA

Read = list[tuple[str, str]]
KINDS: dict[type[Part], str] = {Reasoning: "thinks", Text: "says", CallArguments: "with"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
QWEN = AnswerFormat(FORMATS["think"], "hermes")
OSS = AnswerFormat(calls="harmony", harmony=True)


def reader_of(
    format: AnswerFormat, tools: list[Any] | None = TOOLS, *, inside: bool = False, one_call: bool = False
) -> AnswerReader:
    return AnswerReader(format, tools=tools, begins_inside=inside, one_call=one_call)


def read(reader: AnswerReader, *pieces: str) -> Read:
    parts = joined([*(part for piece in pieces for part in reader.push(piece)), *reader.finish()])
    assert reader.calls == sum(isinstance(part, CallBegin) for part in parts)
    return [("call", part.name) if isinstance(part, CallBegin) else (KINDS[type(part)], part.text) for part in parts]


def call(name: str, number: int = 1) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"x": {number}}}}}\n</tool_call>'


def called(name: str, number: int = 1) -> Read:
    return [("call", name), ("with", f'{{"x": {number}}}')]


ANSWERS: list[tuple[str, Read]] = [
    (f"<think>\nLook.\n</think>\n\n{call('f')}", [("thinks", "Look."), *called("f")]),
    (f"<think>\n\n</think>\n\nOne.\n{call('f')}\n{call('g', 2)}", [("says", "One.\n"), *called("f"), *called("g", 2)]),
    (f"<think>Look.</think>Yes <think> {call('f')}", [("thinks", "Look."), ("says", "Yes <think> "), *called("f")]),
    # The model calls without having closed its reasoning.
    (f"<think>\nLook.\n{call('f')}", [("thinks", "Look."), *called("f")]),
    ('<think>Look. <tool_call>{"name": "f", "arguments": {"x"', [("thinks", "Look."), ("call", "f"), ("with", '{"x"')]),
    # It only thinks of the markers, of a call that is none, or of a tool that there is not.
    (f"<think>I write <tool_call>.</think>{call('f')}", [("thinks", "I write <tool_call>."), *called("f")]),
    (f"<think>A <tool_call></think>{call('f')}", [("thinks", "A <tool_call>"), *called("f")]),
    (f"<think>A <tool_call>\n{call('f')}", [("thinks", "A <tool_call>"), *called("f")]),
    ("<think>A <tool_call>{}</tool_call> b", [("thinks", "A <tool_call>{}</tool_call> b")]),
    (f"<think>Like {call('h')}.", [("thinks", f"Like {call('h')}.")]),
    ('<think>A <tool_call>\n{"na', [("thinks", 'A <tool_call>\n{"na')]),
    (f"No thought. {call('f')}", [("says", "No thought. "), *called("f")]),
]


@pytest.mark.parametrize(("answer", "parts"), ANSWERS, ids=lambda value: str(value)[:40])
def test_reasoning_comes_before_calls_however_the_text_is_cut(answer: str, parts: Read) -> None:
    """Whole, one character at a time, and cut at each place."""
    for pieces in ([answer], list(answer), *([answer[:at], answer[at:]] for at in range(1, len(answer)))):
        assert read(reader_of(QWEN), *pieces) == parts


IN_FORMATS = {
    "hermes": call("f"),
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"x": 1}<|tool_call_end|><|tool_calls_section_end|>',
}


@pytest.mark.parametrize("name", IN_FORMATS)
def test_every_format_of_calls_goes_with_reasoning(name: str) -> None:
    """After it, within it, and where only its first marker is mentioned."""
    format = AnswerFormat(FORMATS["think"], name)
    opener = registry.MARKERS[name][0]
    for start, thought in (
        ("Look.</think>\n\n", "Look."),
        ("Look.\n", "Look."),
        (f"A {opener}, then\n", f"A {opener}, then"),
        (f"A {opener}</think>", f"A {opener}"),
    ):
        answer = start + IN_FORMATS[name]
        for pieces in ([answer], list(answer)):
            thinks, begins, (kind, arguments) = read(reader_of(format, inside=True), *pieces)
            assert (thinks, begins, kind) == (("thinks", thought), ("call", "f"), "with")
            assert json.loads(arguments) == {"x": 1}


def test_without_tools_calls_stay_text() -> None:
    """And reasoning ends by its marker alone."""
    answer = f"{call('f')}</think>{call('f')}"
    assert read(reader_of(QWEN, None, inside=True), answer) == [("thinks", call("f")), ("says", call("f"))]
    assert read(reader_of(PLAIN), answer) == [("says", answer)]
    oss = "<|channel|>commentary to=functions.f<|message|>{}"
    assert read(reader_of(OSS, None), oss) == [("says", "{}")]
    assert read(reader_of(OSS), oss) == [("call", "f"), ("with", "{}")]


def test_one_call_is_passed_on_where_only_one_is_wanted() -> None:
    """The first; what the model says stays."""
    answer = f"A{call('f')}{call('g', 2)} B{call('f', 3)}"
    for pieces in ([answer], list(answer)):
        read_parts = read(reader_of(QWEN, one_call=True), *pieces)
        assert [part for part in read_parts if part[0] != "says"] == called("f")
        assert "".join(text for kind, text in read_parts if kind == "says").split() == ["A", "B"]
    oss = "<|channel|>commentary to=functions.f<|message|>{}<|call|><|channel|>commentary to=functions.g<|message|>{}"
    assert read(reader_of(OSS, one_call=True), oss) == [("call", "f"), ("with", "{}")]


def test_inside_is_what_the_first_reader_says() -> None:
    """Until the reasoning ends, by its marker or by a call; never without reasoning."""
    for text, inside in (("x", True), ("x</think>", False), (f"x{call('f')}", False), ("x<tool_call>", True)):
        reader = reader_of(QWEN, inside=True)
        reader.push(text)
        assert reader.inside is inside
    assert not reader_of(PLAIN, inside=True).inside
    assert reader_of(OSS, inside=True).inside


PIECES = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            call("f"),
            call("h"),
            '{"name": "f"',
            "{}",
            "<",
            "x",
            "\n",
        ]
    ),
    max_size=12,
)


@examples(600)
@given(pieces=PIECES, inside=st.booleans(), one=st.booleans(), places=st.lists(st.integers(0, 300), max_size=12))
def test_any_text_is_read_the_same_however_it_is_cut(
    pieces: list[str], inside: bool, one: bool, places: list[int]
) -> None:
    """Reasoning, text and calls together, whatever comes where."""
    text = "".join(pieces)
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    cut = [text[start:end] for start, end in itertools.pairwise(bounds)]
    whole = read(reader_of(QWEN, inside=inside, one_call=one), text)
    assert read(reader_of(QWEN, inside=inside, one_call=one), *cut) == whole
    assert read(reader_of(QWEN, inside=inside, one_call=one), *text) == whole
    assert not one or sum(kind == "call" for kind, _ in whole) <= 1
    assert "thinks" not in [kind for kind, _ in whole[1:]]


# ---- Which format

TEMPLATES: list[tuple[str, str | None, str | None]] = [
    (QWEN3, "think", "hermes"),
    (DEEPSEEK, "think", None),
    (GLM, "think", "glm"),
    (MAGISTRAL, "mistral", None),
    (GRANITE, "granite_tags", None),
    ("{{ '<think>' }}{{ '<response>' + result + '</response>' }}", "think", None),  # MiniMax M2: results of tools
    (HUNYUAN, "hunyuan", None),
    (EXAONE_DEEP, "exaone_deep", None),
    (HERMES, None, "hermes"),
    (LLAMA, None, "llama3"),
    ("{# models that think write <think> #}{{ messages }}", None, None),
]


@pytest.mark.parametrize(("template", "reasoning", "calls"), TEMPLATES)
def test_the_template_tells_how_its_model_writes(template: str, reasoning: str | None, calls: str | None) -> None:
    """Its markers, and not what its comments say; no calls where it shows no tools."""
    found = AnswerFormat.of_template(template, knows_tools=True)
    assert found.reasoning == (FORMATS[reasoning] if reasoning else None)
    assert found.reasons is (reasoning is not None)
    assert calls is None or found.calls == calls
    assert not found.harmony
    assert AnswerFormat.of_template(template, knows_tools=False).calls is None


def test_gpt_oss_is_harmony() -> None:
    """Whose calls are its own; its markers are its special tokens."""
    found = AnswerFormat.of_template(GPT_OSS, knows_tools=True)
    assert found == OSS
    assert {"<|channel|>", "<|call|>"} < found.markers
    assert found.reasons


PROMPTS: list[tuple[str, dict[str, Any], bool]] = [
    (QWEN3, {}, False),
    (QWEN3, {"enable_thinking": False}, False),
    (DEEPSEEK, {"thinking": True}, True),
    (DEEPSEEK, {"thinking": False}, False),
    (GLM, {}, False),
    (GLM, {"enable_thinking": False}, False),
    (EXAONE_DEEP, {}, True),
    (GPT_OSS, {}, False),
]


@pytest.mark.parametrize(("template", "variables", "inside"), PROMPTS)
def test_the_prompt_tells_whether_the_answer_begins_inside(
    template: str, variables: dict[str, Any], inside: bool
) -> None:
    """Where the template writes the opening marker itself, whatever markers the user writes."""
    found = AnswerFormat.of_template(template, knows_tools=True)
    opening = found.reasoning_markers[0]
    for content in ("Hi", f"What is {opening}", f"{opening}\n"):
        prompt = ChatTemplate(template, variables).render([{"role": "user", "content": content}])
        assert found.begins_inside(prompt[-256:]) is inside


def test_an_answer_that_goes_on_begins_where_its_message_ended() -> None:
    """In reasoning that was not closed, or after it."""
    for end, inside in (("<think>\nHm, ", True), ("<think>\nHm.</think>\nSo ", False), ("So ", False), ("", False)):
        assert QWEN.begins_inside(end, continued=True) is inside
        assert not QWEN.begins_inside(f"{end}x")
    assert OSS.begins_inside("<|start|>assistant<|channel|>analysis<|message|>Hm, ", continued=True)
    assert not OSS.begins_inside("<|start|>assistant<|channel|>final<|message|>So ", continued=True)
    assert not PLAIN.begins_inside("<think>", continued=True)


def test_settings_name_another_format() -> None:
    """One of the known, two markers, or none; each without the other."""

    def named(reasoning: str | None = None, calls: str | None = None, source: str = QWEN3) -> AnswerFormat:
        return AnswerFormat.of_template(source, knows_tools=True, reasoning=reasoning, calls=calls)

    assert named("none") == AnswerFormat(None, "hermes")
    assert named(calls="none") == AnswerFormat(FORMATS["think"])
    assert named("mistral", "llama3") == AnswerFormat(FORMATS["mistral"], "llama3")
    assert named("<r> </r>", "none").reasoning_markers == ("<r>", "</r>")
    assert read(reader_of(named("<r> </r>")), "<r>x</r>y") == [("thinks", "x"), ("says", "y")]
    assert named("harmony") == named(calls="harmony") == OSS
    assert named("harmony", "none") == named(calls="none", source=GPT_OSS) == AnswerFormat(harmony=True)
    assert named("none", source=GPT_OSS) == AnswerFormat(None, registry.format_of(GPT_OSS))


@pytest.mark.parametrize(
    ("reasoning", "calls", "field"),
    [
        ("thinking", None, "reasoning_format"),
        ("", None, "reasoning_format"),
        ("<a> ", None, "reasoning_format"),
        ("<a> b </a>", None, "reasoning_format"),
        ("think", "harmony", "reasoning_format"),
        ("harmony", "hermes", "tool_call_format"),
        (None, "hermess", "tool_call_format"),
        (None, "", "tool_call_format"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(reasoning: str | None, calls: str | None, field: str) -> None:
    """By the name of its setting."""
    with pytest.raises(SettingsError) as caught:
        AnswerFormat.of_template(QWEN3, knows_tools=True, reasoning=reasoning, calls=calls)
    assert caught.value.field == field
    assert "harmony" in str(caught.value.bound)


def test_the_markers_are_those_that_must_stay_visible() -> None:
    """Of reasoning and of calls; of Gemma 4, whose marker is a token and a word, the token too."""
    assert {"<think>", "</think>", "<tool_call>", "</tool_call>"} <= QWEN.markers
    assert {"<|channel>", "<channel|>"} <= AnswerFormat(FORMATS["gemma4"]).markers
    assert not PLAIN.markers
    for name, markers in FORMATS.items():
        assert AnswerFormat(markers).markers == set(markers.texts), name
