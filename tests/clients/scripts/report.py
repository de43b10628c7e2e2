"""How a script that runs in a client's own environment learns about the server, and reports what the client did: a line
of JSON for each check. Only the standard library: no environment has anything else in common.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

TOOL = {
    "name": "height",
    "description": "The height of a mountain in metres.",
    "parameters": {"type": "object", "properties": {"peak": {"enum": ["Eiger", "Jungfrau"]}}, "required": ["peak"]},
}
QUESTION = "How high is the Eiger?"
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


def target() -> SimpleNamespace:
    """What tests/clients/test_clients.py says of the server, and `program`: a command-line client's executable."""
    return SimpleNamespace(**json.loads(sys.argv[1]))


def check(name: str, work: Callable[[], Any]) -> None:
    """Runs one check. What it returns is shown; an exception is its failure."""
    try:
        print(json.dumps({"check": name, "ok": True, "detail": str(work())[:200]}), flush=True)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the result of this check
        place = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({place.name}:{place.lineno})"
        print(json.dumps({"check": name, "ok": False, "detail": detail[:600]}), flush=True)


def need(condition: object, problem: object) -> None:
    if not condition:
        raise ValueError(problem)


def refused(kind: type[Exception], work: Callable[[], Any]) -> str:
    """The message with which the client refuses, and its code, which newer SDKs leave out of the message. Raises
    ValueError if it does not refuse."""
    try:
        answer = work()
    except kind as error:
        return f"{kind.__name__}: {error} {getattr(error, 'code', None) or ''}".rstrip()
    raise ValueError(f"no {kind.__name__}, but {answer}")
