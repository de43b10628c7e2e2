"""Promises of harmony: the messages of gpt-oss become reasoning, text and calls, and no header is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.answer.harmony_reader import MARKERS, MAX_HEADER, HarmonyReader
from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning, Text, joined
from tests.support.examples import examples

Read = list[tuple[str, str]]


def read(pieces: Sequence[str], *, inside: bool = False, tools: bool = True) -> Read:
    """Each part's kind, and its text or the name of its function."""
    reader = HarmonyReader(offers_tools=tools, begins_inside=inside)
    parts = joined([*(part for piece in pieces for part in reader.push(piece)), *reader.finish()])
    ids = [part.id for part in parts if isinstance(part, CallBegin)]
    assert len(set(ids)) == len(ids)
    return [_shown(part) for part in parts]


def _shown(part: Part) -> tuple[str, str]:
    return ("call", part.name) if isinstance(part, CallBegin) else (KINDS[type(part)], part.text)


KINDS: dict[type[Part], str] = {Reasoning: "thinks", Text: "says", CallArguments: "with"}
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.höhe <|constrain|>json<|message|>"

ANSWERS: list[tuple[str, Read]] = [
    (f"{ANALYSIS}Simple.<|end|>{FINAL}2 + 2 = 4.", [("thinks", "Simple."), ("says", "2 + 2 = 4.")]),
    (f"{ANALYSIS}Simple.<|end|>{FINAL}4<|return|>", [("thinks", "Simple."), ("says", "4")]),
    ("<|channel|>final<|message|>\n 4 \n", [("says", "\n 4 \n")]),
    ("<|channel|>final <|constrain|>json<|message|>{}", [("says", "{}")]),
    (f'{ANALYSIS}Look.<|end|>{CALL}{{"x": 1}}', [("thinks", "Look."), ("call", "höhe"), ("with", '{"x": 1}')]),
    (f"{ANALYSIS}Look.<|end|>{CALL}{{}}<|call|>", [("thinks", "Look."), ("call", "höhe"), ("with", "{}")]),
    (f"{CALL}<|call|>", [("call", "höhe"), ("with", "{}")]),
    (f"{CALL}{{}}<|call|>{CALL}{{}}<|call|>", [("call", "höhe"), ("with", "{}")] * 2),
    # The recipient after the role, which is how the templates write earlier calls.
    (" to=functions.f<|channel|>commentary json<|message|>{}", [("call", "f"), ("with", "{}")]),
    (
        f"{ANALYSIS}a<|end|><|start|>assistant to=functions.f<|channel|>analysis<|message|>{{}}",
        [("thinks", "a"), ("call", "f"), ("with", "{}")],
    ),
    # Seen of gpt-oss: a call on the channel of its thoughts.
    ('<|channel|>analysis to=functions.f code<|message|>{"p": ""}<|call|>', [("call", "f"), ("with", '{"p": ""}')]),
    # What it says before its calls, and built-in tools that nobody offered.
    (
        f"<|channel|>commentary<|message|>First I look.<|end|>{CALL}{{}}",
        [("says", "First I look."), ("call", "höhe"), ("with", "{}")],
    ),
    (f"<|channel|>commentary<|message|>a<|end|>{FINAL}b", [("says", "a\n\nb")]),
    (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", [("thinks", "a\n\nb"), ("says", "c")]),
    ("<|channel|>analysis to=python code<|message|>print()<|call|>", [("thinks", "print()")]),
    ("<|channel|>final to=functions.f<|message|>x", [("says", "x")]),
    # Malformed.
    ("", []),
    ("No header.", [("says", "No header.")]),
    (" assistant is a role <|", [("says", " assistant is a role <|")]),
    ("to=functions.f", [("says", "to=functions.f")]),
    (f"Text{ANALYSIS}b<|end|>c", [("says", "Text"), ("thinks", "b"), ("says", "\n\nc")]),
    ("<|channel|>analysisThe user wants<|end|>", [("thinks", "The user wants")]),
    ("<|channel|>finalYes", [("says", "Yes")]),
    ('<|channel|>commentary to=functions.f <|constrain|>json{"x": 1}<|call|>', [("call", "f"), ("with", '{"x": 1}')]),
    ("<|channel|>commentary to=functions.f<|end|>", []),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [("thinks", "a"), ("says", "b")]),
    ("<|start|>assistant<|start|>assistant<|channel|>final<|message|>b", [("says", "b")]),
    ("<|channel|>analysis<|channel|>final<|message|>b", [("says", "b")]),
    ("<|channel|>odd<|message|>b", [("says", "b")]),
    ("<|message|>b", [("says", "b")]),
    ("assistant<|channel|>final<|message|>b", [("says", "b")]),
    (f"{ANALYSIS}a<|message|>b<|constrain|>c", [("thinks", "abc")]),
    ("<|end|><|return|><|call|>", []),
    # Cut off.
    ("<|channel|>anal", []),
    ("<|channel|>final<|mess", []),
    ("<|channel|>commentary to=functions.get_wea", []),
    (f"{ANALYSIS}a<|end", [("thinks", "a<|end")]),
    (f"{ANALYSIS}a<|end|><|start|>assis", [("thinks", "a")]),
    (f'{CALL}{{"x": ', [("call", "höhe"), ("with", '{"x": ')]),
]


