"""The log of a process: a line on stderr for each event, for people or as JSON, by the settings `log_format` and
`log_level`. Every process of a cluster calls `configure` before its first line; a program that embeds a client keeps
its own configuration.

Lines have no text of prompts and answers, no keys, and no local variables of a traceback. Lines of libraries, which use
`logging`, have the same form; below `warning` only with `log_level` = debug.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog
from structlog.contextvars import merge_contextvars
from structlog.dev import ConsoleRenderer
from structlog.processors import ExceptionRenderer, JSONRenderer, TimeStamper, add_log_level
from structlog.stdlib import ProcessorFormatter
from structlog.typing import ExcInfo, Processor

from tandem.settings import Settings

MAX_VALUE_CHARACTERS = 2000  # of one value of a line
MAX_TRACEBACK_CHARACTERS = 16_000
TRACEBACK_MARGIN = "    "  # before each of its lines, so that none can look like the line of another event
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

Event = MutableMapping[str, Any]
_process = {"name": ""}
_configured: dict[tuple[str, str], list[Processor]] = {}


class _Stderr:
    """The current stderr, looked up for each line. A line that cannot be written (a full disk, a closed pipe) is lost:
    the error must end no request and no background task."""

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            return sys.stderr.write(text)
        return 0

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


class _Handler(logging.Handler):
    """Lines of `logging`, whose formatter is a ProcessorFormatter."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 (as every handler of the library)
            self.handleError(record)


_handler = _Handler()


def configure(settings: Settings, process: str) -> None:
    """`process` names the process in each of its lines. Safe to repeat, also under another name: a worker whose role
    was switched has one."""
    _process["name"] = process
    wanted = settings.log_format, settings.log_level
    if structlog.get_config()["processors"] is _configured.get(wanted):
        return
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    last = _renderers(settings.log_format)
    before: list[Processor] = [merge_contextvars, add_log_level, TimeStamper(fmt="iso"), _of_process]
    _handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=before, processors=[ProcessorFormatter.remove_processors_meta, _bounded, *last]
        )
    )
    root = logging.getLogger()
    if _handler not in root.handlers:
        root.addHandler(_handler)
    _handler.setLevel(level if level == logging.DEBUG else max(level, logging.WARNING))
    _configured[wanted] = [*before, _bounded, *last]
    structlog.configure(
        processors=_configured[wanted],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Stderr())),
    )


def _renderers(form: str) -> list[Processor]:
    """Tracebacks are plain: where Rich is installed, structlog prints the local variables of every frame, so that a
    log would have prompts and keys; and it takes 250 ms, during which a router relays no token."""
    if form == "json":
        return [ExceptionRenderer(_traceback), JSONRenderer()]
    return [ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_console_traceback)]


def _console_traceback(line: TextIO, exc_info: ExcInfo) -> None:
    line.write("\n" + _traceback(exc_info))


def _traceback(exc_info: ExcInfo) -> str:
    """A long one without its middle: its messages may quote a client's input."""
    text = "".join(traceback.format_exception(*exc_info)).rstrip()
    if len(text) > MAX_TRACEBACK_CHARACTERS:
        half = MAX_TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}...\n...{text[-half:]}"
    return "\n".join(TRACEBACK_MARGIN + _escaped(line) for line in text.split("\n"))


def _of_process(logger: Any, method: str, event: Event) -> Event:
    event["process"] = _process["name"]
    return event


def _bounded(logger: Any, method: str, event: Event) -> Event:
    """Escapes and truncates values, because they may quote a client's input, which must neither begin a new line nor
    move the terminal's cursor nor fill the disk."""
    for name, value in event.items():
        if isinstance(value, str):
            if len(value) > MAX_VALUE_CHARACTERS:
                value = value[:MAX_VALUE_CHARACTERS] + "..."
            event[name] = _escaped(value)
    return event


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
