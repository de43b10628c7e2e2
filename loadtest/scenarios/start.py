"""Cost of a start: seconds to `ready` and of each stage, memory of each worker, and latency of the first request.

Starts `tandem up` on this machine without the weight cache, with an empty one, and with a filled one; `--runs` times in
turn. Prints medians, and the stages of the last run. Without `--model`, the weights are random ones of a real shape.
Memory is the kernel's account of each process (/proc/PID/smaps_rollup): private memory is freed when that process ends;
shared memory is in mapped files, mostly by several processes. `weights` is the part of it in checkpoints and cached
files. The first request to the cluster is compared with the median of the next ones: 64 tokens in, 8 out.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Annotated, Literal

import typer

from cluster.local_cluster import LocalCluster
from engine.kernels.weight_cache import KEPT
from loadtest.harness.options import Runs, Shape
from loadtest.harness.random_checkpoints import make_checkpoint
from tandem import settings
from tandem.client import Client

WEIGHT_FILES = (KEPT, ".safetensors")
REQUESTS = 9


@dataclass
class Start:
    """One start: seconds to `ready`, each worker's stages, MiB of memory of each worker, seconds of each request."""

    seconds: float = 0.0
    stages: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    requests: list[float] = field(default_factory=list)


def measure(overrides: dict[str, object]) -> Start:
    """Starts a cluster with these settings, sends it some requests, and ends it."""
    measured = Start()

    def note(line: str) -> None:
        """`  12.3 s  decode-0:   2.1 s  libraries imported`; a line without the second duration is not a stage."""
        _, _, rest = line.partition(" s  ")
        worker, _, stage = rest.partition(": ")
        seconds, _, what = stage.strip().partition(" s  ")
        if what and seconds.replace(".", "", 1).isdigit():
            measured.stages.setdefault(worker, []).append((float(seconds), what))

    began = monotonic()
    with LocalCluster(settings.load(port=0, **overrides), note) as cluster:
        measured.seconds = monotonic() - began
        for worker, event in sorted(cluster.workers.items()):
            if event.started:
                measured.memory[worker] = memory_of(event.started.pid)
        client = Client(cluster.target)
        for number in range(REQUESTS):
            sent = monotonic()
            client.generate([number, *range(63)], max_tokens=8, timeout=60)
            measured.requests.append(monotonic() - sent)
        client.close()
    return measured


def memory_of(pid: int) -> dict[str, int]:
    """MiB of a process."""
    kib = dict.fromkeys(("resident", "proportional", "private", "weights"), 0)
    names = {"Rss": "resident", "Pss": "proportional", "Private_Clean": "private", "Private_Dirty": "private"}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        if (into := names.get(name.rstrip(":"))) is not None:
            kib[into] += int(value)
    of_weights = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            of_weights = bool(rest) and rest[-1].endswith(WEIGHT_FILES)
        elif first == "Rss:" and of_weights:
            kib["weights"] += int(rest[0])
    return {name: value // 1024 for name, value in kib.items()}


def show(title: str, starts: Sequence[Start]) -> None:
    """Medians over the runs, with the least and the most."""

    def line(name: str, values: Iterable[float], unit: str = "") -> None:
        each = list(values)
        print(f"  {name:32} {median(each):8.2f}{unit}  ({min(each):.2f} to {max(each):.2f})")

    print(f"\n{title}, {len(starts)} starts")
    line("ready after", (start.seconds for start in starts), " s")
    for worker, memory in starts[-1].memory.items():
        line(f"{worker}: its stages", (sum(took for took, _ in start.stages[worker]) for start in starts), " s")
        for name in memory:
            line(f"{worker}: {name}", (start.memory[worker][name] for start in starts), " MiB")
    line("first request / the next ones", (start.requests[0] / median(start.requests[1:]) for start in starts))
    for worker, stages in sorted(starts[-1].stages.items()):
        for seconds, what in stages:
            print(f"  {worker:10}  {seconds:6.1f} s  {what}")


def main(
    model: Annotated[str, typer.Option(metavar="FOLDER", help="Of the weights; random ones by default.")] = "",
    shape: Shape = "SmolLM2-135M",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "bfloat16",
    prefill: Annotated[int, typer.Option(metavar="N", help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(metavar="N", help="Decode workers.")] = 1,
    runs: Runs = 3,
) -> None:
    with tempfile.TemporaryDirectory(prefix="tandem-start-", dir=Path.home()) as folder:  # /tmp may be in memory
        cache = Path(folder) / "weights"
        overrides: dict[str, object] = {
            "model": model or str(make_checkpoint(Path(folder) / "model", shape)),
            **{"dtype": dtype, "prefill": prefill, "decode": decode, "kv_blocks": 512, "max_model_len": 2048},
        }
        sides: dict[str, list[Start]] = {"without the cache": [], "with an empty cache": [], "with a full cache": []}
        for _ in range(runs):
            shutil.rmtree(cache, ignore_errors=True)
            for title, starts in sides.items():
                kept = "off" if title == "without the cache" else str(cache)
                starts.append(measure({**overrides, "weight_cache": kept}))
        for title, starts in sides.items():
            show(title, starts)
