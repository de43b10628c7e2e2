"""What the linear layers of one step take, by its rows; with one row, that is what reading the weights takes.

    python -m loadtest.products [--shape Qwen3-0.6B] [--rows 1,2,4,6,8,12,16] [--threads 1] [--repeats 9]

bfloat16. Every layer has weights of its own, so they come from memory as in a step. The least and the median of the
repeats, all rows in turn, because the machine's speed wavers.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from engine import kernels
from engine.checkpoints import REAL
from loadtest.stats import in_turn, percentile

CPU = torch.device("cpu")


def products(shape: dict[str, Any]) -> tuple[Callable[[int], float], int]:
    """A function of the rows that does a step's products and returns its seconds; and the bytes of the weights."""

    def packed(n: int, k: int) -> torch.Tensor:
        found: torch.Tensor = torch.ops.tandem.pack.default(torch.randn(n, k, dtype=torch.bfloat16))
        return found

    hidden, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    dim = shape.get("head_dim", hidden // shape["num_attention_heads"])
    heads, kv = dim * shape["num_attention_heads"], dim * shape["num_key_value_heads"]
    layers = [
        (
            [packed(n, hidden) for n in (heads, kv, kv)],
            packed(hidden, heads),
            [packed(inner, hidden) for _ in range(2)],
            packed(hidden, inner),
        )
        for _ in range(shape["num_hidden_layers"])
    ]
    head = packed(vocab, hidden)
    size = 2 * hidden * (len(layers) * (2 * heads + 2 * kv + 3 * inner) + vocab)
    ops, none = torch.ops.tandem, None

    def run(rows: int) -> float:
        x, attended = (torch.randn(rows, n, dtype=torch.bfloat16) for n in (hidden, heads))
        start = perf_counter()
        for qkv, out, gated, down in layers:
            ops.linears.default(x, qkv, [none] * 3, [heads, kv, kv], hidden)
            ops.linear_add.default(attended, out, none, hidden, heads, x)
            between = ops.linears_gated.default(x, gated, [none] * 2, [inner] * 2, hidden, "silu")
            ops.linear_add.default(between, down, none, hidden, inner, x)
        ops.linear.default(x, head, none, vocab, hidden)
        return perf_counter() - start

    return run, size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=REAL, default="Qwen3-0.6B")
    parser.add_argument("--rows", default="1,2,4,6,8,12,16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    if kernels.serving(CPU) == kernels.REFERENCE:
        raise SystemExit("needs the compiled operators: python -m engine.kernels.build")
    torch.set_num_threads(args.threads)
    run, size = products(REAL[args.shape])
    sides: dict[str, Callable[[], float]] = {rows: functools.partial(run, int(rows)) for rows in args.rows.split(",")}
    taken = in_turn(sides, args.repeats)
    few = min(taken[min(taken, key=int)])
    print(f"{args.shape}, {args.threads} thread{'s' * (args.threads > 1)}, {size >> 20} MiB of weights")
    print("| rows | least, ms | median, ms | of the fewest rows | weights read, GB/s |\n|---|---|---|---|---|")
    for rows, each in taken.items():
        least, middle = min(each), percentile(each, 0.5)
        rate = size / least / 1e9
        print(f"| {rows} | {least * 1e3:.1f} | {middle * 1e3:.1f} | {least / few:.2f} | {rate:.1f} |")


if __name__ == "__main__":
    main()
