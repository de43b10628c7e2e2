"""`make bench`: what Tandem costs, as ratios of two things measured in turn in one run on this machine.

    python -m loadtest.bench [--quick] [--json FILE] [--only step,link,hop,ttft,spec,telemetry]

Absolute times stand next to the ratios for orientation only. Every value is a median with its middle half. Exits 0 when
everything was measured; the processes that it starts end with it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.checkpoints import make_checkpoint
from loadtest import hop, link, machine, speculation, step, telemetry, ttft
from loadtest.stats import Section, Spread, Tick
from tandem.errors import TandemError

THREADS = 1  # of the measured engine; the workers have one each, too
DEMO = Path(__file__).parents[1] / "demo" / "model"
DEMO_VOCAB = 2048
FILE_WIDTH = 150  # columns, where the output is no terminal
PARTS = ("step", "link", "hop", "ttft", "spec", "telemetry")


@dataclass(frozen=True)
class Size:
    """What one run measures, and on which shape of model."""

    machine: machine.Plan = field(default_factory=machine.Plan)
    shape: str = "SmolLM2-135M"
    vocab: int = 49152
    step: step.Plan = field(default_factory=step.Plan)
    link: link.Plan = field(default_factory=link.Plan)
    hop: hop.Plan = field(default_factory=hop.Plan)
    ttft: ttft.Plan = field(default_factory=ttft.Plan)
    spec: speculation.Plan = field(default_factory=speculation.Plan)
    telemetry: telemetry.Plan = field(default_factory=telemetry.Plan)


QUICK = Size(
    machine=machine.QUICK,
    shape="tiny-llama",
    vocab=384,
    step=step.Plan(prompt=64, batches=(1, 2), context=32, repeats=3, dtypes=("float32",)),
    link=link.Plan(total=4 * 2**20, blocks=(64 * 2**10,), repeats=3),
    hop=hop.Plan(requests=5, prompt=16, streams=(2,), tokens=128, rounds=2),
    ttft=ttft.Plan(prompts=(32, 128), repeats=2, streams=2, stream_tokens=500, settle=0.2, calm=0.3, kv_blocks=256),
    spec=speculation.Plan(streams=(1,), tokens=12, noise=12, repeats=2),
    telemetry=telemetry.Plan(rounds=2, requests=2, few=2, streams=2, prompt=16, tokens=16),
)


def measure(size: Size, parts: list[str], progress: Progress, stop: _Stop) -> dict[str, Section]:
    """The sections by part, in their order. Raises what a part raises; nothing is left running then either."""
    ticks = {"step": size.step.ticks, "link": size.link.ticks, "hop": size.hop.ticks, "ttft": size.ttft.ticks}
    ticks |= {"spec": size.spec.ticks, "telemetry": size.telemetry.ticks}
    task = progress.add_task("preparing", total=1 + sum(ticks[part] for part in parts))

    def tick_of(part: str) -> Tick:
        def tick(what: str) -> None:
            stop.check()
            progress.update(task, description=f"{part}: {what}", advance=1)

        return tick

    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", size.shape)
        run: dict[str, Callable[[], Section]] = {
            "step": lambda: step.run(checkpoint, size.step, THREADS, tick_of("step")),
            "link": lambda: link.run(size.link, tick_of("link")),
            "hop": lambda: hop.run(DEMO, DEMO_VOCAB, size.hop, tick_of("hop")),
            "ttft": lambda: ttft.run(checkpoint, size.vocab, size.ttft, tick_of("ttft")),
            "spec": lambda: speculation.run(DEMO, checkpoint, size.spec, THREADS, tick_of("spec")),
            "telemetry": lambda: telemetry.run(DEMO, DEMO_VOCAB, size.telemetry, tick_of("telemetry")),
        }
        found = {part: run[part]() for part in parts}
    stop.check()
    progress.update(task, description="done", advance=1)
    return found


def conditions() -> dict[str, Any]:
    """What the numbers depend on."""
    about = machine.describe()
    return {
        "cpu": about["processor"],
        "instructions": " ".join(about["instructions"]),
        "operators": about["operators"],
        "cores": os.cpu_count(),
        "usable_cores": about["cores"],
        "load_before": os.getloadavg()[0],
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def show(section: Section, console: Console) -> None:
    table = Table(title=section.title, title_justify="left", title_style="bold", caption=section.read)
    table.caption_justify = "left"
    table.add_column("what", ratio=2)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("middle half", justify="right", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("for orientation", ratio=3)
    for row in section.rows:
        beside = ", ".join(f"{name} {_value(value, unit)}" for name, (value, unit) in row.beside.items())
        half = f"{_number(row.ratio.low)} to {_number(row.ratio.high)}"
        table.add_row(row.what, _number(row.ratio.median), half, str(row.ratio.count), beside)
    console.print(table)
    for note in section.notes:
        console.print(f"  {note}", style="dim", highlight=False)
    console.print()


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _value(spread: Spread, unit: str) -> str:
    value = spread.median
    if unit == "s":
        scale, name = (1.0, "s") if abs(value) >= 1 else (1e3, "ms") if abs(value) >= 1e-3 else (1e6, "µs")
        return f"{_number(value * scale) if value >= 0 else f'{value * scale:.3g}'} {name}"
    if unit in ("B/s", "FLOP/s"):
        return f"{_number(value / 1e9)} G{unit}"
    return _number(value)


class _Stop:
    """A request to end unwinds every `with` block. Python swallows an exception that happens to be raised in a
    callback, such as those around a fork, so the next step asks again."""

    def __init__(self) -> None:
        self._asked = False

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises KeyboardInterrupt if somebody asked to end."""
        if self._asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench", description="Tandem's costs as ratios")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few repeats: does it run at all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to measure, of {','.join(PARTS)}")
    given = parser.parse_args(arguments)
    parts = [part for part in PARTS if part in given.only.split(",")]
    if not parts or set(given.only.split(",")) - set(PARTS):
        parser.error(f"--only takes some of {','.join(PARTS)}")
    size = QUICK if given.quick else Size()
    before, began = conditions() | {"threads": THREADS, "shape": size.shape}, monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with _Stop() as stop, Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            about = machine.measure(machine.usable_threads(), size.machine)
            sections = measure(size, parts, progress, stop)
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was left running", file=sys.stderr)
        return 130
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    machine.show(about, console)
    for section in sections.values():
        show(section, console)
    seconds = monotonic() - began
    console.print(", ".join(f"{name} {value}" for name, value in before.items()), style="dim", highlight=False)
    console.print(f"measured in {seconds:.0f} s; ratios of one run, medians", style="dim", highlight=False)
    if given.json:
        found = {part: section.to_dict() for part, section in sections.items()}
        report = {"conditions": before, "machine": about.to_dict(), "quick": given.quick, "seconds": seconds}
        report["sections"] = found
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
