"""Splits an answer into the model's reasoning and the rest, by the markers around the reasoning.

    "<think>\\nshort\\n</think>\\n\\nYes."  ─▶  Reasoning("short"), Text("Yes.")

The markers are text here: the detokenizer keeps those visible that are special tokens. vLLM's reasoning parsers and
SGLang's detectors find the same markers, but treat the white space around them differently (see ReasoningReader).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from services.router.answer.call_formats.scanner import Ends
from services.router.answer.parts import CallBegin, Part, PartReader, Reasoning, Text

SPACE = " \t\r\n"
MAX_SPACE = 64  # characters of white space next to a marker that are dropped with it
MAX_CALL = 4096  # characters after a call's marker within which a call must be recognised
# A failed probe's text is read again by the next probe. Each character of reasoning allows for this many characters of
# probes, up to a maximum. Without this bound a text of unclosed calls took 200 times as long.
PROBED_PER_CHARACTER = 4
MAX_ALLOWANCE = 4 * MAX_CALL
PROBE_BLOCK = 64  # characters; probes cost whole blocks, so the cost does not depend on how the text was split


@dataclass(frozen=True, slots=True)
class Markers:
    """The texts around the reasoning. Any of `open` begins it, any of `close` ends it."""

    open: tuple[str, ...]
    close: tuple[str, ...]
    answer: tuple[str, str] | None = None  # before and after the answer, for models that mark it, too
    tokens: tuple[str, ...] = ()  # special tokens that make up a marker that is not one token

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.open, *self.close, *(self.answer or ()), *self.tokens)


@dataclass(frozen=True, slots=True)
class CallsWithin:
    """How to recognise a call that begins before the reasoning has been closed."""

    markers: tuple[str, ...]
    reader: Callable[[], PartReader]  # of calls
    names: frozenset[str]  # of the offered tools


class State(Enum):
    BEGIN = auto()  # nothing but white space has come
    OPENED = auto()  # nothing but white space has come since the marker
    REASONING = auto()
    CALL = auto()  # within the reasoning, after a marker that may begin a call
    CLOSED = auto()  # nothing but white space has come since the marker
    ANSWER = auto()  # within the markers around the answer
    TEXT = auto()  # no marker can follow


class ReasoningReader:
    """Reads Reasoning, then Text.

    The opening marker counts only at the beginning of the answer, possibly after white space; a later one is text. If
    the prompt ends with it (`begins_inside`), a repeated one is dropped. An answer that ends within the reasoning is
    all reasoning. A closing marker without reasoning is text.

    White space around a marker belongs to the marker: it is not shown at the beginning and at the end of the reasoning,
    nor are empty lines before the answer; the answer's own indentation stays. (vLLM and SGLang pass line ends on, so
    their Qwen3 answers begin with two; llama.cpp drops them, too.)

    With `calls`, a call within the reasoning ends the reasoning, because models forget the closing marker and clients
    would never see the call (vLLM's issue 39056; SGLang and vLLM's parser for Qwen3 do the same). Because reasoning
    also mentions markers, the call must be readable, name an offered tool, and begin before any closing marker. If
    there are very many mentions, some are not examined.
    """

    def __init__(self, markers: Markers, *, begins_inside: bool = False, calls: CallsWithin | None = None) -> None:
        self._markers = markers
        self._calls = calls
        self._closes = Ends(*markers.close)
        self._ends = Ends(*markers.close, *(calls.markers if calls else ()))  # of the reasoning, a call's included
        self._answer_ends = Ends(*(markers.answer or ())[1:])
        self._state = State.OPENED if begins_inside else State.BEGIN
        self._steps: dict[State, Callable[[list[Part]], bool]] = {
            State.BEGIN: self._begin,
            State.OPENED: self._opened,
            State.REASONING: self._reasoning,
            State.CALL: self._call,
            State.CLOSED: self._closed,
            State.ANSWER: self._answer,
            State.TEXT: self._text,
        }
        self._held = ""
        self._line_ended = False  # in the white space after the last marker
        self._in_answer = False  # its opening marker has come, and its closing one has not
        self._probe: PartReader | None = None
        self._space = self._probed = 0  # characters of the held text: before the call's marker, and read by the probe
        self._allowance = MAX_ALLOWANCE  # characters that probes may read

    @property
    def inside(self) -> bool:
        """Whether the reasoning has begun and has not ended."""
        return self._state in (State.OPENED, State.REASONING, State.CALL)

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._steps[self._state](parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state is State.CALL and self._probe is not None:
            read = [*self._probe.push(held[self._probed :]), *self._probe.finish()]
            if self._is_call(read):
                self._state = State.TEXT
                return [Text(held[self._space :])]
        if self._state is State.CLOSED and not held.strip(SPACE):
            return []
        return [Reasoning(held) if self.inside else Text(held)] if held else []

    # ---- One step each: takes what it can from the held text; false when it needs more.

    def _begin(self, parts: list[Part]) -> bool:
        body = self._held.lstrip(SPACE)
        space = len(self._held) - len(body)
        answer = self._markers.answer[:1] if self._markers.answer else ()
        if space <= MAX_SPACE:
            if marker := _first(body, self._markers.open):
                self._go(State.OPENED, body[len(marker) :])
                return True
            if marker := _first(body, answer):
                self._in_answer = True
                self._go(State.CLOSED, body[len(marker) :])
                return True
            if _may_become(body, (*self._markers.open, *answer)):
                return False
        self._go(State.TEXT, self._held)
        return True

    def _opened(self, parts: list[Part]) -> bool:
        self._held = self._held.lstrip(SPACE)
        if marker := _first(self._held, self._markers.open):
            self._held = self._held[len(marker) :]
            return True
        if _may_become(self._held, self._markers.open):
            return False
        self._go(State.REASONING, self._held)
        return True

    def _reasoning(self, parts: list[Part]) -> bool:
        found = _find(self._held, self._ends.texts)
        end = found[0] if found else len(self._held) - self._ends.begun(self._held, 0)
        end -= _space_before(self._held, end)
        self._think(parts, end)
        if found is None:
            return False
        _, marker = found
        self._space = self._held.index(marker)
        if marker in self._markers.close:
            self._go(State.CLOSED, self._held[self._space + len(marker) :])
        elif self._calls is not None and self._allowance > 0:
            self._probe, self._probed = self._calls.reader(), self._space
            self._state = State.CALL
        else:
            self._think(parts, self._space + 1)
        return True

    def _call(self, parts: list[Part]) -> bool:
        assert self._probe is not None
        closed = _find(self._held, self._closes.texts)
        end = closed[0] if closed else len(self._held) - self._closes.begun(self._held, 0)
        most = self._space + MAX_CALL
        is_call = None
        while is_call is None and self._probed < min(end, most):
            block = self._probed + PROBE_BLOCK - (self._probed - self._space) % PROBE_BLOCK
            is_call = self._is_call(self._probe.push(self._held[self._probed : min(block, end)]))
            self._probed = min(block, end)
        if is_call is None and closed is None and self._probed < most:
            return False
        if is_call:
            self._go(State.TEXT, self._held[self._space :])
        else:
            blocks = -((self._space - self._probed) // PROBE_BLOCK)
            self._allowance -= blocks * PROBE_BLOCK
            self._state = State.REASONING
            self._think(parts, self._space + 1)
        return True

    def _think(self, parts: list[Part], end: int) -> None:
        """Passes on held characters as reasoning."""
        parts.append(Reasoning(self._held[:end]))
        self._held = self._held[end:]
        self._allowance = min(MAX_ALLOWANCE, self._allowance + end * PROBED_PER_CHARACTER)

    def _is_call(self, parts: Sequence[Part]) -> bool | None:
        """Whether the text from the marker on is a call; None: not known yet."""
        first = next((part for part in parts if isinstance(part, CallBegin) or part.text), None)
        if first is None:
            return None
        return isinstance(first, CallBegin) and self._calls is not None and first.name in self._calls.names

    def _closed(self, parts: list[Part]) -> bool:
        body = self._held.lstrip(SPACE)
        space = self._held[: len(self._held) - len(body)]
        opening = self._markers.answer[:1] if self._markers.answer and not self._in_answer else ()
        if marker := _first(body, opening):
            self._in_answer = True
            self._go(State.CLOSED, body[len(marker) :])
            return True
        self._line_ended = self._line_ended or "\n" in space
        indentation = space.rpartition("\n")[2][-MAX_SPACE:]
        if _may_become(body, opening):
            self._held = indentation + body
            return False
        body = indentation + body if self._line_ended else body
        self._go(State.ANSWER if self._in_answer else State.TEXT, body)
        return True

    def _answer(self, parts: list[Part]) -> bool:
        found = _find(self._held, self._answer_ends.texts)
        end = found[0] if found else len(self._held) - self._answer_ends.begun(self._held, 0)
        space = _space_before(self._held, end)
        parts.append(Text(self._held[: end - space]))
        self._held = self._held[end - space :]
        if found is None:
            return False
        self._in_answer = False
        self._go(State.CLOSED, self._held[space + len(found[1]) :])
        return True

    def _text(self, parts: list[Part]) -> bool:
        parts.append(Text(self._held))
        self._held = ""
        return False

    def _go(self, state: State, rest: str) -> None:
        self._state, self._held, self._line_ended = state, rest, False


def _first(text: str, markers: Sequence[str]) -> str | None:
    """The marker with which the text begins."""
    return next((marker for marker in markers if text.startswith(marker)), None)


def _may_become(text: str, markers: Sequence[str]) -> bool:
    """The text is empty or the beginning of a marker."""
    return not text or any(marker.startswith(text) for marker in markers)


def _find(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The position of the marker that is complete first, and the marker."""
    found = [(at + len(marker), at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found)[1:] if found else None


def _space_before(text: str, end: int) -> int:
    """The number of characters of white space before the position, up to MAX_SPACE."""
    before = text[max(0, end - MAX_SPACE) : end]
    return len(before) - len(before.rstrip(SPACE))
