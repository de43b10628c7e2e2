"""Stop strings: the text ends where the first of them begins. Works on text only, not on tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back text that may begin a stop string. The output does not depend on how the input was chunked."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
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
        self._held += text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            end, start, self.hit = min(matches)
            shown, self._held = self._held[: end if self._include else start], ""
            return shown
        keep = max(self._begun(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """The text held back that did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _begun(self, stop: str) -> int:
        """The length of the longest suffix of the held text that is a prefix of `stop`."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
