"""Promises of grammars: the text fits, a token is a function of the request and its tokens, and a grammar costs no
other request its stream."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import engine.decoding.structured_output
from engine.core.sequence import Sequence
from engine.decoding import grammars as grammars_module
from engine.decoding.grammars import Grammars
from engine.decoding.sampler import choose
from engine.decoding.structured_output import Masks, Matcher, Vocabulary, compile_spec, vocabulary
from services.proto_convert import sampling_from
from services.router.answer.call_formats import registry
from services.router.answer.parts import CallArguments, CallBegin, Text, joined
from services.router.preprocess import grammar_schema
from services.router.preprocess.chat import forced_calls
from tandem.errors import Busy, InternalError, InvalidRequest, PreconditionFailed
from tandem.sampling import GrammarSpec, ReasoningTokens, Sampling
from tandem.v1 import common_pb2, generation_pb2, sampling_pb2
from tests.support.waiting import wait_until

DEMO = Path(__file__).parents[2] / "demo/model"
EOS, VOCAB = 256, 290  # every byte, the end, and ids without a token
BYTES = Vocabulary.of([bytes([byte]) for byte in range(256)], VOCAB, EOS)


def schema_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def compiled(spec: GrammarSpec) -> Any:
    """Once for all sequences of a test's grammar."""
    return _compiled_once(spec, engine.decoding.structured_output.MAX_WHITESPACE)


@lru_cache(maxsize=64)
def _compiled_once(spec: GrammarSpec, _whitespace: int) -> Any:
    return compile_spec(spec, BYTES)


def sequence(spec: GrammarSpec | None, text: str = "", *, stop_ids: tuple[int, ...] = (EOS,), **how: Any) -> Sequence:
    """A sequence with a prompt of two tokens that has generated `text`."""
    tokens = [7, 8, *text.encode()]
    return Sequence(
        id=f"s{id(tokens)}",
        tokens=tokens,
        prompt_len=2,
        max_len=len(tokens) + 1000,
        stop_ids=frozenset(stop_ids),
        sampling=Sampling(grammar=spec, **how),
        grammar=compiled(spec) if spec else None,
    )


def fits(spec: GrammarSpec, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled(spec))
    return all(matcher.accept_token(byte) for byte in text.encode()) and bool(matcher.is_completed())


def step(sequences: list[Sequence], logits: torch.Tensor | None = None) -> list[Any]:
    """One choice for each sequence."""
    masks = Masks()
    if logits is None:
        logits = torch.zeros(len(sequences), VOCAB)
    filling = masks.begin(sequences, VOCAB)
    choices = choose(logits, sequences, filling)
    masks.end()
    return choices


def unpacked(bits: torch.Tensor) -> np.ndarray:
    """Of one row: 1 for each token that may come."""
    return np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[:VOCAB]


def matcher_of(one: Sequence) -> Matcher:
    """As the thread of masks makes it, once."""
    one.matcher = one.matcher or Matcher.of(one)
    matcher: Matcher = one.matcher
    return matcher


