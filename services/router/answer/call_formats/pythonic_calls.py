"""Calls that are a list of Python calls: Llama 4's pythonic format, Llama 3.2's, and LFM2's.

    pythonic   [f(a=1), g(b="x")]   as the whole answer, or within <|python_start|> and <|python_end|>
    lfm2       the same within <|tool_call_start|> and <|tool_call_end|>

The arguments are passed on as a JSON object. Sources: Meta's documentation of Llama 3.2 and 4; vLLM's templates for it;
the chat template of LFM2.5 and LiquidAI's documentation of LFM2.
"""

from __future__ import annotations

import json
import re

from services.router.answer.call_formats.json_calls import ObjectCalls
from services.router.answer.call_formats.python_literal import read_value
from services.router.answer.call_formats.scanner import MAX_NAME, Ends, Steps

_NAME, _KEY = re.compile(r"[\w.-]+"), re.compile(r"\w+")


class PythonicCalls(ObjectCalls):
    """Also reads Llama 3's JSON, which these models write, too, and which is the format of forced calls."""

    whole = ("[", "{")
    openers = Ends("<|python_start|>", "<|python_tag|>")
    between = ("<|python_end|>", ";", "}")
    ends = Ends("<|python_end|>")

    def _call(self, opener: str) -> Steps[bool]:
        marked = opener not in self.whole
        if marked:
            self._in.hold()  # the marker is not shown
            yield from self._in.space()
            opener = yield from self._in.literal(self.whole)
        if opener == "{":
            return (yield from self._object(marked=marked))
        return opener == "[" and (yield from self._functions())

    def _functions(self) -> Steps[bool]:
        """Reads calls with commas between them, after `[`."""
        begun = False
        while (yield from self._function()):
            begun = True
            self._in.hold()
            yield from self._in.space()
            separator = yield from self._in.literal((",", "]"))
            if separator == "":
                self._in.back()
                return True
            if separator == "]" or not (yield from self._more()):
                self._in.drop()
                return True
        if begun:
            self._show(self._in.release())
        return begun

    def _function(self) -> Steps[bool]:
        """As _call, from the name on."""
        yield from self._in.space()
        name = yield from self._in.run(_NAME, MAX_NAME)
        if len(name) > MAX_NAME or not name or name[0].isdigit() or not (yield from self._in.literal(("(",))):
            return False
        yield from self._in.space()
        if (yield from self._in.peek()) == ")":
            self._in.take()
            self._begin(name)
            self._pass("{}")
            return True
        opening = "{"
        while True:
            key = yield from self._keyword()
            if not key and opening == "{":
                return False
            if opening == "{":
                self._begin(name)
            if not key or not (yield from self._value(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")):
                self._pass(self._in.release())
                yield from self._in.upto(self.ends, self._pass)
                return True
            opening = ", "
            if (yield from self._closed()):
                self._pass("}")
                return True

    def _closed(self) -> Steps[bool]:
        """Reads the comma or the bracket after an argument. False: an argument follows; the comma is held."""
        self._in.hold()
        if self._in.take() == ",":
            yield from self._in.space()
            if (yield from self._in.peek()) != ")":
                return False
            self._in.take()
        self._in.drop()
        return True

    def _value(self, before: str) -> Steps[bool]:
        """Reads one argument's value, up to the comma or bracket after it."""
        self._in.drop()
        self._pass(before)
        return (yield from read_value(self._in, self._pass)) and (yield from self._in.peek()) != ""

    def _keyword(self) -> Steps[str]:
        yield from self._in.space()
        key = yield from self._in.run(_KEY, MAX_NAME)
        yield from self._in.space()
        return key if 0 < len(key) <= MAX_NAME and (yield from self._in.literal(("=",))) else ""


class Lfm2Calls(PythonicCalls):
    openers = Ends("<|tool_call_start|>")
    between = ("<|tool_call_end|>", ";", "}")
    ends = Ends("<|tool_call_end|>", "<|tool_call_start|>")
