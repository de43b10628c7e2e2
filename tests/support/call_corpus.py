"""What models write when they call tools, and what clients are to get of it, in every format.

Parts are ("text", ...), ("call", name) and ("arguments", JSON text). Written from the formats' chat templates.
"""

from __future__ import annotations

import json
from typing import Any

from services.router.answer.call_formats.registry import reader_of
from services.router.answer.parts import CallBegin, Part, Text, joined

Seen = list[tuple[str, str]]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING = {"type": "string"}
TOOLS = [
    tool(
        "height",
        peak=STRING,
        year={"type": "integer"},
        exact={"type": "boolean"},
        near={"type": "array", "items": STRING},
        note={"type": ["string", "null"]},
        code={"type": "string", "pattern": "^[A-Z]+$"},
    ),
    tool("now"),
]


def seen(parts: list[Part]) -> Seen:
    kinds = {CallBegin: "call", Text: "text"}
    return [
        (kinds.get(type(part), "arguments"), part.name if isinstance(part, CallBegin) else part.text)
        for part in joined(parts)
    ]


def read(format: str, *pieces: str) -> Seen:
    reader = reader_of(format, TOOLS)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return seen(parts + reader.finish())


def call(name: str, arguments: str) -> Seen:
    return [("call", name), ("arguments", arguments)]


def text(words: str) -> Seen:
    return [("text", words)]


EIGER = '{"peak": "Eiger </tool_call> \\" ] } [TOOL_CALLS]", "year": 2024}'
E, N = call("height", EIGER), call("now", "{}")


def _json(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def _parameters(*pairs: tuple[str, str]) -> str:
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)


def _qwen(name: str, *pairs: tuple[str, str]) -> str:
    return f"<tool_call>\n<function={name}>\n{_parameters(*pairs)}</function>\n</tool_call>"


def _glm(name: str, *pairs: tuple[str, str], space: str = "\n") -> str:
    tags = [f"<arg_key>{key}</arg_key>{space}<arg_value>{value}</arg_value>{space}" for key, value in pairs]
    return f"<tool_call>{name}{space}{''.join(tags)}</tool_call>"


HERMES = f"<tool_call>\n{_json('height', EIGER)}\n</tool_call>"
LLAMA = _json("height", EIGER, "parameters")
DEEPSEEK_3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>height\n```json\n{EIGER}\n```<｜tool▁call▁end｜>"
DEEPSEEK_31 = f"<｜tool▁call▁begin｜>height<｜tool▁sep｜>{EIGER}<｜tool▁call▁end｜>"
KIMI = f"<|tool_call_begin|>functions.height:0<|tool_call_argument_begin|>{EIGER}<|tool_call_end|>"
KIMI_NOW = "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"

PAIRS = [("peak", 'a "b"\n\\ <c>\n'), ("year", "2024"), ("exact", "True"), ("near", "['x', \"y\"]"), ("note", "null")]
READ = '{"peak": "a \\"b\\"\\n\\\\ <c>\\n", "year": 2024, "exact": true, "near": ["x", "y"], "note": null}'

