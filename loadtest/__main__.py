"""The load generator: requests at their times, whether earlier ones have ended or not, against any server.

    python -m loadtest run --target HOST:PORT|URL --rate R | --trace FILE [--rate R | --speed S]
    python -m loadtest search --target HOST:PORT|URL [--trace FILE]
    python -m loadtest compare A B
    python -m loadtest experiment disaggregated|interference [--quick] [--vllm]

HOST:PORT is a router of Tandem (gRPC); http://HOST:PORT any server with OpenAI's streaming completions. A and B are
reports that `--json` wrote, or two targets, which are measured in turn. docs/performance.md says how to read it.
Exits with 1 when something failed, and with 3 when the report is invalid because this client was late.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import report as reports
from loadtest.generator import Say
from loadtest.goodput import Load, Objective
from loadtest.local import precedence
from loadtest.plan import Plan, Search, measure, search
from loadtest.report import LATE_S, Report, Side
from loadtest.stats import Tick
from loadtest.targets import target
from tandem.errors import SettingsError, TandemError

INVALID = 3


def parse(arguments: list[str]) -> argparse.Namespace:
    """Exits with 2 and a sentence for a wrong command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    load, searched, written = _load_options(), _search_options(), _report_options()
    run = commands.add_parser("run", parents=[load, written], help="one load")
    find = commands.add_parser("search", parents=[load, searched, written], help="the highest rate that is kept")
    for one in (run, find):
        one.add_argument("--target", required=True, metavar="HOST:PORT|URL")
    beside = commands.add_parser("compare", parents=[load, written], help="two reports, or two targets in turn")
    beside.add_argument("sides", nargs=2, metavar="A B", help="two files of --json, or two targets")
    beside.add_argument("--rounds", type=_whole, default=2, metavar="N", help="of two targets [2]")
    experiment = commands.add_parser("experiment", parents=[written], help="systems side by side on this machine")
    experiment.add_argument("name", choices=("disaggregated", "interference"))
    experiment.add_argument("--quick", action="store_true", help="the least of everything: does it run at all")
    experiment.add_argument("--vllm", action="store_true", help="beside vLLM's CPU build, too")
    experiment.add_argument("--sides", metavar="A,B", help="of loadtest/peers/servers.py; the first is the baseline")
    experiment.add_argument("--rounds", type=_whole, metavar="N", help="of disaggregated")
    script, home = os.environ.get("PEERS_SCRIPT"), os.environ.get("PEERS_HOME", "~/.cache/tandem-peers")
    experiment.add_argument("--script", type=Path, default=script, help="starts vLLM [PEERS_SCRIPT]")
    experiment.add_argument("--home", type=Path, default=home, help="checkpoints and peers [PEERS_HOME]")
    return parser.parse_args(arguments)


def _load_options() -> argparse.ArgumentParser:
    parser, plan = argparse.ArgumentParser(add_help=False), Plan()
    parser.add_argument("--model", default="", help="of an HTTP server that has several; the first by default")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="of Azure, Mooncake or ServeGen; else Poisson")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=_number, metavar="R", help="requests a second, on average")
    pace.add_argument("--speed", type=_number, metavar="S", help="of a trace: 2 halves all gaps")
    parser.add_argument("--poisson", action="store_true", help="a trace's lengths at times by chance")
    parser.add_argument("--bursts", action="store_true", help="a trace's equal times as recorded, not spread")
    parser.add_argument("--scale", type=_whole, default=1, metavar="N", help="divides a trace's lengths [1]")
    parser.add_argument("--input", type=_whole, default=plan.input, metavar="N", help="tokens, without a trace [256]")
    parser.add_argument("--output", type=_whole, default=plan.output, metavar="N", help="tokens, without a trace [32]")
    parser.add_argument("--seconds", type=_number, default=plan.seconds, metavar="S", help="that are counted [60]")
    parser.add_argument("--warmup", type=float, default=plan.warmup, metavar="S", help="before, not counted [5]")
    parser.add_argument("--context", type=_whole, metavar="N", help="tokens of the longest request [the server's]")
    parser.add_argument("--vocab", type=_whole, default=plan.vocab, metavar="N", help="token ids are below it [256]")
    parser.add_argument("--seed", type=int, default=plan.seed, metavar="N", help="of the arrivals [1]")
    return parser


