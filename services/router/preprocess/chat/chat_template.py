"""Renders a conversation with the checkpoint's chat template."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from services.router.preprocess.chat import template_abilities
from services.router.preprocess.chat.compiled_template import FAILURES, CompiledTemplate, Messages
from services.router.preprocess.chat.template_abilities import REASONING_NAMES, Abilities
from tandem.errors import CheckpointRefused, InvalidRequest

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
# Variables of templates that other fields of a request determine, or that are options of transformers.
RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", *SPECIAL_TOKENS}
DEFAULT, TOOL_USE = "default", "tool_use"  # names of a checkpoint's templates, as in transformers
MAX_KEPT = 16  # compiled templates of clients


@dataclass(frozen=True, slots=True)
class Rendering:
    """A request's options for rendering its chat."""

    variables: Mapping[str, Any] = field(default_factory=dict)  # for the template; one may be `documents`
    continue_last: bool = False  # the text ends with the last message's content
    generation_prompt: bool = True
    template: str | None = None  # another template: the name of one of the checkpoint's, or its source


AS_USUAL = Rendering()


class ChatTemplate:
    """The checkpoint's Jinja templates, run in a sandbox as transformers does.

    `variables` are bos_token, eos_token, ... `source` is the source of the default template, `tool_source` of the one
    used with tools, and `call` an answer with a call as rendered by the latter, empty if it shows no calls
    (`shows_calls`).
    """

    def __init__(
        self,
        source: str,
        variables: dict[str, str],
        others: Mapping[str, str] | None = None,
        *,
        from_requests: bool = False,
    ) -> None:
        """`others` are the checkpoint's other templates, by name. `from_requests`: a request may have its own template.
        Raises TemplateError for an invalid template."""
        self.source = source
        self.variables = variables
        self._from_requests = from_requests
        self._named = {name: _Template(one, variables) for name, one in {**(others or {}), DEFAULT: source}.items()}
        with_tools = self._named.get(TOOL_USE) or self._named[DEFAULT]
        self.tool_source = with_tools.compiled.source
        self.knows_tools = with_tools.knows_tools
        self.call, self.shows_calls = with_tools.abilities.call, with_tools.abilities.shows_calls

    def render(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, how: Rendering = AS_USUAL
    ) -> str:
        """Raises InvalidRequest when the template refuses the messages, does not support tools or documents, or does
        not show the message to be continued."""
        template = self._chosen(how.template, bool(tools))
        if tools and not template.knows_tools:
            raise InvalidRequest(
                "the chat template of this model supports no tools",
                field="chat.tools",
                bound="absent with this model",
            )
        _check_variables(how.variables, template.compiled)
        variables = template_abilities.fit_variables(how.variables, template.compiled, template.abilities)
        fitted = template_abilities.fit(messages, template.abilities)
        try:
            if how.continue_last:
                return _continued(template.compiled, fitted, {**variables, **self.variables}, tools)
            return template.compiled.render(
                fitted, {**variables, **self.variables}, tools, generation_prompt=how.generation_prompt
            )
        except FAILURES as error:
            raise InvalidRequest(
                f"the chat template of this model refuses these messages: {error}", field="chat.messages"
            ) from error

    def _chosen(self, wanted: str | None, tools: bool) -> _Template:
        if wanted is None:
            return self._named.get(TOOL_USE if tools else DEFAULT) or self._named[DEFAULT]
        if (named := self._named.get(wanted)) is not None:
            return named
        if not self._from_requests:
            raise InvalidRequest(
                "a chat template is a program that nothing bounds, and this server runs none that a request brings"
                " (setting allow_request_chat_template)",
                field="chat.template",
                bound=f"absent, or one of {', '.join(sorted(self._named))}",
            )
        try:
            return _of_request(wanted, tuple(self.variables.items()))
        except TemplateError as error:
            raise InvalidRequest(
                f"chat.template is not a Jinja template: {error}", field="chat.template", bound="a Jinja template"
            ) from error


