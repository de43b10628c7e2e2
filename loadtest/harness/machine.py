"""Peaks of this machine: its processor, measured rates of products and of reading, and the floors that follow.

`bench` and `peers` print them before their results. A peak is the best of some repeats, all sides in turn: the best
rate of a product that fits the cache, with our operators and with torch's, and the rate of reading memory from one end
to the other in large pages. Takes some seconds for each number of threads.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

from engine.kernels import REFERENCE, described, fresh_memory, serving, sum_order
from engine.kernels.speed_check import processor
from loadtest.harness.options import Json, Quick, numbers
from loadtest.harness.random_checkpoints import REAL
from loadtest.harness.stats import console, in_turn, taken

CPU = torch.device("cpu")
GEMM = (512, 2048, 2048)  # rows, inner, columns
STREAM_BYTES = 256 * 2**20  # far more than most caches
INSTRUCTIONS = {  # as /proc/cpuinfo calls them
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX512-BF16",
    "amx_bf16": "AMX",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "BF16",
}
FLOORS = ("SmolLM2-135M", "Qwen3-0.6B")  # shapes whose floors are reported
PROMPT, BATCHES, CONTEXT = 512, (1, 8, 16), 256


@dataclass(frozen=True)
class Plan:
    """Products of (rows, inner, columns), and `stream` bytes that are read, `repeats` times each."""

    shapes: tuple[tuple[int, int, int], ...] = ((512, 576, 1536), (512, 1024, 1024), GEMM)
    stream: int = STREAM_BYTES
    repeats: int = 9


QUICK = Plan(shapes=((32, 64, 64),), stream=2**20, repeats=2)


@dataclass(frozen=True)
class Peaks:
    """Peak rates with `threads` threads: of products by name ("bfloat16, ours") in FLOP/s, of reading in B/s."""

    threads: int
    products: dict[str, float]
    read: float

    def of(self, dtype: str) -> float:
        """The best rate of products of a type, Tandem's or torch's."""
        return max(rate for name, rate in self.products.items() if name.startswith(dtype))


@dataclass(frozen=True)
class Machine:
    """`operators` is what serves a model here; `peaks` are by number of threads, in their order."""

    processor: str
    instructions: list[str]
    operators: str
    cores: int
    peaks: list[Peaks]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"floors": {shape: self.floors(shape) for shape in FLOORS}}

    def floors(self, shape: str) -> dict[str, list[float]]:
        """Seconds that the steps of a bfloat16 model of this shape need at least, for each number of threads."""
        sizes = Sizes.of(REAL[shape])
        seconds = {f"prefill {PROMPT}": [2 * sizes.layers * PROMPT / peak.of("bfloat16") for peak in self.peaks]}
        for batch in BATCHES:
            moved = sizes.weight_bytes + batch * CONTEXT * sizes.token_bytes
            flop = 2 * batch * (sizes.layers + sizes.head)
            seconds[f"decode {batch} x {CONTEXT}"] = [
                max(moved / peak.read, flop / peak.of("bfloat16")) for peak in self.peaks
            ]
        return seconds


@dataclass(frozen=True)
class Sizes:
    """Of a shape: parameters of the products of all layers, and of the head; bytes in bfloat16."""

    layers: int
    head: int
    token_bytes: int  # of a token's K and V

    @classmethod
    def of(cls, shape: dict[str, Any]) -> Sizes:
        hidden, count = shape["hidden_size"], shape["num_hidden_layers"]
        dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
        heads, kv = dim * shape["num_attention_heads"], dim * shape["num_key_value_heads"]
        layer = hidden * (2 * heads + 2 * kv + 3 * shape["intermediate_size"])
        return cls(count * layer, shape["vocab_size"] * hidden, 2 * 2 * count * kv)

    @property
    def weight_bytes(self) -> int:
        """That a decode step reads."""
        return 2 * (self.layers + self.head)


def describe() -> dict[str, Any]:
    """What needs no measuring: the processor's name, its instructions, and which operators serve."""
    name, about = processor()
    flags = set(about.split())
    return {
        "processor": name,
        "instructions": [shown for flag, shown in INSTRUCTIONS.items() if flag in flags],
        "operators": described(serving(CPU), sum_order(CPU, torch.bfloat16)),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
    }


