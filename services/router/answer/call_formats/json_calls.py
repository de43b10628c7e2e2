"""Calls that are a JSON object each, with the name in it: Hermes and Qwen, Llama 3, Mistral's lists.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    llama3    {"name": ..., "parameters": {...}} as the whole answer, or after <|python_tag|>; `; ` between several
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]; newer ones [TOOL_CALLS]NAME[ARGS]{...}

Sources: the chat templates of Qwen3, Llama 3.1 to 4 and Mistral 7B v0.3 to Small 3.2.
"""

from __future__ import annotations

import json
import re
import secrets
import string

from services.router.answer.call_formats.call_reader import CallReader, is_name
from services.router.answer.call_formats.scanner import MAX_NAME, NOTHING, Ends, Steps

ARGUMENTS = ("arguments", "parameters")
NAME = re.compile(r"""[^\s<>{}\[\]()"'=,`]+""")  # of a function, unquoted


class ObjectCalls(CallReader):
    """Reads objects with a name and arguments, in any order."""

    ends = NOTHING  # texts that end a call even if its object is incomplete
    name_key = "name"

    def _call(self, opener: str) -> Steps[bool]:
        yield from self._in.space()
        if (yield from self._in.peek()) != "{":
            return False
        self._in.take()
        return (yield from self._object())

    def _object(self, *, marked: bool = True) -> Steps[bool]:
        """Reads one object after its `{`, and holds it (see _call). Without a marker before it, an object without
        arguments is a call only if a tool has its name."""
        name, arguments = "", ""
        while True:
            key = yield from self._key()
            if key == "}":
                break
            if key == self.name_key:
                name = _decoded((yield from self._in.string()))
                if not is_name(name):
                    return False
            elif key in ARGUMENTS:
                if (yield from self._in.peek()) != "{":
                    return False
                if name:
                    self._begin(name)
                    if (yield from self._in.nested(self._pass, self.ends)) == "}":
                        yield from self._rest()
                    return True
                pieces: list[str] = []
                if (yield from self._in.nested(pieces.append, self.ends)) != "}":
                    return False
                arguments = "".join(pieces)
            elif not key or not (yield from self._in.value(_ignore)):
                return False
            if name and arguments:
                self._begin(name)
                self._pass(arguments)
                yield from self._rest()
                return True
        if not name or not (marked or self._offers(name)):
            return False
        self._begin(name)
        self._pass("{}")
        return True

    def _offers(self, name: str) -> bool:
        return not self._tools or any(tool["function"]["name"] == name for tool in self._tools)

    def _key(self) -> Steps[str]:
        """Reads the next key of an object, up to its value; `}` at the object's end; empty if there is neither."""
        yield from self._in.space()
        if (yield from self._in.peek()) == ",":
            self._in.take()
            yield from self._in.space()
        if (yield from self._in.peek()) == "}":
            return self._in.take()
        key = _decoded((yield from self._in.string()))
        yield from self._in.space()
        if (yield from self._in.peek()) != ":":
            return ""
        self._in.take()
        yield from self._in.space()
        return key if key != "}" and not self._in.full else ""

    def _rest(self) -> Steps[None]:
        """Reads the rest of the object after its arguments, which is not shown."""
        while True:
            self._in.hold()
            yield from self._in.space()
            if (yield from self._in.peek()) not in (",", "}"):
                self._in.back()
                return
            key = yield from self._key()
            if key == "}":
                self._in.drop()
                return
            if not key or not (yield from self._in.value(_ignore)):
                self._show(self._in.release())
                return

    def _list(self, *, marked: bool = True) -> Steps[bool]:
        """Reads objects with commas between them, after the first one's `{`."""
        if not (yield from self._object(marked=marked)):
            return False
        while True:
            self._in.hold()
            yield from self._in.space()
            separator = yield from self._in.literal((",", "]", "}"))
            if separator == "":
                self._in.back()
                return True
            if separator == "]" or (separator == "," and not (yield from self._more())):
                self._in.drop()
                return True
            if separator == "}":  # one too many
                continue
            if not (yield from self._in.literal(("{",))) or not (yield from self._object(marked=marked)):
                self._show(self._in.release())
                return True

    def _more(self) -> Steps[bool]:
        """Reads white space after a comma between two calls. Whether anything else follows."""
        yield from self._in.space()
        return (yield from self._in.peek()) != ""


class HermesCalls(ObjectCalls):
    openers = Ends("<tool_call>")
    between = ("</tool_call>", "}")
    ends = Ends("</tool_call>", "<tool_call>")


class Llama3Calls(ObjectCalls):
    """Llama 4's template writes <|python_start|>TEXT<|python_end|> before the same calls. Its markers are not shown."""

    whole = ("{",)
    openers = Ends("<|python_tag|>", "<|python_start|>", "<|python_end|>")
    between = (";", "}")
    ends = openers

    def _call(self, opener: str) -> Steps[bool]:
        if opener == "{":
            return (yield from self._object(marked=False))
        self._in.hold()
        return (yield from super()._call(opener))


class MistralCalls(ObjectCalls):
    """Both of Mistral's formats; a list may also be the whole answer. Ids are nine letters or digits, since Mistral's
    templates refuse others in the history."""

    whole = ("[{",)
    openers = Ends("[TOOL_CALLS]")
    others = ("[ARGS]", "[CALL_ID]")
    ends = Ends("[TOOL_CALLS]")

    def _call(self, opener: str) -> Steps[bool]:
        if opener == "[{":
            return (yield from self._list(marked=False))
        yield from self._in.space()
        character = yield from self._in.peek()
        if character == "[":
            self._in.take()
            yield from self._in.space()
            if (yield from self._in.peek()) != "{":
                return False
            self._in.take()
            return (yield from self._list())
        if character == "{":
            self._in.take()
            return (yield from self._object())
        return (yield from self._named())

    def _named(self) -> Steps[bool]:
        """NAME[ARGS]{...}, NAME[CALL_ID]ID[ARGS]{...} or NAME{...}."""
        name, id = (yield from self._in.run(NAME, MAX_NAME)), ""
        while (yield from self._in.peek()) == "[":
            marker = yield from self._in.literal(("[ARGS]", "[CALL_ID]"))
            if marker == "[CALL_ID]":
                id = yield from self._in.run(NAME, MAX_NAME)
            elif marker == "":
                return False
            else:
                break
        if not is_name(name):
            return False
        yield from self._in.space()
        if (yield from self._in.peek()) != "{":
            return False
        self._begin(name, id)
        yield from self._in.nested(self._pass, self.ends)
        return True

    def _new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _decoded(literal: str) -> str:
    """The value of a JSON string; empty if the text is not one."""
    try:
        value = json.loads(literal)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _ignore(text: str) -> None:
    """Ignores text that is held anyway, or not needed."""
