"""The parts of an answer to a chat, which readers find in the model's text.

    text ─▶ AnswerReader ─▶ Reasoning, Text, CallBegin, CallArguments

A reader takes pieces of text. Its parts, with adjacent ones of one kind joined, do not depend on how the text was
split, and contain no piece of a marker. A reader holds back only text that may become a marker. Independent of HTTP,
gRPC and tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the last call's arguments; all pieces together are JSON text."""

    text: str


Part = Text | Reasoning | CallBegin | CallArguments


class PartReader(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[Part]:
        """The parts that the text completes."""

    def finish(self) -> list[Part]:
        """Ends the answer: the parts that were held back."""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts, adjacent ones of one kind joined, without empty ones."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, CallBegin):
            out.append(part)
        elif not part.text:
            continue
        elif last is not None and type(last) is type(part) and not isinstance(last, CallBegin):
            out[-1] = type(part)(last.text + part.text)
        else:
            out.append(part)
    return out
