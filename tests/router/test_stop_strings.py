"""Promises of stop strings: what is shown depends on the text alone, never on how it came."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.answer.parts import Part, Text
from services.router.execution.detokenizer import Detokenizer
from services.router.execution.output_reader import OutputReader
from services.router.execution.stop_strings import StopStrings
from services.router.preprocess.request import Request
from services.router.preprocess.tokenizer import Tokenizer
from tandem.v1 import common_pb2, decode_pb2, sampling_pb2
from tests.support.examples import examples

DEMO = Path(__file__).parents[2] / "demo/model"
TEXT = Tokenizer.load(DEMO)


def defined(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The definition: read character by character; the first stop string that is complete ends the text."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end if include else end - max(map(len, done))], True
    return text, False


def chunks(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


ALPHABET = st.sampled_from("abé\n")
WORDS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4)


@examples(500)
@given(
    text=st.text(ALPHABET, max_size=30),
    stops=WORDS,
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_the_text_ends_where_the_definition_says_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """Any text, any stop strings, any chunks: what is shown is what the definition gives."""
    found = StopStrings(stops, include=include)
    shown = "".join(found.push(chunk) for chunk in chunks(text, cuts)) + found.finish()
    assert (shown, found.hit is not None) == defined(text, stops, include)


@examples(300)
@given(text=st.text(ALPHABET, max_size=30), stops=WORDS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_nothing_is_shown_too_soon_and_nothing_is_held_too_long(text: str, stops: list[str], cuts: list[int]) -> None:
    """At any time all is shown that can no longer become a stop string, and nothing that can."""
    found, came, shown = StopStrings(stops), "", ""
    for chunk in chunks(text, cuts):
        shown, came = shown + found.push(chunk), came + chunk
        if found.hit is not None:
            break
        open_ends = [length for stop in stops for length in range(1, len(stop)) if came.endswith(stop[:length])]
        assert shown == came[: len(came) - max(open_ends, default=0)]


def stretches(tokens: list[int], cuts: list[int], job: Request, logprobs: bool) -> list[decode_pb2.Tokens]:
    places = sorted({0, len(tokens), *(cut % len(tokens) for cut in cuts)})
    made = []
    for start, end in itertools.pairwise(places):
        one = decode_pb2.Tokens(position=job.prompt_len + start, token_ids=tokens[start:end])
        if logprobs:
            known = common_pb2.Logprobs(
                chosen=[-float(place) for place in range(start, end)],
                top_ids=[place for place in range(start, end) for _ in range(2)],
                top=[-float(place) for place in range(start, end) for _ in range(2)],
            )
            one.logprobs.CopyFrom(known)
        made.append(one)
    return made


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def read(
    text: str, stops: list[str], cuts: list[int], *, logprobs: bool = False, **how: int
) -> tuple[str, list[int], Request, list[float]]:
    """What a client sees of a completion with this text: shown text, ids, the job, log probabilities."""
    tokens = TEXT.encode(text)
    job = Request(
        request_id="r",
        internal_id="r",
        tokens=[5, 6],
        prompt_len=2,
        max_tokens=1000,
        sampling=sampling_pb2.Sampling(**how),
        stop_ids=[0],
        salt=b"",
        vocab_size=1000,
        stops=tuple(stops),
    )
    reader, shown, ids, known = OutputReader(Detokenizer(TEXT), job), "", [], []
    for one in stretches(tokens, cuts, job, logprobs):
        job.tokens += one.token_ids
        shown += text_of([part for run in reader.read(one) for part in run.parts])
        ids += one.token_ids
        known += one.logprobs.chosen
        assert len(one.logprobs.top_ids) == 2 * len(one.logprobs.chosen)
        if job.stopped:
            break
    return shown + text_of(reader.finish()), ids, job, known


@examples(200)
@given(
    text=st.text(st.sampled_from("the value\n.é日"), min_size=1, max_size=40),
    stops=st.lists(st.text(st.sampled_from("the vé日."), min_size=1, max_size=3), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=10),
)
def test_the_tokens_end_at_the_one_that_completes_it(text: str, stops: list[str], cuts: list[int]) -> None:
    """Text, ids, journal and log probabilities are the same whether tokens came one by one or in stretches."""
    one_by_one = read(text, stops, list(range(60)), logprobs=True)
    shown, ids, job, known = read(text, stops, cuts, logprobs=True)
    assert (shown, ids, known) == (one_by_one[0], one_by_one[1], one_by_one[3])
    assert job.tokens[2:] == ids == TEXT.encode(text)[: len(ids)]
    assert known == [-float(place) for place in range(len(ids))]
    expected, hit = defined(TEXT.backend.decode(TEXT.encode(text)), stops, False)
    assert (shown, job.stopped) == (expected, hit)
    assert (job.finish() == common_pb2.FINISH_REASON_STOP) == hit


def test_what_comes_before_min_tokens_ends_nothing() -> None:
    """A stop string that is complete before is ordinary text; the next one ends it."""
    text = "the value and the value"
    count = len(TEXT.encode("the value"))
    assert read(text, [" value"], [])[0] == "the"
    assert read(text, [" value"], [], min_tokens=count)[0] == "the"
    assert read(text, [" value"], [], min_tokens=count + 1)[0] == "the value and the"
    assert read(text, [" value"], [], min_tokens=500)[0] == text


def test_a_stop_token_is_not_text() -> None:
    """The end-of-sequence token ends the text also where a stop string has begun, and completes none."""
    tokens = [*TEXT.encode("the valu"), 0]
    job = Request("r", "r", [5, *tokens], 1, 1000, sampling_pb2.Sampling(), [0], b"", 1000, stops=("value", "<|end|>"))
    reader = OutputReader(Detokenizer(TEXT), job)
    [run] = reader.read(decode_pb2.Tokens(token_ids=tokens))
    parts = [*run.parts, *reader.finish()]
    assert text_of(parts) == "the valu"
    assert not job.stopped


@pytest.mark.parametrize("include", [False, True])
def test_of_two_the_one_that_is_complete_first(include: bool) -> None:
    """Not the one that is named first, nor the one that began first."""
    found = StopStrings(["bcde", "cd"], include=include)
    assert found.push("abcdef") == ("abcd" if include else "ab")
    assert found.hit == "cd"


class Watched(str):
    """Counts how often a part of it is looked at."""

    looked_at = 0

    def __getitem__(self, place: object) -> str:
        Watched.looked_at += 1
        return str.__getitem__(self, place)  # type: ignore[index]


@pytest.mark.parametrize("others", ["b", "a"])
def test_a_text_of_one_letter_costs_no_more_than_any_other(others: str) -> None:
    """One stop string keeps as much of the text held as a client may ask for, and 15 others are searched in it: by
    their beginnings, of which none or each is there."""
    more = [others * 200 + chr(99 + number) * 56 for number in range(15)]
    stops = [Watched(stop) for stop in ("a" * 255 + "!", *more)]
    found = StopStrings(stops)
    Watched.looked_at = 0
    text = "a" * 2000 + "!"
    for character in text:
        found.push(character)
    assert found.hit == stops[0]
    assert Watched.looked_at <= 4 * len(stops) * len(text)
