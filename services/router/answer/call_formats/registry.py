"""The formats of calls by name, and the one in which a chat template writes them."""

from __future__ import annotations

import re
from typing import Any

from services.router.answer.call_formats.call_reader import CallReader
from services.router.answer.call_formats.json_calls import HermesCalls, Llama3Calls, MistralCalls
from services.router.answer.call_formats.named_calls import DeepSeekCalls, KimiCalls
from services.router.answer.call_formats.pythonic_calls import PythonicCalls
from services.router.answer.call_formats.xml_calls import GlmCalls, Qwen3CoderCalls
from services.router.answer.parts import PartReader

_READERS: dict[str, type[CallReader]] = {
    "hermes": HermesCalls,
    "qwen3_coder": Qwen3CoderCalls,
    "glm": GlmCalls,
    "llama3": Llama3Calls,
    "pythonic": PythonicCalls,
    "mistral": MistralCalls,
    "deepseek_v3": DeepSeekCalls,
    "deepseek_v31": DeepSeekCalls,
    "kimi_k2": KimiCalls,
}
NAMES = tuple(_READERS)

# The marker texts of each format; some tokenizers have special tokens for them.
MARKERS: dict[str, tuple[str, ...]] = {name: reader.markers() for name, reader in _READERS.items()}

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_OTHER_TAGS = ("<tool_sep>", "<arg_key>", "<function=")  # within <tool_call>, instead of JSON
_JSON_CALL = re.compile(r"<tool_call>.{0,200}?(\"name\\?\"|\\\"name|tojson)", re.DOTALL)
_PYTHON_DEFINITION = re.compile(r"['\"\s]def ['\"]\s*[+~]")  # Command R's templates show the model its tools so
_PYTHON_CALL = re.compile(r"\bname(\s*\|\s*\w+)?\s*[+~]\s*['\"]\(")


def reader_of(name: str, tools: list[Any] | None = None) -> PartReader:
    """A reader of one answer. `tools` are those that were offered, as in OpenAI's API; formats whose arguments have no
    types need them to tell strings from other values."""
    return _READERS[name](tools)


def format_of(template: str) -> str | None:
    """The format in which a model with this chat template writes calls; None if it is unknown."""
    source = _COMMENT.sub("", template)
    if "<|tool_call_argument_begin|>" in source:
        return "kimi_k2"
    if "<｜tool▁call▁begin｜>" in source:
        return "deepseek_v3" if "```json" in source else "deepseek_v31"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<function=" in source:
        return "qwen3_coder" if "<parameter=" in source else None
    if "<arg_key>" in source:
        return "glm"
    if "<tool_call>" in source:
        writes_json = _JSON_CALL.search(source) and not any(tag in source for tag in _OTHER_TAGS)
        return "hermes" if writes_json else None
    if _PYTHON_CALL.search(source) and "<function_calls>" not in source and not _PYTHON_DEFINITION.search(source):
        return "pythonic"
    return "llama3" if '"parameters"' in source and "ipython" in source else None
