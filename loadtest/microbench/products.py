"""Time of the linear layers of one step, by its number of rows; with one row this is the time to read the weights.

bfloat16. Every layer has weights of its own, so they come from memory as in a step, in large pages as in a worker.
Shows the least and the median of the repeats. All numbers of rows take turns, with one read of the same memory between
them, because the machine's speed varies, and memory of one process is not all equally fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

from engine import kernels
from engine.kernels.weight_cache import placed
from engine.runner.captured_steps import Call, operators
from loadtest.harness import machine
from loadtest.harness.machine import Sizes, describe, reader_of
from loadtest.harness.options import Repeats, Shape, Threads, numbers
from loadtest.harness.random_checkpoints import REAL
from loadtest.harness.stats import in_turn, percentile, taken

CPU = torch.device("cpu")
WANTED = {1: 0.9, 8: 0.8, 16: 0.7}  # of the floor, by rows: promised


def products(shape: dict[str, Any]) -> tuple[Callable[[int], float], torch.Tensor, int]:
    """A function of the rows that does a step's products and returns its seconds; the memory of the weights (uint8) and
    their bytes."""

    hidden, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    heads, kv = dim * shape["num_attention_heads"], dim * shape["num_key_value_heads"]
    layer = [(heads, hidden), (kv, hidden), (kv, hidden), (hidden, heads), (inner, hidden), (inner, hidden)]
    layer.append((hidden, inner))
    count = shape["num_hidden_layers"]
    weights, memory = _packed([*(layer * count), (vocab, hidden)])
    *each, head = weights
    layers = [
        (each[at : at + 3], each[at + 3], each[at + 4 : at + 6], each[at + 6]) for at in range(0, len(each), len(layer))
    ]
    size = Sizes.of(shape).weight_bytes
    ops, none = torch.ops.tandem, None
    steps: dict[int, Call] = {}  # captured, as a worker's are

    def run(rows: int) -> float:
        if rows not in steps:
            x, attended = (torch.randn(rows, n, dtype=torch.bfloat16) for n in (hidden, heads))
            steps[rows] = operators(functools.partial(step, x, attended))
        return taken(steps[rows])

    def step(x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        for qkv, out, gated, down in layers:
            ops.linears.default(x, qkv, [none] * 3, [heads, kv, kv], hidden)
            ops.linear_add.default(attended, out, none, hidden, heads, x)
            between = ops.linears_gated.default(x, gated, [none] * 2, [inner] * 2, hidden, "silu")
            ops.linear_add.default(between, down, none, hidden, inner, x)
        logits: torch.Tensor = ops.linear.default(x, head, none, vocab, hidden)
        return logits

    return run, memory, size


def _packed(shapes: list[tuple[int, int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Panels of random weights, concatenated in large pages; and these."""
    made = {(n, k): torch.ops.tandem.pack.default(torch.randn(n, k, dtype=torch.bfloat16)) for n, k in set(shapes)}
    sizes = [made[shape].nbytes for shape in shapes]
    starts, total = placed(sizes)
    stretch = kernels.fresh_memory(total)
    parts = [stretch[at : at + size].view(torch.bfloat16) for at, size in zip(starts, sizes, strict=True)]
    return [part.copy_(made[shape]) for part, shape in zip(parts, shapes, strict=True)], stretch


def main(
    shape: Shape = "Qwen3-0.6B",
    rows: Annotated[str, typer.Option(metavar="N,N", help="Of a step.")] = "1,2,4,6,8,12,16",
    threads: Threads = 1,
    repeats: Repeats = 9,
) -> None:
    if kernels.serving(CPU) == kernels.REFERENCE:
        raise SystemExit("needs the compiled operators: python -m engine.kernels.build")
    torch.set_num_threads(threads)
    run, memory, size = products(REAL[shape])
    sides: dict[str, Callable[[], float]] = {str(each): functools.partial(run, each) for each in numbers(rows)}
    times = in_turn({"read": reader_of([memory]), **sides}, repeats)
    reads = times.pop("read")
    read, typical = (memory.nbytes / seconds / 1e9 for seconds in (min(reads), percentile(reads, 0.5)))
    about = describe()
    print(f"{about['processor']} ({', '.join(about['instructions'])}), {about['operators']}")
    print(f"{shape}, {threads} thread{'s' * (threads > 1)}, {size >> 20} MiB of weights")
    peak = machine.measure([threads], machine.Plan()).peaks[0].of("bfloat16")
    print(f"these weights are read at {read:.1f} GB/s at best, which is the bandwidth (median {typical:.1f})")
    print(
        f"a large product runs at {peak / 1e9:.0f} GFLOP/s; the floor is reading or computing, whichever takes longer\n"
    )
    columns = ("rows", "least, ms", "median, ms", "of the fewest rows", "weights read, GB/s", "of the bandwidth")
    print(f"| {' | '.join((*columns, 'of the floor', 'wanted'))} |\n|{'---|' * 8}")
    few = min(times[min(times, key=int)])
    for count, each in times.items():
        least, middle = min(each), percentile(each, 0.5)
        rate = size / least / 1e9
        wanted = f"at least {WANTED[int(count)]:.0%}" if int(count) in WANTED else ""
        print(
            f"| {count} | {least * 1e3:.1f} | {middle * 1e3:.1f} | {least / few:.2f} | {rate:.1f} | {rate / read:.0%} |"
            f" {max(size / read / 1e9, int(count) * size / peak) / least:.0%} | {wanted} |"
        )
