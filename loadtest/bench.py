"""`make bench`: the cost of each part of Tandem, as ratios of two sides measured in turn in one run on this machine.

    step        the engine's packed step, compared with transformers and with the floor
    link        KV over NIXL and Gloo and its digest, compared with memcpy
    hop         latency and CPU that the router adds
    ttft        disaggregated and local prefill: time to first token, idle and during streams
    spec        speculative decoding, compared with none
    telemetry   CPU of traces and metrics

Absolute times are shown for orientation only. Every value is a median with its middle half. Exits with 0 when all parts
were measured; the processes that it starts end with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from loadtest.harness import machine
from loadtest.harness.demo_model import DEMO, DEMO_VOCAB
from loadtest.harness.machine import conditions
from loadtest.harness.options import Json, Quick, names
from loadtest.harness.progress import progress
from loadtest.harness.random_checkpoints import make_checkpoint
from loadtest.harness.section_table import finish
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


def measure(size: Size, parts: list[str], tick: Tick) -> dict[str, Section]:
    """The sections by part, in their order. Raises what a part raises; nothing is left running then either."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", size.shape)
        run: dict[str, Callable[[Tick], Section]] = {
            "step": partial(step.run, checkpoint, size.step, THREADS),
            "link": partial(link.run, size.link),
            "hop": partial(hop.run, DEMO, DEMO_VOCAB, size.hop),
            "ttft": partial(ttft.run, checkpoint, size.vocab, size.ttft),
            "spec": partial(speculation.run, DEMO, checkpoint, size.spec, THREADS),
            "telemetry": partial(telemetry.run, DEMO, DEMO_VOCAB, size.telemetry),
        }
        return {part: run[part](lambda what, part=part: tick(f"{part}: {what}")) for part in parts}  # type: ignore[misc]


def main(
    quick: Quick = False,
    results: Json = None,
    only: Annotated[str, typer.Option(metavar="PART,...", help="Parts to measure.")] = ",".join(PARTS),
) -> int:
    chosen = names(only, PARTS)
    parts = [part for part in PARTS if part in chosen]
    size = QUICK if quick else Size()
    before, began = conditions() | {"threads": THREADS, "shape": size.shape}, monotonic()
    with progress("bench", sum(getattr(size, part).ticks for part in parts)) as (tick, _):
        about = machine.measure(machine.usable_threads(), size.machine)
        sections = measure(size, parts, tick)
    finish(about, sections, before, began, results, quick=quick)
    return 0
