"""Arguments that models write without quotes, or as Python, become the JSON that their schema wants."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.answer.call_formats import typed_value
from services.router.answer.call_formats.python_literal import MAX_PARTS, json_of_python
from services.router.answer.call_formats.registry import reader_of
from tests.support.call_corpus import seen

DEFS = {
    "word": {"type": "string"},
    "size": {"$ref": "#/$defs/number"},
    "number": {"type": "number"},
    "loop": {"$ref": "#/$defs/loop"},
}
STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
VALUES: list[tuple[Any, str, Any]] = [
    (STRING, "12", "12"),
    (STRING, "null", "null"),
    (STRING, ' "x" ', ' "x" '),
    (INTEGER, "12", 12),
    (INTEGER, " 12 ", 12),
    (INTEGER, "twelve", "twelve"),
    ({"type": "number"}, "1e3", 1000.0),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "False", False),
    ({"type": "boolean"}, "true", True),
    ({"type": "object"}, "{'a': None, \"b\": [1,]}", {"a": None, "b": [1]}),
    ({"type": "object"}, "{'a': 1", "{'a': 1"),
    ({"type": "array"}, "(1, 'x')", [1, "x"]),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "12", "12"),
    ({"anyOf": [STRING, NULL]}, "None", None),
    ({"anyOf": [STRING, INTEGER]}, "12", 12),
    ({"anyOf": [STRING, INTEGER]}, '"12"', '"12"'),
    ({"anyOf": [{}, INTEGER]}, "x", "x"),
    ({"$ref": "#/$defs/word"}, "12", "12"),
    ({"$ref": "#/$defs/size"}, "12", 12),
    ({"$ref": "#/$defs/loop"}, "12", 12),
    ({"anyOf": [STRING] * 64}, "12", "12"),
    ({"anyOf": [STRING] * 65}, "12", 12),  # more alternatives than are looked at
    ({"anyOf": [{"anyOf": [STRING] * 8}] * 8}, "12", "12"),
    ({"anyOf": [{"anyOf": [STRING] * 9}] * 8}, "12", 12),
    ({"$ref": "#/$defs/none"}, "x", "x"),
    ({"enum": ["a", "b"]}, " a ", "a"),
    ({"enum": ["5", "6"]}, "5", "5"),
    ({"enum": ["red", 5]}, "5", 5),
    ({"const": "yes"}, "yes", "yes"),
    ({**STRING, "pattern": "^a+$"}, "\ta", "a"),
    ({**STRING, "maxLength": 2}, " ab", "ab"),
    ({**STRING, "maxLength": 2}, " a", " a"),
    ({**STRING, "maxLength": 2}, "abc", "abc"),
    ({**STRING, "minLength": 1}, " a", " a"),
    ({}, "[1, 2]", [1, 2]),
    ({}, "[1, 2", "[1, 2"),
    ({}, '"x"', "x"),
    ({}, "x", "x"),
    ({}, "", ""),
    (True, "5", 5),
    (None, "5", 5),
]


@pytest.mark.parametrize("format", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(("schema", "written", "value"), VALUES, ids=str)
def test_a_value_has_the_type_of_its_parameter(format: str, schema: Any, written: str, value: Any) -> None:
    """A string stays one whatever it looks like; other types are JSON or Python's literals, and otherwise strings."""
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFS}
    for tools in ([{"function": {"name": "f", "parameters": parameters}}],):
        for step in (1, 1000):
            reader = reader_of(format, tools)
            said = {
                "qwen3_coder": f"<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>",
                "glm": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
            }[format]
            pieces = [said[at : at + step] for at in range(0, len(said), step)]
            parts = seen([part for piece in pieces for part in reader.push(piece)] + reader.finish())
            assert parts[0] == ("call", "f")
            found = json.loads(parts[1][1])["a"]
            assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    "tools", [None, [], [{"function": {"name": "f"}}], [{"function": {"name": "f", "parameters": 5}}]]
)
def test_a_value_without_a_schema_is_json_where_it_can_be(tools: Any) -> None:
    """No tools, none of that name, none with parameters."""
    reader = reader_of("glm", tools)
    said = "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"
    for written, value in (("5", "5"), ("x", '"x"')):
        reader = reader_of("glm", tools)
        assert seen(reader.push(said.format(written)))[1] == ("arguments", f'{{"a": {value}}}')


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(LITERALS)
def test_a_python_literal_is_the_json_of_its_value(value: Any) -> None:
    """As repr writes it: quotes of either kind, escapes, True and None, nested."""
    assert json.loads(json_of_python(repr(value))) == value


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'''a'b'''", "a'b"),
        ('"""a\n"""', "a\n"),
        ("''", ""),
        ("'\\q\\''", "\\q'"),
        ("'\\U0001F600\\ud83d\\ude00'", "😀😀"),
        ("'\\x4'", "\\x4"),
        ("(1,)", [1]),
        ("[1, 2,]", [1, 2]),
        ("0x10", 16),
        ("1_000", 1000),
        ("+5", 5),
        (".5", 0.5),
        ("1e999", "1e999"),
        ("007", "007"),
        ("nan", "nan"),
        ("word", "word"),
    ],
)
def test_python_that_is_no_json_has_its_meaning_or_is_a_string(literal: str, value: Any) -> None:
    """Quotes, escapes, numbers; a number that JSON cannot represent is a string."""
    found = json.loads(json_of_python(literal))
    assert (found, type(found)) == (value, type(value)) or literal == "1e999"


@pytest.mark.parametrize(
    "text", ["1 2", "[1 2]", "[1}", "]", "", "'x", "[" * 100 + "]" * 100, "9" * 5000, "{1 2}", "[,]"]
)
def test_what_is_no_literal_is_no_json(text: str) -> None:
    """Two values without a comma, unbalanced, too deep, too long: nothing is made up."""
    with pytest.raises(ValueError):
        json.loads(json_of_python(text))


def test_a_schema_of_alternatives_of_alternatives_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """References make a million of them out of a few lines. It is read once, however often a call has the parameter."""
    read, real = [], typed_value._kind
    monkeypatch.setattr(typed_value, "_kind", lambda *about: read.append(1) or real(*about))
    several = {"anyOf": [{"anyOf": [{"$ref": "#/$defs/more"}] * 8}] * 8}
    schema = {"properties": {"a": several}, "$defs": {"more": several}}
    reader = reader_of("qwen3_coder", [{"function": {"name": "f", "parameters": schema}}])
    parts = seen(reader.push("<function=f>\n" + "<parameter=a>\n5\n</parameter>\n" * 100 + "</function>"))
    assert parts[1] == ("arguments", "{" + ", ".join(['"a": 5'] * 100) + "}")
    assert len(read) <= 1 + 8 + 3 * 64


@pytest.mark.parametrize("item", ["1, ", "'a', ", "(), ", "\\'"])
def test_a_long_python_literal_is_a_string(item: str) -> None:
    """It is converted at once, which takes 6 us a character; JSON takes a hundredth of that."""
    fits = MAX_PARTS // 8
    assert isinstance(json.loads(json_of_python(f"[{item * fits}]" if "," in item else f"'{item * fits}'")), list | str)
    for literal in (f"[{item * MAX_PARTS}]", f"'{item * MAX_PARTS}'"):
        assert json_of_python(literal) == ""
