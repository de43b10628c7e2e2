"""A chat template as transformers compiles it: Jinja in a sandbox, with the extensions that checkpoints expect.

Source: `_compile_jinja_template` in transformers/utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What a template may raise for messages that it refuses.
FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)

Messages = Sequence[Mapping[str, Any]]


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the model's text for training. Here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class CompiledTemplate:
    def __init__(self, source: str) -> None:
        """Raises TemplateError for an invalid template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.reads = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # in the Python that Jinja generates
            raise TemplateError(f"it is nested too deep, or has an impossible value: {error}") from error
        self.functions = frozenset(environment.globals)

    def render(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        tools: list[Any] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Raises one of FAILURES. As with transformers, absent `tools` and `documents` are none."""
        return self._template.render(
            {
                "documents": None,
                **variables,
                "messages": messages,
                "tools": tools or None,
                "add_generation_prompt": generation_prompt,
            }
        )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter tojson; Jinja's own would escape HTML. Templates pass these options by name and by position."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
