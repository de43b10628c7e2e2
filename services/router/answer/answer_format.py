"""STUB until branch reasoning is merged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    calls: str | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return ()

    @property
    def reasons(self) -> bool:
        return False

    @property
    def reasoning_markers(self) -> tuple[str, str]:
        return "", ""

    def begins_inside(self, end: str) -> bool:
        return False


PLAIN = AnswerFormat()
