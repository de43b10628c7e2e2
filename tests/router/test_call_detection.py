"""The chat template tells in which format its model writes calls, and none is taken for another."""

from __future__ import annotations

import pytest

from services.router.answer.answer_format import AnswerFormat
from services.router.answer.call_formats.registry import MARKERS, NAMES, format_of, reader_of
from services.router.preprocess.chat.calls_in_content import FORMATS
from services.router.preprocess.chat.chat_template import ChatTemplate
from services.router.preprocess.tokenizer import Tokenizer
from tests.support.call_corpus import TOOLS, read
from tests.support.call_templates import TEMPLATES, UNKNOWN
from tests.support.reasoning_templates import GLM, QWEN3
from tests.support.templates import HERMES, LLAMA


def detected(source: str) -> str | None:
    """As the tokenizer does it."""
    template = ChatTemplate(source, {})
    return format_of(template.tool_source, template.call)


@pytest.mark.parametrize(("format", "template"), TEMPLATES, ids=lambda value: value[:20])
def test_the_template_tells_the_format(format: str, template: str) -> None:
    """By what it writes for calls, not by a marker that several formats have."""
    assert detected(template) == format


def test_each_format_is_found_by_some_template() -> None:
    """And each has a reader and knows its markers."""
    assert {format for format, _ in TEMPLATES} == {*NAMES} == {*MARKERS}
    for name in NAMES:
        assert reader_of(name).finish() == []
    assert {format_of(HERMES), format_of(QWEN3)} == {"hermes"}
    assert (format_of(LLAMA), format_of(GLM)) == ("llama3", "glm")


@pytest.mark.parametrize("template", UNKNOWN, ids=lambda value: value[-60:-10])
def test_a_format_that_is_not_known_is_none(template: str) -> None:
    """Calls would be read wrongly, or not at all, without a word."""
    assert detected(template) is None


@pytest.mark.parametrize(
    ("format", "shown"),
    [
        ("lfm2", 'x<|tool_call_start|>[height(peak="it\'s", near=[1, None, True]), now()]<|tool_call_end|>'),
        ("granite", 'x<|tool_call|>[{"name": "height", "arguments": {"peak": "it\'s", "near": [1, null, true]}}]'),
    ],
)
def test_calls_of_earlier_turns_are_shown_by_a_template_that_drops_them(format: str, shown: str) -> None:
    """In the model's own format, so that they can be read again. A template that shows them shows them once."""
    source = next(template for name, template in TEMPLATES if name == format)
    template = ChatTemplate(source, {})
    assert not template.shows_calls
    tokenizer = Tokenizer(None, template, AnswerFormat.of_template(source, knows_tools=True))
    functions = [{"name": "height", "arguments": {"peak": "it's", "near": [1, None, True]}}, {"name": "now"}]
    functions = functions if format == "lfm2" else functions[:1]
    turns = [
        {"role": "user", "content": "How high?"},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": one} for one in functions]},
        {"role": "tool", "content": "3967"},
    ]
    assert tokenizer.render(turns, TOOLS).endswith(f"How high?{shown}3967")
    names = [name for kind, name in read(format, shown) if kind == "call"]
    assert names == [one["name"] for one in functions]
    assert format in FORMATS
    assert ChatTemplate(HERMES, {}).shows_calls