def measure(threads: Sequence[int], plan: Plan) -> Machine:
    """Measures in this process, whose torch threads are as before afterwards."""
    before, peaks = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            peaks.append(_peaks(count, plan))
    finally:
        torch.set_num_threads(before)
    return Machine(**describe(), peaks=peaks)


def _peaks(threads: int, plan: Plan) -> Peaks:
    sides: dict[str, Callable[[], float]] = {"read": reader(plan.stream)}
    flop: dict[str, int] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for rows, inner, columns in plan.shapes:
            for whose, seconds in products(dtype, (rows, inner, columns)).items():
                name = f"{str(dtype).removeprefix('torch.')}, {whose}: {rows}x{inner}x{columns}"
                sides[name], flop[name] = seconds, 2 * rows * inner * columns
    least = {name: min(times) for name, times in in_turn(sides, plan.repeats).items()}
    best: dict[str, float] = {}
    for name, operations in flop.items():
        whose = name.partition(":")[0]
        best[whose] = max(best.get(whose, 0.0), operations / least[name])
    return Peaks(threads, best, plan.stream / least["read"])


def products(dtype: torch.dtype, shape: tuple[int, int, int] = GEMM) -> dict[str, Callable[[], float]]:
    """Functions that do a product of (rows, inner, columns) and return its seconds: "ours", where it is built, and
    "torch"."""
    rows, inner, columns = shape
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    products = {"torch": lambda: taken(lambda: F.linear(x, weight))}
    if serving(CPU) != REFERENCE:
        panels = torch.ops.tandem.pack.default(weight)
        products["ours"] = lambda: taken(lambda: torch.ops.tandem.linear.default(x, panels, None, columns, inner))
    return products


def reader(size: int = STREAM_BYTES) -> Callable[[], float]:
    """A function that reads `size` bytes of memory once and returns its seconds."""
    return reader_of([fresh_memory(size).view(torch.float32).fill_(1.0)])


def reader_of(tensors: Sequence[torch.Tensor]) -> Callable[[], float]:
    """A function that reads all of these once and returns its seconds.

    On a host with several memory controllers the same process reads some of its memory a third faster than other
    memory, so a step is compared with reading its own weights.
    """
    streams = [tensor.reshape(-1).view(torch.float32) for tensor in tensors]
    if serving(CPU) == REFERENCE:
        return lambda: taken(lambda: [stream.sum() for stream in streams])
    return lambda: taken(lambda: [torch.ops.tandem.stream_read.default(stream) for stream in streams])


def conditions() -> dict[str, Any]:
    """What the numbers depend on."""
    about = describe()
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
        "transformers": version("transformers"),
    }


def usable_threads() -> list[int]:
    """One, and as many as there are cores."""
    return sorted({1, describe()["cores"]})


def show(machine: Machine, out: Console) -> None:
    title = f"{machine.processor}: {', '.join(machine.instructions)}; operators: {machine.operators}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("peak, or floor that follows from it")
    for peak in machine.peaks:
        table.add_column(f"{peak.threads} thread{'s' * (peak.threads > 1)}", justify="right")
    for name in machine.peaks[0].products:
        rates = [f"{peak.products[name] / 1e9:.0f} GFLOP/s" for peak in machine.peaks]
        table.add_row(f"product in {name}", *rates)
    table.add_row("streaming read", *(f"{peak.read / 1e9:.1f} GB/s" for peak in machine.peaks))
    table.add_section()
    for shape in FLOORS:
        for what, seconds in machine.floors(shape).items():
            table.add_row(f"{shape}, bfloat16: {what}", *(f"{value * 1e3:.1f} ms" for value in seconds))
    out.print(table)
    out.print()


def main(
    threads: Annotated[str, typer.Option(metavar="N,N", help="Numbers of threads; one, and all cores.")] = "",
    quick: Quick = False,
    results: Json = None,
) -> None:
    machine = measure(numbers(threads) if threads else usable_threads(), QUICK if quick else Plan())
    show(machine, console())
    if results:
        results.write_text(json.dumps(machine.to_dict(), indent=1) + "\n")
