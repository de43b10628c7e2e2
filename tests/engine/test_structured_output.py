"""Promises of grammars: the text fits, and a token is a function of the request and its tokens. What a grammar may cost
is in test_grammar_limits.py."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import engine.decoding.structured_output
from engine.core.sequence import Sequence
from engine.decoding.structured_output import Matcher, Vocabulary, compile_spec, vocabulary
from services.proto_convert import sampling_from
from services.router.answer.call_formats import registry
from services.router.answer.harmony_reader import HarmonyReader
from services.router.answer.parts import CallArguments, CallBegin, Text, joined
from services.router.preprocess import grammar_schema
from services.router.preprocess.chat import forced_calls
from tandem.errors import InternalError, InvalidRequest, PreconditionFailed
from tandem.sampling import GrammarSpec, ReasoningTokens, Sampling
from tandem.v1 import common_pb2, generation_pb2, sampling_pb2
from tests.support.byte_grammars import (
    DEMO,
    EOS,
    VOCAB,
    fits,
    matcher_of,
    possible,
    schema_of,
    sequence,
    step,
    write,
)

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


# The tokens of harmony, a byte for each.
WORDS = {
    "!": "<|end|>",
    "(": "<|start|>",
    "a": "assistant",
    "<": "<|channel|>",
    ">": "<|message|>",
    "|": "<|constrain|>",
}
WORDS |= {"t": "analysis", "f": "final", "c": "commentary", "j": "json"}
HEADERS = tuple(map(tuple, (b"!(", b"(a<", b"<t>", b"<f>")))
HARMONY = ReasoningTokens(OPEN, tuple(b"f>"), HEADERS)


@pytest.mark.parametrize(
    ("begun", "following"),
    [("<", "tf"), ("<t", ">"), ("<f", ">"), ("<t>f!", "("), ("<t>!(", "a"), ("<t>!(a", "<"), ("<t>f!(a<f", ">")],
)
def test_only_a_header_goes_on_where_one_has_begun(begun: str, following: str) -> None:
    """gpt-oss also writes `<|channel|>final <|constrain|>json<|message|>`, after which no grammar would begin. Without
    headers, as a router of an earlier version sends it, every token may come."""
    assert possible(sequence(DIGITS, begun, before_grammar=HARMONY)) == set(following.encode())
    assert len(possible(sequence(DIGITS, begun, before_grammar=HARMONY._replace(headers=())))) > 256
    within = f"t>{begun}"
    assert possible(sequence(DIGITS, within, before_grammar=HARMONY._replace(open=None))) == set(following.encode())


@pytest.mark.parametrize("text", ["<t>", "<t>so", "<t>a", "<t>f"])
def test_the_words_of_a_header_are_free_in_a_thought(text: str) -> None:
    """They begin nothing there."""
    assert possible(sequence(DIGITS, text, before_grammar=HARMONY)) == set(range(VOCAB)) - {EOS}


@pytest.mark.parametrize("headers", [HEADERS, ()], ids=["headers", "none"])
def test_whatever_gpt_oss_writes_its_answer_fits(headers: tuple[tuple[int, ...], ...]) -> None:
    """Its reader takes only constrained text for the answer. Control: without headers also other text."""
    likely = [*map(ord, WORDS), *b"12. ", EOS]
    answers = set()
    for seed in range(100):
        one = sequence(DIGITS, "<", before_grammar=HARMONY._replace(headers=headers))
        chance = np.random.default_rng(seed)
        while one.tokens[-1] != EOS and one.generated < 40:
            allowed_now = possible(one)
            one.tokens.append(int(chance.choice([token for token in likely if token in allowed_now])))
        reader = HarmonyReader(offers_tools=False)
        text = "".join(WORDS.get(chr(token), chr(token)) for token in one.tokens[2:] if token != EOS)
        answers.add("".join(part.text for part in reader.push(text) + reader.finish() if isinstance(part, Text)))
    assert len(answers) > 10
    assert all(re.fullmatch("[0-9]*", answer) for answer in answers) is bool(headers)


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
    message.before_grammar.close[:] = [6]
    message.before_grammar.headers.add(token_ids=[5, 7, 6])
    assert sampling_from(message, VOCAB).before_grammar == ReasoningTokens(5, (6,), ((5, 7, 6),))
    message.before_grammar.headers.add(token_ids=[5, VOCAB])
    with pytest.raises(InvalidRequest):
        sampling_from(message, VOCAB)
