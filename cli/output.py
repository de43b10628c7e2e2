"""Common code of the commands: connection, output, and errors."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.errors import (
    Busy,
    DeadlineExceeded,
    ResumeFailed,
    SettingsError,
    TandemError,
    TooLarge,
    Unavailable,
    WorkerLost,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tandem.client import Client

INTERRUPTED = 130


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"


TEXT, JSON = Format

Target = Annotated[
    str, typer.Option("--target", metavar="HOST:PORT", envvar="TANDEM_TARGET", help="The cluster's router.")
]
Output = Annotated[Format, typer.Option("--output", help="json: one JSON value on stdout and nothing else.")]
DEFAULT_TARGET = "localhost:50051"


def display(what: RenderableType) -> None:
    from rich.console import Console

    # Without a terminal nothing is cut: a pipe or a log is as wide as the table.
    Console(highlight=False, width=None if sys.stdout.isatty() else 240).print(what, crop=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def write(text: str) -> None:
    if sys.stdout.isatty():
        from cli.rendering import printable

        text = printable(text)
    sys.stdout.write(text)
    sys.stdout.flush()


def write_dim(text: str) -> None:
    """Dimmed on a terminal; absent in a pipe, where only the answer is wanted."""
    if text and sys.stdout.isatty():
        from cli.rendering import printable

        sys.stdout.write(f"\x1b[2m{printable(text)}\x1b[0m")
        sys.stdout.flush()


def tell(what: RenderableType) -> None:
    """A text is no markup: it may be what a user, a model or a server said."""
    from rich.console import Console
    from rich.text import Text

    from cli.rendering import printable

    shown = Text(printable(what)) if isinstance(what, str) else what
    Console(stderr=True, highlight=False).print(shown, style="dim", soft_wrap=True)


@contextmanager
def reported(target: str | None = None, *, timed: bool = False) -> Iterator[None]:
    """Turns an error into a sentence on stderr and the exit code. `timed`: see `sentence`."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of the output is gone; exit without a second error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except TandemError as error:
        print(f"error: {sentence(error, target, timed=timed)}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, SettingsError) else 1) from error


@contextmanager
def connected(target: str, *, timed: bool = False) -> Iterator[Client]:
    """A client; an error ends the command as above."""
    with reported(target, timed=timed):
        from tandem.client import Client

        with Client(target) as client:
            yield client


def sentence(error: TandemError, target: str | None = None, *, timed: bool = False) -> str:
    """The error for a person: what, where, the bound, and what to do. `timed`: the command was given --timeout."""
    if target is not None and isinstance(error, WorkerLost) and _CONNECT_FAILURE.search(error.message):
        why = error.message.rpartition(": ")[2]
        return f"nothing answers at {target} ({why}); start a cluster with `tandem up`, or name one with --target"
    what = error.message.strip().rstrip(".") or error.reason
    if error.field and error.field not in what:
        what = f"{error.field}: {what}"
    if error.bound and error.bound not in what:
        what += f" (allowed: {error.bound})"
    advice = "allow more time with --timeout" if timed and isinstance(error, DeadlineExceeded) else _advice(error)
    return f"{what}; {advice}" if advice else what


# gRPC's message when it cannot reach a server.
_CONNECT_FAILURE = re.compile("failed to connect|DNS resolution failed", re.IGNORECASE)


def _advice(error: TandemError) -> str:
    if error.retry_after is not None:
        return f"try again in {error.retry_after:g} s"
    match error:
        case Busy() | Unavailable():
            return "try again"
        case ResumeFailed():
            return "send the request again"
        case TooLarge():
            return "send less"
    return ""
