"""Gemma's calls: objects with unquoted keys, and strings between two special tokens.

    gemma4           <|tool_call>call:NAME{peak:<|"|>Eiger<|"|>,year:2024,near:[<|"|>Mönch<|"|>]}<tool_call|>
    functiongemma    <start_function_call>call:NAME{peak:<escape>Eiger<escape>}<end_function_call>

The arguments are passed on as a JSON object. Sources: the chat template of Gemma 4; Google's description of
FunctionGemma's format (https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices).
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from services.router.answer.call_formats.call_reader import is_name
from services.router.answer.call_formats.json_calls import NAME, ObjectCalls
from services.router.answer.call_formats.python_literal import MAX_DEPTH, MAX_WORD, json_of_word
from services.router.answer.call_formats.scanner import MAX_NAME, NOTHING, Ends, Steps
from services.router.answer.call_formats.typed_value import escaped, parameter_kind

_KEY, _WORD = re.compile(r'[^:,{}\[\]<"]+'), re.compile(r'[^,{}\[\]<"]+')
_QUOTED_KEY = re.compile(r"[^<]+")
_CLOSERS = {"{": "}", "[": "]"}


class GemmaCalls(ObjectCalls):
    """Also reads Llama 3's JSON, the format of forced calls. After its calls the model writes <|tool_response> and
    stops."""

    quote: ClassVar[str] = '<|"|>'
    whole = ("{",)
    openers = Ends("<|tool_call>")
    between: ClassVar[tuple[str, ...]] = ("<tool_call|>", "<|tool_response>", ";", "}")
    others: ClassVar[tuple[str, ...]] = (quote,)
    ends = Ends("<|tool_call>", "<tool_call|>")
    string_end: ClassVar[Ends] = Ends(quote)

    def _call(self, opener: str) -> Steps[bool]:
        if opener == "{":
            return (yield from self._object(marked=False))
        yield from self._in.space()
        if not (yield from self._in.literal(("call:",))):
            return False
        name = yield from self._in.run(NAME, MAX_NAME)
        if not is_name(name) or not (yield from self._in.literal(("{",))):
            return False
        self._begin(name)
        self._pass("{")
        if not (yield from self._arguments(name)) and (end := (yield from self._in.upto(self.ends, self._pass))):
            self._in.hold(end)
            self._in.back()
        return True

    def _arguments(self, name: str) -> Steps[bool]:
        """Reads an object after its opening brace, to its end. False: the next text is not part of an object."""
        open, key, first = ["}"], "", True  # open brackets; the current key; whether no item has come yet
        while open:
            yield from self._in.space()
            if (yield from self._in.peek()) == open[-1]:
                self._pass(self._in.take())
                open.pop()
                first = False
                continue
            if not first:
                if (yield from self._in.peek()) != ",":
                    return False
                self._in.take()
                yield from self._in.space()
                if (yield from self._in.peek()) == open[-1]:
                    continue
                self._pass(", ")
            if open[-1] == "}":
                key = yield from self._named_key()
                if not key:
                    return False
            bracket = yield from self._in.peek()
            first = bracket in _CLOSERS and len(open) < MAX_DEPTH
            if first:
                self._pass(self._in.take())
                open.append(_CLOSERS[bracket])
            elif not (yield from self._scalar(name, key if len(open) == 1 else "")):
                return False
        return True

    def _named_key(self) -> Steps[str]:
        """Reads a key, which may be quoted, and passes it on; empty if there is none."""
        self._in.hold()
        quoted = (yield from self._in.literal((self.quote,))) if (yield from self._in.peek()) == "<" else ""
        key = (yield from self._in.run(_QUOTED_KEY if quoted else _KEY, MAX_NAME)).strip()
        closed = not quoted or (yield from self._in.literal((self.quote,)))
        yield from self._in.space()
        if not closed or not 0 < len(key) <= MAX_NAME or not (yield from self._in.literal((":",))):
            self._in.back()
            return ""
        self._in.drop()
        self._pass(f"{json.dumps(key, ensure_ascii=False)}: ")
        yield from self._in.space()
        return key

    def _scalar(self, name: str, key: str) -> Steps[bool]:
        """Passes on a string as it arrives, or a word. `key`: the parameter's; empty within its value."""
        character = yield from self._in.peek()
        if character == "<":
            self._in.hold()
            if not (yield from self._in.literal((self.quote,))):
                self._in.back()
                return False
            self._in.drop()
            self._pass('"')
            if (yield from self._in.upto(self.string_end, lambda text: self._pass(escaped(text)))):
                self._pass('"')
            return True
        if character == '"':
            return (yield from self._in.nested(self._pass, NOTHING)) == '"'
        word = (yield from self._in.run(_WORD, MAX_WORD)).strip()
        if (yield from self._in.peek()) == "":
            self._pass(word)  # the word may continue
            return False
        text = bool(key) and parameter_kind(self._tools, name, key).types == {"string"}
        self._pass(json.dumps(word, ensure_ascii=False) if text else json_of_word(word))
        return 0 < len(word) <= MAX_WORD


class FunctionGemmaCalls(GemmaCalls):
    quote = "<escape>"
    openers = Ends("<start_function_call>")
    between = ("<end_function_call>", "<start_function_response>", ";", "}")
    others = (quote,)
    ends = Ends("<start_function_call>", "<end_function_call>")
    string_end = Ends(quote)
