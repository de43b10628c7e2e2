"""Converts unquoted values of arguments to JSON, by the types of the tool's parameters."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from services.router.answer.call_formats.python_literal import json_of_python
from services.router.answer.call_formats.scanner import MAX_HELD, Emit

MAX_DEPTH = 4  # nested references and alternatives of a schema
MAX_OPTIONS = 64  # alternatives of a parameter, nested ones included
_REF = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_TYPES = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
_OF_PYTHON = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class Kind:
    """The possible types of a parameter, as far as they determine how to read it."""

    types: frozenset[str] = frozenset()  # of JSON; empty: any
    exact: bool = False  # its strings have a pattern, a format, or few values: surrounding space is not part of them
    longest: int | None = None  # characters of a string; None: any number

    @property
    def streams(self) -> bool:
        """Whether the value is a string that can be passed on before its end is known."""
        return self.types == frozenset({"string"}) and not self.exact and self.longest is None

    def string(self, text: str) -> str:
        """The string of the text; a grammar allows one white space character on each side of it."""
        if self.exact:
            return text.strip()
        for candidate in (text, text.rstrip(), text.lstrip(), text.strip()):
            if self.longest is None or len(candidate) <= self.longest:
                return candidate
        return text


ANY, TEXT = Kind(), Kind(frozenset({"string"}))


def parameter_kind(tools: list[Any], function: str, parameter: str) -> Kind:
    """The kind of a parameter of an offered function."""
    for tool in tools:
        if tool["function"]["name"] == function:
            schema = tool["function"].get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            return _kind(properties.get(parameter), schema, 0, MAX_OPTIONS) if isinstance(properties, dict) else ANY
    return ANY


def _kind(schema: Any, root: Any, depth: int, most: int) -> Kind:
    """`most`: the number of examined alternatives; with more, the kind is unknown."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return ANY
    if isinstance(schema.get("$ref"), str) and (target := _REF.fullmatch(schema["$ref"])):
        definitions = root.get(target[1])
        return _kind(definitions.get(target[2]), root, depth + 1, most) if isinstance(definitions, dict) else ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return Kind(frozenset(_OF_PYTHON.get(type(value), "null") for value in values), exact=True)
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        longest = schema.get("maxLength")
        return Kind(
            frozenset(name for name in names if isinstance(name, str)),
            exact="pattern" in schema or "format" in schema,
            longest=longest if isinstance(longest, int) else None,
        )
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(word), list):
            if len(options) > most:
                return ANY
            each = most // max(1, len(options))
            return _joined([_kind(option, root, depth + 1, each) for option in options])
    return ANY


def _joined(kinds: list[Kind]) -> Kind:
    if not all(kind.types for kind in kinds):
        return ANY
    strings = [kind for kind in kinds if "string" in kind.types]
    lengths = [kind.longest for kind in strings if kind.longest is not None]
    return Kind(
        frozenset().union(*(kind.types for kind in kinds)),
        exact=any(kind.exact for kind in strings),
        longest=max(lengths) if lengths and len(lengths) == len(strings) else None,
    )


class TypedValue:
    """Converts one value that arrives in pieces. A string is passed on as it arrives, another value when it is
    complete: as JSON if it is JSON or a Python literal, otherwise as a string."""

    def __init__(self, kind: Kind, emit: Emit) -> None:
        self._kind = kind
        self._emit = emit
        self._pieces: list[str] | None = []  # of a value that is not a string; None: text is passed on
        self._size = 0
        self._string = False
        if kind.streams:
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
            self._emit(_json("".join(self._pieces), self._kind))
        elif self._string:
            self._emit('"')

    def cut(self) -> None:
        """Ends a value within which the answer ended."""
        if self._pieces:
            self._give_up()

    def _give_up(self) -> None:
        """Passes on an incomplete value."""
        text = "".join(self._pieces or ()).strip()
        if "string" not in self._kind.types and (text[:1] in ("{", "[") or as_json(text) is not None):
            self._pieces = None
            self._emit(text)
        else:
            self._go_on_as_string()
            self._emit(escaped(text))

    def _go_on_as_string(self) -> None:
        self._pieces, self._string = None, True
        self._emit('"')


def escaped(text: str) -> str:
    """The text, escaped as part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json(text: str, kind: Kind) -> str:
    if kind.types == frozenset({"string"}):
        return f'"{escaped(kind.string(text))}"'
    value = as_json(text.strip())
    if value is None:
        value = as_json(json_of_python(text.strip()))
    if value is None or ("string" in kind.types and not _fits(value, kind.types - {"string"})):
        return f'"{escaped(kind.string(text))}"'
    return value


def _fits(value: str, types: frozenset[str]) -> bool:
    kind = _TYPES.get(value[0]) or ("integer" if re.fullmatch(r"-?\d+", value) else "number")
    return kind in types or (kind == "integer" and "number" in types)


def as_json(text: str) -> str | None:
    """The text if it is JSON, otherwise None."""
    try:
        json.loads(text, parse_constant=_refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and the infinities are not JSON
