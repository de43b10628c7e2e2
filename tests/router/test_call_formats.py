"""Calls are taken out of a model's text in every format: as they come, however the text is cut, and nothing is lost."""

from __future__ import annotations

import itertools
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.answer.call_formats import scanner
from services.router.answer.call_formats.registry import MARKERS, NAMES, reader_of
from services.router.answer.parts import CallArguments, CallBegin, Text, joined
from tests.support.call_corpus import ALL, BROKEN, GOOD, NO_CALLS, TOOLS, Seen, read, seen, text, valid


@pytest.mark.parametrize(("format", "said", "parts"), ALL, ids=lambda value: str(value)[:60])
def test_calls_and_text_are_told_apart_wherever_the_text_is_cut(format: str, said: str, parts: Seen) -> None:
    """Whole, at every single place, and into characters."""
    assert read(format, said) == parts
    assert read(format, *said) == parts
    for place in range(1, len(said)):
        assert read(format, said[:place], said[place:]) == parts


@pytest.mark.parametrize(("format", "said", "parts"), GOOD, ids=lambda value: str(value)[:60])
def test_what_a_model_writes_as_it_should_is_json_and_shows_no_marker(format: str, said: str, parts: Seen) -> None:
    """Names, arguments and text have none, but for those within a string."""
    assert valid(parts)
    for kind, words in read(format, said):
        assert kind == "arguments" or not any(marker in words for marker in MARKERS[format])


def test_the_corpus_has_every_format() -> None:
    """Good answers, such as look like calls, and broken ones."""
    assert {format for format, _, _ in GOOD} == {format for format, _ in NO_CALLS} == {*NAMES}
    assert {format for format, _, _ in BROKEN} == {*NAMES}


PIECES = [
    *(marker for markers in MARKERS.values() for marker in markers),
    *(
        '{"name": "f", "arguments": ',
        '{"name": "f", "parameters": {"a": "',
        '"}}',
        "{}",
        "}",
        '"',
        "\\",
        "\n",
        " ",
        "]",
    ),
    *("call:f{", "a:", ">>>", "all\n", "f\n", '">', '" string="true">', '{"f": {'),
    *("height", "functions.f:0", "```json\n", "f(", "a=", "'x'", "[", ",", ")", "<tool", ">", "[TOOL_", "word", "é"),
]


@given(
    st.sampled_from(NAMES), st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.integers(0, 200), max_size=9)
)
def test_how_any_text_is_cut_changes_nothing(format: str, pieces: list[str], cuts: list[int]) -> None:
    """Also of what no model writes; and no text makes a reader fail."""
    said = "".join(pieces)
    places = sorted({min(cut, len(said)) for cut in cuts} | {0, len(said)})
    assert read(format, *(said[start:end] for start, end in itertools.pairwise(places))) == read(format, said)


