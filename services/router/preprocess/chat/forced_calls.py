"""Forces an answer to consist of tool calls, by a grammar in the model's format.

A grammar allows no special token, so a marker that is one in the checkpoint's tokenizer is spelled letter by letter.
Mistral's and Llama's markers always are special tokens, so a form without them is forced, which their readers accept.
So do Gemma's and LFM2's readers, because no schema grammar exists for their formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.router.answer.call_formats.json_calls import NAME
from services.router.answer.call_formats.scanner import MAX_NAME
from services.router.preprocess import grammar_schema
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2, generation_pb2

KEY = re.compile(r'[^<>"\s]([^<>"\n]*[^<>"\s])?')  # of a parameter that is a tag


@dataclass(frozen=True, slots=True)
class _Form:
    """The text before the arguments of a call and after them."""

    before: Callable[[str], str]  # of the name
    after: str
    separator: str = "\n"
    style: str = ""  # of the arguments, as xgrammar names it; empty: JSON
    name: re.Pattern[str] | None = NAME  # None: any string, because it is written as a JSON string


def _object(before: str, arguments: str, name_key: str = "name") -> Callable[[str], str]:
    return lambda name: f'{before}{{"{name_key}": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '


def _dsml(section: str) -> _Form:
    return _Form(
        lambda name: f'<｜DSML｜{section}>\n<｜DSML｜invoke name="{name}">\n',
        f"\n</｜DSML｜invoke>\n</｜DSML｜{section}>",
        style="deepseek_xml",
    )


_LLAMA3 = _Form(_object("", "parameters"), "}", "; ", name=None)
_FORMS = {
    "hermes": _Form(_object("<tool_call>\n", "arguments"), "}\n</tool_call>", name=None),
    "llama3": _LLAMA3,
    "pythonic": _LLAMA3,
    "mistral": _Form(_object("[", "arguments"), "}]", name=None),
    "qwen3_coder": _Form(
        lambda name: f"<tool_call>\n<function={name}>\n", "\n</function>\n</tool_call>", style="qwen_xml"
    ),
    "glm": _Form(lambda name: f"<tool_call>{name}\n", "\n</tool_call>", style="glm_xml"),
    "deepseek_v3": _Form(
        lambda name: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _Form(
        lambda name: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": _Form(
        lambda name: f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "minimax_m2": _Form(
        lambda name: f'<minimax:tool_call>\n<invoke name="{name}">\n',
        "\n</invoke>\n</minimax:tool_call>",
        style="minimax_xml",
    ),
    "gemma4": _LLAMA3,
    "functiongemma": _LLAMA3,
    "lfm2": _LLAMA3,
    "cohere": _Form(_object("<|START_ACTION|>[", "parameters", "tool_name"), "}]<|END_ACTION|>", name=None),
    "hunyuan_a13b": _Form(_object("<tool_calls>[", "arguments"), "}]</tool_calls>", name=None),
    "hy_v3": _Form(
        lambda name: f"<tool_calls><tool_call>{name}<tool_sep>\n", "\n</tool_call></tool_calls>", style="glm_xml"
    ),
    "apertus": _Form(
        lambda name: f"<|tools_prefix|>[{{{json.dumps(name, ensure_ascii=False)}: ", "}]<|tools_suffix|>", name=None
    ),
    "functionary_v31": _Form(lambda name: f"<function={name}>", "</function>"),
    "functionary_v32": _Form(lambda name: f"{name}\n", "", ">>>"),
    "nemotron": _Form(_object("<TOOLCALL>[", "arguments"), "}]</TOOLCALL>", name=None),
    "granite": _Form(_object("<|tool_call|>[", "arguments"), "}]", name=None),
}


FORMATS = tuple(_FORMS)


def forced(tools: list[Any], choice: generation_pb2.ToolChoice, format: str) -> common_pb2.Grammar:
    """The grammar of the allowed answers. Raises InvalidRequest that names the tool and the place in its schema."""
    tool_name = choice.name if choice.HasField("name") else None
    chosen = [(at, tool["function"]) for at, tool in enumerate(tools) if tool_name in (None, tool["function"]["name"])]
    if not chosen:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise InvalidRequest(
            f"no tool is named {tool_name!r:.140}; there are: {names:.500}",
            field="chat.tool_choice",
            bound="one of them",
        )
    form = _FORMS[format]
    calls = common_pb2.Calls(
        separator=form.separator.encode() if choice.several else None, style=form.style if form.style else None
    )
    schemas = {}
    for at, function in chosen:
        field = f"chat.tools[{at}].function.parameters"
        schemas[field] = schema = _arguments(function, field)
        before = form.before(_name(function["name"], form, at))
        calls.any.add(before=before.encode(), after=form.after.encode(), arguments=json.dumps(schema).encode())
    grammar = common_pb2.Grammar(calls=calls)
    grammar_schema.check_size(grammar, "chat.tools")
    for field, schema in schemas.items():
        grammar_schema.check_schema(schema, field)
        if form.style:
            _check_tags(schema, field)
    return grammar


def written(name: str, arguments: str, format: str) -> str:
    """One call with these arguments (JSON text), as the grammar forces it. For formats with JSON arguments."""
    return f"{_FORMS[format].before(name)}{arguments}{_FORMS[format].after}"


def _name(name: str, form: _Form, at: int) -> str:
    if form.name is not None and (len(name) > MAX_NAME or not form.name.fullmatch(name)):
        raise InvalidRequest(
            f"this model's format of calls cannot hold the name {name!r:.140}, so tool_choice cannot force it",
            field=f"chat.tools[{at}].function.name",
            bound=f"1 to {MAX_NAME} letters, digits and marks such as _ - . :",
        )
    return name


def _arguments(function: dict[str, Any], field: str) -> dict[str, Any]:
    """The schema of a function's arguments; {} is the only value for one without parameters."""
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise InvalidRequest(f"{field} is not an object schema", field=field, bound='a JSON schema of type "object"')
    if schema.get("properties") == {}:
        schema = {"additionalProperties": False, **schema}
    return schema


def _check_tags(schema: dict[str, Any], field: str) -> None:
    """Raises InvalidRequest for parameters that no tag can hold."""
    for name in schema.get("properties", {}):
        if not KEY.fullmatch(name) or len(name) > MAX_NAME:
            raise InvalidRequest(
                f"this model's format of calls cannot hold a parameter named {name!r:.140}",
                field=f"{field}.properties",
                bound=f"names of 1 to {MAX_NAME} characters without <, > and quotes, and without space at their ends",
            )