def _search_options() -> argparse.ArgumentParser:
    parser, how = argparse.ArgumentParser(add_help=False), Search()
    parser.add_argument("--start", type=_number, default=how.start, metavar="R", help="the first rate tried [1]")
    parser.add_argument("--precision", type=_number, default=how.precision, metavar="P", help="[0.1]")
    parser.add_argument("--tries", type=_whole, default=how.tries, metavar="N", help="rates at most [12]")
    return parser


def _report_options() -> argparse.ArgumentParser:
    parser, objective = argparse.ArgumentParser(add_help=False), Objective()
    parser.add_argument("--ttft", type=_number, default=objective.ttft, metavar="S", help="objective [2]")
    parser.add_argument("--tpot", type=_number, default=objective.tpot, metavar="S", help="objective [0.1]")
    share = objective.attainment
    parser.add_argument("--attainment", type=_number, default=share, metavar="SHARE", help="of all requests [0.9]")
    parser.add_argument("--late", type=_number, default=LATE_S, metavar="S", help="over it: invalid [0.05]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for `compare` and for programs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page with plots that needs nothing else")
    return parser


def planned(given: argparse.Namespace) -> Plan:
    return Plan(
        trace=given.trace,
        rate=given.rate,
        speed=given.speed,
        scale=given.scale,
        by_chance=given.poisson,
        bursts=given.bursts,
        input=given.input,
        output=given.output,
        seconds=given.seconds,
        warmup=given.warmup,
        seed=given.seed,
        vocab=given.vocab,
        context=given.context,
    )


def objective(given: argparse.Namespace) -> Objective:
    return Objective(given.ttft, given.tpot, given.attainment)


async def run(given: argparse.Namespace, say: Say) -> Report:
    async with target(given.target, given.model) as server:
        load, notes = await measure(server, planned(given), given.rate, objective(given), say)
        side = Side(server.model or given.target, server.address, server.model, [load])
    return Report(f"Load on {given.target}", objective(given), [side], notes)


async def find(given: argparse.Namespace, say: Say) -> Report:
    how = Search(given.start, given.precision, given.tries)
    async with target(given.target, given.model) as server:
        side = Side(server.model or given.target, server.address, server.model)
        notes = await search(server, planned(given), how, objective(given), say, side)
    return Report(f"Goodput of {given.target}", objective(given), [side], notes)


async def in_turn(given: argparse.Namespace, say: Say) -> Report:
    """Two targets, A B B A: the same arrivals for both."""
    sides = [Side(one, one, "") for one in given.sides]
    notes: list[str] = []
    async with target(given.sides[0], given.model) as one, target(given.sides[1], given.model) as other:
        for number in range(given.rounds):
            for place in (0, 1) if number % 2 == 0 else (1, 0):
                server, side = (one, other)[place], sides[place]
                side.model = server.model
                load, notes = await measure(server, planned(given), given.rate, objective(given), say)
                side.loads.append(load)
    notes = [*notes, f"{given.rounds} rounds in turn"]
    return Report(f"{given.sides[1]} against {given.sides[0]}", objective(given), sides, notes)


def compare(given: argparse.Namespace, say: Say) -> Report:
    files = [Path(one) for one in given.sides]
    there = [path.exists() for path in files]
    if all(there):
        one, other = map(reports.read, files)
        names = (files[0].stem, files[1].stem)
        return reports.beside(one, other, names if names[0] != names[1] else (str(files[0]), str(files[1])))
    if any(there):
        raise SettingsError(f"{given.sides[there.index(False)]} is no file, and the other one is", field="sides")
    return _measured(lambda: asyncio.run(in_turn(given, say)))


