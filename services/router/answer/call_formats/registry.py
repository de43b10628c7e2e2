"""The formats of calls by name, and the detection of a chat template's format."""

from __future__ import annotations

import re
from typing import Any

from services.router.answer.call_formats.call_reader import CallReader
from services.router.answer.call_formats.gemma_calls import FunctionGemmaCalls, GemmaCalls
from services.router.answer.call_formats.invoke_calls import DsmlCalls, MiniMaxCalls
from services.router.answer.call_formats.json_calls import HermesCalls, Llama3Calls, MistralCalls
from services.router.answer.call_formats.list_calls import (
    ApertusCalls,
    CohereCalls,
    GraniteCalls,
    NemotronCalls,
    TagListCalls,
)
from services.router.answer.call_formats.named_calls import (
    DeepSeekCalls,
    FunctionTagCalls,
    KimiCalls,
    RecipientCalls,
)
from services.router.answer.call_formats.pythonic_calls import Lfm2Calls, PythonicCalls
from services.router.answer.call_formats.xml_calls import GlmCalls, HunyuanCalls, Qwen3CoderCalls
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
    "deepseek_v32": DsmlCalls,
    "deepseek_v4": DsmlCalls,
    "kimi_k2": KimiCalls,
    "minimax_m2": MiniMaxCalls,
    "gemma4": GemmaCalls,
    "functiongemma": FunctionGemmaCalls,
    "cohere": CohereCalls,
    "hunyuan_a13b": TagListCalls,
    "hy_v3": HunyuanCalls,
    "lfm2": Lfm2Calls,
    "apertus": ApertusCalls,
    "functionary_v31": FunctionTagCalls,
    "functionary_v32": RecipientCalls,
    "nemotron": NemotronCalls,
    "granite": GraniteCalls,
}
NAMES = tuple(_READERS)

# The markers of each format; some tokenizers have special tokens for them.
MARKERS: dict[str, tuple[str, ...]] = {name: reader.markers() for name, reader in _READERS.items()}
# Special tokens that are a part of the markers.
TOKENS: dict[str, tuple[str, ...]] = {name: reader.tokens for name, reader in _READERS.items()}

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_OTHER_TAGS = ("<tool_sep", "<arg_key", "<function=", "<tool_calls>")  # beside or within <tool_call>, not JSON in it
_JSON_CALL = re.compile(r"<tool_call>.{0,200}?(\"name\\?\"|\\\"name|tojson)", re.DOTALL)
_PYTHON_DEFINITION = re.compile(r"['\"\s]def ['\"]\s*[+~]")  # how Command R's templates show tools to the model
_PYTHON_CALL = re.compile(r"\bname(\s*\|\s*\w+)?\s*[+~]\s*['\"]\(")


def _marks(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, patterns))


# Formats by the texts that a template and its rendered call must all have; the first match counts.
_MARKS: dict[str, tuple[re.Pattern[str], ...]] = {
    "kimi_k2": _marks(r"<\|tool_call_argument_begin\|>"),
    "deepseek_v3": _marks("<｜tool▁call▁begin｜>", "```json"),
    "deepseek_v31": _marks("<｜tool▁call▁begin｜>"),
    "deepseek_v4": _marks("<｜DSML｜tool_calls>"),
    "deepseek_v32": _marks("｜DSML｜"),
    "gemma4": _marks(r"<\|tool_call>call:"),
    "functiongemma": _marks("<start_function_call>call:"),
    "mistral": _marks(r"\[TOOL_CALLS\]"),
    "minimax_m2": _marks("<minimax:tool_call>", '<parameter name="'),
    "cohere": _marks(r"<\|START_ACTION\|>", '"tool_name"'),
    "apertus": _marks(r"<\|tools_prefix\|>"),
    "lfm2": _marks(r"<\|tool_(list|call)_start\|>"),
    "functionary_v32": _marks(">>>all", r">>>\$\{recipient\}"),
    "hy_v3": _marks("<tool_sep", "<arg_key"),
    "nemotron": _marks(r"<TOOLCALL>\s*\["),
    "granite": _marks(r"<\|tool_call\|> followed by a JSON list"),
    "hunyuan_a13b": _marks(r"<tool_calls>\s*\[?\s*\{\s*\"name"),
    "functionary_v31": _marks(r"<function=[^<>]+>\{(?!\{)", r"\A(?![\s\S]*<parameter=)"),
}


def reader_of(name: str, tools: list[Any] | None = None) -> PartReader:
    """A reader of one answer. `tools` are the offered tools, as in OpenAI's API; formats with untyped arguments need
    them to distinguish strings from other values."""
    return _READERS[name](tools)


def format_of(template: str, written: str = "") -> str | None:
    """The format of calls of a model with this chat template; None if it is unknown. `written`: a rendered answer with
    a call, because some templates compose their markers from pieces."""
    source = _COMMENT.sub("", template)
    both = f"{source}\n{written}"
    marked = next((name for name, marks in _MARKS.items() if all(mark.search(both) for mark in marks)), None)
    return marked or _by_tags(source)


def _by_tags(source: str) -> str | None:
    """The format, among those that share their markers."""
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