class _Template:
    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.compiled = CompiledTemplate(source)
        self.abilities: Abilities = template_abilities.find(self.compiled, variables)
        self.knows_tools = "tools" in self.compiled.reads


@lru_cache(MAX_KEPT)
def _of_request(source: str, variables: tuple[tuple[str, str], ...]) -> _Template:
    return _Template(source, dict(variables))


def _check_variables(variables: Mapping[str, Any], template: CompiledTemplate) -> None:
    where = "chat.template_variables"
    for name in variables:
        if name in RESERVED or name in template.functions:
            raise InvalidRequest(
                f"{where}: {name} is what the server gives the template itself, or what a field of its own says",
                field=f"{where}.{name}",
                bound="other names",
            )
    if variables.get("documents") and "documents" not in template.reads:
        raise InvalidRequest(
            "the chat template of this model takes no documents; put them into a message",
            field=f"{where}.documents",
            bound="absent with this model",
        )


def _continued(
    template: CompiledTemplate, messages: Messages, variables: Mapping[str, Any], tools: list[Any] | None
) -> str:
    """The rendered messages up to the end of the last one's content, or of its reasoning if it has no content. A mark
    at that end shows where it is, as in transformers' `continue_final_message`."""
    field, bound = "chat.continue_last_message", "false, or true with a last message of an assistant, without calls"
    last = messages[-1]
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise InvalidRequest("the last message cannot be continued", field=field, bound=bound)
    reasoning = REASONING_NAMES if not last.get("content") and last.get(REASONING_NAMES[0]) else ()
    text = str(last[REASONING_NAMES[0]] if reasoning else last.get("content") or "")
    mark = f"END{secrets.token_hex(8)}"
    marked = {**last, **dict.fromkeys(reasoning or ("content",), f"{text}{mark} ")}
    rendered = template.render([*messages[:-1], marked], variables, tools, generation_prompt=False)
    at = rendered.rfind(mark)
    if at < 0 or text.strip() not in rendered[:at]:
        raise InvalidRequest(
            "the chat template of this model changes the last message, so that it cannot be continued",
            field=field,
            bound="false, or a last message that the template shows as it is",
        )
    # If the template trims text after the mark, it would also trim the text's own spaces.
    trimmed = text.strip() and not rendered.startswith(" ", at + len(mark))
    return rendered[: at - (len(text) - len(text.rstrip()) if trimmed else 0)]


# ---- the checkpoint's files


def load_template(folder: Path, *, from_requests: bool = False) -> ChatTemplate | None:
    """The template; None if the checkpoint has none. `from_requests`: a request may have its own. Raises
    CheckpointRefused if it cannot be read."""
    config_path = folder / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
    except ValueError as error:
        raise CheckpointRefused(f"{config_path} is not JSON: {error}") from error
    sources = _sources(folder, config)
    if (default := sources.pop(DEFAULT, None)) is None:
        return None
    variables = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            variables[name] = value
    try:
        return ChatTemplate(default, variables, sources, from_requests=from_requests)
    except TemplateError as error:
        raise CheckpointRefused(f"{folder} has a chat template that cannot be read: {error}") from error


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. Files take precedence over tokenizer_config.json, as in transformers."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (path := folder / "chat_template.jinja").is_file():
        files[DEFAULT] = path
    try:
        sources = {name: path.read_text("utf-8") for name, path in files.items()}
    except UnicodeDecodeError as error:
        raise CheckpointRefused(f"{folder} has a chat template that is not UTF-8: {error}") from error
    if DEFAULT in sources:
        return sources
    configured = config.get("chat_template")
    if isinstance(configured, str):
        configured = [{"name": DEFAULT, "template": configured}]
    listed = configured if isinstance(configured, list) else []
    named = {one.get("name"): one.get("template") for one in listed if isinstance(one, dict)}
    return {name: one for name, one in named.items() if isinstance(name, str) and isinstance(one, str)} | sources