def possible(one: Sequence) -> set[int]:
    """The tokens that may come next."""
    bits = torch.zeros((1, -(-VOCAB // 32)), dtype=torch.int32)
    matcher_of(one).fill(one, bits, 0)
    return set(np.flatnonzero(unpacked(bits)).tolist())


def write(spec: GrammarSpec, seed: int, length: int = 400, *, likes: bytes = b"", by: float = 5.0) -> tuple[str, bool]:
    """What a model with constant logits writes under the grammar, and whether it ended. It prefers to close. Tokens are
    drawn here, from the masks of the product: a step of the product takes ten times as long."""
    one = sequence(spec)
    one.max_len = 10_000
    logits = np.zeros(VOCAB)
    logits[EOS] = 5.0
    for byte in b'"]},:0123456789':
        logits[byte] = 3.0
    for byte in b" \n\t\\":
        logits[byte] = -2.0
    for byte in range(128, 256):
        logits[byte] = -3.0
    for byte in likes:
        logits[byte] = by
    weights, chance, matcher = np.exp(logits), np.random.default_rng(seed), matcher_of(one)
    bits = torch.zeros((1, -(-VOCAB // 32)), dtype=torch.int32)
    while one.generated < length:
        matcher.fill(one, bits, 0)
        along = np.cumsum(weights * unpacked(bits))
        if one.append(int(np.searchsorted(along, chance.random() * along[-1], side="right"))):
            break
    text = bytes(one.tokens[2:-1]) if one.tokens[-1] == EOS else bytes(one.tokens[2:])
    return text.decode(errors="replace"), one.tokens[-1] == EOS


# ---- what fits


INT, STR = {"type": "integer"}, {"type": "string"}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INT}, "required": ["kind", "lives"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "name": STR}, "required": ["kind"]}
FISH = {"type": "object", "properties": {"fins": INT}, "required": ["fins"], "additionalProperties": False}
KEPT: list[tuple[Any, list[str], list[str]]] = [
    ({}, ['"a"', '{"a": [1, null]}'], ["a", ""]),
    ({"type": ["string", "null"]}, ['"a"', "null"], ["1"]),
    ({"type": "object"}, ["{}", '{"a": 1}'], ["[]", "1"]),
    ({"type": "object", "additionalProperties": INT}, ['{"a": 1}'], ['{"a": "x"}']),
    (
        {"type": "object", "properties": {"a": INT}, "required": ["a"]},
        ['{"a": 1}'],
        ["{}", '{"a": "x"}', '{"a": 1, "b": 2}'],
    ),
    (
        {"type": "object", "minProperties": 2, "maxProperties": 3, "additionalProperties": INT},
        ['{"a":1,"b":2}'],
        ['{"a":1}'],
    ),
    ({"type": "array", "items": INT, "minItems": 2, "maxItems": 3}, ["[1, 2]"], ["[1]", "[1, 2, 3, 4]", '["a", 1]']),
    ({"type": "array", "prefixItems": [INT, STR], "items": False}, ['[1, "a"]'], ['["a", 1]', '[1, "a", 2]']),
    ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2"]),
    ({"const": "a", "type": "string"}, ['"a"'], ['"b"']),
    ({"anyOf": [STR, INT]}, ['"a"', "1"], ["null"]),
    ({"oneOf": [STR, INT, {"type": "null"}]}, ['"a"', "1", "null"], ["true", "1.5"]),
    ({"oneOf": [{"enum": ["a", 1]}, {"const": 2}]}, ['"a"', "1", "2"], ["3"]),
    (
        {"oneOf": [CAT, DOG, FISH]},
        ['{"kind": "cat", "lives": 9}', '{"kind": "wolf"}', '{"fins": 2}'],
        ['{"kind": "cat"}', '{"kind": "cow"}', '{"kind": "dog", "lives": 9}', "{}"],
    ),
    (
        {
            "$defs": {"c": CAT, "d": DOG},
            "type": "array",
            "items": {
                "discriminator": {"propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}],
            },
        },
        ['[{"kind": "cat", "lives": 9}, {"kind": "dog"}]'],
        ['[{"kind": "cat"}]'],
    ),
    ({"type": "integer", "multipleOf": 7}, ["0", "-14", "7007"], ["8", "3.5"]),
    ({"type": ["integer", "null"], "multipleOf": 1024}, ["2048", "null"], ["2047"]),
    ({"type": "integer", "multipleOf": 5, "minimum": 7, "exclusiveMaximum": 1007}, ["10", "1005"], ["5", "11", "1010"]),
    ({"allOf": [INT]}, ["5"], ['"a"']),
    ({"type": "integer", "minimum": 3, "maximum": 10}, ["3", "10"], ["2", "11", "3.5"]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 10}, ["4", "9"], ["3", "10"]),
    ({"type": "number", "minimum": 3.5, "maximum": 10.25}, ["3.5", "4"], ["3.4", "10.26", "1e5", "1e-9"]),
    ({"type": "number", "exclusiveMinimum": 3.5}, ["3.6"], ["3.5", "3.50"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"éab"'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"b"', '"ab"', '""']),
    ({"type": "string", "pattern": "^[^a]$"}, ['"b"'], ['"a"', '"\n"', '"""', '"\\"']),
    ({"type": "string", "format": "date"}, ['"2020-01-02"'], ['"x"', '"2020-13-45"']),
    ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"256.1.1.1"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"x"']),
    (
        {"$defs": {"x": INT}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}, "n": {"$ref": "#"}}},
        ['{"a": 1, "n": {"a": 2}}'],
        ['{"a": "x"}', '{"n": {"a": "x"}}'],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), KEPT, ids=lambda value: json.dumps(value)[:60])
def test_a_schema_that_is_taken_is_kept(schema: Any, good: list[str], bad: list[str]) -> None:
    """Every keyword that the router lets pass decides what may be written."""
    grammar_schema.check(common_pb2.Grammar(json_schema=json.dumps(schema).encode()))
    assert [text for text in good if not fits(schema_of(schema), text)] == []
    assert [text for text in bad if fits(schema_of(schema), text)] == []


# xgrammar compiles each of these and lets the text through: the router must not.
PASSED_OVER: list[tuple[Any, str]] = [
    ({"type": "array", "items": INT, "uniqueItems": True}, "[1, 1]"),
    ({"oneOf": [INT, {"type": "number"}]}, "5"),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0]}]}, "2"),
    ({"oneOf": [CAT, {"type": "object", "properties": {"kind": {"const": "cat"}}}]}, '{"kind": "cat", "lives": 1}'),
    ({"type": "object", "oneOf": [{"properties": {"a": INT}}, {"properties": {"b": INT}}]}, "{}"),
    ({"type": "integer", "multipleOf": 1025}, "4"),
    ({"type": "number", "multipleOf": 2}, "3"),
    ({"type": "integer", "multipleOf": 1.5}, "4"),
    ({"type": ["integer", "number"], "multipleOf": 3}, "4"),
    ({"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 10_000}, "4"),
    ({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]}, "5"),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 10}]}, "1"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, "4"),
    ({"not": STR}, '"a"'),
    ({"type": "object", "properties": {"a": INT}, "required": ["z"]}, '{"a":1}'),
    ({"type": "string", "enum": ["a", 1]}, "1"),
    ({"enum": [1, 5], "minimum": 3}, "1"),
    ({"type": "string", "anyOf": [{"minLength": 3}]}, '"a"'),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"'),
    ({"type": "string", "pattern": '^"$'}, '"""'),
    ({"type": "string", "pattern": "^\\n$"}, '"\n"'),
    ({"type": "string", "pattern": "a^b"}, '"ab"'),
    ({"type": "string", "format": "regex"}, '"("'),
    ({"minimum": 3}, "1"),
    ({"$defs": {"x": INT}, "$ref": "#/$defs/x", "minimum": 3}, "1"),
    ({"$ref": "http://example.com/schema"}, "1"),
    ({"type": "object", "properties": {"a": INT, "b": INT}, "dependentRequired": {"a": ["b"]}}, '{"a":1}'),
    ({"type": "object", "properties": {"a": INT}, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a":1}'),
]


@pytest.mark.parametrize(("schema", "text"), PASSED_OVER, ids=lambda value: json.dumps(value)[:60])
def test_a_schema_that_would_not_be_kept_is_refused(schema: Any, text: str) -> None:
    """With the place named. The control: without the refusal the library would take a text that breaks the schema."""
    with pytest.raises(InvalidRequest) as caught:
        grammar_schema.check(common_pb2.Grammar(json_schema=json.dumps(schema).encode()))
    assert caught.value.field.startswith("sampling.grammar.json_schema")
    assert caught.value.bound
    assert fits(schema_of(schema), text)


NAMES = st.sampled_from(["a", "b", "name", "x y", "é"])
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 200),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]{1,3}$"}, {"type": "string", "pattern": "^\\d{2}-\\w$"}]),
    st.sampled_from([{"enum": ["red", 5, None]}, {"const": "yes"}, {"type": "string", "format": "date"}]),
)


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(NAMES, inner, min_size=1, max_size=3).flatmap(
        lambda properties: st.builds(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            },
            st.sets(st.sampled_from(sorted(properties))),
        )
    )
    arrays = st.builds(
        lambda one, low: {"type": "array", "items": one, "minItems": low, "maxItems": 3}, inner, st.integers(0, 2)
    )
    return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=st.recursive(LEAVES, branches, max_leaves=5), seed=st.integers(0, 2**32))
