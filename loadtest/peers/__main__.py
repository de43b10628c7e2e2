"""`make peers`: Tandem beside its peers on this machine, as ratios of things measured in turn in one run.

    python -m loadtest.peers serve|interference|engines|soak|exposed|frontend [--quick] [--json FILE]

docs/performance.md says what each measures and how to install the peers. Everything that was started ends with it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import machine
from loadtest.bench import FILE_WIDTH, conditions, show
from loadtest.peers import engines, frontend, interference, serve, soak
from loadtest.peers.servers import SIDES, Peers
from loadtest.stats import Section, Tick
from tandem.errors import TandemError
from tandem.settings import Settings

PARTS = ("serve", "interference", "engines", "soak", "exposed", "frontend")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Exits with 2 and a sentence for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.peers", description="Tandem beside its peers")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="the least of everything: does it run at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--runs", type=_count, metavar="N", help="of each side (not for soak)")
    parser.add_argument("--requests", type=_count, metavar="N", help="of soak")
    lists = {
        "shape": ("serve", serve.Plan.shapes),
        "series": ("serve", tuple(serve.SERIES)),
        "sides": ("interference", SIDES),
        "engines": ("engines", engines.ENGINES),
    }
    for name, (part, known) in lists.items():
        parser.add_argument(f"--{name}", type=_some_of(known), metavar="A,B", help=f"of {part}: {','.join(known)}")
    parser.add_argument("--concurrency", type=_counts, metavar="N,N", help="of serve: 1,8,16")
    parser.add_argument("--waves", type=_count, metavar="N", help="of serve: requests behind one another at each place")
    parser.add_argument("--threads", type=_counts, metavar="N,N", help="of engines: 1,2")
    parser.add_argument("--set", type=_settings, default={}, metavar="NAME=VALUE,...", help="settings of Tandem")
    script, home = os.environ.get("PEERS_SCRIPT"), os.environ.get("PEERS_HOME", "~/.cache/tandem-peers")
    parser.add_argument("--script", type=Path, default=script, help="starts vLLM [PEERS_SCRIPT]")
    parser.add_argument("--home", type=Path, default=home, help="the peers' environments [PEERS_HOME]")
    return parser.parse_args(arguments)


def planned(given: argparse.Namespace) -> dict[str, Any]:
    """The plan of each part by name: its own numbers, those of --quick, and what the command line says."""
    quick: bool = given.quick
    plans: dict[str, Any] = {
        "serve": serve.Plan(shapes=("SmolLM2-135M",), runs=1, waves=1) if quick else serve.Plan(),
        "interference": interference.Plan(rounds=1, seconds=20.0, settle=3.0) if quick else interference.Plan(),
        "engines": engines.Plan(rounds=2, steps=6) if quick else engines.Plan(),
        "soak": soak.Plan(requests=200, samples=10, repeats=2) if quick else soak.Plan(),
        "frontend": frontend.Plan(rounds=1, seconds=1.0, alone=20) if quick else frontend.Plan(),
    }
    plans["exposed"] = plans["soak"]
    said: dict[str, dict[str, Any]] = {
        "serve": {
            "shapes": given.shape,
            "series": given.series,
            "concurrency": given.concurrency,
            "runs": given.runs,
            "waves": given.waves,
        },
        "interference": {"sides": given.sides, "rounds": given.runs},
        "engines": {"engines": given.engines, "threads": given.threads, "rounds": given.runs},
        "soak": {"requests": given.requests},
        "exposed": {"repeats": given.runs},
        "frontend": {"rounds": given.runs},
    }
    return {
        part: replace(plans[part], **{name: value for name, value in said[part].items() if value is not None})
        for part in PARTS
    }


def measure(part: str, plan: Any, peers: Peers, tick: Tick) -> list[Section]:
    run: dict[str, Callable[[], list[Section]]] = {
        "serve": lambda: serve.run(peers, plan, tick),
        "interference": lambda: interference.run(peers, plan, tick),
        "engines": lambda: engines.run(peers, plan, tick),
        "soak": lambda: [soak.run(peers, plan, tick)],
        "exposed": lambda: [soak.run_exposed(peers, plan, tick)],
        "frontend": lambda: frontend.run(peers, plan, tick),
    }
    return run[part]()


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    given = parse(arguments)
    plan = planned(given)[given.part]
    before, began = conditions(), monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        with Progress(*columns, console=errors, transient=True) as progress:
            total = plan.exposed_ticks if given.part == "exposed" else plan.ticks
            task = progress.add_task(given.part, total=total)

            def tick(what: str) -> None:
                progress.update(task, description=what, advance=1)
                if not errors.is_terminal:
                    print(f"{monotonic() - began:7.1f} s  {what}", file=sys.stderr, flush=True)

            about = machine.measure(machine.usable_threads(), machine.QUICK if given.quick else machine.Plan())
            sections = measure(given.part, plan, Peers(given.script, given.home.expanduser(), given.set), tick)
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was left running", file=sys.stderr)
        return 130
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    machine.show(about, console)
    for section in sections:
        show(section, console)
    console.print(", ".join(f"{name} {value}" for name, value in before.items()), style="dim", highlight=False)
    if given.json:
        report = {"conditions": before, "machine": about.to_dict(), "seconds": monotonic() - began}
        report |= {"plan": vars(plan), "set": given.set}
        report["sections"] = [section.to_dict() for section in sections]
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _some_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        if wrong := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(wrong))} is none of {', '.join(known)}")
        return tuple(text.split(","))

    return names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number over 0")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_count, text.split(",")))


def _settings(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if wrong := [name for name, _, value in pairs if name not in Settings.model_fields or not value]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: give a setting of docs/operations.md and its value")
    return {name: value for name, _, value in pairs}


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