def test_control_without_holding_back_a_cut_marker_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus notices a reader that passes on the beginning of a marker."""
    monkeypatch.setattr(scanner.Ends, "begun", lambda self, text, at: 0)
    assert any(read(format, *said) != parts for format, said, parts in GOOD)


@given(st.sampled_from([one for one in GOOD if len(one[2]) > 1]), st.lists(st.text(string.ascii_letters, min_size=1)))
def test_text_around_calls_is_kept(case: tuple[str, str, Seen], words: list[str]) -> None:
    """Text before a call that has a marker, and after any call, in its order, but for white space between calls."""
    format, said, parts = case
    # Such a call begins the answer.
    alone = format in ("llama3", "pythonic", "functionary_v32") or said.startswith(("[{", "{"))
    before = "" if alone else "".join(words) + "."
    shown = "".join(said for kind, said in read(format, f"{before}{said}. {''.join(words)}") if kind == "text")
    expected = "".join(said for kind, said in parts if kind == "text")
    assert "".join(f"{before}{expected}. {''.join(words)}".split()) == "".join(shown.split())


@pytest.mark.parametrize("format", NAMES)
def test_text_is_passed_on_at_once_unless_it_may_become_a_marker(format: str) -> None:
    """At each place only the longest beginning of a marker is held."""
    reader = reader_of(format)
    said = "so x < y, [a] and {b}: <tool, <tool_cal [TOOL <| <｜tool▁cal <func `` end"
    shown = ""
    for place, character in enumerate(said, 1):
        shown += "".join(part.text for part in reader.push(character) if isinstance(part, Text))
        held = said[len(shown) : place]
        assert held == "" or any(marker.startswith(held) and marker != held for marker in MARKERS[format])
    assert shown == said


HEADS = {
    "hermes": '<tool_call>{"name": "height", "arguments": ',
    "llama3": '{"name": "height", "parameters": ',
    "mistral": "[TOOL_CALLS]height[ARGS]",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>height\n```json\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>height<｜tool▁sep｜>",
    "kimi_k2": "<|tool_call_begin|>functions.height:0<|tool_call_argument_begin|>",
    "qwen3_coder": "<tool_call>\n<function=height>\n<parameter=",
    "glm": "<tool_call>height\n<arg_key>",
    "pythonic": "[height(peak=",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="height">\n<｜DSML｜parameter name="',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="height">\n<｜DSML｜parameter name="',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="height">\n<parameter name="',
    "gemma4": "<|tool_call>call:height{",
    "functiongemma": "<start_function_call>call:height{",
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "height", "parameters": ',
    "hunyuan_a13b": '<tool_calls>[{"name": "height", "arguments": ',
    "hy_v3": "<tool_calls>\n<tool_call>height<tool_sep>\n<arg_key>",
    "lfm2": "<|tool_call_start|>[height(peak=",
    "apertus": '<|tools_prefix|>[{"height": ',
    "functionary_v31": "<function=height>",
    "functionary_v32": "height\n",
    "nemotron": '<TOOLCALL>[{"name": "height", "arguments": ',
    "granite": '<|tool_call|>[{"name": "height", "arguments": ',
}
# What follows in the formats whose arguments are no JSON, to the first character of a string.
TAGS = {
    "qwen3_coder": "peak>\n",
    "glm": "peak</arg_key>\n<arg_value>",
    "pythonic": "'",
    "deepseek_v32": 'peak" string="true">',
    "deepseek_v4": 'peak" string="true">',
    "minimax_m2": 'peak">',
    "gemma4": 'peak:<|"|>',
    "functiongemma": "peak:<escape>",
    "hy_v3": "peak</arg_key>\n<arg_value>",
    "lfm2": "'",
}


@pytest.mark.parametrize("format", NAMES)
def test_a_call_begins_with_its_name_and_its_arguments_follow_as_they_come(format: str) -> None:
    """The name before any argument is there; then each character of a string by itself."""
    reader = reader_of(format, TOOLS)
    head = HEADS[format] + ("{" if format not in TAGS else "")
    *early, begin = joined([part for character in head for part in reader.push(character)])[:1]
    assert not early
    assert isinstance(begin, CallBegin)
    assert begin.name == "height"
    assert not seen(reader.push(TAGS.get(format, '"peak": "')))[1:]
    said, passed = "The Eiger, 3967 m: ünd < ", ""
    for place, character in enumerate(said, 1):
        passed += "".join(part.text for part in reader.push(character) if isinstance(part, CallArguments))
        assert said[:place] == passed + ("<" if character == "<" and passed != said[:place] else "")


def test_ids_are_the_models_where_its_template_needs_them() -> None:
    """Kimi's have the function's name, and none comes twice; Mistral's have nine letters or digits."""

    def ids(format: str, said: str) -> list[str]:
        reader = reader_of(format)
        return [part.id for part in reader.push(said) + reader.finish() if isinstance(part, CallBegin)]

    one = "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert ids("kimi_k2", one.format(0) + one.format(7)) == ["functions.f:0", "functions.f:7"]
    assert ids("kimi_k2", one.format(0) * 3) == ["functions.f:0", "functions.f:1", "functions.f:2"]
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}") == ["abcdefghi"]
    [first], [second] = ids("mistral", "[TOOL_CALLS]f[ARGS]{}"), ids("mistral", "[TOOL_CALLS]f[ARGS]{}")
    assert first != second
    assert len(first) == len(second) == 9
    assert (first + second).isalnum()
    two = '<tool_call>{"name": "f"}</tool_call>' * 2
    assert len({*ids("hermes", two)}) == 2


@pytest.mark.parametrize(
    ("format", "head"),
    [
        ("hermes", '<tool_call>{"x": "'),
        ("hermes", '<tool_call>{"arguments": {"x": "'),
        ("hermes", "<tool_call> "),
        ("llama3", '{"x": ["'),
        ("mistral", "[TOOL_CALLS] "),
        ("cohere", '<|START_ACTION|>[{"x": "'),
        ("gemma4", "<|tool_call> "),
        ("deepseek_v32", "<｜DSML｜tool_calls> "),
    ],
)
def test_what_is_held_is_bounded(format: str, head: str) -> None:
    """What does not become a call within MAX_HELD characters is text, and the rest is passed on at once."""
    reader, size = reader_of(format), scanner.MAX_HELD // 16
    passed = ""
    said = head + (" " if head.endswith(" ") else "x") * (20 * size)
    for at in range(0, len(said), size):
        passed += "".join(part.text for part in reader.push(said[at : at + size]) if isinstance(part, Text))
        assert at + size - len(passed) <= scanner.MAX_HELD + 2 * size
    assert seen([Text(passed), *reader.finish()]) == text(said)


@pytest.mark.parametrize("type", ["object", "array", "integer"])
def test_a_value_that_is_held_is_bounded_too(type: str) -> None:
    """An endless value of a type that is converted as a whole is passed on as it comes after MAX_HELD characters."""
    tools: list[Any] = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": type}}}}}]
    reader = reader_of("qwen3_coder", tools)
    start = {"object": '{"a": "', "array": "[1", "integer": "1"}[type]
    parts = reader.push(f"<function=f>\n<parameter=a>\n{start}")
    parts += reader.push("1" * scanner.MAX_HELD)
    more = reader.push("22")
    assert seen(more) == [("arguments", "22")]
    assert seen(parts)[1] == ("arguments", f'{{"a": {start}{"1" * scanner.MAX_HELD}')
