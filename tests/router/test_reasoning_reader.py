"""Promises of reasoning: what is reasoning depends on the text alone, and no marker is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.answer import reasoning_reader
from services.router.answer.answer_format import FORMATS
from services.router.answer.call_formats import registry
from services.router.answer.parts import CallBegin, Part, Reasoning, Text, joined
from services.router.answer.reasoning_reader import (
    MAX_ALLOWANCE,
    MAX_CALL,
    MAX_SPACE,
    PROBE_BLOCK,
    PROBED_PER_CHARACTER,
    CallsWithin,
    Markers,
    ReasoningReader,
)
from tests.support.examples import examples

THINK = FORMATS["think"]
PAIRED = Markers(("<a>",), ("</a>",), answer=("<b>", "</b>"))


class Calls:
    """Reads [f( and [g( as the beginning of a call of f and g, everything else as text."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[Part]:
        self._text += text
        if self._text.startswith(("[f(", "[g(")):
            return [CallBegin("id", self._text[1])]
        return [] if "[f(".startswith(self._text) or "[g(".startswith(self._text) else [Text(self._text)]

    def finish(self) -> list[Part]:
        return [Text(self._text)]


CALLS = CallsWithin(("[",), Calls, frozenset("f"))


def read(pieces: Sequence[str], markers: Markers, inside: bool = False, calls: CallsWithin | None = None) -> list[Part]:
    reader = ReasoningReader(markers, begins_inside=inside, calls=calls)
    return joined([*(part for piece in pieces for part in reader.push(piece)), *reader.finish()])


def of(reasoning: str, text: str) -> list[Part]:
    return joined([Reasoning(reasoning), Text(text)])


def cuts(text: str) -> list[list[str]]:
    """Whole, one character at a time, and in two at every place."""
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


ANSWERS: list[tuple[str, bool, str, str, str]] = [
    # What Qwen3 writes, and the same where the template wrote the marker.
    ("think", False, "<think>\nTwo\nlines.\n</think>\n\nYes.", "Two\nlines.", "Yes."),
    ("think", True, "Two\nlines.\n</think>\n\nYes.", "Two\nlines.", "Yes."),
    ("think", True, "\n\nx\n\n</think>Yes.\n", "x", "Yes.\n"),
    ("think", True, "<think>\nx</think>y", "x", "y"),  # written again
    ("think", False, "\n<think>x</think> y", "x", "y"),  # GLM-4.5
    ("think", False, "<think>\n\n</think>\n\nYes.", "", "Yes."),  # of Qwen3 that does not think
    ("think", False, "<think>x</think>\r\n\r\n    return 1\n", "x", "    return 1\n"),
    ("think", False, "<think>x</think>", "x", ""),
    ("think", False, "<think>x</think>\n \n", "x", ""),
    ("think", False, "<think>cut \n", "cut \n", ""),
    ("think", True, "cut </thi", "cut </thi", ""),
    ("think", True, "<thin", "<thin", ""),
    ("think", True, "", "", ""),
    ("think", False, "", "", ""),
    ("think", False, "<thin", "", "<thin"),
    ("think", False, "  No markers.", "", "  No markers."),
    ("think", False, " \n ", "", " \n "),
    ("think", False, "Say <think>x</think>", "", "Say <think>x</think>"),
    ("think", False, "x</think>y", "", "x</think>y"),
    ("think", False, "<think>x</think>y <think>z</think>", "x", "y <think>z</think>"),
    ("think", False, "<think>a < b </ think> <think></think>c", "a < b </ think> <think>", "c"),
    ("think", False, " " * MAX_SPACE + "<think>x</think>", "x", ""),
    ("think", False, " " * (MAX_SPACE + 1) + "<think>x", "", " " * (MAX_SPACE + 1) + "<think>x"),
    ("think", True, "x" + "\n" * (MAX_SPACE + 2) + "</think>", "x\n\n", ""),
    ("think", True, "x</think>" + "\n " * 300 + "y", "x", " y"),
    ("mistral", False, "[THINK]x [/]y[/THINK]\nYes [THINK]", "x [/]y", "Yes [THINK]"),
    ("seed_oss", False, "<seed:think>x</seed:think>Yes.", "x", "Yes."),
    ("minimax_m3", True, "x</mm:think>Yes.", "x", "Yes."),
    ("apertus", False, "<|inner_prefix|>x<|inner_suffix|>Yes.", "x", "Yes."),
    ("kimi_vl", False, "◁think▷x◁/think▷Yes.", "x", "Yes."),
    ("exaone_deep", True, "\nx\n</thought>\n\nYes.", "x", "Yes."),
    ("gemma4", False, "<|channel>thought\nx\n<channel|>Yes.", "x", "Yes."),
    ("gemma4", False, "<|channel>thought\n<channel|>Yes.", "", "Yes."),
    ("granite", False, "Here is my thought process:\nx\n\nHere is my response:\nYes.", "x", "Yes."),
    ("granite", False, "Here's my thought process: Here is x. Here's my response: Yes.", "Here is x.", "Yes."),
    ("granite", False, "Here is my answer: no", "", "Here is my answer: no"),
    ("granite_tags", False, "<think>x</think>\n\n<response>Yes.</response>", "x", "Yes."),
    ("hunyuan", False, "<think>\nx\n</think>\n<answer>\nYes\n\nNo\n</answer>", "x", "Yes\n\nNo"),
    ("hunyuan", False, "<think>x</think><answer>\n  1 < 2 ", "x", "  1 < 2 "),  # a stop token came before the marker
    ("hunyuan", False, "<answer>Yes</answer>\n", "", "Yes"),
    ("hunyuan", False, "<think>x</think>\nYes </answer>", "x", "Yes </answer>"),
    ("hunyuan", False, "<think>x</think>\n<answ", "x", "<answ"),
    ("cohere", False, "<|START_THINKING|>x<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "x", "Yes."),
    ("cohere", True, "x<|END_THINKING|>Yes.", "x", "Yes."),  # the others hidden, as special tokens
]


@pytest.mark.parametrize(("name", "inside", "answer", "reasoning", "text"), ANSWERS, ids=lambda value: str(value)[:40])
def test_reasoning_is_told_from_the_answer_however_the_text_is_cut(
    name: str, inside: bool, answer: str, reasoning: str, text: str
) -> None:
    """Every format, whole, one character at a time, and cut at each place: closed, cut off, empty, absent."""
    for pieces in cuts(answer):
        assert read(pieces, FORMATS[name], inside) == of(reasoning, text)


CALLED: list[tuple[str, str, str]] = [
    ("I call. [f(1)", "I call.", "[f(1)"),
    ("[f(1)</a>", "", "[f(1)</a>"),
    ("a [x] [g(1) [", "a [x] [g(1) [", ""),  # no call, one of an unknown tool, and what never becomes one
    ("a [[f(", "a [", "[f("),
    ("a [</a> [f(", "a [", "[f("),
    ("a [f", "a [f", ""),
    ("a</a>[f(", "a", "[f("),
]


@pytest.mark.parametrize(("answer", "reasoning", "text"), CALLED)
def test_a_call_of_an_offered_tool_ends_the_reasoning(answer: str, reasoning: str, text: str) -> None:
    """Only if it really begins there: reasoning also mentions the marker. Without tools it is reasoning."""
    for pieces in cuts(answer):
        assert read(pieces, PAIRED, True, CALLS) == of(reasoning, text)
    ending = answer.partition("</a>")
    assert read([answer], PAIRED, True) == of(ending[0].rstrip() if ending[1] else ending[0], ending[2].lstrip())


def test_a_call_that_is_known_at_the_end_alone_is_a_call_too() -> None:
    """The end of the answer may complete what tells that it is one."""

    class Late(Calls):
        def push(self, text: str) -> list[Part]:
            return []

        def finish(self) -> list[Part]:
            return [CallBegin("id", "f")]

    for names, parts in (("f", of("a", "[f")), ("g", of("a [f", ""))):
        assert read(["a [", "f"], PAIRED, True, CallsWithin(("[",), Late, frozenset(names))) == parts


@pytest.mark.long
def test_a_call_that_stays_unknown_does_not_hold_the_reasoning_forever() -> None:
    """After MAX_CALL characters the marker was only mentioned; the same for every cut."""

    class Undecided(Calls):
        def push(self, text: str) -> list[Part]:
            return []

    answer = "[" + "x" * (2 * MAX_CALL) + "</a>y"
    for pieces in ([answer], list(answer)):
        calls = CallsWithin(("[",), Undecided, frozenset("f"))
        reader = ReasoningReader(PAIRED, begins_inside=True, calls=calls)
        held = most = 0
        parts: list[Part] = []
        for piece in pieces:
            parts += reader.push(piece)
            held += len(piece)
            most = max(most, held - sum(len(part.text) for part in parts if isinstance(part, Text | Reasoning)))
        assert joined(parts) == of(answer[:-5], "y")
        assert most <= MAX_CALL or len(pieces) == 1


PIECES = st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "[f(", "[g(", "[", "<", "</", "a>", "x", " ", "\n"]))


@examples(600)
@given(pieces=PIECES, inside=st.booleans(), offered=st.booleans(), sizes=st.lists(st.integers(1, 7), min_size=1))
def test_any_text_is_read_the_same_however_it_is_cut(
    pieces: list[str], inside: bool, offered: bool, sizes: list[int]
) -> None:
    """And nothing but markers and the white space beside them is lost."""
    text, calls = "".join(pieces), CALLS if offered else None
    cut, at = [], 0
    while at < len(text):
        cut.append(text[at : at + sizes[len(cut) % len(sizes)]])
        at += len(cut[-1])
    parts = read([text], PAIRED, inside, calls)
    assert read(cut, PAIRED, inside, calls) == parts
    shown, whole = ["".join(kept.split()) for kept in ("".join(getattr(part, "text", "") for part in parts), text)]
    rest = iter(whole)
    assert all(character in rest for character in shown)
    lost = len(whole) - len(shown)
    marked = sum(len(marker) * whole.count(marker) for marker in ("<a>", "</a>", "<b>", "</b>"))
    assert lost <= marked


@examples(400)
@given(pieces=PIECES, inside=st.booleans())
def test_nothing_is_held_but_what_may_become_a_marker(pieces: list[str], inside: bool) -> None:
    """After each character all is shown but the beginning of a marker and the white space before it."""
    reader, came, shown = ReasoningReader(PAIRED, begins_inside=inside), "", ""
    for character in "".join(pieces):
        came += character
        shown += "".join(part.text for part in reader.push(character) if isinstance(part, Text | Reasoning))
        held = reader._held
        assert came.endswith(held.lstrip(" \n"))
        assert any(marker.startswith(held.lstrip()) for marker in ("<a>", "</a>", "<b>", "</b>"))


def test_inside_lasts_until_the_reasoning_ends() -> None:
    """From the opening marker, or from the beginning, to the closing one; not in an answer without reasoning."""
    for text, inside, expected in (
        ("<think>x</think>y", False, "0" * 7 + "1" * 9 + "00"),
        ("x</think>y", True, "1" * 9 + "00"),
        ("x", False, "00"),
    ):
        reader = ReasoningReader(THINK, begins_inside=inside)
        seen = [reader.inside]
        for character in text:
            reader.push(character)
            seen.append(reader.inside)
        assert "".join(str(int(one)) for one in seen) == expected


@pytest.mark.long
def test_long_reasoning_is_read_in_linear_time() -> None:
    """25,000 each of white space, of beginnings of markers, and of calls that are none, character by character."""
    for unit in (" ", "<", "</", "["):
        reader = ReasoningReader(PAIRED, begins_inside=True, calls=CALLS)
        for _ in range(25_000):
            reader.push(unit)
            assert len(reader._held) <= MAX_SPACE + 8


@pytest.mark.parametrize(
    "mention", ['<tool_call>{"name', '<tool_call>{"x": [1, "', "<tool_call>{", "<tool_call>", "<tool_call>\n{'name': "]
)
def test_a_closing_marker_ends_the_reasoning_although_a_call_seemed_to_begin(mention: str) -> None:
    """Reasoning about the format stops in the middle of an example: the answer after it is no part of that."""
    calls = CallsWithin(("<tool_call>",), lambda: registry.reader_of("hermes", None), frozenset("f"))
    for pieces in cuts(f"It writes {mention}</think>\n\nYes."):
        assert read(pieces, THINK, True, calls) == of(f"It writes {mention.rstrip()}", "Yes.")


class Counted:
    """Reads Hermes' calls, and counts the characters."""

    total = 0

    def __init__(self) -> None:
        self._reader = registry.reader_of("hermes", None)

    def push(self, text: str) -> list[Part]:
        Counted.total += len(text)
        return self._reader.push(text)

    def finish(self) -> list[Part]:
        return self._reader.finish()


SPAM = {
    "one in the other, and all end at once": '<tool_call>{"x":[' * 200 + "]" * 400,
    "one in the other": '<tool_call>{"x":[' * 800,
    "nothing but markers": "<tool_call>" * 1000,
    "one after the other": '<tool_call>{"x":["' + "y" * 3000 + "]}" + '<tool_call>{"x":["' * 300,
}


@pytest.mark.parametrize("name", SPAM)
@pytest.mark.long
def test_unclosed_calls_within_reasoning_are_read_a_bounded_number_of_times(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them begins a probe, which reads what the one before had read. The parts do not depend on the cut, and a
    call after the next some thousand characters is found. The control: without the allowance, many times the text."""
    calls = CallsWithin(("<tool_call>",), Counted, frozenset("f"))
    text = SPAM[name] + "x " * MAX_CALL + '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    def cost(step: int) -> tuple[list[Part], int]:
        Counted.total = 0
        parts = read([text[at : at + step] for at in range(0, len(text), step)], THINK, True, calls)
        return parts, Counted.total

    parts, total = cost(1)
    assert parts == of(text[: text.index(" <tool_call>")], text[text.index('<tool_call>{"name"') :])
    bound = PROBED_PER_CHARACTER * (len(text) + PROBE_BLOCK) + MAX_ALLOWANCE + MAX_CALL
    assert total <= bound
    assert all(cost(step)[0] == parts for step in (3, 64, 1000, len(text)))
    monkeypatch.setattr(reasoning_reader, "MAX_ALLOWANCE", 10**9)
    assert cost(len(text))[1] > bound or name == "nothing but markers"
