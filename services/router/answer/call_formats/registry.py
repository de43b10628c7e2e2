"""The formats of calls by name, and the one in which a chat template writes them."""

from __future__ import annotations

import re
from typing import Any

from services.router.answer.call_formats.call_reader import CallReader
from services.router.answer.call_formats.json_calls import HermesCalls, Llama3Calls, MistralCalls
from services.router.answer.parts import PartReader

_READERS: dict[str, type[CallReader]] = {
    "hermes": HermesCalls,
    "llama3": Llama3Calls,
    "mistral": MistralCalls,
}
NAMES = tuple(_READERS)

# The marker texts of each format; some tokenizers have special tokens for them.
MARKERS: dict[str, tuple[str, ...]] = {name: reader.markers() for name, reader in _READERS.items()}


def reader_of(name: str, tools: list[Any] | None = None) -> PartReader:
    """A reader of one answer. `tools` are those that were offered, as in OpenAI's API; formats whose arguments have no
    types need them to tell strings from other values."""
    return _READERS[name](tools)


def format_of(template: str) -> str | None:
    """The format in which a model with this chat template writes calls; None if it is unknown."""
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if re.search(r'"parameters"', template) and "ipython" in template else None
