"""The chat template tells in which format its model writes calls, and none is taken for another."""

from __future__ import annotations

import pytest
from jinja2 import Environment

from services.router.answer.call_formats.registry import MARKERS, NAMES, format_of, reader_of
from tests.support.call_templates import TEMPLATES, UNKNOWN
from tests.support.reasoning_templates import GLM, QWEN3
from tests.support.templates import HERMES, LLAMA


@pytest.mark.parametrize(("format", "template"), TEMPLATES, ids=lambda value: value[:20])
def test_the_template_tells_the_format(format: str, template: str) -> None:
    """By what it writes for calls, not by a marker that several formats have."""
    Environment().parse(template)
    assert format_of(template) == format


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
    Environment().parse(template)
    assert format_of(template) is None
