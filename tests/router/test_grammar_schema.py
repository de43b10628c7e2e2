"""Promises of the router about grammars: it bounds what it reads, quickly, and takes what people use."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel

from services.router.preprocess.grammar_schema import _weight, check
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2
from tests.support.stopwatch import ThreadTime


def checked(**kind: Any) -> None:
    check(common_pb2.Grammar(**kind))


class Inner(BaseModel):
    name: str
    tags: list[str] = []


class Outer(BaseModel):
    """A model as people write it."""

    id: int
    score: float | None = None
    inner: Inner
    others: list[Inner]
    by_name: dict[str, int] = {}


def test_schemas_of_pydantic_models_pass() -> None:
    """Titles, descriptions, defaults, references and optional fields are what such a schema is made of."""
    checked(json_schema=json.dumps(Outer.model_json_schema()).encode())


def test_calls_are_the_routers_to_make() -> None:
    """A client's would not be checked."""
    with pytest.raises(InvalidRequest) as caught:
        checked(calls=common_pb2.Calls(any=[common_pb2.Call(before=b"x", arguments=b"{}")]))
    assert caught.value.field == "sampling.grammar.calls"


@pytest.mark.parametrize(
    "regex",
    [r"\d{3}-\d{3}-\d{4}", "^[a-z]{1,200}$", r"(\w+\s){0,100}", "a{2}{3}", r"\{\"a\": [0-9]{1,3}\}", "x{", "[(]{3}"],
)
def test_ordinary_expressions_pass(regex: str) -> None:
    """Counted repetitions, anchors at the ends, braces that are escaped, in a class or no repetition at all."""
    checked(regex=regex.encode())


@pytest.mark.parametrize(
    ("bare", "weight"),
    [
        ("abc", 3),
        ("a{3}", 3),
        ("(ab){3}", 6),
        ("(a{2,5}b){4}c", 25),
        ("a{0}b", 2),
        ("(a|b)*c", 3),
        ("((a{9}){9}){9}", 729),
    ],
)
def test_repetitions_are_multiplied(bare: str, weight: int) -> None:
    """As the library writes them out, at least."""
    assert _weight(bare) == weight


@pytest.mark.parametrize(
    "given",
    [
        {"regex": b"[" * 65_000},
        {"regex": b"(" * 65_000},
        {"regex": b"{9" * 30_000},
        {"regex": b"\\" * 65_000},
        {"regex": b"(a{9}" * 10_000},
        {"json_schema": b"[" * 65_000},
        {"json_schema": b'{"items":' * 7_000},
        {"json_schema": b'{"anyOf":[' + b"{}," * 20_000 + b"{}]}"},
        {"json_schema": b'{"enum":[' + b"1," * 30_000 + b"1]}"},
        {"ebnf": b"(" * 65_000},
    ],
    ids=lambda given: str(given)[:30],
)
def test_nothing_of_the_allowed_size_holds_the_router_up(given: Any) -> None:
    """Refused or not, in a time in which no stream is late."""
    with ThreadTime() as taken, suppress(InvalidRequest):
        checked(**given)
    assert taken.seconds < 0.25


@pytest.mark.parametrize("value", [[], {}, 5, None, "frobnicate"])
def test_a_format_of_any_kind_is_refused_by_its_field(value: Any) -> None:
    """Also one that is no string."""
    with pytest.raises(InvalidRequest) as caught:
        checked(json_schema=json.dumps({"type": "string", "format": value}).encode())
    assert caught.value.field == "sampling.grammar.json_schema.format"


@pytest.mark.parametrize("regex", ["a{4294967297}", "a{1,4294967297}", "a{" + "9" * 5000 + "}"])
def test_a_count_that_the_library_cannot_hold_is_refused(regex: str) -> None:
    """It would count modulo 2^32, and keep something else."""
    with pytest.raises(InvalidRequest):
        checked(regex=regex.encode())
