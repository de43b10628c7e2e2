"""How a script that runs in a client's own environment reports what it did: a line of JSON for each check."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

TOOL = {
    "name": "height",
    "description": "The height of a mountain in metres.",
    "parameters": {"type": "object", "properties": {"peak": {"enum": ["Eiger", "Jungfrau"]}}, "required": ["peak"]},
}
QUESTION = "How high is the Eiger?"


def target() -> tuple[str, str]:
    """The server's URL without a path, and the model's name."""
    return sys.argv[1], sys.argv[2]


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
