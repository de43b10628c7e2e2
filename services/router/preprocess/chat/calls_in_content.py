"""Puts the calls of earlier turns into the text of their messages, in the model's format, for chat templates that show
no calls (LFM2's, Granite 3.3's). Otherwise the model would read results without calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.router.preprocess.chat import forced_calls

# The formats of such models. For other formats all known templates show calls.
FORMATS = ("lfm2", "granite")


def calls_in_content(messages: Sequence[dict[str, Any]], format: str) -> list[dict[str, Any]]:
    """The messages, with calls at the end of their content; unchanged for other formats."""
    if format not in FORMATS:
        return list(messages)
    return [
        {**message, "content": f"{message.get('content') or ''}{_written(message['tool_calls'], format)}"}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _written(calls: Sequence[Mapping[str, Any]], format: str) -> str:
    functions = [call["function"] for call in calls]
    if format == "lfm2":
        return f"<|tool_call_start|>[{', '.join(map(_in_python, functions))}]<|tool_call_end|>"
    return "\n".join(
        forced_calls.written(function["name"], _json(function.get("arguments")), format) for function in functions
    )


def _in_python(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        return f"{function['name']}({arguments or ''})"
    return f"{function['name']}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
