"""The parts of the answer to a chat, as its readers find them in the model's text.

    text ─▶ AnswerReader ─▶ Reasoning, Text, CallBegin, CallArguments

A reader is fed pieces of text. The parts that it returns, adjacent ones of one kind joined, do not depend on how the
text was cut; no part has a piece of a marker; and a reader holds back only what may become a marker. Independent of
HTTP, gRPC and tokens.
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
    """A piece of the last call's arguments, which are JSON text together."""

    text: str


Part = Text | Reasoning | CallBegin | CallArguments


class PartReader(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[Part]:
        """The parts that the text completes."""

    def finish(self) -> list[Part]:
        """What was held back; the answer has ended."""


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