def experiment(given: argparse.Namespace, tick: Tick, say: Say) -> Report:
    from loadtest import experiments  # brings the engine and torch, which a client of a server far away needs not
    from loadtest.peers.servers import SIDES, Peers

    sides = given.sides.split(",") if given.sides else [*experiments.OURS, *(experiments.VLLM if given.vllm else ())]
    if wrong := set(sides) - set(SIDES):
        raise SettingsError(f"{', '.join(sorted(wrong))}: known are {', '.join(SIDES)}", field="sides")
    sizes = experiments.QUICK if given.quick else experiments.FULL
    sizes = replace(sizes, rounds=given.rounds or sizes.rounds)
    peers = Peers(given.script, given.home.expanduser())
    what = {"disaggregated": experiments.disaggregated, "interference": experiments.steady}[given.name]
    found = what(peers, sides, sizes, objective(given), tick, say)
    if given.quick:
        found.notes.insert(0, "--quick: it shows that everything works; the numbers mean nothing")
    return found


def _measured(work: Callable[[], Report]) -> Report:
    with precedence() as said:
        found = work()
    found.notes.append(said)
    return found


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    given = parse(arguments)
    try:
        with _ending(), _progress(given.command) as (tick, say):
            if given.command == "run":
                found = _measured(lambda: asyncio.run(run(given, say)))
            elif given.command == "search":
                found = _measured(lambda: asyncio.run(find(given, say)))
            elif given.command == "compare":
                found = compare(given, say)
            else:
                found = experiment(given, tick, say)
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was left running", file=sys.stderr)
        return 130
    found.bound = given.late
    found.notes.append(f"python -m loadtest {shlex.join(arguments)}")
    found.write(given.html, given.json)
    _show(found, given)
    return INVALID if found.faults() else 0


def _show(found: Report, given: argparse.Namespace) -> None:
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False, soft_wrap=True)
    console.print(found.title, style="bold", markup=False)
    for side in found.sides:
        best = ", ".join(f"{rate:.2f}" for rate in side.bests)
        console.print(f"{side.name}{f': highest rate kept {best} requests/s' if best else ''}", markup=False)
        for line in reports.lines(side.loads, found.objective):
            console.print(line, markup=False)
        for count, why in reports.failures(side.loads):
            console.print(f"  {count} times: {why}", markup=False)
    for row in reports.ratios(found):
        console.print(
            f"{row.side} / {found.sides[0].name}, {row.what}: {row.ratio.median:.2f} ({row.better} is better)",
            markup=False,
        )
    for note in found.notes:
        console.print(f"  {note}", style="dim", markup=False)
    for fault in found.faults():
        console.print(f"INVALID: {fault}", style="bold red", markup=False)
    for path in (given.json, given.html):
        if path:
            console.print(f"wrote {path}", style="dim", markup=False)


@contextmanager
def _progress(command: str) -> Iterator[tuple[Tick, Say]]:
    """A bar on a terminal; elsewhere a line for each thing that begins, and one for each load now and then."""
    errors, began = Console(stderr=True), monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, redirect_stdout=False) as progress:
        doing, last = progress.add_task(command, total=None), monotonic()

        def tick(what: str) -> None:
            progress.update(doing, description=what, total=None)
            if not errors.is_terminal:
                print(f"{monotonic() - began:7.1f} s  {what}", file=sys.stderr, flush=True)

        def say(load: Load, now: float) -> None:
            nonlocal last
            states = [one.state if one.ended else "in progress" for one in load.outcomes]
            counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
            late = max((one.late for one in load.outcomes[-50:]), default=0.0)
            line = f"{load.name}: {counts or 'nothing sent yet'}; late by {late * 1e3:.0f} ms"
            progress.update(doing, description=line, total=load.until, completed=min(now, load.until))
            if not errors.is_terminal and monotonic() - last > 5.0:
                last = monotonic()
                print(f"{last - began:7.1f} s  {line}", file=sys.stderr, flush=True)

        yield tick, say


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is no number over 0")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number over 0")
    return int(text)


@contextmanager
def _ending() -> Iterator[None]:
    """A request to end unwinds every `with` block, so that nothing is left running."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
