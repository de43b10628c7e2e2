"""A text that arrives in pieces, read once from its beginning to its end.

A reading function is a generator: it yields when it needs the next piece, so its results do not depend on how the text
was split. Text that may still turn out to be plain text is read between `hold` and `drop` or `release`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], object]

MAX_HELD = 64 * 1024  # characters of a call that are held until its name and the beginning of its arguments are known
MAX_NAME = 256  # characters of a name, of an id or of a parameter's name

SPACE = re.compile(r"\s+")
_OUTSIDE, _INSIDE = r'["{}\[\]]', re.compile(r'["\\]')
_SCALAR = re.compile(r"[^\s,:{}\[\]\"<]+")


class Ends:
    """Texts that end a part of the text. None is a prefix of another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._longest = max(map(len, texts), default=0)
        found = "|".join(map(re.escape, texts))
        self.pattern = re.compile(found or r"(?!)")
        self.in_json = re.compile(f"{found}|{_OUTSIDE}" if found else _OUTSIDE)

    def begun(self, text: str, at: int) -> int:
        """The length of the longest suffix of text[at:] that is a prefix of one of the texts."""
        for size in range(min(self._longest - 1, len(text) - at), 0, -1):
            suffix = text[len(text) - size :]
            if any(len(end) > size and end.startswith(suffix) for end in self.texts):
                return size
        return 0

    def begins(self, text: str, at: int) -> bool:
        """Whether text[at:] is a proper prefix of one of the texts."""
        rest = text[at : at + self._longest]
        return any(end.startswith(rest) and end != rest for end in self.texts)


NOTHING = Ends()


class _JsonPlace:
    """A position within a JSON string, object or array; initially before it."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def go_on(self, text: str, at: int, ends: Ends, *, last: bool) -> tuple[int, str]:
        """The position up to which the text was read, and its end if found; see Scanner.nested."""
        if self._escaped and at < len(text):
            self._escaped, at = False, at + 1
        while at < len(text):
            match = (_INSIDE if self._quoted else ends.in_json).search(text, at)
            if match is None:
                return len(text) - (0 if last or self._quoted else ends.begun(text, at)), ""
            at, found = match.end(), match[0]
            if not self._quoted and not last and ends.begins(text, match.start()):
                return match.start(), ""  # a bracket, or the beginning of an end
            if self._quoted and found == "\\":
                self._escaped = at == len(text)  # the character after the backslash has not arrived
                at = min(at + 1, len(text))
            elif found == '"':
                self._quoted = not self._quoted
                if not self._quoted and self._depth == 0:
                    return at, found
            elif found in ends.texts:
                return match.start(), found
            else:
                self._depth += 1 if found in "{[" else -1
                if self._depth <= 0:
                    return at, found
        return at, ""


class Scanner:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # everything before this position was read
        self._held: list[str] | None = None
        self._held_size = 0
        self.ended = False

    def feed(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def hold(self, text: str = "") -> None:
        """Text that is read from here on can be taken back; `text` was read already."""
        self._held, self._held_size = [text], len(text)

    def drop(self) -> None:
        self._held = None

    def release(self) -> str:
        """Returns the text that was read since `hold`, and stops holding it."""
        held, self._held = "".join(self._held or ()), None
        return held

    def back(self) -> None:
        """Moves back to `hold`: that text is read again."""
        self._text, self._at = self.release() + self._text[self._at :], 0

    @property
    def full(self) -> bool:
        """Whether more is held than any call needs."""
        return self._held is not None and self._held_size > MAX_HELD

    def take(self, count: int = 1) -> str:
        """Reads characters that have arrived."""
        piece = self._text[self._at : self._at + count]
        self._at += len(piece)
        if self._held is not None:
            self._held.append(piece)
            self._held_size += len(piece)
        return piece

    def rest(self) -> str:
        """The text that has arrived and was not read."""
        return self._text[self._at :]

    def all_of(self, pattern: re.Pattern[str]) -> str:
        """Reads the arrived text that matches."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def run(self, pattern: re.Pattern[str], most: int) -> Steps[str]:
        """Reads characters while they match, up to about `most`."""
        pieces: list[str] = []
        size = 0
        while (yield from self.peek()) and size <= most and (match := pattern.match(self._text, self._at)):
            pieces.append(self.take(match.end() - self._at))
            size += len(pieces[-1])
        return "".join(pieces)

    def space(self) -> Steps[str]:
        return (yield from self.run(SPACE, MAX_HELD))

    def literal(self, texts: Iterable[str]) -> Steps[str]:
        """Reads one of the texts, of which none is a prefix of another. Otherwise empty; the common characters were
        then read, so call it only while something is held."""
        left, size = list(texts), 0
        while left:
            character = yield from self.peek()
            left = [text for text in left if text.startswith(character, size)] if character else []
            if left:
                self.take()
                size += 1
                if len(left[0]) == size:
                    return left[0]
        return ""

    def upto(self, ends: Ends, emit: Emit) -> Steps[str]:
        """Passes on the text before the first of the ends, and returns that end; empty at the end of all text. Holds
        back only a possible beginning of an end."""
        while True:
            match = ends.pattern.search(self._text, self._at)
            if match:
                emit(self.take(match.start() - self._at))
                return self.take(match.end() - match.start())
            keep = 0 if self.ended else ends.begun(self._text, self._at)
            emit(self.take(len(self._text) - self._at - keep))
            if self.ended:
                return ""
            yield

    def string(self) -> Steps[str]:
        """Reads a JSON string with its quotes; empty if there is none, or if it does not end."""
        if (yield from self.peek()) != '"':
            return ""
        pieces: list[str] = []
        return "".join(pieces) if (yield from self.nested(pieces.append, NOTHING)) == '"' else ""

    def value(self, emit: Emit) -> Steps[bool]:
        """Reads any JSON value; the content of an object or an array is not checked. False: there is none, or it is too
        long."""
        if (yield from self.peek()) in ('"', "{", "["):
            return (yield from self.nested(emit, NOTHING)) != ""
        scalar = yield from self.run(_SCALAR, MAX_HELD)
        emit(scalar)
        return bool(scalar) and not self.full

    def nested(self, emit: Emit, ends: Ends) -> Steps[str]:
        """Passes on the JSON string, object or array that begins here, verbatim. Returns its last character. Or one of
        the ends, which cannot be part of JSON, if that comes first outside of its strings; it is not read. Empty if
        neither comes, or if too much is held."""
        place = _JsonPlace()
        while not self.full:
            before = self._at
            at, found = place.go_on(self._text, before, ends, last=self.ended)
            emit(self.take(at - before))
            if found or self.ended:
                return found
            yield
        return ""
