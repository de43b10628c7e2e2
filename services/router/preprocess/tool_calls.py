"""Tool calls: parses the calls in a model's answer, and forces them by a grammar, in the two common formats.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, after text or not, several one after another
    llama3   {"name": ..., "parameters": {...}}; the answer is nothing else, with `;` between several

The chat template determines the format. Text that is not a valid call stays text. Independent of HTTP and tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from services.router.preprocess import grammar_schema
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2, generation_pb2

Format = Literal["hermes", "llama3"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
SEPARATORS = {"hermes": b"\n", "llama3": b"; "}


@dataclass(frozen=True)
class Call:
    """One call, as OpenAI's API has it."""

    id: str
    name: str
    arguments: str  # JSON


def format_of(template: str) -> Format | None:
    """The format in which a model with this chat template writes calls; None if it is unknown."""
    if OPEN in template:
        return "hermes"
    return "llama3" if '"parameters"' in template and "ipython" in template else None


def forced(tools: list[Any], choice: generation_pb2.ToolChoice, format: Format) -> common_pb2.Grammar:
    """The calls that an answer may be. Raises InvalidRequest that names the tool and the place in its schema."""
    tool_name = choice.name if choice.HasField("name") else None
    chosen = [(at, tool["function"]) for at, tool in enumerate(tools) if tool_name in (None, tool["function"]["name"])]
    if not chosen:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise InvalidRequest(
            f"no tool is named {tool_name!r:.140}; there are: {names:.500}",
            field="chat.tool_choice",
            bound="one of them",
        )
    calls = common_pb2.Calls(separator=SEPARATORS[format] if choice.several else None)
    schemas = {}
    for at, function in chosen:
        field = f"chat.tools[{at}].function.parameters"
        schemas[field] = schema = _arguments(function, field)
        before, after = _around(function["name"], format)
        calls.any.add(before=before.encode(), after=after.encode(), arguments=json.dumps(schema).encode())
    grammar = common_pb2.Grammar(calls=calls)
    grammar_schema.check_size(grammar, "chat.tools")
    for field, schema in schemas.items():
        grammar_schema.check_schema(schema, field)
    return grammar


def _around(name: str, format: Format) -> tuple[str, str]:
    """The text of a call before and after its arguments."""
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, '
    if format == "hermes":
        return f'{OPEN}\n{head}"arguments": ', f"}}\n{CLOSE}"
    return f'{head}"parameters": ', "}"


def _arguments(function: dict[str, Any], field: str) -> dict[str, Any]:
    """The schema of a function's arguments; {} is the only value for one without parameters."""
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise InvalidRequest(f"{field} is not an object schema", field=field, bound='a JSON schema of type "object"')
    if schema.get("properties") == {}:
        schema = {"additionalProperties": False, **schema}
    return schema


class CallReader:
    """Extracts calls from a text that arrives in pieces. The result does not depend on how the text was cut."""

    def __init__(self, format: Format) -> None:
        self._push: Callable[[str], str] = self._hermes if format == "hermes" else self._llama3
        self._format = format
        self._held = ""
        self._inside = False  # of a call, or of text that may become one
        self._begun = False  # a character other than space has arrived
        self._looked = 0  # characters of the held text that were scanned; there, in a string or after a backslash:
        self._quoted = self._escaped = False
        self.calls: list[Call] = []

    def push(self, text: str) -> str:
        """The text that can be shown now; calls that are complete are added to `calls`."""
        return self._push(text)

    def finish(self) -> str:
        """The text held back that did not become a call."""
        held, self._held = self._held, ""
        if not self._inside:
            return held
        calls = _several(held) if self._format == "llama3" else _single(held.removeprefix(OPEN))
        self.calls += calls
        return "" if calls else held

    def _hermes(self, text: str) -> str:
        self._held += text
        shown = ""
        while True:
            if self._inside:
                end = self._end()
                if end is None:
                    return shown
                call_text, self._held = self._held[:end], self._held[end:]
                calls = _single(call_text[len(OPEN) : -len(CLOSE)])
                self.calls += calls
                shown += "" if calls else call_text
                self._inside = False
            at = self._held.find(OPEN)
            if at < 0:
                cut = len(self._held) - _begun(self._held)
                shown, self._held = shown + self._held[:cut], self._held[cut:]
                return shown
            shown, self._held = shown + self._held[:at], self._held[at:]
            self._inside, self._looked, self._quoted, self._escaped = True, len(OPEN), False, False

    def _end(self) -> int | None:
        """The end of the held call, after CLOSE, unless that is part of a string."""
        for place in range(self._looked, len(self._held)):
            character = self._held[place]
            if self._escaped:
                self._escaped = False
            elif character == '"':
                self._quoted = not self._quoted
            elif character == "\\":
                self._escaped = self._quoted
            elif character == ">" and not self._quoted and self._held.endswith(CLOSE, 0, place + 1):
                return place + 1
        self._looked = len(self._held)
        return None

    def _llama3(self, text: str) -> str:
        if not self._begun:
            self._held += text
            if not self._held.strip():
                return ""
            self._begun, self._inside = True, self._held.lstrip().startswith("{")
            text, self._held = self._held, ""
        if self._inside:
            self._held += text
            return ""
        return text


def _begun(text: str) -> int:
    """The length of the longest suffix of the text that is a prefix of OPEN."""
    return next((size for size in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:size])), 0)


def _single(text: str) -> list[Call]:
    """The text as a call; empty if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    call = _call(value)
    return [call] if call else []


def _several(text: str) -> list[Call]:
    """The text as a sequence of calls; empty if any part is not one."""
    decoder, at = json.JSONDecoder(), 0
    calls: list[Call] = []
    while at < len(text):
        if text[at].isspace() or (calls and text[at] == ";"):
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = _call(value)
        if call is None:
            return []
        calls.append(call)
    return calls


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        name.encode()
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # invalid Unicode, or a number that JSON cannot represent
        return None
    return Call(f"call_{secrets.token_hex(12)}", name, _LONE.sub(lambda surrogate: f"\\u{ord(surrogate[0]):04x}", text))


_LONE = re.compile("[\ud800-\udfff]")
