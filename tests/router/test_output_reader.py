"""From tokens to the parts of an answer: where a completion is cut, or taken over, changes no part before that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from services.router.answer.answer_format import FORMATS, AnswerFormat
from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning, Text, joined
from services.router.answer.reading import Reading
from services.router.execution.detokenizer import Detokenizer
from services.router.execution.output_reader import OutputReader
from services.router.preprocess.request import Request
from services.router.preprocess.tokenizer import Tokenizer
from tandem.v1 import decode_pb2, sampling_pb2

TEXT = Tokenizer.load(Path(__file__).parents[2] / "demo/model")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
THINKS = Reading(AnswerFormat(FORMATS["think"], "hermes"), TOOLS, begins_inside=False, one_call=False)
HARMONY = Reading(AnswerFormat(calls="harmony", harmony=True), TOOLS, begins_inside=False, one_call=False)
ANSWER = (
    "<think>\nso é\n</think>\n\nI ask. <tool_call>\n"
    '{"name": "f", "arguments": {"x": "a é"}}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call> ok'
)
OF_HARMONY = (
    "<|channel|>analysis<|message|>so é<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
    '<|message|>{"x": "a é"}<|call|><|start|>assistant<|channel|>final<|message|>ok<|return|>'
)


def asked(reading: Reading, stops: Sequence[str] = ()) -> Request:
    return Request("r", "r", [5], 1, 1000, sampling_pb2.Sampling(), [], b"", 1000, stops=tuple(stops), reading=reading)


def reader_of(request: Request) -> OutputReader:
    return OutputReader(Detokenizer(TEXT, special=True), request)


def go_on(reader: OutputReader, request: Request, tokens: Sequence[int], step: int = 1) -> list[Part]:
    """The parts of tokens that come `step` at a time, up to a stop string."""
    parts: list[Part] = []
    for at in range(0, len(tokens), step):
        if request.finish() is not None:
            break
        chunk = decode_pb2.Tokens(token_ids=tokens[at : at + step])
        request.tokens.extend(chunk.token_ids)
        parts += [part for run in reader.read(chunk) for part in run.parts]
    return parts


def named(parts: Sequence[Part]) -> list[Part]:
    """Joined, with the ids of calls made equal, since they are random."""
    return joined(replace(part, id="id") if isinstance(part, CallBegin) else part for part in parts)


def whole(reading: Reading, text: str, stops: Sequence[str] = (), step: int = 1) -> tuple[list[Part], Request]:
    request = asked(reading, stops)
    reader = reader_of(request)
    return named([*go_on(reader, request, TEXT.encode(text, special=False), step), *reader.finish()]), request


CASES = [
    (THINKS, ANSWER, ()),
    (THINKS, ANSWER, ("ask", "never")),
    (THINKS, ANSWER, ("</tool", "é")),
    (HARMONY, OF_HARMONY, ()),
    (replace(THINKS, begins_inside=True), "so é</think>ok", ("ok",)),
    (replace(THINKS, one_call=True), ANSWER, ()),
]


@pytest.mark.parametrize(("reading", "text", "stops"), CASES, ids=range(len(CASES)))
def test_a_completion_that_is_taken_over_at_any_token_has_each_part_once(
    reading: Reading, text: str, stops: Sequence[str]
) -> None:
    """The next router reads all tokens that were passed on, and passes on only what comes after."""
    tokens = TEXT.encode(text, special=False)
    expected, undisturbed = whole(reading, text, stops)
    for at in range(1, len(tokens)):
        first = asked(reading, stops)
        passed_on = go_on(reader_of(first), first, tokens[:at])
        second = asked(reading, stops)
        reader = reader_of(second)
        go_on(reader, second, first.tokens[1:], step=max(1, at))  # in one piece, as a slow client's delta
        passed_on += [*go_on(reader, second, tokens[at:]), *reader.finish()]
        assert named(passed_on) == expected, f"taken over after {at} tokens"
        assert second.tokens == undisturbed.tokens


@pytest.mark.parametrize(("reading", "text", "stops"), CASES, ids=range(len(CASES)))
def test_a_completion_that_ends_at_any_token_has_the_beginning_of_the_same_parts(
    reading: Reading, text: str, stops: Sequence[str]
) -> None:
    """max_tokens may lie within a marker: its beginning is then part of the text around it, and nothing else
    changes. However the tokens come, the parts are the same."""
    tokens = TEXT.encode(text, special=False)
    for at in range(1, len(tokens) + 1):
        request = asked(reading, stops)
        reader = reader_of(request)
        shown = go_on(reader, request, tokens[:at])
        parts = named([*shown, *reader.finish()])
        assert whole(reading, TEXT.decode(tokens[:at]), stops, step=7)[
            0
        ] == parts or "\N{REPLACEMENT CHARACTER}" in str(parts)
        kinds = [type(part) for part in named(shown)]
        assert [type(part) for part in whole(reading, text, stops)[0]][: len(kinds)] == kinds


STOPPED: list[tuple[Sequence[str], list[Part], str]] = [
    (("so",), [], "so"),  # it ends the answer within the reasoning too, whose marker has no part
    (("I ask",), [Reasoning("so é")], "I ask"),
    (
        ('"a é',),
        [Reasoning("so é"), Text("I ask. "), CallBegin("id", "f"), CallArguments('{"x": ')],
        '"a é',
    ),
    (("<tool_call>",), [Reasoning("so é"), Text("I ask. ")], "<tool_call>"),
    (("</think>",), [Reasoning("so é\n")], "</think>"),
]


@pytest.mark.parametrize(("stops", "parts", "hit"), STOPPED)
def test_a_stop_string_counts_in_every_part_and_in_its_markers(
    stops: Sequence[str], parts: list[Part], hit: str
) -> None:
    """It is one of what the model writes, as in vLLM; what comes after it is not shown."""
    for step in (1, 5, 1000):
        request = asked(THINKS, stops)
        reader = reader_of(request)
        found = [*go_on(reader, request, TEXT.encode(ANSWER, special=False), step), *reader.finish()]
        assert (named(found), reader.stop, request.stopped) == (parts, hit, True)


def test_tokens_of_text_are_told_from_others_where_they_have_log_probabilities() -> None:
    """In one chunk that is the whole answer. The control: without log probabilities all are together."""
    tokens = TEXT.encode(ANSWER, special=False)

    def runs(chunk: decode_pb2.Tokens) -> list[list[Part]]:
        request = asked(THINKS)
        request.tokens.extend(tokens)
        found = reader_of(request).read(chunk)
        assert sum(run.tokens for run in found) == len(tokens)
        return [run.parts for run in found]

    together, apart = decode_pb2.Tokens(token_ids=tokens), decode_pb2.Tokens(token_ids=tokens)
    apart.logprobs.chosen.extend([-1.0] * len(tokens))
    [parts], several = runs(together), runs(apart)
    assert named([part for some in several for part in some]) == named(parts)
    assert {type(part) for part in parts} == {Reasoning, Text, CallBegin, CallArguments}
    for some in several:
        kinds = {type(part) for part in some if isinstance(part, CallBegin) or part.text}
        assert Text not in kinds or kinds == {Text}


def test_tokens_that_show_nothing_are_apart_from_text_however_they_come() -> None:
    """Markers, for one: with log probabilities, what is around them says whose they are."""
    tokens = TEXT.encode(ANSWER, special=False)

    def of_text(step: int) -> list[int]:
        """The places of the tokens in runs of text."""
        request, found = asked(THINKS), list[int]()
        reader = reader_of(request)
        for at in range(0, len(tokens), step):
            chunk = decode_pb2.Tokens(token_ids=tokens[at : at + step])
            chunk.logprobs.chosen.extend([-1.0] * len(chunk.token_ids))
            request.tokens.extend(chunk.token_ids)
            place = at
            for run in reader.read(chunk):
                found += range(place, place + run.tokens) if run.is_text else ()
                place += run.tokens
        return found

    assert of_text(1) == of_text(3) == of_text(1000)
