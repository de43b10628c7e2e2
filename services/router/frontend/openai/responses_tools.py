"""The tools of the Responses API as functions that a model can call.

    function     itself
    custom       a function with one argument, the string `input`; its call becomes a custom_tool_call again
    namespace    each of its tools as NAMESPACE__NAME; in the call the two names are apart again
    web_search   dropped from a request that has other tools, because agents always offer it

All other kinds are refused by name, because the server would have to run them. The model sees the grammar of a custom
tool; it is not enforced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from services.router.frontend.json_body import clean
from services.router.preprocess.chat.prompt import MAX_TOOLS
from services.router.preprocess.json_limits import out_of_bounds
from tandem.errors import InvalidRequest
from tandem.v1 import generation_pb2

CORE_NAMESPACE = "functions"  # the namespace of calls without one: its tools keep their names
LEFT_OUT = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
SERVED_TOOLS = "function, custom or namespace"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """The client's tool behind a function."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. `functions`: for the chat template, in OpenAI's chat format; `by_name`: the client's
    tools by function name; `shown`: the client's list without dropped tools."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    by_name: dict[str, Tool] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Choice:
    """The effect of tool_choice: the offered functions, and the forced call, if any."""

    offered: list[dict[str, Any]]
    forced: generation_pb2.ToolChoice | None = None


def read_tools(tools: object) -> Tools:
    """Raises InvalidRequest."""
    if tools is None:
        return Tools()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise out_of_bounds("tools", "not a list, or too long", f"a list of at most {MAX_TOOLS} tools")
    found, left_out = Tools(), ""
    for index, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in LEFT_OUT:
            left_out = f"tools[{index}]"
            continue
        _add(found, tool, kind, f"tools[{index}]")
        found.shown.append(tool)
    if left_out and not found.functions:
        raise InvalidRequest(
            f"{left_out} is a search of the web, which this server does not have, and there is no other tool",
            field=f"{left_out}.type",
            bound=SERVED_TOOLS,
        )
    return found


def _add(found: Tools, tool: Any, kind: object, where: str, namespace: str | None = None) -> None:
    match kind:
        case "function":
            _offer(found, where, _named(tool, where, namespace), tool.get("description"), tool.get("parameters"))
        case "custom":
            described = _custom_description(tool)
            _offer(found, where, _named(tool, where, namespace, custom=True), described, CUSTOM_PARAMETERS)
        case "namespace" if namespace is None:
            inner = tool.get("tools")
            if not isinstance(inner, list) or len(inner) > MAX_TOOLS:
                raise out_of_bounds(f"{where}.tools", "not a list, or too long", f"a list of at most {MAX_TOOLS} tools")
            name = _named(tool, where).name
            for index, one in enumerate(inner):
                place = f"{where}.tools[{index}]"
                _add(found, one, one.get("type") if isinstance(one, dict) else None, place, name)
        case str():
            raise InvalidRequest(
                f"{where} is of type {kind!r:.80}, which this server does not run; it must be {SERVED_TOOLS}",
                field=f"{where}.type",
                bound=SERVED_TOOLS,
            )
        case _:
            raise out_of_bounds(f"{where}.type", "not a string", SERVED_TOOLS)


def _named(tool: dict[str, Any], where: str, namespace: str | None = None, *, custom: bool = False) -> Tool:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise out_of_bounds(f"{where}.name", "absent or not a string", "the name of the tool")
    return Tool(clean(name, f"{where}.name"), namespace, custom)


def _offer(found: Tools, where: str, tool: Tool, description: object, parameters: object) -> None:
    name = flat_name(tool.name, tool.namespace)
    if name in found.by_name:
        raise out_of_bounds(f"{where}.name", "the name of another tool too", "unique")
    if len(found.functions) >= MAX_TOOLS:
        raise out_of_bounds("tools", f"more than {MAX_TOOLS} tools, with those of namespaces", f"at most {MAX_TOOLS}")
    function = {
        "name": name,
        "description": description if isinstance(description, str) else "",
        "parameters": parameters if parameters is not None else {"type": "object", "properties": {}},
    }
    found.functions.append({"type": "function", "function": function})
    found.by_name[name] = tool


def _custom_description(tool: dict[str, Any]) -> str:
    """The description with the grammar of the tool's input, as OpenAI shows it to its models."""
    description = tool.get("description")
    text = description if isinstance(description, str) else ""
    match tool.get("format"):
        case {"type": "grammar", "definition": str(definition), **more}:
            text += f"\n\n`input` must match this grammar ({more.get('syntax', 'lark')!s:.20}):\n{definition}"
    return text


def flat_name(name: str, namespace: str | None) -> str:
    """The name of the function that stands for a tool of a namespace."""
    return name if namespace in (None, "", CORE_NAMESPACE) else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool, as JSON text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a custom tool's call; other arguments are passed on unchanged."""
    try:
        value = json.loads(arguments)
        text = value.get("input") if isinstance(value, dict) else None
        if isinstance(text, str):
            text.encode()  # an escape may be a lone surrogate, which is not text
    except (ValueError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


def choose(choice: object, tools: Tools, *, parallel: bool) -> Choice:
    """`tool_choice` of a request with these tools. `parallel`: several calls are allowed. Raises InvalidRequest."""
    match choice:
        case None | "auto":
            return Choice(tools.functions)
        case "none":
            return Choice([])
        case "required":
            return Choice(tools.functions, generation_pb2.ToolChoice(several=parallel))
        case {"type": "function" | "custom"}:
            name = _chosen(choice, tools, "tool_choice")
            return Choice(tools.functions, generation_pb2.ToolChoice(name=name))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            if not 1 <= len(allowed) <= MAX_TOOLS:
                raise out_of_bounds("tool_choice.tools", f"{len(allowed)} tools", f"1 to {MAX_TOOLS} of the tools")
            names = {_chosen(tool, tools, f"tool_choice.tools[{index}]") for index, tool in enumerate(allowed)}
            offered = [function for function in tools.functions if function["function"]["name"] in names]
            forced = generation_pb2.ToolChoice(several=parallel) if mode == "required" else None
            return Choice(offered, forced)
    kinds = "auto, none, required, or an object of type function, custom or allowed_tools"
    raise out_of_bounds("tool_choice", "of a kind that is not served", kinds)


def _chosen(choice: Any, tools: Tools, where: str) -> str:
    match choice:
        case {"type": "function" | "custom", "name": str(name), **more}:
            namespace = more.get("namespace")
            flat = flat_name(name, namespace if isinstance(namespace, str) else None)
            if flat in tools.by_name:
                return flat
    raise out_of_bounds(where, "not the name of one of the tools", "a function or custom tool of `tools`")
