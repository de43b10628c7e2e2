"""What a measurement is doing: a bar on a terminal; elsewhere a line for each thing that begins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.harness.goodput import Load, Say
from loadtest.harness.interrupts import check
from loadtest.harness.stats import Tick

SAY_EVERY_S = 5.0


@contextmanager
def progress(command: str, total: int | None = None) -> Iterator[tuple[Tick, Say]]:
    """`total` is the number of ticks; without it the bar is that of the load which is said to run."""
    errors, began = Console(stderr=True), monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, redirect_stdout=False) as shown:
        task, last = shown.add_task(command, total=total), monotonic()

        def line(text: str) -> None:
            if not errors.is_terminal:
                print(f"{monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

        def tick(what: str) -> None:
            check()
            shown.update(task, description=what, total=total, advance=1 if total else 0)
            line(what)

        def say(load: Load, now: float) -> None:
            nonlocal last
            states = [outcome.state if outcome.ended else "in progress" for outcome in load.outcomes]
            counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
            late = max((outcome.late for outcome in load.outcomes[-50:]), default=0.0)
            text = f"{load.name}: {counts or 'nothing sent yet'}; late by {late * 1e3:.0f} ms"
            shown.update(task, description=text, total=load.until, completed=min(now, load.until))
            if monotonic() - last > SAY_EVERY_S:
                last = monotonic()
                line(text)

        yield tick, say
