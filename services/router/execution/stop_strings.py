"""Stop strings: the text ends where the first of them begins. Works on text only, not on tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back text that may begin a stop string. The output does not depend on how the input was chunked."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [_Stop(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.hit: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """The text that can be shown now. Of several stop strings, the one completed first ends the text; of those
        completed together, the one that began first."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        before = len(self._held)
        self._held += text
        found = [(end, -len(stop.text), stop.text) for stop in self._stops if (end := stop.push(text))]
        if found:
            end, size, self.hit = min(found)
            end += before
            shown, self._held = self._held[: end if self._include else end + size], ""
            return shown
        cut = len(self._held) - max(stop.begun for stop in self._stops)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """The text held back that did not become a stop string."""
        held, self._held = self._held, ""
        return held


class _Stop:
    """Finds one stop string in chunked text. The work is linear in any text (Knuth, Morris and Pratt); restarting at
    each possible beginning took 0.4 ms per token for a text of one repeated letter."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0  # characters at the end of the text so far that begin the stop string
        self._shorter = [0]  # by length - 1 of a prefix: its longest proper suffix that is also a prefix
        for character in text[1:]:
            self._shorter.append(self._next(self._shorter[-1], character))

    def push(self, text: str) -> int:
        """The number of characters of this chunk that complete the stop string; 0 if it is not complete."""
        if not self.begun and self.text[0] not in text:
            return 0
        begun = self.begun
        for place, character in enumerate(text, 1):
            begun = self._next(begun, character)
            if begun == len(self.text):
                return place
        self.begun = begun
        return 0

    def _next(self, begun: int, character: str) -> int:
        while begun and self.text[begun] != character:
            begun = self._shorter[begun - 1]
        return begun + (self.text[begun] == character)