# As the models are trained to: no marker is ever part of what is shown.
GOOD: list[tuple[str, str, Seen]] = [
    ("hermes", "no call at all", text("no call at all")),
    ("hermes", HERMES, E),
    ("hermes", f"I look. {HERMES}\n{HERMES}\n", [*text("I look. "), *E, *E]),
    ("hermes", f"<tool_call>{_json('now', '{}')}</tool_call> and then", [*N, *text(" and then")]),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1]}, "id": {"x": "}"}, "name": "f"}</tool_call>',
        call("f", '{"a": [1]}'),
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', N),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"}</tool_call>', call("f", '{"a": 1}')),
    ("hermes", f"<tool_call>{_json('now', '{}')}", N),  # the end token came before the closing tag
    ("llama3", "no call {}", text("no call {}")),
    ("llama3", f" {LLAMA}", E),
    ("llama3", f"{LLAMA}; {_json('now', '{}', 'parameters')}\n", [*E, *N]),
    ("llama3", f"I look.<|python_tag|>{LLAMA}", [*text("I look."), *E]),
    ("llama3", f"<|python_start|>I look.<|python_end|>{LLAMA}{LLAMA}", [*text("I look."), *E, *E]),
    ("pythonic", "[1] is no call", text("[1] is no call")),
    ("pythonic", '[height(peak="Eiger", year=2024), now()]', [*call("height", '{"peak": "Eiger", "year": 2024}'), *N]),
    (
        "pythonic",
        "[f(a='\"', b=[1, None, {'c': (True,)}], d=-1.5,)] ",
        call("f", '{"a": "\\"", "b": [1, null, {"c": [true]}], "d": -1.5}'),
    ),
    (
        "pythonic",
        '<|python_start|>[f(a="\\u00e9\\x41\\n")]<|python_end|> so',
        [*call("f", '{"a": "\\u00e9A\\n"}'), *text(" so")],
    ),
    ("pythonic", f"{LLAMA}; {LLAMA}", [*E, *E]),
    ("mistral", f"[TOOL_CALLS][{_json('height', EIGER)}, {_json('now', '{}')}]", [*E, *N]),
    ("mistral", f'I look.[TOOL_CALLS] [{_json("height", EIGER)[:-1]}, "id": "abcdefghi"}}]', [*text("I look."), *E]),
    ("mistral", f"[TOOL_CALLS]height[ARGS]{EIGER}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}", [*E, *N]),
    ("mistral", f"[TOOL_CALLS]now{{}} {_json('a', '{}')}", [*N, *text(f" {_json('a', '{}')}")]),
    ("mistral", f"[{_json('height', EIGER)}]\n[{_json('now', '{}')}]", [*E, *N]),
    (
        "qwen3_coder",
        f"I look.\n{_qwen('height', *PAIRS)}\n{_qwen('now')}",
        [*text("I look.\n"), *call("height", READ), *N],
    ),
    (
        "qwen3_coder",
        "<function=height>\n<parameter=peak>a\n<parameter=year>5\n</function>",
        call("height", '{"peak": "a", "year": 5}'),
    ),
    ("qwen3_coder", f"<seed:tool_call>{_qwen('now')[11:-12]}</seed:tool_call> so", [*N, *text(" so")]),
    ("glm", f"I look.\n{_glm('height', *PAIRS)}\n{_glm('now')}", [*text("I look.\n"), *call("height", READ), *N]),
    ("glm", f"{_glm('height', *PAIRS, space='')}{_glm('now', space='')} so", [*call("height", READ), *N, *text(" so")]),
    ("glm", _glm("height", ("code", "\nEIGER ")), call("height", '{"code": "EIGER"}')),
    ("deepseek_v3", f"I look.{SECTION.format(DEEPSEEK_3 * 2)} so", [*text("I look."), *E, *E, *text(" so")]),
    ("deepseek_v31", f"I look.{SECTION.format(DEEPSEEK_31 * 2)}", [*text("I look."), *E, *E]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>\n```a", [*N, *text("\n```a")]),
    ("kimi_k2", f"I look.{KIMI_SECTION.format(KIMI + KIMI_NOW)}", [*text("I look."), *E, *N]),
    ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|><|tool_call_end|>", N),
]