def test_whatever_is_written_under_a_schema_is_valid(schema: Any, seed: int) -> None:
    """A model with constant logits, under masks alone, writes what jsonschema finds valid."""
    grammar_schema.check(common_pb2.Grammar(json_schema=json.dumps(schema).encode()))
    text, ended = write(schema_of(schema), seed)
    if ended:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_every_kind_of_grammar_is_kept() -> None:
    """JSON mode, a regular expression, rules and a choice: what is written fits; without the masks it does not."""
    for seed in range(5):
        text, ended = write(GrammarSpec("json", ""), seed)
        assert not ended or isinstance(json.loads(text), dict)
        assert write(GrammarSpec("regex", "[a-f]{3}-[0-9]{2}"), seed)[0].count("-") == 1
        assert set(write(GrammarSpec("ebnf", 'root ::= "ab" root | "c"'), seed)[0]) <= {"a", "b", "c"}
        assert write(GrammarSpec("choice", '["yes", "no \\"so\\"\\n", "日本"]'), seed) in [
            ("yes", True), ('no "so"\n', True), ("日本", True)
        ]  # fmt: skip
    assert step([sequence(GrammarSpec("regex", "[a-f]"))])[0].token in b"abcdef"
    assert step([sequence(None)])[0].token == 0, "without one, the first of equal logits"


# These readers mend a call whose last value has no end: to them </tool_call> in a value without quotes is the call's.
MENDED = ("glm", "hy_v3")


def schemas_of(format: str) -> dict[str, Any]:
    """Arguments of functions, one of which takes text that ends a call, if the format can say it."""
    defined = {"x": {"enum": ["</x>" if format in MENDED else "</tool_call>"]}}
    return {
        "a": {"$defs": {"x": INT}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]},
        "b": {"$defs": defined, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}},
        "no": None,
    }


def functions_of(format: str) -> list[Any]:
    return [{"function": {"name": name, "parameters": given}} for name, given in schemas_of(format).items()]


def calls_of(format: str, **choice: Any) -> GrammarSpec:
    grammar = forced_calls.forced(functions_of(format), generation_pb2.ToolChoice(**choice), format)
    spec = sampling_from(sampling_pb2.Sampling(grammar=grammar), VOCAB).grammar
    assert spec is not None
    return spec


def read(format: str, text: str, tools: list[Any]) -> tuple[str, list[tuple[str, Any]]]:
    """What is no call, and the calls."""
    shown, found = "", list[tuple[str, str]]()
    reader = registry.reader_of(format, tools)
    for part in joined(reader.push(text) + reader.finish()):
        match part:
            case Text(text):
                shown += text
            case CallBegin(_, name):
                found.append((name, ""))
            case CallArguments(text):
                found[-1] = (found[-1][0], text)
    return shown, found


@pytest.mark.parametrize("format", registry.NAMES)
def test_what_is_written_where_calls_are_forced_is_calls(format: str) -> None:
    """A model with constant logits writes only calls of the functions, with arguments of their schemas: one, or several
    where allowed, of any function or of the named one. Each format reads what it forces."""
    found: dict[Any, list[list[str]]] = {}
    schemas, likes = schemas_of(format), b">" if format == "functionary_v32" else b"\n;"
    for choice in ({}, {"several": True}, {"name": "no"}):
        spec = calls_of(format, **choice)
        for seed in range(16):
            text, ended = write(spec, seed, 800, likes=likes)
            if not ended:
                continue
            shown, calls = read(format, text, functions_of(format))
            for name, arguments in calls:
                jsonschema.validate(json.loads(arguments), schemas[name] or {"const": {}})
            assert not shown.strip()
            found.setdefault(str(choice), []).append([name for name, _ in calls])
    one, several, named = found.values()
    assert {len(names) for names in one} == {len(names) for names in named} == {1}
    assert min(map(len, several)) == 1
    assert max(map(len, several)) > 1
    assert {names[0] for names in one} == {*schemas}
    assert {names[0] for names in named} == {"no"}


