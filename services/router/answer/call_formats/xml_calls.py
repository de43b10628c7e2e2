"""Calls with one tag for each parameter, and unquoted values: Qwen3-Coder, GLM, Hunyuan.

    qwen3_coder   <tool_call>           glm   <tool_call>NAME
                  <function=NAME>             <arg_key>KEY</arg_key>
                  <parameter=KEY>             <arg_value>VALUE</arg_value>
                  VALUE                       </tool_call>
                  </parameter>
                  </function>
                  </tool_call>

    hy_v3   <tool_calls><tool_call>NAME<tool_sep>, then as GLM; newer ones write each name as tool_calls:opensource, ...

A value ends with its tag where the next parameter or the end of the call follows. With GLM and Hunyuan a string may
have any other tag; Qwen3-Coder forgets that tag at times, so the next one at the beginning of a line ends a value, too.
The arguments are passed on as a JSON object. Sources: the chat templates of Qwen3-Coder, which Qwen3.5 and Seed-OSS
follow, of GLM-4.5 to 4.7, and of Hunyuan 3.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from typing import Any, ClassVar

from services.router.answer.call_formats.call_reader import CallReader, is_name
from services.router.answer.call_formats.json_calls import NAME
from services.router.answer.call_formats.scanner import MAX_NAME, NOTHING, Ends, Steps
from services.router.answer.call_formats.typed_value import Kind, TypedValue, parameter_kind

_QWEN_KEY, _GLM_KEY = re.compile(r"[^<>\n]+"), re.compile(r"[^<]+")


class XmlCalls(CallReader):
    call_tag: ClassVar[str] = ""  # the tag before a call's name, up to the name
    name_closer: ClassVar[str] = ""  # the text between the name and the parameters
    parameters: ClassVar[tuple[str, ...]] = ()  # tags before a parameter's name
    closers: ClassVar[tuple[str, ...]] = ()  # tags after the last parameter
    value_ends: ClassVar[Ends] = NOTHING  # the first ones end a value; the others show that its end is missing
    value_closers: ClassVar[tuple[str, ...]] = ()  # the first ones

    def __init__(self, tools: list[Any] | None = None) -> None:
        super().__init__(tools)
        self._kinds: dict[tuple[str, str], Kind] = {}  # kinds of parameters, cached because a schema may be long

    @abstractmethod
    def _key(self) -> Steps[str]:
        """Reads a parameter's name, and the text up to its value; empty if that is missing."""

    def _call(self, opener: str) -> Steps[bool]:
        if opener != self.call_tag:
            yield from self._in.space()
            if not (yield from self._in.literal((self.call_tag,))):
                return False
        name = yield from self._in.run(NAME, MAX_NAME)
        if not (yield from self._in.literal((self.name_closer,))):
            return False
        return (yield from self._parameters(name))

    def _parameters(self, name: str) -> Steps[bool]:
        """Reads the parameters of a call; see _call."""
        if not is_name(name):
            return False
        opening = "{"
        while True:
            yield from self._in.space()
            tag = yield from self._in.literal((*self.parameters, *self.closers))
            if not tag and opening == "{":
                return False
            if opening == "{":
                self._begin(name)
            if tag in self.closers:
                self._pass("{}" if opening == "{" else "}")
                self._in.drop()
                return True
            if not tag:
                yield from self._broken()
                return True
            self._in.hold(tag)
            key = yield from self._key()
            if not key or self._in.full:
                yield from self._broken()
                return True
            self._in.drop()
            self._pass(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(name, key)
            opening = ", "
            self._in.hold()

    def _value(self, name: str, key: str) -> Steps[None]:
        value = TypedValue(self._kind(name, key), self._pass)
        while end := (yield from self._in.upto(self.value_ends, value.push)):
            if end not in self.value_closers:
                self._in.hold(end)
                self._in.back()
                value.end()
                return
            self._in.hold()
            over = yield from self._value_over()
            self._in.back()
            if over:
                value.end()
                return
            value.push(end)
        value.cut()

    def _value_over(self) -> Steps[bool]:
        """Whether what follows an end of a value shows that it is one. No format escapes strings, so a value may have
        the same text; only the next parameter or the end of the call cannot follow that."""
        yield from self._in.space()
        tag = yield from self._in.literal((*self.parameters, *self.closers))
        return bool(tag) or (yield from self._in.peek()) == ""

    def _kind(self, name: str, key: str) -> Kind:
        if (kind := self._kinds.get((name, key))) is None:
            kind = self._kinds[name, key] = parameter_kind(self._tools, name, key)
        return kind

    def _broken(self) -> Steps[None]:
        """Passes on text that is not a parameter, up to the end of the call, except a tag that the end of the answer
        truncates."""
        if (yield from self._in.peek()) != "":
            self._pass(self._in.release())
            yield from self._in.upto(Ends(*self.closers), self._pass)


class Qwen3CoderCalls(XmlCalls):
    """The line ends around a value are not part of it."""

    call_tag, name_closer = "<function=", ">"
    openers = Ends("<tool_call>", "<seed:tool_call>", call_tag)
    between = ("</function>", "</tool_call>", "</seed:tool_call>")
    others = ("<parameter=", "</parameter>")
    parameters = ("<parameter=",)
    closers = between
    value_closers = ("\n</parameter>", "</parameter>")
    value_ends = Ends(*value_closers, "\n<parameter=", *(f"\n{tag}" for tag in between))

    def _key(self) -> Steps[str]:
        key = yield from self._in.run(_QWEN_KEY, MAX_NAME)
        if len(key) > MAX_NAME or not (yield from self._in.literal((">",))):
            return ""
        if (yield from self._in.peek()) == "\n":
            self._in.take()
        return key


class GlmCalls(XmlCalls):
    openers = Ends("<tool_call>")
    between: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    others: ClassVar[tuple[str, ...]] = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    parameters: ClassVar[tuple[str, ...]] = ("<arg_key>",)
    closers: ClassVar[tuple[str, ...]] = between
    key_closers: ClassVar[tuple[str, ...]] = ("</arg_key>",)
    value_openers: ClassVar[tuple[str, ...]] = ("<arg_value>",)
    value_closers: ClassVar[tuple[str, ...]] = ("</arg_value>",)
    value_ends = Ends(*value_closers)

    def _call(self, opener: str) -> Steps[bool]:
        yield from self._in.space()
        name = yield from self._in.run(NAME, MAX_NAME)
        return (yield from self._parameters(name))

    def _key(self) -> Steps[str]:
        key = yield from self._in.run(_GLM_KEY, MAX_NAME)
        if len(key) > MAX_NAME or not (yield from self._in.literal(self.key_closers)):
            return ""
        yield from self._in.space()
        return key.strip() if (yield from self._in.literal(self.value_openers)) else ""


def _both(name: str) -> tuple[str, str]:
    """A tag of Hunyuan, as written by its first models and by the open ones."""
    return f"<{name}>", f"<{name}:opensource>"


class HunyuanCalls(GlmCalls):
    call: ClassVar[tuple[str, ...]] = _both("tool_call")
    separators: ClassVar[tuple[str, ...]] = _both("tool_sep")
    openers = Ends(*_both("tool_calls"), *call)
    between = (*_both("/tool_call"), *_both("/tool_calls"))
    parameters = _both("arg_key")
    closers = between
    key_closers, value_openers, value_closers = _both("/arg_key"), _both("arg_value"), _both("/arg_value")
    others = (*separators, *parameters, *key_closers, *value_openers, *value_closers)
    value_ends = Ends(*value_closers)

    def _call(self, opener: str) -> Steps[bool]:
        if opener not in self.call:
            yield from self._in.space()
            if not (yield from self._in.literal(self.call)):
                return False
        yield from self._in.space()
        name = yield from self._in.run(NAME, MAX_NAME)
        if not (yield from self._in.literal(self.separators)):
            return False
        return (yield from self._parameters(name))
