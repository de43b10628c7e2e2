"""Bodies that are made to cost: each is refused after little work, whatever it is made of."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.frontend import json_body
from services.router.frontend.openai import openai_protocol
from services.router.preprocess import json_limits
from services.router.preprocess.sampling_defaults import Defaults
from tandem.errors import InvalidRequest
from tests.support.stopwatch import ThreadTime

SIZE = 4 * 1024 * 1024
CPU_S = 0.3  # of a core whose other thread is busy; without the bounds it is seconds


def filled(before: str, item: str, after: str) -> bytes:
    """Of SIZE bytes at most, with as many items as fit."""
    count = (SIZE - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * count) + after).encode()


HOSTILE = {
    **{
        f"messages of {item}": filled('{"messages":[', item, "]}")
        for item in ("0", "[]", "{}", '""', "null", "1.5", "-1", "[[[]]]", '{"role":"user"}', '"\\""')
    },
    "content of parts": filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}"),
    "calls": filled('{"messages":[{"role":"user","tool_calls":[', "0", "]}]}"),
    "tools": filled('{"messages":[],"tools":[', "0", "]}"),
    "stop strings": filled('{"messages":[],"stop":[', '"a"', "]}"),
    "stop ids": filled('{"messages":[],"stop_token_ids":[', '"a"', "]}"),
    "choices": filled('{"messages":[],"guided_choice":[', "0", "]}"),
    "fields": ("{" + ",".join(f'"{number:x}":0' for number in range(SIZE // 12)) + "}").encode(),
    "biases": (
        '{"messages":[],"logit_bias":{' + ",".join(f'"{number}":"x"' for number in range(SIZE // 14)) + "}}"
    ).encode(),
    "depth": b'{"messages":' + b"[" * (SIZE // 2),
    "escapes": b'{"messages":["' + b'\\"' * (SIZE // 2 - 10) + b'"]}',
    "backslashes": b'{"messages":["' + b"\\" * (SIZE - 20),
    "long integers": filled('{"messages":[', "9" * 4000, "]}"),
    "a long float": b'{"messages":[1.' + b"3" * (SIZE - 20) + b"]}",
    "a long key": b'{"logit_bias":{"' + b"a" * (SIZE - 40) + b'":1},"messages":[]}',
    "quotes": b'"' * SIZE,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_is_made_to_cost_costs_little(name: str) -> None:
    """4 MiB that pydantic would make two million errors of, or json as many objects."""
    with ThreadTime() as taken, pytest.raises(InvalidRequest) as refused:
        openai_protocol.requests(openai_protocol.parse(HOSTILE[name], openai_protocol.Chat), "id", Defaults())
    assert taken.seconds < CPU_S
    assert len(refused.value.message) < SIZE + 100


def test_control_without_the_bounds_a_hostile_body_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time above is the bounds' doing. Half of the body, which suffices."""
    body = HOSTILE["messages of []"][: SIZE // 2 // 3 * 3] + b"[]]}"

    def seconds() -> float:
        with ThreadTime() as taken, pytest.raises(InvalidRequest):
            openai_protocol.parse(body, openai_protocol.Chat)
        return taken.seconds

    bounded = seconds()
    monkeypatch.setattr(json_limits, "check", lambda *_, **__: None)
    monkeypatch.setattr(openai_protocol, "MAX_ITEMS", {})
    assert seconds() > 8 * bounded


def test_what_is_asked_for_in_earnest_is_taken() -> None:
    """A thousand messages in parts, a hundred tools, and as many token ids as the context times the prompts allows."""
    part = {"role": "user", "content": [{"type": "text", "text": 'say "a, b" [and] {c}\\'}]}
    properties = {f"p{number}": {"type": "string", "description": "of it"} for number in range(20)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    body = json.dumps({"messages": [part] * 1024, "tools": [tool] * 100}).encode()
    assert len(openai_protocol.requests(openai_protocol.parse(body, openai_protocol.Chat), "id", Defaults())) == 1
    prompts = [[number % 2048 for number in range(4096)]] * 128
    body = json.dumps({"prompt": prompts}).encode()
    asked = openai_protocol.parse(body, openai_protocol.Completions, openai_protocol.Completions.most_numbers(4096))
    made = openai_protocol.requests(asked, "id", Defaults(), "", 4096)
    assert [list(one.token_ids.ids) for one in made] == prompts
    text = json.dumps({"prompt": '"quoted", ' * 400_000}).encode()
    assert openai_protocol.parse(text, openai_protocol.Completions).prompt == '"quoted", ' * 400_000


def test_ids_over_the_context_are_refused_before_they_are_looked_at() -> None:
    """By the code that a prompt of too many tokens has."""
    asked = openai_protocol.parse(filled('{"prompt":[', "0", "]}"), openai_protocol.Completions, SIZE)
    with pytest.raises(InvalidRequest) as refused:
        openai_protocol.requests(asked, "id", Defaults(), "", 2048)
    assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"


def test_so_many_levels_and_no_more() -> None:
    """Far fewer than what follows here could call itself for."""
    for depth in (json_limits.MAX_DEPTH, json_limits.MAX_DEPTH + 1):
        body = b'{"":' * depth + b"0" + b"}" * depth
        expected = nullcontext() if depth <= json_limits.MAX_DEPTH else pytest.raises(InvalidRequest, match="too deep")
        with expected:
            json_body.read(body)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=30,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5), st.integers(1, 40), st.booleans())