@pytest.mark.parametrize("format", ["qwen3_coder", "glm", "minimax_m2", "deepseek_v32", "hy_v3"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(schema=st.recursive(LEAVES, branches, max_leaves=4), seed=st.integers(0, 2**32))
def test_arguments_without_quotes_are_read_as_their_schema_wants(format: str, schema: Any, seed: int) -> None:
    """Of whatever type: what a grammar lets a model write as tags becomes JSON that the schema finds valid."""
    properties = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    tools = [{"function": {"name": "f", "parameters": properties}}]
    grammar = forced_calls.forced(tools, generation_pb2.ToolChoice(), format)
    spec = sampling_from(sampling_pb2.Sampling(grammar=grammar), VOCAB).grammar
    assert spec is not None
    text, ended = write(spec, seed, likes=b"</")
    if ended:
        [(_, arguments)] = read(format, text, tools)[1]
        jsonschema.Draft202012Validator(properties).validate(json.loads(arguments))


@pytest.mark.parametrize("style", ["qwen_xml", "glm_xml", "minimax_xml", "deepseek_xml"])
def test_beside_a_value_without_quotes_is_at_most_one_space(style: str) -> None:
    """Of more, a reader could not tell how many are part of the value. Beside DeepSeek's is none, and it is read as it
    stands."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x$"}}, "required": ["a"]}
    spec = GrammarSpec("calls", json.dumps([None, [["", json.dumps(schema), "end"]], style]))
    before, after = {
        "qwen_xml": ("<parameter=a>", "</parameter>end"),
        "glm_xml": ("<arg_key>a</arg_key><arg_value>", "</arg_value>end"),
        "minimax_xml": ('<parameter name="a">', "</parameter>end"),
        "deepseek_xml": ('<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>end"),
    }[style]
    for value, allowed in [
        ("x", True),
        ("\nx\n", style != "deepseek_xml"),
        ("\n\nx", False),
        ("x  ", False),
        ("y", False),
    ]:
        assert fits(spec, f"{before}{value}{after}") is allowed


def test_calls_are_matched_again_from_their_tokens() -> None:
    """A worker that resumes in the middle of a call has the mask bits of the one that began it."""
    spec = calls_of("hermes", several=True)
    text, _ = write(spec, 3)
    grown = sequence(spec)
    for at, character in enumerate(text):
        if at % 7 == 0:
            assert possible(grown) == possible(sequence(spec, text[:at]))
        grown.tokens += character.encode()


def test_a_grammar_of_a_kind_that_a_worker_does_not_know_is_refused() -> None:
    """Ignored, it would give an unconstrained answer."""
    assert sampling_from(sampling_pb2.Sampling(), VOCAB).grammar is None
    with pytest.raises(InvalidRequest):
        sampling_from(sampling_pb2.Sampling(grammar=common_pb2.Grammar()), VOCAB)


PLACES = [
    "{",
    '{"a"',
    '{"a":',
    '{"a":5',
    '{"a":5,',
    '{"a":5,"b"',
    '{"a":5,"b":',
    '{"a":5,"b":[',
    '{"a":5,"b":[7',
    '{"a":5,"b":[7,',
]
A_AND_B = {
    "type": "object",
    "properties": {"a": INT, "b": {"type": "array", "items": INT, "maxItems": 3}},
    "required": ["a", "b"],
}


CALLS_OF_F = GrammarSpec("calls", json.dumps([None, [["f(", json.dumps(A_AND_B), ")"]]]))


@pytest.mark.parametrize(
    ("spec", "head"),
    [(GrammarSpec("json", ""), ""), (schema_of({}), ""), (schema_of(A_AND_B), ""), (CALLS_OF_F, "f(")],
    ids=str,
)
def test_between_two_parts_of_json_are_at_most_a_few_spaces(spec: GrammarSpec, head: str) -> None:
    """In every kind of JSON, at every place, as many as MAX_WHITESPACE and no more."""
    spaces = set(b" \n\r\t")
    most = engine.decoding.structured_output.MAX_WHITESPACE
    for place in PLACES:
        text = head + place
        for run in (" " * most, "\n" * most, ("\n \r " * most)[:most]):
            assert possible(sequence(spec, text + run[1:])) & spaces, (text, run)
            assert not possible(sequence(spec, text + run)) & spaces, (text, run)


def test_a_model_that_likes_spaces_best_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its JSON is whole. The control: with no bound worth the name it writes spaces to the last token."""
    text, ended = write(schema_of(A_AND_B), 1, length=200, likes=b" \n\t", by=30.0)
    assert ended
    jsonschema.validate(json.loads(text), A_AND_B)
    monkeypatch.setattr(engine.decoding.structured_output, "MAX_WHITESPACE", 1000)
    text, ended = write(schema_of(A_AND_B), 1, length=200, likes=b" \n\t", by=30.0)
    assert (text.strip(), ended) == ("{", False)


# ---- how it is chosen


def test_the_grammar_has_the_last_word() -> None:
    """No bias, penalty or temperature makes a token possible that it forbids."""
    spec = GrammarSpec("regex", "[ab]{4}")
    for how in (
        {"logit_bias": ((99, 100.0), (97, -100.0), (98, -100.0))},
        {"repetition_penalty": 10.0, "frequency_penalty": 2.0},
        {"temperature": 100.0, "seed": 4, "logit_bias": ((99, 100.0),)},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.9},
    ):
        logits = torch.zeros(1, VOCAB)
        logits[0, 99] = 50.0
        logits[0, 97:99] = -60.0
        assert step([sequence(spec, "ab", **how)], logits)[0].token in b"ab"


def test_a_stop_token_comes_only_where_the_text_is_complete() -> None:
    """Neither the end of sequence nor a client's own, also when the grammar knows it as a character."""
    spec = GrammarSpec("regex", "a{2,3}b?")
    assert [sorted(possible(sequence(spec, text))) for text in ("", "a", "aa", "aaa", "aab")] == [
        [97], [97], [97, 98, EOS], [98, EOS], [EOS]
    ]  # fmt: skip
    own = (EOS, 98, 200)
    assert possible(sequence(spec, "a", stop_ids=own)) == {97}
    assert possible(sequence(spec, "aa", stop_ids=own)) == {97, *own}
    for inner in ("a[ab]c", "a(.|\n)c", "a(b|aa)c"):
        here = possible(sequence(GrammarSpec("regex", inner), "a", stop_ids=own))
        assert 97 in here
        assert not here & set(own), "a client's stop token may not end it in the middle, whatever it is elsewhere"


def test_neighbours_change_nothing() -> None:
    """A row with a grammar and one without choose in a batch what they choose alone."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCAB, generator=generator)
    rows = [
        lambda: sequence(None, temperature=1.0, seed=1),
        lambda: sequence(GrammarSpec("regex", "[a-z]+"), "ab", temperature=1.0, seed=2, logprobs=3),
        lambda: sequence(GrammarSpec("regex", "[0-9]+"), temperature=1.0, seed=3),
        lambda: sequence(None, logprobs=1),
    ]
    together = step([make() for make in rows], logits.clone())
    alone = [step([make()], logits[row : row + 1].clone())[0] for row, make in enumerate(rows)]
    assert [one.token for one in together] == [one.token for one in alone]
    assert together[1].logprob.top_ids == logits[1].topk(3).indices.tolist(), "log probabilities are the model's own"


def test_min_tokens_keeps_the_end_away_while_the_grammar_goes_on() -> None:
    """And where the grammar is complete before, there is no token: a status that names the field, not a wrong token."""
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 9.0
    assert step([sequence(GrammarSpec("regex", "a+"), "aa", min_tokens=3)], logits.clone())[0].token == 97
    assert step([sequence(GrammarSpec("regex", "a+"), "aaa", min_tokens=3)], logits.clone())[0].token == EOS
    choice = step([sequence(GrammarSpec("regex", "aa"), "aa", min_tokens=3)])[0]
    assert choice.token is None
    assert isinstance(choice.error, InvalidRequest)
    assert (choice.error.reason, choice.error.field) == ("GRAMMAR_DEAD_END", "sampling.min_tokens")


def test_a_dead_end_is_a_status_and_costs_the_neighbours_nothing() -> None:
    """A grammar that no text fits gives no token; other rows of the step are not affected, sampling or greedy."""
    for how in ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}):
        dead = sequence(GrammarSpec("ebnf", "root ::= root"), logprobs=2, **how)
        other = sequence(GrammarSpec("regex", "[ab]"), **how)
        plain = sequence(None, **how)
        first, second, third = step([dead, other, plain])
        assert (first.token, first.logprob) == (None, None)
        assert isinstance(first.error, InvalidRequest)
        assert first.error.reason == "GRAMMAR_DEAD_END"
        assert second.token in b"ab"
        assert third.token == step([sequence(None, **how)])[0].token


def test_tokens_that_do_not_fit_their_grammar_are_a_bug_and_not_an_answer() -> None:
    """A journal that the grammar cannot have made (another grammar, a lost token) stops the request."""
    choice = step([sequence(GrammarSpec("regex", "[ab]+c"), "axb")])[0]
    assert choice.token is None
    assert isinstance(choice.error, InternalError)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1))
def test_whoever_has_the_tokens_goes_on_the_same_way(seed: int, cut: float) -> None:
    """Matched step by step, or again from the start at any point: the same bits, so the same tokens."""
    spec = schema_of(
        {"type": "object", "properties": {"a": {"type": "array", "items": INT}, "b": STR}, "required": ["a", "b"]}
    )
    text, _ = write(spec, seed, length=60)
    text = text.encode().decode(errors="ignore").rstrip("�")
    at = int(cut * len(text))
    grown = sequence(spec, text[:at])
    for character in text[at:]:
        possible(grown)
        grown.tokens += character.encode()
    assert possible(grown) == possible(sequence(spec, text))
    if len(text) > at + 1:
        assert possible(sequence(spec, text[:at])) != set(), "and the state matters"


# ---- what it may cost


def test_masks_are_filled_while_the_caller_does_something_else() -> None:
    """`begin` returns at once; `wait` waits. The control: nothing is filled before the thread may go on."""
    one = sequence(GrammarSpec("regex", "[ab]"))
    go, fill = threading.Event(), matcher_of(one)

    class Held(Matcher):
        def fill(self, *arguments: Any) -> None:
            assert go.wait(600)
            fill.fill(*arguments)

    one.matcher = Held(one.grammar, one.stop_ids)
    masks = Masks()
    filling = masks.begin([one], VOCAB)
    assert filling is not None
    assert int(filling.bits[0, 97 // 32]) == 0, "nothing is allowed before it is filled"
    go.set()
    filling.wait()
    assert int(filling.bits[0, 97 // 32]) != 0
    masks.end()
    assert masks.begin([sequence(None)], VOCAB) is None


def test_a_grammar_that_does_not_end_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request gets a status, its neighbours their masks, and later steps another thread. CPU time decides: a thread
    that merely waits, because the machine is busy, is waited for."""
    monkeypatch.setattr(engine.decoding.structured_output, "MASK_CPU_S", 0.2)
    spec = GrammarSpec("regex", "[ab]")
    slow, late, good = sequence(spec), sequence(spec), sequence(spec)
    go = threading.Event()

    class Spins(Matcher):
        def fill(self, *arguments: Any) -> None:
            while not go.is_set():
                pass

    class Sleeps(Matcher):
        def fill(self, *arguments: Any) -> None:
            go.wait(0.5)
            Matcher.fill(self, *arguments)

    slow.matcher, slow.tenant = Spins(slow.grammar, slow.stop_ids), "slow"
    late.matcher = Sleeps(late.grammar, late.stop_ids)
    masks = Masks()
    filling = masks.begin([late, slow, good], VOCAB)
    choices = choose(torch.zeros(3, VOCAB), [late, slow, good], filling)
    assert [choice.token in b"ab" if choice.token else None for choice in choices] == [True, None, True]
    assert isinstance(choices[1].error, InvalidRequest)
    assert choices[1].error.reason == "GRAMMAR_TOO_COMPLEX"
    assert (masks.left_behind.count("slow"), masks.left_behind.count("")) == (1, 0)
    assert {os.getpriority(os.PRIO_PROCESS, thread.native_id) for thread in masks.left_behind.threads} == {19}
    assert choose(torch.zeros(1, VOCAB), [good], masks.begin([good], VOCAB))[0].token in b"ab"
    go.set()
    masks.end()
    for thread in masks.left_behind.threads:
        thread.join(600)
    assert masks.left_behind.count("slow") == 0


def test_a_row_that_ends_as_its_thread_is_left_gives_no_other_row_to_two_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that was too slow went on with the next row, beside the one that took over: a token of that request
    was matched twice."""
    monkeypatch.setattr(engine.decoding.structured_output, "MASK_CPU_S", 0.2)
    spec = GrammarSpec("regex", "[ab]+")
    slow, good = sequence(spec), sequence(spec)
    go, fills = threading.Event(), list[str]()

    class Spins(Matcher):
        def fill(self, *arguments: Any) -> None:
            while not go.is_set():
                pass

    class Counts(Matcher):
        def fill(self, *arguments: Any) -> None:
            fills.append(threading.current_thread().name)
            Matcher.fill(self, *arguments)

    slow.matcher, good.matcher = Spins(slow.grammar, slow.stop_ids), Counts(good.grammar, good.stop_ids)
    masks = Masks()
    leave = masks.leave

    def leave_late(tenant: str) -> None:
        left = masks.thread()
        go.set()
        leave(tenant)
        left.join(600)  # it does all that it would do

    monkeypatch.setattr(masks, "leave", leave_late)
    choices = choose(torch.zeros(2, VOCAB), [slow, good], masks.begin([slow, good], VOCAB))
    assert [choice.token in b"ab" if choice.token else None for choice in choices] == [None, True]
    assert len(fills) == 1
    masks.end()


def cpu_until_it_fails(monkeypatch: pytest.MonkeyPatch, at_once: float, each: float) -> tuple[float, int]:
    """CPU seconds that a hostile request's masks take over its life, and its tokens; a good one gets all of its own."""
    monkeypatch.setattr(engine.decoding.structured_output, "MASK_CPU_S", at_once)
    monkeypatch.setattr(engine.decoding.structured_output, "TOKEN_CPU_S", each)
    hostile = sequence(GrammarSpec("regex", "(a*)*(a*)*(aa|a)*(a|aa)*" * 8))  # compiles in a millisecond
    good, masks = sequence(GrammarSpec("regex", "a+")), Masks()
    compiled(hostile.sampling.grammar)
    taken = time.process_time()
    while True:  # as many tokens as it takes
        filling = masks.begin([hostile, good], VOCAB)
        assert filling is not None
        filling.wait()
        assert int(filling.bits[1, 97 // 32]) != 0
        if failed := filling.failed:
            break
        hostile.tokens.append(97)
        good.tokens.append(97)
    taken = time.process_time() - taken
    masks.end()
    assert failed.keys() == {0}
    assert isinstance(failed[0], InvalidRequest)
    assert failed[0].reason == "GRAMMAR_TOO_COMPLEX"
    for thread in masks.left_behind.threads:
        thread.join(60)
    return taken, hostile.generated


def test_a_grammar_that_grows_slower_does_not_slow_down_the_others_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """All wait for its masks, so that the time counts over its tokens. The control: with a limit for each token alone,
    it stays just below that for dozens of tokens."""
    taken, tokens = cpu_until_it_fails(monkeypatch, 0.1, 0.002)
    assert taken < 0.1 + 0.002 * tokens + 0.3  # a call under way is left within 50 ms or so
    alone, longer = cpu_until_it_fails(monkeypatch, 0.1, 0.1)
    assert alone > 3 * taken
    assert longer > tokens


@pytest.mark.parametrize(
    ("masks_s", "fails_at"),
    [
        ([0.9] + [0.018] * 3000, None),  # a long text under a large grammar, on a slow machine
        ([0.5, 0.5], None),
        ([0.6, 0.6], 1),
        ([0.0001] * 3000 + [0.9, 0.9], 3001),  # what was not used for long is not saved up
        ([0.0001] * 3000 + [1.1], 3000),
    ],
)
def test_the_time_of_a_request_s_masks_is_filled_up_by_its_tokens(
    monkeypatch: pytest.MonkeyPatch, masks_s: list[float], fails_at: int | None
) -> None:
    """Up to a second at once, and 20 ms for each token in the long run."""
    clock = [1e6]
    monkeypatch.setattr(engine.decoding.structured_output, "thread_time", lambda: clock[0])
    one, masks, failed = sequence(GrammarSpec("regex", "a+")), Masks(), None

    class Takes(Matcher):
        def fill(self, *arguments: Any) -> None:
            clock[0] += masks_s[one.generated]
            Matcher.fill(self, *arguments)

    one.matcher = Takes(one.grammar, one.stop_ids)
    for place in range(len(masks_s)):
        filling = masks.begin([one], VOCAB)
        assert filling is not None
        if filling.wait().failed:
            failed = place
            break
        one.tokens.append(97)
    masks.end()
    assert failed == fails_at


def test_a_resumed_request_has_the_time_to_match_its_tokens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all matched before its first mask on another worker."""
    clock = [1e6]
    monkeypatch.setattr(engine.decoding.structured_output, "thread_time", lambda: clock[0])
    resumed, masks = sequence(GrammarSpec("regex", "a+"), "a" * 500), Masks()

    class Takes(Matcher):
        def fill(self, *arguments: Any) -> None:
            clock[0] += 0.018 * resumed.generated
            Matcher.fill(self, *arguments)

    resumed.matcher = Takes(resumed.grammar, resumed.stop_ids)
    assert choose(torch.zeros(1, VOCAB), [resumed], masks.begin([resumed], VOCAB))[0].token == 97
    masks.end()


def test_a_matcher_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a state, so that a token is matched once."""
    made: list[Sequence] = []
    new = Matcher.of
    monkeypatch.setattr(Matcher, "of", lambda one: (made.append(one), new(one))[1])
    one, masks = sequence(GrammarSpec("regex", "[ab]+")), Masks()
    for _ in range(3):
        choose(torch.zeros(1, VOCAB), [one], masks.begin([one], VOCAB))
        one.tokens.append(97)
    assert made == [one]
    assert one.matcher.matched == len(one.tokens) - 1
    masks.end()


def threads_inside_one_matcher(monkeypatch: pytest.MonkeyPatch, *, kept: bool) -> int:
    """How many are at once, when the step whose masks were slow has failed and its sequence is retried. `kept`: the
    sequence keeps its matcher, as it did."""
    monkeypatch.setattr(engine.decoding.structured_output, "MASK_CPU_S", 0.2)
    one = sequence(GrammarSpec("regex", "[ab]+"))
    go, inside = threading.Event(), set[int]()

    class Spins(Matcher):
        def fill(self, *arguments: Any) -> None:
            inside.add(threading.get_ident())
            while not go.is_set():
                pass

    one.matcher = slow = Spins(one.grammar, one.stop_ids)
    masks = Masks()
    for _ in range(2):  # what the failed step learns of its rows is lost with it
        filling = masks.begin([one], VOCAB)
        assert filling is not None
        filling.wait()
        one.matcher = slow if kept else one.matcher
    go.set()
    masks.end()
    for thread in masks.left_behind.threads:
        thread.join(60)
    assert kept or one.matcher is not slow, "nor does it come back with its thread"
    return len(inside)


def test_a_matcher_that_was_left_with_its_thread_serves_no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads inside one native matcher are a data race: it may crash the worker, or allow wrong tokens. The
    control: they were two."""
    assert threads_inside_one_matcher(monkeypatch, kept=False) == 1
    assert threads_inside_one_matcher(monkeypatch, kept=True) == 2


def test_a_wait_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog allows a step more time only while it waits for its masks."""
    masks = Masks()
    filling = masks.begin([sequence(GrammarSpec("regex", "[ab]"))], VOCAB)
    assert filling is not None

    def fails(_: float) -> bool:
        assert masks.waits == 1
        raise RuntimeError("the wait fails")

    monkeypatch.setattr(filling._ended, "wait", fails)
    with pytest.raises(RuntimeError, match="the wait fails"):
        filling.wait()
    assert masks.waits == 2
    masks.end()


def test_a_bug_on_the_masks_thread_is_not_an_unmasked_token() -> None:
    """Its row fails, and no other; the next step is not affected."""

    class Broken(Matcher):
        def fill(self, *arguments: Any) -> None:
            raise TypeError("a bug")

    spec = GrammarSpec("regex", "[ab]")
    good, bad, after = sequence(spec), sequence(spec), sequence(spec)
    bad.matcher = Broken(bad.grammar, bad.stop_ids)
    masks = Masks()
    first, second, third = choose(torch.zeros(3, VOCAB), [good, bad, after], masks.begin([good, bad, after], VOCAB))
    assert first.token in b"ab"
    assert third.token in b"ab"
    assert second.token is None
    assert isinstance(second.error, InternalError)
    assert choose(torch.zeros(1, VOCAB), [after], masks.begin([after], VOCAB))[0].token in b"ab"
    masks.end()


def test_a_mask_does_not_hide_logits_that_are_no_numbers() -> None:
    """Neither where the grammar excludes the token, nor where it would be blamed for a dead end; and a mask that failed
    itself does not hide it either."""
    spec = GrammarSpec("regex", "[ab]")
    logits = torch.zeros(4, VOCAB)
    logits[0, 120], logits[1], logits[2, 120] = math.nan, -math.inf, math.nan
    rows = [sequence(spec) for _ in range(4)]
    broken = sequence(spec, "x")  # does not fit its grammar
    reasons = [choice.error and choice.error.reason for choice in step([rows[0], rows[1], broken, rows[3]], logits)]
    assert reasons == ["LOGITS_NOT_FINITE"] * 3 + [None]


def test_compiling_is_bounded_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that takes too long is refused, at once when it comes again; the next one is compiled."""
    grammars = Grammars(DEMO, 2048, [0])
    hostile = GrammarSpec("regex", "(a*)*(a*)*(a|b)*(a|aa)*" * 70)  # 1.6 s on a Zen 4
    first = grammars.compile(GrammarSpec("regex", "a+")).result(600)
    assert grammars.compile(GrammarSpec("regex", "a+")).result(0) is first, "from the cache"
    monkeypatch.setattr(grammars_module, "COMPILE_CPU_S", 0.05)
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(hostile).result(600)
    assert (caught.value.reason, caught.value.field) == ("GRAMMAR_TOO_COMPLEX", "sampling.grammar.regex")
    monkeypatch.setattr(grammars, "_bounded", lambda *_: pytest.fail("it was compiled again"))
    with pytest.raises(InvalidRequest):
        grammars.compile(hostile).result(600)
    monkeypatch.undo()
    assert grammars.compile(GrammarSpec("regex", "b+")).result(600) is not first
    for thread in grammars.left_behind.threads:
        thread.join(600)


class Slow:
    """Grammars of capital letters take CPU time until `go` is set; `begun` has all in the order in which they begin."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def compile(self, spec: GrammarSpec, known: Any) -> Any:
        self.begun.append(spec.text)
        while spec.text.isupper() and not self.go.is_set():
            sum(range(1000))
        return compile_spec(spec, known)


def test_grammars_that_are_slow_to_compile_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them go on beside the next ones, and the same one again waits for what comes of it. A fourth is waited
    for, so that no more threads compile. The control: when none goes on beside others, one holds up all."""
    grammars, slow = Grammars(DEMO, 2048, [0]), Slow()
    monkeypatch.setattr(grammars_module, "compile_spec", slow.compile)
    monkeypatch.setattr(grammars_module, "COMPILE_CPU_S", 600.0)
    monkeypatch.setattr(grammars_module, "QUICK_CPU_S", 0.01)
    slow_ones = [grammars.compile(GrammarSpec("regex", text)) for text in ("A", "B", "A", "C")]
    assert grammars.compile(GrammarSpec("regex", "d")).result(600)
    assert not any(one.done() for one in slow_ones)
    fourth, later = grammars.compile(GrammarSpec("regex", "E")), grammars.compile(GrammarSpec("regex", "f"))
    with pytest.raises(TimeoutError):
        later.result(0.3)
    slow.go.set()
    assert slow_ones[0].result(600) is slow_ones[2].result(600)
    assert all(one.result(600) for one in (*slow_ones, fourth, later))
    assert sorted(slow.begun) == ["A", "B", "C", "E", "d", "f"]
    slow.go.clear()
    monkeypatch.setattr(grammars_module, "QUICK_CPU_S", 600.0)
    alone, after = grammars.compile(GrammarSpec("regex", "G")), grammars.compile(GrammarSpec("regex", "h"))
    with pytest.raises(TimeoutError):
        after.result(0.3)
    slow.go.set()
    assert alone.result(600)
    assert after.result(600)


def test_a_tenant_whose_grammars_are_compiled_has_no_threads() -> None:
    """A worker serves more tenants than it should have threads for."""
    grammars, before = Grammars(DEMO, 2048, [0]), set(threading.enumerate())
    for tenant in range(8):
        grammars.compile(GrammarSpec("regex", f"[a-{'bcdefghi'[tenant]}]+"), f"tenant-{tenant}").result(600)
    wait_until(lambda: not {*threading.enumerate()} - before, 10, lambda: grammars._lines)


def test_a_tenant_s_grammars_hold_up_no_other_tenant(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Neither those that are slow, nor those that never end, after which its own are refused. The same grammar is
    compiled once for all tenants."""
    grammars, slow = Grammars(DEMO, 2048, [0]), Slow()
    request.addfinalizer(slow.go.set)
    monkeypatch.setattr(grammars_module, "compile_spec", slow.compile)
    monkeypatch.setattr(grammars_module, "COMPILE_CPU_S", 600.0)
    monkeypatch.setattr(grammars_module, "QUICK_CPU_S", 0.01)
    slow_ones = [grammars.compile(GrammarSpec("regex", text), "slow") for text in ("A", "B", "C", "E")]
    behind = grammars.compile(GrammarSpec("regex", "d"), "slow")
    with pytest.raises(TimeoutError):
        behind.result(0.3)
    assert grammars.compile(GrammarSpec("regex", "e"), "other").result(600)
    shared = grammars.compile(GrammarSpec("regex", "A"), "other")
    slow.go.set()
    assert all(one.result(600) for one in (*slow_ones, behind))
    assert shared.result(600) is slow_ones[0].result(0)
    assert sorted(slow.begun) == ["A", "B", "C", "E", "d", "e"]
    slow.go.clear()
    monkeypatch.setattr(grammars_module, "COMPILE_CPU_S", 0.02)
    for text in ("X", "Y", "Z"):
        with pytest.raises(InvalidRequest, match="too long to compile"):
            grammars.compile(GrammarSpec("regex", text), "slow").result(600)
    with pytest.raises(Busy, match="of this tenant"):
        grammars.compile(GrammarSpec("regex", "x"), "slow").result(600)
    monkeypatch.setattr(grammars_module, "COMPILE_CPU_S", 600.0)
    assert grammars.compile(GrammarSpec("regex", "x"), "other").result(600)
    slow.go.set()
    for thread in grammars.left_behind.threads:
        thread.join(600)


def test_a_bug_while_compiling_is_an_answer_and_not_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request gets the error, and the next grammar is compiled."""
    grammars = Grammars(DEMO, 2048, [0])
    monkeypatch.setattr(grammars_module, "compile_spec", lambda *_: [][1])
    with pytest.raises(IndexError):
        grammars.compile(GrammarSpec("regex", "a")).result(600)
    monkeypatch.undo()
    assert grammars.compile(GrammarSpec("regex", "a")).result(600)


def test_bad_grammars_name_their_field() -> None:
    """What the library rejects is the client's error."""
    grammars = Grammars(DEMO, 2048, [0])
    for kind, text in [
        ("regex", "(a"),
        ("regex", "(?=a)b"),
        ("ebnf", "x ::= y"),
        ("ebnf", "root ::= ["),
        ("json_schema", "{"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            grammars.compile(GrammarSpec(kind, text)).result(600)
        assert caught.value.field == f"sampling.grammar.{kind}"
        assert ".cc:" not in caught.value.message


def test_a_large_grammar_and_a_worker_full_of_stuck_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded too; and with too many stuck threads the router is sent to another worker."""
    grammars = Grammars(DEMO, 2048, [0])
    monkeypatch.setattr(grammars_module, "MAX_GRAMMAR_BYTES", 100)
    with pytest.raises(InvalidRequest, match="bytes"):
        grammars.compile(GrammarSpec("regex", "abc")).result(600)
    monkeypatch.setattr(grammars.left_behind, "count", lambda _: 3)
    with pytest.raises(Busy):
        grammars.compile(GrammarSpec("regex", "abcd")).result(600)


def test_a_tenant_whose_grammars_are_stuck_gets_none_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar whose masks never end is one that compiles: from the cache it cost a thread with each request. Other
    tenants get it, and a grammar that was refused is refused as before."""
    grammars, spec, bad = Grammars(DEMO, 2048, [0]), GrammarSpec("regex", "abc"), GrammarSpec("regex", "(a")
    found = grammars.compile(spec, "stuck").result(60)
    with pytest.raises(InvalidRequest):
        grammars.compile(bad, "stuck").result(60)
    monkeypatch.setattr(grammars.left_behind, "count", lambda tenant: 3 if tenant == "stuck" else 0)
    with pytest.raises(Busy) as caught:
        grammars.compile(spec, "stuck").result(60)
    assert caught.value.reason == "GRAMMARS_STUCK"
    with pytest.raises(InvalidRequest):
        grammars.compile(bad, "stuck").result(60)
    assert grammars.compile(spec, "other").result(60) is found
    monkeypatch.setattr(grammars.left_behind, "count", lambda _: 2)
    assert grammars.compile(spec, "stuck").result(60) is found, "the control: two threads are no reason"


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used grammar is evicted first."""
    grammars = Grammars(DEMO, 2048, [0])
    specs = [GrammarSpec("regex", f"{letter}+") for letter in "abc"]
    a = grammars.compile(specs[0]).result(600)
    b = grammars.compile(specs[1]).result(600)
    c = Grammars(DEMO, 2048, [0]).compile(specs[2]).result(600)
    limit = a.memory_size_bytes + max(b.memory_size_bytes, c.memory_size_bytes)
    monkeypatch.setattr(grammars_module, "CACHE_BYTES", limit)
    assert grammars.compile(specs[0]).result(600) is a
    grammars.compile(specs[2]).result(600)
    assert grammars.compile(specs[0]).result(600) is a
    assert grammars.compile(specs[1]).result(600) is not b


# ---- the vocabulary


def test_tokens_are_to_the_grammar_what_they_are_to_the_reader(tmp_path: Path) -> None:
    """Each token's bytes are those that the detokeniser shows; special tokens show nothing and are never allowed."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found = vocabulary(DEMO, 2048, [0]).plain
    texts = found.decoded_vocab
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    assert special
    shown = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    assert [texts[token].decode(errors="replace") for token in range(len(shown))] == shown
    assert {token for token in range(len(shown)) if not texts[token]} == special
    matcher = Matcher(compile_spec(GrammarSpec("regex", "(.|\n)*"), Vocabulary(found)), [0])
    one = Sequence(id="s", tokens=[9], prompt_len=1, max_len=9, stop_ids=frozenset([0]))
    bits = torch.zeros((1, 64), dtype=torch.int32)
    matcher.fill(one, bits, 0)
    allowed = set(np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")).tolist())
    assert not allowed & (special - {0})
    assert len(allowed) > 1000
    with pytest.raises(PreconditionFailed):
        vocabulary(tmp_path, 2048, [0])


def test_a_sequence_cannot_be_made_without_its_compiled_grammar() -> None:
    """Compiling cannot be forgotten: an unmasked stream would be a wrong answer."""
    with pytest.raises(ValueError, match="compiled"):
        Sequence(id="s", tokens=[1], prompt_len=1, max_len=5, sampling=Sampling(grammar=GrammarSpec("regex", "a")))


def test_no_token_of_a_masked_row_is_infinitely_likely() -> None:
    """Every choice under a mask comes from finite logits."""
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 97] = 0.0
    assert step([sequence(GrammarSpec("regex", "a+"))], logits.clone())[0].token == 97
    assert step([sequence(GrammarSpec("regex", "b+"))], logits.clone())[0].token is None


DIGITS = GrammarSpec("regex", "[0-9]+")
OPEN, CLOSE = ord("<"), (ord(">"), ord("!"))


def allowed(*, generated: str, opening: int | None, special: int = 280) -> tuple[set[int], bool]:
    """The bytes that may follow, and whether a token without text may."""
    row = torch.zeros((1, -(-VOCAB // 32)), dtype=torch.int32)
    asked = sequence(DIGITS, generated, before_grammar=ReasoningTokens(opening, CLOSE))
    matcher_of(asked).fill(asked, row, 0)
    bits = [bool(row[0, token // 32] >> token % 32 & 1) for token in range(VOCAB)]
    return {token for token in range(EOS + 1) if bits[token]}, bits[special]


NUMBER = set(b"0123456789")


def test_a_grammar_begins_where_the_reasoning_ends() -> None:
    """Until then every token may come, special ones too, but none that would end the completion. The tokens that end
    the reasoning need not be one."""
    everything = set(range(256))
    for text in ("", "1 <think", "a>", "a> !"):
        assert allowed(generated=text, opening=None) == (everything, True)
    assert allowed(generated="a>!", opening=None) == (NUMBER, False)
    assert allowed(generated="a>!1", opening=None) == (NUMBER | {EOS}, False)
    assert allowed(generated=">!1", opening=None) == (NUMBER | {EOS}, False)


def test_a_model_that_may_reason_either_does_or_writes_what_fits() -> None:
    """Its first token decides."""
    assert allowed(generated="", opening=OPEN) == (NUMBER | {OPEN}, False)
    assert allowed(generated="1", opening=OPEN) == (NUMBER | {EOS}, False)
    assert allowed(generated="<a", opening=OPEN) == (set(range(256)), True)
    assert allowed(generated="<a>!", opening=OPEN) == (NUMBER, False)


def test_a_worker_that_takes_over_within_reasoning_goes_on_with_the_same_masks() -> None:
    """All state is derived from the tokens, wherever the sequence was when it moved."""
    text = "<a>b>!12"
    asked = sequence(DIGITS, "", before_grammar=ReasoningTokens(OPEN, CLOSE))
    stepwise = []
    for byte in text.encode():
        row = torch.zeros((1, -(-VOCAB // 32)), dtype=torch.int32)
        matcher_of(asked).fill(asked, row, 0)
        stepwise.append({token for token in range(EOS + 1) if row[0, token // 32] >> token % 32 & 1})
        asked.tokens.append(byte)
    assert stepwise == [allowed(generated=text[:count], opening=OPEN)[0] for count in range(len(text))]


def test_reasoning_without_an_end_is_refused_by_the_worker() -> None:
    """Else the grammar would never begin."""
    message = sampling_pb2.Sampling(grammar=common_pb2.Grammar(json=True))
    message.before_grammar.open = 5
    with pytest.raises(InvalidRequest, match="without an end"):
        sampling_from(message, VOCAB)
    message.before_grammar.close.append(VOCAB)
    with pytest.raises(InvalidRequest):
        sampling_from(message, VOCAB)
