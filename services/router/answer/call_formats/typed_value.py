"""Values of arguments that a model writes without quotes, as JSON: their types are those of the tool's parameters."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from services.router.answer.call_formats.python_literal import json_of_python
from services.router.answer.call_formats.scanner import MAX_HELD, Emit

MAX_DEPTH = 4  # references and alternatives within each other, in a schema
MAX_OPTIONS = 16
_REF = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_OF_PYTHON = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def parameter_types(tools: list[Any], function: str, parameter: str) -> frozenset[str] | None:
    """The JSON types that a parameter of an offered function may have; None: any."""
    for tool in tools:
        if tool["function"]["name"] == function:
            schema = tool["function"].get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            return _types(properties.get(parameter), schema, 0) if isinstance(properties, dict) else None
    return None


def _types(schema: Any, root: Any, depth: int) -> frozenset[str] | None:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    if isinstance(schema.get("$ref"), str) and (target := _REF.fullmatch(schema["$ref"])):
        definitions = root.get(target[1])
        return _types(definitions.get(target[2]), root, depth + 1) if isinstance(definitions, dict) else None
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(name for name in names if isinstance(name, str)) or None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_OF_PYTHON.get(type(value), "null") for value in values) or None
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            found = [_types(option, root, depth + 1) for option in schema[word][:MAX_OPTIONS]]
            return frozenset().union(*(types for types in found if types)) if all(found) else None
    return None


class TypedValue:
    """Converts one value that arrives in pieces. A string is passed on as it comes, anything else when it is complete:
    as JSON if it is JSON, or Python's way to write it, and otherwise as a string."""

    def __init__(self, types: frozenset[str] | None, emit: Emit) -> None:
        self._types = types
        self._emit = emit
        self._pieces: list[str] | None = []  # of a value that is no string; None: what comes is passed on
        self._size = 0
        self._string = False
        if types == frozenset({"string"}):
            self._go_on_as_string()

    def push(self, text: str) -> None:
        if self._pieces is None:
            self._emit(escaped(text) if self._string else text)
            return
        self._pieces.append(text)
        self._size += len(text)
        if self._size > MAX_HELD:
            self._give_up()

    def end(self) -> None:
        if self._pieces is not None:
            self._emit(_json("".join(self._pieces), self._types))
        elif self._string:
            self._emit('"')

    def cut(self) -> None:
        """The answer ended within the value."""
        if self._pieces:
            self._give_up()

    def _give_up(self) -> None:
        """Passes on an incomplete value."""
        text = "".join(self._pieces or ()).strip()
        if "string" not in (self._types or ()) and (text[:1] in ("{", "[") or as_json(text) is not None):
            self._pieces = None
            self._emit(text)
        else:
            self._go_on_as_string()
            self._emit(escaped(text))

    def _go_on_as_string(self) -> None:
        self._pieces, self._string = None, True
        self._emit('"')


def escaped(text: str) -> str:
    """As part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json(text: str, types: frozenset[str] | None) -> str:
    value = as_json(text.strip())
    if value is None:
        value = as_json(json_of_python(text.strip()))
    if value is None or (types is not None and "string" in types and not _fits(value, types - {"string"})):
        return f'"{escaped(text)}"'
    return value


def _fits(value: str, types: frozenset[str]) -> bool:
    kind = _KINDS.get(value[0]) or ("integer" if re.fullmatch(r"-?\d+", value) else "number")
    return kind in types or (kind == "integer" and "number" in types)


def as_json(text: str) -> str | None:
    """The text if it is JSON."""
    try:
        json.loads(text, parse_constant=_refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and the infinities are not JSON