def test_whatever_json_means_it_means_here(fields: dict[str, Any], piece: int, ascii: bool) -> None:
    """Cut anywhere, also between a backslash and a quote: what is within the bounds is read as json reads it, and the
    bounds see every value."""
    body = json.dumps(fields, ensure_ascii=ascii).encode()
    before, json_limits.PIECE_BYTES = json_limits.PIECE_BYTES, piece
    try:
        assert json_body.read(body) == fields
        with pytest.raises(InvalidRequest):
            json_limits.check(body[:-1] + b', "": [' + b"0," * 3 + b"0]}", most_numbers=3)
    finally:
        json_limits.PIECE_BYTES = before


@pytest.mark.parametrize("number", ["1e999", "-1e309", "[2.5e400]"])
def test_a_number_that_json_cannot_show_again_is_refused(number: str) -> None:
    """A response repeats the tools of its request, and Infinity in them would be no JSON."""
    assert json_body.read(b'{"tools": 1e308}') == {"tools": 1e308}
    with pytest.raises(InvalidRequest) as refused:
        json_body.read(f'{{"tools": {number}}}'.encode())
    assert refused.value.field == "body"


@given(st.text(alphabet='a\\"[]{},0', max_size=60), st.integers(1, 10))
def test_text_is_never_taken_for_structure(text: str, piece: int) -> None:
    """Whatever a string holds, it counts as one."""
    before, json_limits.PIECE_BYTES = json_limits.PIECE_BYTES, piece
    bounds = (json_limits.MAX_STRUCTURE, json_limits.MAX_DEPTH)
    json_limits.MAX_STRUCTURE, json_limits.MAX_DEPTH = 7, 1  # {"":""} and no more
    try:
        json_limits.check(json.dumps({text: text}).encode(), most_numbers=0)
    finally:
        json_limits.PIECE_BYTES = before
        json_limits.MAX_STRUCTURE, json_limits.MAX_DEPTH = bounds


@given(st.text(st.sampled_from("a \x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\n\r\té😀")))
def test_what_is_sent_is_one_line_for_every_reader(text: str) -> None:
    """Also for one that ends lines where Python's str.splitlines does, as httpx's iter_lines and programs that read
    the files of batches."""
    (event, blank) = httpx2.Response(200, content=json_body.to_sse({text: text})).iter_lines()
    assert (json.loads(event.removeprefix("data: ")), blank) == ({text: text}, "")
    (line,) = json_body.to_json([text]).decode().splitlines()
    assert json.loads(line) == [text]
