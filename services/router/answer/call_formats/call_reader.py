"""What the readers of all formats of calls have in common.

    text ─▶ upto a marker ─▶ a call ─▶ the gap after it ─▶ another call, or text again

A call begins as soon as its name and the beginning of its arguments are there. What does not get that far is text, its
marker included. What comes later is passed on as arguments, even where it is no JSON: clients validate. White space
after a call is only shown where text follows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from services.router.answer.call_formats.scanner import MAX_NAME, NOTHING, Ends, Scanner, Steps
from services.router.answer.parts import CallArguments, CallBegin, Part, Text, new_call_id


class CallReader(ABC):
    """A PartReader of Text and calls. Its work is linear in the text, and what it holds is bounded by MAX_HELD."""

    whole: ClassVar[tuple[str, ...]] = ()  # what an answer may begin with that is a call and nothing else
    openers: ClassVar[Ends] = NOTHING  # markers before a call, anywhere
    between: ClassVar[tuple[str, ...]] = ()  # what may stand between calls and after them; it is not shown
    others: ClassVar[tuple[str, ...]] = ()  # markers within a call
    tokens: ClassVar[tuple[str, ...]] = ()  # special tokens that are a part of markers, where a marker is not one token

    def __init__(self, tools: list[Any] | None = None) -> None:
        """`tools` are those that were offered, as in OpenAI's API; formats whose arguments have no types need them."""
        self._tools = tools or []
        self._in = Scanner()
        self._parts: list[Part] = []
        self._steps = self._answer()

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Texts that stand around calls, and may be special tokens of a tokenizer."""
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
        """Reads what follows the opener, which is held, to the end of the call. False: it is no call, and all of it is
        still held. True: the call has begun, and nothing is held."""

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
        """The opener with which the answer begins after white space; only in a format whose call may be all of it."""
        if not self.whole:
            return ""
        self._in.hold()
        yield from self._in.space()
        opener = yield from self._in.literal((*self.whole, *self.openers.texts))
        if not opener:
            self._show(self._in.release())
        return opener

    def _gap(self) -> Steps[str]:
        """Passes over what follows a call. Returns the opener of the next one, which is held."""
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
        """A piece of the arguments."""
        if text:
            self._parts.append(CallArguments(text))


def is_name(text: str) -> bool:
    """Whether it may be the name of a function: text that can be encoded, of some length."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return 0 < len(text) <= MAX_NAME
