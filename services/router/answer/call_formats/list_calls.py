"""Calls that are a list of JSON objects between two markers.

    cohere         <|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>
    hunyuan_a13b   <tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>; MiniMax M1 writes no brackets
    nemotron       <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>
    granite        <|tool_call|>[{"name": ..., "arguments": {...}}]
    apertus        <|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>

Sources: the chat templates of Command R7B and A, Apriel 1.5, MiniMax M1, Nemotron Nano v2, Granite 3.3 and Apertus;
Tencent's description of Hunyuan A13B's calls.
"""

from __future__ import annotations

from services.router.answer.call_formats.call_reader import is_name
from services.router.answer.call_formats.json_calls import ObjectCalls
from services.router.answer.call_formats.scanner import Ends, Steps


class ListCalls(ObjectCalls):
    """The brackets may be missing."""

    def _call(self, opener: str) -> Steps[bool]:
        yield from self._in.space()
        bracket = yield from self._in.peek()
        if bracket == "[":
            self._in.take()
            yield from self._in.space()
        if not (yield from self._in.literal(("{",))):
            return False
        if bracket == "[":
            return (yield from self._list())
        if not (yield from self._object()):
            return False
        while True:
            self._in.hold()
            yield from self._in.space()
            if not (yield from self._in.literal(("{",))):
                self._in.back()
                return True
            if not (yield from self._object()):
                self._show(self._in.release())
                return True


class CohereCalls(ListCalls):
    openers = Ends("<|START_ACTION|>")
    between = ("<|END_ACTION|>",)
    ends = Ends("<|START_ACTION|>", "<|END_ACTION|>")
    name_key = "tool_name"


class TagListCalls(ListCalls):
    openers = Ends("<tool_calls>")
    between = ("</tool_calls>",)
    ends = Ends("<tool_calls>", "</tool_calls>")


class NemotronCalls(ListCalls):
    openers = Ends("<TOOLCALL>")
    between = ("</TOOLCALL>",)
    ends = Ends("<TOOLCALL>", "</TOOLCALL>")


class GraniteCalls(ListCalls):
    openers = Ends("<|tool_call|>")
    ends = openers


class ApertusCalls(ListCalls):
    """An object's only key is the name of the function."""

    openers = Ends("<|tools_prefix|>")
    between = ("<|tools_suffix|>",)
    ends = Ends("<|tools_prefix|>", "<|tools_suffix|>")

    def _object(self, *, marked: bool = True) -> Steps[bool]:
        name = yield from self._key()
        if name == "}" or not is_name(name) or (yield from self._in.peek()) != "{":
            return False
        self._begin(name)
        if (yield from self._in.nested(self._pass, self.ends)) == "}":
            yield from self._rest()
        return True