@pytest.mark.parametrize(("answer", "parts"), ANSWERS, ids=lambda value: str(value)[:60])
def test_messages_become_parts_however_the_text_is_cut(answer: str, parts: Read) -> None:
    """Whole, one character at a time, and cut at each place: as documented, malformed, cut off."""
    for pieces in ([answer], list(answer), *([answer[:at], answer[at:]] for at in range(1, len(answer)))):
        assert read(pieces) == parts


def test_without_tools_there_are_no_calls() -> None:
    """What the model writes to a function is text, or its thoughts by the channel."""
    assert read([f"{CALL}{{}}"], tools=False) == [("says", "{}")]
    assert read(["<|channel|>analysis to=functions.f<|message|>{}"], tools=False) == [("thinks", "{}")]


def test_an_answer_goes_on_where_its_prompt_ended() -> None:
    """Within reasoning, or within text, whose first space is part of it."""
    assert read([f" more.<|end|>{FINAL}x"], inside=True) == [("thinks", " more."), ("says", "x")]
    assert read([" more.<|return|>"]) == [("says", " more.")]


def test_a_header_without_an_end_is_bounded() -> None:
    """After MAX_HEADER characters its message begins; the same for every cut, and with a marker at the bound."""
    for size in range(MAX_HEADER - 20, MAX_HEADER + 20):
        answer = f"<|channel|>final{'x' * size}<|channel|>analysis<|message|>b"
        parts = read([answer])
        assert "".join(text for _, text in parts).count("x") == size
        assert read(list(answer)) == parts
        answer = f"<|channel|>final{'x' * size}<|constrain|>{'y' * MAX_HEADER}"
        assert read([answer]) == read(list(answer)) == [("says", "x" * size + "y" * MAX_HEADER)]
    reader = HarmonyReader(offers_tools=True)
    for _ in range(50_000):
        reader.push("to=")
        assert len(reader._held) < 2 * MAX_HEADER


WORDS = ("analysis", "final", "commentary", " to=functions.f", "assistant", "<|", "|>", "<", "x", " ", "\n", "{}")
PIECES = st.lists(st.sampled_from([*MARKERS, *MARKERS, *WORDS]), max_size=20)


@examples(800)
@given(pieces=PIECES, inside=st.booleans(), tools=st.booleans(), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_any_text_is_read_the_same_however_it_is_cut(
    pieces: list[str], inside: bool, tools: bool, sizes: list[int]
) -> None:
    """No marker is shown, nothing is raised, and every call has a name and arguments."""
    text, cut, at = "".join(pieces), [], 0
    while at < len(text):
        cut.append(text[at : at + sizes[len(cut) % len(sizes)]])
        at += len(cut[-1])
    parts = read([text], inside=inside, tools=tools)
    assert read(cut, inside=inside, tools=tools) == parts
    assert not any(marker in shown for _, shown in parts for marker in MARKERS)
    kinds = [kind for kind, _ in parts]
    assert tools or "call" not in kinds
    for place, (kind, shown) in enumerate(parts):
        assert kind != "call" or (shown and kinds[place + 1 : place + 2] == ["with"])


@examples(400)
@given(pieces=PIECES)
def test_nothing_is_held_but_headers_and_what_may_become_one(pieces: list[str]) -> None:
    """Within a message only the beginning of a marker waits."""
    reader, came = HarmonyReader(offers_tools=True), ""
    for character in "".join(pieces):
        came += character
        reader.push(character)
        held = reader._held
        assert came.endswith(held)
        in_header = any(marker in held for marker in MARKERS)
        waits = any(marker.startswith(held) for marker in MARKERS)
        words = held.partition("<")[0].split()
        assert in_header or waits or all(_opens(word) for word in words)


def _opens(word: str) -> bool:
    return any(known.startswith(word) for known in ("assistant", "to=")) or word.startswith("to=")


def test_inside_is_a_message_of_reasoning() -> None:
    """Neither a header nor any other message is."""
    reader = HarmonyReader(offers_tools=True)
    seen = []
    for piece in (
        "<|channel|>analysis",
        "<|message|>",
        "a",
        "<|end|>",
        "<|start|>assistant",
        "<|channel|>final<|message|>",
    ):
        reader.push(piece)
        seen.append(reader.inside)
    assert seen == [False, True, True, False, False, False]
    assert HarmonyReader(offers_tools=True, begins_inside=True).inside
