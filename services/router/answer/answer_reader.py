"""Reads an answer in its model's format: reasoning first, then text with calls."""

from __future__ import annotations

from functools import partial
from typing import Any

from services.router.answer.answer_format import AnswerFormat
from services.router.answer.call_formats import registry
from services.router.answer.harmony_reader import HarmonyReader
from services.router.answer.parts import CallArguments, CallBegin, Part, PartReader, Text, joined
from services.router.answer.reasoning_reader import CallsWithin, ReasoningReader


class AnswerReader:
    """Reads the parts of one answer.

    `tools`: the offered tools, a list as in OpenAI's API; without tools, calls stay text. `begins_inside`: the prompt
    ends within reasoning. `one_call`: all calls except the first are dropped (parallel_tool_calls: false, as in vLLM).
    A call within unfinished reasoning ends the reasoning (ReasoningReader), unless `marker_ends` says that only the
    closing marker does: there a worker begins with a grammar.
    """

    def __init__(
        self,
        format: AnswerFormat,
        *,
        tools: list[Any] | None,
        begins_inside: bool,
        one_call: bool = False,
        marker_ends: bool = False,
    ) -> None:
        self._one_call = one_call
        self._calls: PartReader | None = None  # reads the text of the first reader
        self._first: ReasoningReader | HarmonyReader | None = None  # None: there is no reasoning
        self._dropping = False  # the call being read
        self.calls = 0  # passed on
        if format.harmony:
            offers = bool(tools) and format.calls is not None
            self._first = HarmonyReader(offers_tools=offers, begins_inside=begins_inside)
            return
        within = None
        if tools and format.calls:
            self._calls = registry.reader_of(format.calls, tools)
            names = frozenset(str(tool["function"]["name"]) for tool in tools)
            reader = partial(registry.reader_of, format.calls, tools)
            within = None if marker_ends else CallsWithin(registry.MARKERS[format.calls], reader, names)
        if format.reasoning:
            self._first = ReasoningReader(format.reasoning, begins_inside=begins_inside, calls=within)

    @property
    def inside(self) -> bool:
        """Whether the text is within reasoning."""
        return self._first is not None and self._first.inside

    def push(self, text: str) -> list[Part]:
        """The parts that the text completes."""
        return self._passed_on(self._with_calls(self._first.push(text) if self._first else [Text(text)]))

    def finish(self) -> list[Part]:
        """Ends the answer: the parts that were held back."""
        parts = self._with_calls(self._first.finish() if self._first else [])
        return self._passed_on(parts + (self._calls.finish() if self._calls else []))

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._calls is None:
            return parts
        read: list[Part] = []
        for part in parts:
            read += self._calls.push(part.text) if isinstance(part, Text) else [part]
        return read

    def _passed_on(self, parts: list[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, CallBegin):
                self._dropping = self._one_call and self.calls > 0
                self.calls += not self._dropping
            if not (self._dropping and isinstance(part, CallBegin | CallArguments)):
                kept.append(part)
        return joined(kept)
