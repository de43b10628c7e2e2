"""What models write when they call tools, and what clients are to get of it, in every format.

Parts are ("text", ...), ("call", name) and ("arguments", JSON text). Written from the formats' chat templates.
"""

from __future__ import annotations

import json
import re
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


# The tags of a call within a string: a value ends only where the next parameter or the end of the call follows.
TAGGED = [("peak", "a</tool_call> <b></arg_value>\n<arg_value></arg_key></tool_call>"), ("year", "1")]
TAGGED_READ = '{"peak": "a</tool_call> <b></arg_value>\\n<arg_value></arg_key></tool_call>", "year": 1}'
PARAMETER_READ = '{"peak": "a</parameter> b", "year": 1}'


def _minimax(name: str, *pairs: tuple[str, str]) -> str:
    tags = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in pairs)
    return f'<invoke name="{name}">\n{tags}</invoke>'


def _dsml(name: str, *pairs: tuple[str, str, str]) -> str:
    tag = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
    tags = "".join(tag.format(key, kind, value) for key, kind, value in pairs)
    return f'<｜DSML｜invoke name="{name}">\n{tags}</｜DSML｜invoke>'


def _hunyuan(name: str, *pairs: tuple[str, str], suffix: str = "") -> str:
    tags = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs]
    text = f"<tool_call>{name}<tool_sep>\n{''.join(tags)}</tool_call>"
    return re.sub(r"<(/?(?:tool|arg)_\w+)>", rf"<\1{suffix}>", text)


