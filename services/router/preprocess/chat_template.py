"""The checkpoint's chat template: a conversation as the model reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.router.answer.call_formats.registry import format_of
from tandem.errors import CheckpointRefused, InvalidRequest


class ChatTemplate:
    """The checkpoint's Jinja template, run in a sandbox as transformers does.

    `variables` are bos_token, eos_token, ... `calls` is the format in which the model writes tool calls; None: none.
    """

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        """Raises TemplateError for an invalid template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._template = environment.from_string(source)
        self.source = source
        self.variables = variables
        self._knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        self.calls = format_of(source) if self._knows_tools else None

    def render(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """Raises InvalidRequest when the template refuses the messages, or does not support tools."""
        if tools and self.calls is None:
            raise InvalidRequest(
                "the chat template of this model supports no tools, or no known format of calls",
                field="chat.tools",
                bound="absent with this model",
            )
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=True, **self.variables
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template of this model refuses these messages: {error}", field="chat.messages"
            ) from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def load_template(folder: Path) -> ChatTemplate | None:
    """None: the checkpoint has none. Raises CheckpointRefused for one that cannot be read."""
    config_path, jinja_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        config: dict[str, Any] = json.loads(config_path.read_text()) if config_path.is_file() else {}
    except ValueError as error:
        raise CheckpointRefused(f"{config_path} is not JSON: {error}") from error
    source = jinja_path.read_text() if jinja_path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates: the default one serves plain chat
        source = next((template["template"] for template in source if template.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    variables = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            variables[name] = value
    try:
        return ChatTemplate(source, variables)
    except TemplateError as error:
        raise CheckpointRefused(f"{folder} has a chat template that cannot be read: {error}") from error
