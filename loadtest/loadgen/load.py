"""The load generator's commands: open-loop load on any server."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadtest.harness import report as reports
from loadtest.harness.goodput import Objective, Say, Side
from loadtest.harness.options import Json, positive
from loadtest.harness.processes import precedence
from loadtest.harness.progress import progress
from loadtest.harness.report import LATE_S, Report
from loadtest.loadgen import plan as plans
from loadtest.loadgen import targets
from loadtest.loadgen.plan import Plan, Search, measure
from tandem.errors import SettingsError

INVALID = 3
Target = Annotated[str, typer.Option(metavar="HOST:PORT|URL", help="Router of Tandem (gRPC), or any OpenAI server.")]
Model = Annotated[str, typer.Option(help="For an HTTP server with several models; the first by default.")]


@dataclass(frozen=True)
class Output:
    """Where the report goes, and when it is invalid."""

    late: Annotated[
        float,
        typer.Option(
            metavar="S", help="Lateness of this client (p99) that makes the report invalid.", callback=positive
        ),
    ] = LATE_S
    data: Json = None
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots, in one file.")] = None

    def finish(self, report: Report, command_line: typer.Context) -> int:
        """Writes and prints the report. Returns the exit code."""
        report.bound = self.late
        report.notes.append(f"python -m loadtest {shlex.join(command_line.obj)}")
        report.write(self.html, self.data)
        _show(report)
        for path in (self.data, self.html):
            if path:
                print(f"wrote {path}")
        return INVALID if report.faults() else 0


def run(
    command_line: typer.Context, target: Target, plan: Plan, objective: Objective, to: Output, model: Model = ""
) -> int:
    """One load on one server: Poisson arrivals (--rate), or a trace (--trace, with --rate or --speed).

    HOST:PORT is a router of Tandem (gRPC); http://HOST:PORT any server with OpenAI's streaming completions.
    docs/measuring.md explains the report. Exits with 1 when no load could be sent, and with 3 when the report is
    invalid because this client was late. Requests that fail are part of the report.
    """

    async def load(say: Say) -> Report:
        async with targets.target(target, model) as server:
            report, notes = await measure(server, plan, plan.rate, objective, say)
            side = Side(server.model or target, server.address, server.model, [report])
        return Report(f"Load on {target}", objective, [side], notes)

    _check(plan)
    return to.finish(_measured(load, "run"), command_line)


def search(
    command_line: typer.Context,
    target: Target,
    plan: Plan,
    limits: Search,
    objective: Objective,
    to: Output,
    model: Model = "",
) -> int:
    """The highest rate of requests that keeps the objective, on one server. Options as for `run`."""

    async def find(say: Say) -> Report:
        async with targets.target(target, model) as server:
            side = Side(server.model or target, server.address, server.model)
            notes = await plans.search(server, plan, limits, objective, say, side)
        return Report(f"Goodput of {target}", objective, [side], notes)

    _check(plan)
    return to.finish(_measured(find, "search"), command_line)


def compare(
    command_line: typer.Context,
    baseline: Annotated[str, typer.Argument(metavar="A", help="A file of --json, or a target.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another of the same kind.")],
    plan: Plan,
    objective: Objective,
    to: Output,
    model: Model = "",
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds of two targets.")] = 2,
) -> int:
    """Two reports that `--json` wrote, or two targets that are measured in turn with the same arrivals (A B B A)."""
    _check(plan)
    files = [Path(baseline), Path(other)]
    there = [path.exists() for path in files]
    if all(there):
        names = (files[0].stem, files[1].stem)
        names = names if names[0] != names[1] else (baseline, other)
        return to.finish(reports.beside(reports.read(files[0]), reports.read(files[1]), names), command_line)
    if any(there):
        raise SettingsError(f"{files[there.index(False)]} is no file, and the other one is", field="sides")

    async def in_turn(say: Say) -> Report:
        sides = [Side(baseline, baseline, ""), Side(other, other, "")]
        notes: list[str] = []
        async with targets.target(baseline, model) as first, targets.target(other, model) as two:
            for number in range(rounds):
                for place in (0, 1) if number % 2 == 0 else (1, 0):
                    server, side = (first, two)[place], sides[place]
                    side.model = server.model
                    load, notes = await measure(server, plan, plan.rate, objective, say)
                    side.loads.append(load)
        return Report(f"{other} against {baseline}", objective, sides, [*notes, f"{rounds} rounds in turn"])

    return to.finish(_measured(in_turn, "compare"), command_line)


def _check(plan: Plan) -> None:
    if plan.rate is not None and plan.speed is not None:
        raise typer.BadParameter("--rate and --speed exclude each other")


def _measured(work: Callable[[Say], Awaitable[Report]], name: str) -> Report:
    async def run() -> Report:
        return await work(say)

    with progress(name) as (_, say), precedence() as priority_note:
        report = asyncio.run(run())
    report.notes.append(priority_note)
    return report


def _show(report: Report) -> None:
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False, soft_wrap=True)
    console.print(report.title, style="bold", markup=False)
    for side in report.sides:
        best = ", ".join(f"{rate:.2f}" for rate in side.bests)
        console.print(f"{side.name}{f': highest rate kept {best} requests/s' if best else ''}", markup=False)
        for line in reports.lines(side.loads, report.objective):
            console.print(line, markup=False)
        for count, why in reports.failures(side.loads):
            console.print(f"  {count} times: {why}", markup=False)
    for row in reports.ratios(report):
        console.print(
            f"{row.side} / {report.sides[0].name}, {row.what}: {row.ratio.median:.2f} ({row.better} is better)",
            markup=False,
        )
    for note in report.notes:
        console.print(f"  {note}", style="dim", markup=False)
    for fault in report.faults():
        console.print(f"INVALID: {fault}", style="bold red", markup=False)
