"""How the answer of one request is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.router.answer.answer_format import AnswerFormat
from services.router.answer.answer_reader import AnswerReader
from tandem.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Reading:
    format: AnswerFormat
    tools: list[Any] | None  # the offered tools; None: calls stay text
    begins_inside: bool  # the prompt ends within reasoning
    one_call: bool  # only the first call is passed on
    marker_ends: bool = False  # only its closing marker ends the reasoning: there a worker begins with a grammar

    @property
    def finds_parts(self) -> bool:
        """Whether the answer can have parts other than text."""
        return self.format.reasons or bool(self.tools and self.format.calls)

    def reader(self) -> AnswerReader:
        return AnswerReader(
            self.format,
            tools=self.tools,
            begins_inside=self.begins_inside,
            one_call=self.one_call,
            marker_ends=self.marker_ends,
        )

    def message(self) -> generation_pb2.Reading:
        tools = json.dumps(self.tools).encode() if self.tools else b""
        return generation_pb2.Reading(tools=tools, begins_in_reasoning=self.begins_inside, one_call=self.one_call)