GEMMA_QUOTE = '<|"|>'
GEMMA_EIGER = 'call:height{near:[<|"|>a, "b"<|"|>,{k:<|"|>{<|"|>,n:None}],peak:<|"|>a "b"\n\\ <c>\n<|"|>,year:2024}'
GEMMA_READ = '{"near": ["a, \\"b\\"", {"k": "{", "n": null}], "peak": "a \\"b\\"\\n\\\\ <c>\\n", "year": 2024}'
MINIMAX = f"<minimax:tool_call>\n{_minimax('height', *PAIRS)}\n{_minimax('now')}\n</minimax:tool_call>"
DSML_PAIRS = [("peak", "true", PAIRS[0][1]), ("year", "false", "2024"), ("exact", "false", "true")]
DSML_READ = '{"peak": "a \\"b\\"\\n\\\\ <c>\\n", "year": 2024, "exact": true}'
COHERE = f'{{"tool_call_id": "0", "tool_name": "height", "parameters": {EIGER}}}'
COHERE_NOW = '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}'

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
    ("glm", _glm("height", *TAGGED), call("height", TAGGED_READ)),
    ("glm", f"{_glm('height', *TAGGED, space='')}{_glm('now', space='')}", [*call("height", TAGGED_READ), *N]),
    ("hy_v3", f"<tool_calls>{_hunyuan('height', *TAGGED)}</tool_calls>", call("height", TAGGED_READ)),
    ("qwen3_coder", _qwen("height", ("peak", "a</parameter> b"), ("year", "1")), call("height", PARAMETER_READ)),
    ("minimax_m2", _minimax("height", ("peak", "a</parameter> b"), ("year", "1")), call("height", PARAMETER_READ)),
    ("deepseek_v3", f"I look.{SECTION.format(DEEPSEEK_3 * 2)} so", [*text("I look."), *E, *E, *text(" so")]),
    ("deepseek_v31", f"I look.{SECTION.format(DEEPSEEK_31 * 2)}", [*text("I look."), *E, *E]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>\n```a", [*N, *text("\n```a")]),
    ("kimi_k2", f"I look.{KIMI_SECTION.format(KIMI + KIMI_NOW)}", [*text("I look."), *E, *N]),
    ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|><|tool_call_end|>", N),
    (
        "deepseek_v32",
        f"So.\n\n<｜DSML｜function_calls>\n{_dsml('height', *DSML_PAIRS)}\n{_dsml('now')}\n</｜DSML｜function_calls>",
        [*text("So.\n\n"), *call("height", DSML_READ), *N],
    ),
    (
        "deepseek_v32",
        _dsml("height", ("note", "true", "null"), ("peak", "false", "7")) + " so",
        [*call("height", '{"note": "null", "peak": 7}'), *text(" so")],
    ),
    (
        "deepseek_v4",
        f"<｜DSML｜tool_calls>\n{_dsml('height', *DSML_PAIRS)}\n</｜DSML｜tool_calls>",
        call("height", DSML_READ),
    ),
    ("minimax_m2", f"I look.\n{MINIMAX}", [*text("I look.\n"), *call("height", READ), *N]),
    (
        "minimax_m2",
        f"{_minimax('height', ('code', ' EIGER '))}\n{_minimax('now')} so",
        [*call("height", '{"code": "EIGER"}'), *N, *text(" so")],
    ),
    (
        "gemma4",
        f"I look.<|tool_call>{GEMMA_EIGER}<tool_call|><|tool_call>call:now{{}}<tool_call|><|tool_response>",
        [*text("I look."), *call("height", GEMMA_READ), *N],
    ),
    (
        "gemma4",
        '<|tool_call>call:height{<|"|>peak<|"|>: 12, year: 1e3, note : null ,}<tool_call|> so',
        [*call("height", '{"peak": "12", "year": 1e3, "note": null}'), *text(" so")],
    ),
    ("gemma4", f"{LLAMA}; {LLAMA}", [*E, *E]),
    (
        "functiongemma",
        f"I look.<start_function_call>{GEMMA_EIGER.replace(GEMMA_QUOTE, '<escape>')}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call><start_function_response>",
        [*text("I look."), *call("height", GEMMA_READ), *N],
    ),
    ("functiongemma", f"{LLAMA}; {LLAMA}", [*E, *E]),
    (
        "cohere",
        f"I look.<|START_ACTION|>[\n    {COHERE},\n    {COHERE_NOW}\n]<|END_ACTION|>",
        [*text("I look."), *E, *N],
    ),
    (
        "hunyuan_a13b",
        f"I look.\n<tool_calls>[{_json('height', EIGER)}, {_json('now', '{}')}]</tool_calls>",
        [*text("I look.\n"), *E, *N],
    ),
    (
        "hunyuan_a13b",
        f"<tool_calls>\n{_json('height', EIGER)}\n{_json('now', '{}')}\n</tool_calls> so",
        [*E, *N, *text(" so")],
    ),
    (
        "hy_v3",
        f"So.<tool_calls>\n{_hunyuan('height', *PAIRS)}\n{_hunyuan('now')}\n</tool_calls>",
        [*text("So."), *call("height", READ), *N],
    ),
    (
        "hy_v3",
        f"<tool_calls:opensource>\n{_hunyuan('height', *PAIRS, suffix=':opensource')}\n</tool_calls:opensource>",
        call("height", READ),
    ),
    (
        "lfm2",
        'I look.<|tool_call_start|>[height(peak="Eiger", year=2024), now()]<|tool_call_end|> so',
        [*text("I look."), *call("height", '{"peak": "Eiger", "year": 2024}'), *N, *text(" so")],
    ),
    ("lfm2", f"{LLAMA}; {LLAMA}", [*E, *E]),
    (
        "apertus",
        f'I look.<|tools_prefix|>[{{"height": {EIGER}}}, {{"now": {{}}}}]<|tools_suffix|>',
        [*text("I look."), *E, *N],
    ),
    (
        "functionary_v31",
        f"I look.<function=height>{EIGER}</function><function=now>{{}}</function> so",
        [*text("I look."), *E, *N, *text(" so")],
    ),
    (
        "functionary_v32",
        f"all\nI look there.\n>>>height\n{EIGER}>>>now\n{{}}",
        [*text("I look there.\n"), *E, *N],
    ),
    ("functionary_v32", f"height\n{EIGER}>>>all\nso", [*E, *text("so")]),
    (
        "nemotron",
        f"I look.\n<TOOLCALL>[{_json('height', EIGER)}, {_json('now', '{}')}]</TOOLCALL>",
        [*text("I look.\n"), *E, *N],
    ),
    ("granite", f"<|tool_call|>[{_json('height', EIGER)}, {_json('now', '{}')}]", [*E, *N]),
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
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\nsome words</｜DSML｜invoke>'),
    ("deepseek_v4", "<｜DSML｜tool_calls>\nnone\n</｜DSML｜tool_calls>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\nsome words</invoke>'),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="a b">'),
    ("minimax_m2", '<invoke name="f'),
    ("gemma4", "<|tool_call>height{}<tool_call|>"),
    ("gemma4", "<|tool_call>call:height()<tool_call|>"),
    ("gemma4", '{"name": "Heidi", "age": 7}'),
    ("functiongemma", "<start_function_call>height{}<end_function_call>"),
    ("cohere", "<|START_ACTION|>[]<|END_ACTION|>"),
    ("cohere", f"<|START_ACTION|>[{_json('f', '{}')}]<|END_ACTION|>"),
    ("hunyuan_a13b", "<tool_calls>none</tool_calls>"),
    ("hunyuan_a13b", _hunyuan("height", *PAIRS)),
    ("hy_v3", "<tool_calls>[]</tool_calls>"),
    ("hy_v3", _glm("height", *PAIRS)),
    ("lfm2", "<|tool_list_start|>[]"),
    ("lfm2", "<|tool_call_start"),
    ("apertus", '<|tools_prefix|>[{"f": 5}]<|tools_suffix|>'),
    ("apertus", "<|tools_prefix|>[{}]<|tools_suffix|>"),
    ("functionary_v31", "<function=f>some words</function>"),
    ("functionary_v31", _qwen("height", *PAIRS)),
    ("functionary_v32", "I look >>>there\n{}"),
    ("functionary_v32", "height\n\n{}"),
    ("functionary_v32", "height"),
    ("nemotron", "<TOOLCALL>[]</TOOLCALL>"),
    ("granite", "<|tool_call|>[none]"),
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
        call("height", '{"year": "x</parameter>\\nwell </function> so'),
    ),
    ("qwen3_coder", "<function=f>\n<parameter=a b=c>\nx</parameter>\n</function>", call("f", '{"a b=c": "x"}')),
    ("glm", "<tool_call>f<arg_key>a</arg_key>1</tool_call> so", [*call("f", "<arg_key>a</arg_key>1"), *text(" so")]),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call> so", call("f", '{"a": "1</tool_call> so')),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>\n</tool", call("f", '{"a": 1')),
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
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="height">\n<｜DSML｜parameter name="peak" string="true">12 < 1',
        call("height", '{"peak": "12 < 1'),
    ),
    (
        "deepseek_v4",
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="?">1</｜DSML｜parameter></｜DSML｜invoke> so',
        [*call("f", '<｜DSML｜parameter name="a" string="?">1</｜DSML｜parameter>'), *text(" so")],
    ),
    ("minimax_m2", '<invoke name="height">\n<parameter name="year">12', call("height", '{"year": 12')),
    ("minimax_m2", '<invoke name="f"><parameter name="a">1\n</invoke> so', [*call("f", '{"a": 1}'), *text(" so")]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x', call("f", '{"a": "x')),
    ("gemma4", "<|tool_call>call:f{a:[1,2<tool_call|> so", [*call("f", '{"a": [1, 2'), *text(" so")]),
    ("gemma4", "<|tool_call>call:f{a:1 b:2}", call("f", '{"a": "1 b:2"}')),
    ("gemma4", "<|tool_call>call:f{so}<|tool_call>call:now{}", [*call("f", "{so}"), *N]),
    ("gemma4", "<|tool_call>call:f{a:20", call("f", '{"a": 20')),
    ("functiongemma", "<start_function_call>call:f{a:<escape>x <", call("f", '{"a": "x <')),
    (
        "cohere",
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": [1}<|END_ACTION|> so',
        [*call("f", '{"a": [1}'), *text(" so")],
    ),
    ("hunyuan_a13b", f"<tool_calls>{_json('now', '{}')} {{hello", [*N, *text(" {hello")]),
    (
        "hy_v3",
        "<tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>1</tool_call> so",
        call("f", '{"a": "1</tool_call> so'),
    ),
    ("lfm2", "<|tool_call_start|>[f(a=1 2)]<|tool_call_end|> so", [*call("f", '{"a": 1 2)]'), *text(" so")]),
    ("apertus", '<|tools_prefix|>[{"f": {"a": <|tools_suffix|> so', [*call("f", '{"a": '), *text(" so")]),
    ("functionary_v31", '<function=f>{"a": [1</function> so', [*call("f", '{"a": [1'), *text(" so")]),
    ("functionary_v32", "all\n>>> f\n>>>f\n{}>>>now", text(">>> f\n>>>f\n{}>>>now")),
    ("functionary_v32", 'now\n{"a": >>>height\n{}', [*call("now", '{"a": '), *call("height", "{}")]),
    ("nemotron", f"<TOOLCALL>[{_json('now', '{}')}, hello]", [*N, *text(", hello]")]),
    ("granite", f"<|tool_call|>[{_json('now', '{}')}}}] so", [*N, *text(" so")]),
]

ALL: list[tuple[str, str, Seen]] = [*GOOD, *((format, words, text(words)) for format, words in NO_CALLS), *BROKEN]


def valid(parts: Seen) -> bool:
    """Whether every call has a JSON object as its arguments."""
    arguments = [json.loads(words) for kind, words in parts if kind == "arguments"]
    return all(isinstance(value, dict) for value in arguments) and len(arguments) == len(
        [name for kind, name in parts if kind == "call"]
    )
