"""Splits an answer in gpt-oss's harmony format: messages, each with a header.

    <|channel|>analysis<|message|>short<|end|>                     ─▶  Reasoning("short")
    <|start|>assistant<|channel|>commentary to=functions.f
        <|constrain|>json<|message|>{"x": 1}<|call|>               ─▶  CallBegin("f"), CallArguments('{"x": 1}')
    <|start|>assistant<|channel|>final<|message|>Yes.<|return|>    ─▶  Text("Yes.")

The prompt ends with <|start|>assistant. The format: docs/format.md in github.com/openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from services.router.answer.call_formats.scanner import Ends
from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning, Text, new_call_id

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
ENDS = (END, RETURN, CALL)
MAX_HEADER = 512  # characters
OPENING = ("assistant", "to=")  # words before a header's first marker
WORDS = (*OPENING, "analysis", "commentary", "final", "json")

_MARKERS = Ends(*MARKERS)  # any marker ends what is before it
_MARKER = _MARKERS.pattern
_WORDS = re.compile(  # of a header, from the marker of its channel on, or from its beginning where it has none
    r"\s*(?:assistant)?\s*(?:to=[^\s<]+)?\s*(?P<channel>analysis|commentary|final)?\s*(?:to=[^\s<]+)?"
    rf"\s*(?:{re.escape(CONSTRAIN)}\s*(?:json)?\s*)?"
)
_FUNCTION = re.compile(r"(?:^|[\s>])to=functions\.([^\s<]+)")

Kind = type[Text] | type[Reasoning] | type[CallArguments]


class HarmonyReader:
    """Reads the messages of an answer. Their texts are passed on unchanged, with an empty line between two messages
    that become one part.

    The channel `analysis` is reasoning, every other one text, including `commentary` without a recipient, which comes
    before calls. With `offers_tools` a message to `functions.NAME` on any channel but `final` is a call: the models
    also write them to `analysis`. A call without arguments gets {}. A message to another recipient, such as the
    built-in `python`, counts by its channel.

    A malformed answer loses only headers. Text before any header is text. A header without an end, or longer than
    MAX_HEADER, is still followed by its message. A message ends where the next header begins. A marker counts anywhere,
    because the text does not show which markers were special tokens.
    """

    def __init__(self, *, offers_tools: bool, begins_inside: bool = False) -> None:
        """`begins_inside`: the prompt ends within a message of reasoning."""
        self._offers_tools = offers_tools
        self._held = ""
        self._looked = 0  # characters of the held header that were searched
        self._kind: Kind = Reasoning if begins_inside else Text
        self._step: Callable[[list[Part]], bool] = self._body if begins_inside else self._opening
        self._empty = True  # nothing of this message has been passed on
        self._shown: set[Kind] = set()  # of earlier messages

    @property
    def inside(self) -> bool:
        """Whether the text is within a message of reasoning."""
        return self._step == self._body and self._kind is Reasoning

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        held, self._held = self._held, ""
        if self._step == self._header:
            kind, name, held = _read(held[: len(held) - _MARKERS.begun(held, 0)], self._offers_tools)
            if any(word.startswith(held) for word in WORDS):
                return []  # the answer ended within the header
            self._begin(parts, kind, name)
        self._pass_on(parts, held)
        self._end(parts)
        return parts

    # ---- One step each: takes what it can from the held text; false when it needs more.

    def _opening(self, parts: list[Part]) -> bool:
        """Before the first marker of a header."""
        marker = _MARKER.search(self._held)
        end = marker.start() if marker else len(self._held) - _MARKERS.begun(self._held, 0)
        if not _may_open(self._held[:end], ended=end < len(self._held)):
            self._begin(parts, Text)
        elif marker is None:
            return False
        elif marker[0] in ENDS:
            self._held = self._held[marker.end() :]
        else:
            self._looked, self._step = 0, self._header
        return True

    def _header(self, parts: list[Part]) -> bool:
        for marker in _MARKER.finditer(self._held, self._looked):
            if marker.start() > MAX_HEADER:
                break
            header, found = self._held[: marker.start()], marker[0]
            if found == MESSAGE:
                self._held = self._held[marker.end() :]
                self._begin(parts, *_read(header, self._offers_tools)[:2])
                return True
            if found in ENDS or (found == START and header.strip()) or (found == CHANNEL and CHANNEL in header):
                self._held = self._held[marker.start() :]
                self._without_message(parts, header)
                self._end(parts)
                return True
            self._looked = marker.end()
        if len(self._held) <= MAX_HEADER + len(CONSTRAIN):
            return False
        end = max(MAX_HEADER, self._looked)
        header, self._held = self._held[:end], self._held[end:]
        self._without_message(parts, header)
        return True

    def _body(self, parts: list[Part]) -> bool:
        marker = _MARKER.search(self._held)
        end = marker.start() if marker else len(self._held) - _MARKERS.begun(self._held, 0)
        self._pass_on(parts, self._held[:end])
        self._held = self._held[end:]
        if marker is None:
            return False
        if marker[0] in (MESSAGE, CONSTRAIN):
            self._held = self._held[len(marker[0]) :]
        else:
            self._end(parts)
        return True

    # ---- Messages

    def _begin(self, parts: list[Part], kind: Kind, name: str = "") -> None:
        if kind is CallArguments:
            parts.append(CallBegin(new_call_id(), name))
        self._kind, self._step, self._empty = kind, self._body, True

    def _without_message(self, parts: list[Part], header: str) -> None:
        """The header has no <|message|>: its message follows its words."""
        kind, name, rest = _read(header, self._offers_tools)
        self._begin(parts, Text if kind is CallArguments and not rest else kind, name)
        self._pass_on(parts, rest)

    def _pass_on(self, parts: list[Part], text: str) -> None:
        if not text:
            return
        if self._empty and self._kind in self._shown:
            parts.append(self._kind("\n\n"))
        self._empty = False
        parts.append(self._kind(text))

    def _end(self, parts: list[Part]) -> None:
        """Ends the message."""
        if self._kind is CallArguments:
            if self._empty:
                parts.append(CallArguments("{}"))
        elif not self._empty:
            self._shown.add(self._kind)
        self._kind, self._step, self._empty = Text, self._opening, True


def _read(header: str, offers_tools: bool) -> tuple[Kind, str, str]:
    """The kind of the header's message, the name of the function that it calls, and the text after the header's
    words."""
    words = _WORDS.match(header.rpartition(CHANNEL)[2].rpartition(START)[2])
    assert words is not None  # each of them may be absent
    rest = _MARKER.sub("", words.string[words.end() :])
    function = _FUNCTION.search(header)
    if offers_tools and function and words["channel"] != "final":
        return CallArguments, function[1], rest
    return Reasoning if words["channel"] == "analysis" else Text, "", rest


def _may_open(text: str, *, ended: bool) -> bool:
    """The text may come before the first marker of a header. `ended`: nothing is added to its last word."""
    *words, last = text.split() or [""]
    ended = ended or text[-1:].isspace()
    complete = [*words, last] if ended and last else words
    return (
        len(text) <= MAX_HEADER
        and all(word == "assistant" or word.startswith("to=") for word in complete)
        and (ended or any(word.startswith(last) for word in OPENING) or last.startswith("to="))
    )
