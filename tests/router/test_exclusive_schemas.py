"""Which alternatives of a `oneOf` certainly exclude each other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.router.preprocess import exclusive_schemas
from services.router.preprocess.exclusive_schemas import MAX_ALTERNATIVES, ExclusiveSchemas
from services.router.preprocess.grammar_schema import check_schema
from tandem.errors import InvalidRequest
from tests.support.stopwatch import ThreadTime

INT, STR, ANY = {"type": "integer"}, {"type": "string"}, {}


def object_of(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties) if required is None else required,
    }


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "additionalProperties": False}


@pytest.mark.parametrize(
    "alternatives",
    [
        [INT, STR, {"type": "null"}, {"type": ["boolean", "array"]}],
        [{"const": "a"}, {"enum": ["b", 1]}, {"const": True}],
        [{"const": "a"}, INT],
        [object_of(kind={"const": "a"}), object_of(kind={"enum": ["b", "c"]})],
        [object_of(at=object_of(kind={"const": 1})), object_of(at=object_of(kind={"const": 2}))],
        [closed(object_of(a=INT)), closed(object_of(b=INT))],
        [object_of(a=INT), object_of(b=INT)],  # neither writes the other's property
        [object_of(a=INT), object_of(a=STR)],
        [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}],
    ],
    ids=lambda value: json.dumps(value)[:70],
)
def test_alternatives_that_exclude_each_other_pass(alternatives: list[Any]) -> None:
    """Other types, other values, a required property that the other one lacks, a discriminator at any level."""
    root = {"$defs": {"one": object_of(k={"const": 1}), "two": object_of(k={"const": 2})}, "oneOf": alternatives}
    assert ExclusiveSchemas(root).overlapping(alternatives) is None
    check_schema(root, "schema")


@pytest.mark.parametrize(
    "alternatives",
    [
        [INT, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"const": [1, {"a": 2}]}, {"const": [1.0, {"a": 2.0}]}],
        [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}],
        [{"const": "a"}, STR],
        [ANY, INT],
        [object_of([], kind={"const": "a"}), object_of([], kind={"const": "b"})],  # not required: {} is both
        [object_of(a=INT), object_of(["a"], a=INT, b=STR)],
        [{**object_of(a=INT), "additionalProperties": True}, object_of(b=INT)],
        [{**object_of(a=INT), "additionalProperties": {}}, object_of(b=INT)],
        [{"type": "array", "items": INT}, {"type": "array", "items": STR}],  # [] is both
        [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/one"}],
    ],
    ids=lambda value: json.dumps(value)[:70],
)
def test_alternatives_that_may_overlap_are_refused_by_name(alternatives: list[Any]) -> None:
    """A text of the first may be valid under the second, which xgrammar would not notice."""
    root = {"$defs": {"one": object_of(k={"const": 1})}, "oneOf": alternatives}
    with pytest.raises(InvalidRequest, match="would not be excluded") as caught:
        check_schema(root, "schema")
    assert caught.value.field == "schema.oneOf"


@pytest.mark.parametrize("value", [None, {}, [], "x", [INT] * (MAX_ALTERNATIVES + 1), [INT, 5]])
def test_alternatives_of_another_kind_or_number_are_refused(value: Any) -> None:
    """The field names the place."""
    with pytest.raises(InvalidRequest) as caught:
        check_schema({"oneOf": value}, "schema")
    assert caught.value.field.startswith("schema.oneOf")


def test_references_in_a_circle_come_to_an_end() -> None:
    """And prove nothing."""
    root: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    assert ExclusiveSchemas(root).overlapping([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]) is not None


def test_many_alternatives_of_much_to_compare_take_little_time() -> None:
    """The largest number, each with many properties of several levels, that differ at the last."""

    def alternative(number: int) -> dict[str, Any]:
        inner = object_of(
            **{f"p{place}": object_of(x=INT, y={"enum": [f"same{n}" for n in range(4)]}) for place in range(8)}
        )
        return object_of(**{f"q{place}": inner for place in range(4)}, z={"const": number})

    alternatives = [alternative(number) for number in range(MAX_ALTERNATIVES)]
    with ThreadTime() as taken:
        assert ExclusiveSchemas({"oneOf": alternatives}).overlapping(alternatives) is None
    assert taken.seconds < 2.0  # 0.5 to 0.9 on a Zen 3, 4 to 8 without the cache of values


def of_itself(properties: int) -> dict[str, Any]:
    """An object whose properties are all the object itself: three levels of them are `properties` to the third."""
    names = [f"{number:x}" for number in range(properties)]
    itself = {"$ref": "#"}
    return object_of(**dict.fromkeys(names, itself)) | {"$defs": {"z": {"oneOf": [itself, itself]}}}


def of_many(count: int) -> dict[str, Any]:
    """So many objects, each of which requires three others and a value of its own: all that exclude each other, which
    is found out last."""
    defined: dict[str, Any] = {}
    for number in range(count):
        inner = {f"p{place}": {"$ref": f"#/$defs/e{(number * 3 + place) % count}"} for place in range(3)}
        defined[f"e{number}"] = object_of(a=object_of(b=STR), **{f"p{place}": object_of(c=STR) for place in range(3)})
        defined[f"d{number}"] = object_of(**inner, z={"const": number})
    for first in range(count):
        chosen = [{"$ref": f"#/$defs/d{(first + step * 31) % count}"} for step in range(MAX_ALTERNATIVES)]
        defined[f"z{first}"] = {"oneOf": chosen}
    return {"type": "object", "$defs": defined}


@pytest.mark.parametrize(("properties", "seconds"), [(78, 0.05), (2700, 0.5)])
def test_a_short_schema_that_contains_itself_takes_no_longer_than_it_is(properties: int, seconds: float) -> None:
    """One of 1.9 KB made half a million comparisons, and one of 62 KB had a thread for hours."""
    with ThreadTime() as taken, pytest.raises(InvalidRequest, match="would not be excluded"):
        check_schema(of_itself(properties), "schema")
    assert taken.seconds < seconds


def test_what_takes_long_to_compare_is_refused_by_name() -> None:
    """Pairs of many objects, each of which is another pair: all `oneOf` of a schema share what may be compared."""
    with ThreadTime() as taken, pytest.raises(InvalidRequest, match="too long") as caught:
        check_schema(of_many(128), "schema")
    assert caught.value.field.startswith("schema.$defs.z")
    assert taken.seconds < 2.0


def test_control_without_the_bound_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the refusal above is the bound's doing; a smaller schema of the kind needs no more than it."""
    check_schema(of_many(MAX_ALTERNATIVES), "schema")
    monkeypatch.setattr(exclusive_schemas, "MAX_COMPARED", 10**9)
    check_schema(of_many(128), "schema")


@pytest.mark.parametrize(
    "odd",
    [{"type": "object", "properties": 5}, {"type": "object", "required": 5}, {"type": [{}]}],
    ids=["properties", "required", "type"],
)
def test_what_a_reference_leads_to_is_checked_before_it_is_compared(odd: Any) -> None:
    """The client's error is named by its place: compared first, it was taken for a bug of ours."""
    alternatives = [{"$ref": "#/$defs/z"}, {"type": "object"}]
    with pytest.raises(InvalidRequest) as caught:
        check_schema({"type": "object", "$defs": {"a": {"oneOf": alternatives}, "z": odd}}, "schema")
    assert caught.value.field.startswith("schema.$defs.z")


@pytest.mark.parametrize("odd", [5, ["b"]])
def test_definitions_of_another_kind_are_refused_before_they_are_referred_to(odd: Any) -> None:
    """Also from the other group, which is checked before them."""
    options = [{"$ref": "#/definitions/b"}, {"type": "string"}]
    with pytest.raises(InvalidRequest) as caught:
        check_schema({"type": "object", "$defs": {"a": {"oneOf": options}}, "definitions": odd}, "schema")
    assert caught.value.field == "schema.definitions"
