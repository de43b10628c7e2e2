"""STUB until branch reasoning is merged."""

from __future__ import annotations

from typing import Any

from services.router.answer.answer_format import AnswerFormat
from services.router.answer.parts import Part, Text


class AnswerReader:
    def __init__(self, format: AnswerFormat, *, tools: list[Any] | None, begins_inside: bool, one_call: bool) -> None:
        self.inside = begins_inside

    def push(self, text: str) -> list[Part]:
        return [Text(text)]

    def finish(self) -> list[Part]:
        return []
