"""`make bench`: the cost of each part of Tandem, as ratios of two sides measured in turn in one run on this machine.

Absolute times are shown for orientation only. Every value is a median with its middle half. Exits with 0 when all parts
were measured; the processes that it starts end with it.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import FrameType, ModuleType, TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.harness import machine
from loadtest.harness.demo_model import DEMO, DEMO_VOCAB
from loadtest.harness.machine import conditions
from loadtest.harness.options import Json, Quick, names
from loadtest.harness.random_checkpoints import make_checkpoint
from loadtest.harness.section_table import FILE_WIDTH, show
from loadtest.harness.stats import Section, Tick
from loadtest.microbench import hop, link, speculation, step, telemetry
from loadtest.scenarios import ttft

THREADS = 1  # of the measured engine; the workers have one each, too
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
        results = {part: run[part]() for part in parts}
    stop.check()
    progress.update(task, description="done", advance=1)
    return results


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
        if error is not None:
            self.check()  # what fails after a request to end fails because of it

    def check(self) -> None:
        """Raises KeyboardInterrupt if a signal has requested the end."""
        if self._asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        raise KeyboardInterrupt


def main(
    quick: Quick = False,
    results: Json = None,
    only: Annotated[str, typer.Option(metavar="PART,...", help="Parts to measure.")] = ",".join(PARTS),
) -> int:
    chosen = names(only, PARTS)
    parts = [part for part in PARTS if part in chosen]
    size = QUICK if quick else Size()
    before, began = conditions() | {"threads": THREADS, "shape": size.shape}, monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _Stop() as stop, Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        about = machine.measure(machine.usable_threads(), size.machine)
        sections = measure(size, parts, progress, stop)
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    machine.show(about, console)
    for section in sections.values():
        show(section, console)
    seconds = monotonic() - began
    console.print(", ".join(f"{name} {value}" for name, value in before.items()), style="dim", highlight=False)
    console.print(f"measured in {seconds:.0f} s; ratios of one run, medians", style="dim", highlight=False)
    if results:
        by_part = {part: section.to_dict() for part, section in sections.items()}
        report = {"conditions": before, "machine": about.to_dict(), "quick": quick, "seconds": seconds}
        report["sections"] = by_part
        results.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _alone(part: str, what: ModuleType) -> Callable[..., int]:
    def run(quick: Quick = False, results: Json = None) -> int:
        return main(quick, results, part)

    run.__doc__ = what.__doc__
    return run


step_alone = _alone("step", step)
link_alone = _alone("link", link)
hop_alone = _alone("hop", hop)
ttft_alone = _alone("ttft", ttft)
spec_alone = _alone("spec", speculation)
telemetry_alone = _alone("telemetry", telemetry)