# What never gets as far as a name and the beginning of arguments is text, as it stands.
NO_CALLS: list[tuple[str, str]] = [
    ("hermes", "<tool_call>{broken}</tool_call> after"),
    ("hermes", '<tool_call>{"name": 5}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}'),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>'),
    ("hermes", '<tool_call>{"f</tool_call> after'),
    ("hermes", '<tool_call>{"name": "f"'),
    ("hermes", f'<tool_call>{{"name": "{"f" * 300}", "arguments": {{}}}}'),
    ("hermes", "a < b <tool"),
    ("hermes", _qwen("height", *PAIRS)),
    ("hermes", _glm("height", *PAIRS)),
    ("llama3", '{"x": 1}'),
    ("llama3", '{"name": "f"'),
    ("llama3", '{"name": "Heidi", "age": 7}'),
    ("llama3", "  "),
    ("llama3", f"I look. {LLAMA}"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f"),
    ("pythonic", "[2nd(a=1)]"),
    ("pythonic", "[f, g(a=1)]"),
    ("mistral", '[{"name": "Heidi", "age": 7}]'),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]name[ARGS] none"),
    ("mistral", "[TOOL_CALLS]name[ARGUMENTS]"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nsome words </function>"),
    ("qwen3_coder", HERMES),
    ("qwen3_coder", "<function=f"),
    ("glm", HERMES),
    ("glm", "<tool_call>f some words</tool_call>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜> none <｜tool▁calls▁end｜>"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>none"),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>none"),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_end|>"),
]

# Once the arguments have begun they are passed on, whatever they are; what follows the call is text.
BROKEN: list[tuple[str, str, Seen]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999, b', call("f", '{"a": 1e999, b')),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1}</tool_call> so',
        [*call("f", '{"a": [1}'), *text(" so")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> so', [*call("f", '{"a": 1}'), *text(" so")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}}</tool_call> so',
        [*call("f", '{"a": 1}'), *text(" so")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, so</tool_call>',
        [*call("f", '{"a": 1}'), *text(", so</tool_call>")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}  so <tool_call>',
        [*call("f", '{"a": 1}'), *text("  so <tool_call>")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\', call("f", '{"a": "\\')),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": 1{HERMES}', [*call("f", '{"a": 1'), *E]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800é"}}</tool_call>', call("f", '{"x": "\\ud800é"}')),
    ("llama3", f"{LLAMA} and more", [*E, *text(" and more")]),
    ("llama3", '{"name": "f", "parameters": {"a": "b', call("f", '{"a": "b')),
    ("pythonic", "[f(a=1 2)] so", call("f", '{"a": 1 2)] so')),
    ("pythonic", "[f(a=[1, 'x", call("f", '{"a": [1, "x')),
    ("pythonic", "[f(a=1), hello] so", [*call("f", '{"a": 1}'), *text(", hello] so")]),
    (
        "pythonic",
        "[f(a=x, b=2024-01-02, c=007, d=1_000, e=.5)]",
        call("f", '{"a": "x", "b": "2024-01-02", "c": "007", "d": 1000, "e": 0.5}'),
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [TOOL_CALLS]now[ARGS]{}', [*call("f", '{"a": '), *N]),
    ("mistral", f"[TOOL_CALLS][{_json('now', '{}')}, hello]", [*N, *text(", hello]")]),
    ("mistral", f"[TOOL_CALLS][{_json('now', '{}')}}}] so", [*N, *text(" so")]),
    ("qwen3_coder", "<tool_call>\n<function=height>\n<parameter=peak>\n12 < 13", call("height", '{"peak": "12 < 13')),
    ("qwen3_coder", "<tool_call>\n<function=height>\n<parameter=year>\n12", call("height", '{"year": 12')),
    (
        "qwen3_coder",
        "<tool_call>\n<function=height>\n<parameter=year>\n12\n</parameter>\n</func",
        call("height", '{"year": 12'),
    ),
    (
        "qwen3_coder",
        "<function=height>\n<parameter=year>\nx</parameter>\nwell </function> so",
        [*call("height", '{"year": "x"\nwell '), *text(" so")],
    ),
    ("qwen3_coder", "<function=f>\n<parameter=a b=c>\nx</parameter>\n</function>", call("f", '{"a b=c": "x"}')),
    ("glm", "<tool_call>f<arg_key>a</arg_key>1</tool_call> so", [*call("f", "<arg_key>a</arg_key>1"), *text(" so")]),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call> so", [*call("f", '{"a": 1}'), *text(" so")]),
    (
        "deepseek_v31",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a"<｜tool▁call▁end｜> so',
        [*call("f", '{"a"'), *text(" so")],
    ),
    ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n', call("f", '{"a": 1}')),
    (
        "kimi_k2",
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a"<|tool_calls_section_end|> so',
        [*call("f", '{"a"'), *text(" so")],
    ),
]

ALL: list[tuple[str, str, Seen]] = [*GOOD, *((format, words, text(words)) for format, words in NO_CALLS), *BROKEN]


def valid(parts: Seen) -> bool:
    """Whether every call has a JSON object as its arguments."""
    arguments = [json.loads(words) for kind, words in parts if kind == "arguments"]
    return all(isinstance(value, dict) for value in arguments) and len(arguments) == len(
        [name for kind, name in parts if kind == "call"]
    )
