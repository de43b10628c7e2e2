"""The command line, `tandem`.

Facts go to stdout, with `--output json` as one JSON value and nothing else; progress and errors go to stderr. The exit
code is 0 only on success, 1 for an error, 2 for a wrong command line, 130 for Ctrl-C. Commands import what they need
when they run, so that `--help` is quick.
"""

from __future__ import annotations

import sys

import typer

from cli import cluster_commands, operator_commands, request_commands
from cli.output import INTERRUPTED

app = typer.Typer(
    help="Serve language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for part in (cluster_commands, request_commands, operator_commands):
    app.add_typer(part.app)


def main() -> None:
    """The `tandem` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character ends no stream
    try:
        app(prog_name="tandem")
    except RuntimeError as error:
        # Ctrl-C in the middle of threading.Condition.wait surfaces as "cannot release un-acquired lock".
        if isinstance(error.__context__, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        raise
