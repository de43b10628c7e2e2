"""What the log of a process shows of an error."""

from __future__ import annotations

import sys

import structlog
from structlog.dev import ConsoleRenderer, plain_traceback


def show_no_values() -> None:
    """Makes tracebacks plain. Where Rich is installed, structlog prints the local variables of every frame, so that
    a log sent along with a report has prompts and keys; and it takes 250 ms, during which a router relays no token.
    Safe to call twice."""
    *before, last = structlog.get_config()["processors"]
    if isinstance(last, ConsoleRenderer):
        renderer = ConsoleRenderer(colors=sys.stdout.isatty(), exception_formatter=plain_traceback)
        structlog.configure(processors=[*before, renderer])
