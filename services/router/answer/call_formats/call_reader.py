"""The base of the readers of all formats of calls.

    text ─▶ upto a marker ─▶ a call ─▶ the gap after it ─▶ another call, or text again

A call begins when its name and the beginning of its arguments have arrived. Before that it is text, its marker
included. After that everything is passed on as arguments, even if it is not JSON: clients validate. White space after a
call is shown only if text follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from services.router.answer.call_formats.scanner import MAX_NAME, NOTHING, Ends, Scanner, Steps
from services.router.answer.parts import CallArguments, CallBegin, Part, Text, new_call_id


class CallReader(ABC):
    """A PartReader of Text and calls. Its work is linear in the text; it holds at most MAX_HELD characters."""

    whole: ClassVar[tuple[str, ...]] = ()  # beginnings of an answer that is only a call
    openers: ClassVar[Ends] = NOTHING  # markers before a call, anywhere
    between: ClassVar[tuple[str, ...]] = ()  # texts between calls and after them, which are not shown
    others: ClassVar[tuple[str, ...]] = ()  # markers within a call
    tokens: ClassVar[tuple[str, ...]] = ()  # special tokens that are a part of a marker

    def __init__(self, tools: list[Any] | None = None) -> None:
        """`tools` are the offered tools, as in OpenAI's API; formats with untyped arguments need them."""
        self._tools = tools or []
        self._in = Scanner()
        self._parts: list[Part] = []
        self._steps = self._answer()

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Texts around calls, which may be special tokens of a tokenizer."""
        texts = (*cls.openers.texts, *cls.between, *cls.others)
        return tuple(dict.fromkeys(text for text in texts if len(text) > 1))

    def push(self, text: str) -> list[Part]:
        self._in.feed(text)
        next(self._steps)
        return self._taken()

    def finish(self) -> list[Part]:
        self._in.ended = True
        for _ in self._steps:
            pass
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    @abstractmethod
    def _call(self, opener: str) -> Steps[bool]:
        """Reads from after the opener, which is held, to the end of the call. False: it is not a call, and everything
        is still held. True: the call has begun, and nothing is held."""

    def _answer(self) -> Steps[None]:
        opener = yield from self._beginning()
        while True:
            while opener:
                if (yield from self._call(opener)):
                    opener = yield from self._gap()
                else:
                    self._show(self._in.release())
                    opener = ""
            opener = yield from self._in.upto(self.openers, self._show)
            if not opener:
                return
            self._in.hold(opener)

    def _beginning(self) -> Steps[str]:
        """The opener at the beginning of the answer, after white space, in a format whose call may be the whole
        answer."""
        if not self.whole:
            return ""
        self._in.hold()
        yield from self._in.space()
        opener = yield from self._in.literal((*self.whole, *self.openers.texts))
        if not opener:
            self._show(self._in.release())
        return opener

    def _gap(self) -> Steps[str]:
        """Skips the text after a call. Returns the opener of the next call, which is held."""
        while True:
            self._in.hold()
            yield from self._in.space()
            if (yield from self._in.peek()) == "":
                self._in.drop()
                return ""
            found = yield from self._in.literal((*self.between, *self.whole, *self.openers.texts))
            if not found:
                self._show(self._in.release())
            if found not in self.between:
                return found

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(Text(text))

    def _begin(self, name: str, id: str = "") -> None:
        self._in.drop()
        self._parts.append(CallBegin(id or self._new_id(), name))

    def _new_id(self) -> str:
        return new_call_id()

    def _pass(self, text: str) -> None:
        """Passes on a piece of the arguments."""
        if text:
            self._parts.append(CallArguments(text))


def is_name(text: str) -> bool:
    """Whether the text may be the name of a function: encodable, of 1 to MAX_NAME characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return 0 < len(text) <= MAX_NAME
