"""Calls with the name before the arguments, a JSON object: DeepSeek, Kimi and functionary.

    deepseek_v3    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
                   ```json
                   {...}
                   ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    deepseek_v31   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
                   <｜tool▁calls▁end｜>
    kimi_k2        <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}
                   <|tool_call_end|><|tool_calls_section_end|>
    functionary_v31    <function=NAME>{...}</function>
    functionary_v32    NAME, a line end and {...}, after >>>, with which the prompt ends; text is addressed to `all`

Sources: the chat templates of DeepSeek-R1, V3 and V3.1, of Kimi-K2 and of functionary v3.1 and v3.2; Kimi-K2's
tool_call_guidance.md; Llama 3.1's prompt format, which functionary v3.1 follows.
"""

from __future__ import annotations

from typing import Any

from services.router.answer.call_formats.call_reader import CallReader, is_name
from services.router.answer.call_formats.json_calls import NAME
from services.router.answer.call_formats.scanner import MAX_NAME, Ends, Steps


class NamedCalls(CallReader):
    begin = end = argument = ""  # markers: before a call, after it, and before its arguments or part of its name

    def _call(self, opener: str) -> Steps[bool]:
        if opener != self.begin:  # it begins a section of calls
            yield from self._in.space()
            if not (yield from self._in.literal((self.begin,))):
                return False
        yield from self._in.space()
        name = yield from self._in.run(NAME, MAX_NAME)
        yield from self._in.space()
        if not (yield from self._in.literal((self.argument,))):
            return False
        yield from self._in.space()
        return (yield from self._arguments(name))

    def _arguments(self, name: str) -> Steps[bool]:
        """Reads the arguments after the name and its marker."""
        character = yield from self._in.peek()
        if not is_name(name) or character not in ("{", "<"):
            return False
        if character == "<":  # the arguments are missing
            if not (yield from self._in.literal((self.end,))):
                return False
            self._begin(*self._named(name))
            self._pass("{}")
            return True
        self._begin(*self._named(name))
        yield from self._in.nested(self._pass, Ends(self.end, self.begin, *self.between[1:]))
        return True

    def _named(self, name: str) -> tuple[str, str]:
        """The name and the id of a call, from the text before its arguments; without an id any id will do."""
        return name, ""


class DeepSeekCalls(NamedCalls):
    """DeepSeek's formats up to V3.1. V3.2 has another one."""

    begin, end, argument = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    openers = Ends("<｜tool▁calls▁begin｜>", begin)
    between = (end, "<｜tool▁calls▁end｜>")
    others = (argument,)

    def _arguments(self, name: str) -> Steps[bool]:
        if (yield from self._in.peek()) in ("{", "<"):
            return (yield from super()._arguments(name))
        name = yield from self._in.run(NAME, MAX_NAME)  # the word before was the type
        yield from self._in.space()
        if not (yield from self._in.literal(("```json",))):
            return False
        yield from self._in.space()
        if not (yield from super()._arguments(name)):
            return False
        self._in.hold()
        yield from self._in.space()
        if (yield from self._in.literal(("```",))):
            self._in.drop()
        else:
            self._in.back()
        return True


class KimiCalls(NamedCalls):
    """Calls keep the model's id, because its template needs it in the history. If the model repeats an id, the second
    one gets another number."""

    begin, end, argument = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
    openers = Ends("<|tool_calls_section_begin|>", begin)
    between = (end, "<|tool_calls_section_end|>")
    others = (argument,)

    def __init__(self, tools: list[Any] | None = None) -> None:
        super().__init__(tools)
        self._ids: set[str] = set()

    def _named(self, name: str) -> tuple[str, str]:
        id, stem = name, name.rpartition(":")[0] or name
        number = len(self._ids)
        while id in self._ids:
            id, number = f"{stem}:{number}", number + 1
        self._ids.add(id)
        return stem.removeprefix("functions.") or stem, id


class FunctionTagCalls(CallReader):
    openers = Ends("<function=")
    between = ("</function>",)
    ends = Ends("<function=", "</function>")

    def _call(self, opener: str) -> Steps[bool]:
        name = yield from self._in.run(NAME, MAX_NAME)
        if not is_name(name) or not (yield from self._in.literal((">",))):
            return False
        yield from self._in.space()
        if (yield from self._in.peek()) != "{":
            return False
        self._begin(name)
        yield from self._in.nested(self._pass, self.ends)
        return True


class RecipientCalls(CallReader):
    """Only an offered function can be called, because the marker also occurs in text. Text for `all` is shown without
    that address."""

    openers = Ends(">>>")

    def __init__(self, tools: list[Any] | None = None) -> None:
        super().__init__(tools)
        self._recipients = tuple({"all\n": "", **{f"{tool['function']['name']}\n": "" for tool in self._tools}})

    def _beginning(self) -> Steps[str]:
        """The prompt ends with the marker."""
        self._in.hold()
        if not (yield from self._call("")):
            self._show(self._in.release())
            return ""
        return (yield from self._gap())

    def _call(self, opener: str) -> Steps[bool]:
        recipient = yield from self._in.literal(self._recipients)
        if recipient == "all\n":
            self._in.drop()
            return True
        if not recipient or (yield from self._in.peek()) != "{":
            return False
        self._begin(recipient[:-1])
        yield from self._in.nested(self._pass, self.openers)
        return True
