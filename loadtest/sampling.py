"""What choosing tokens takes: the compiled operator beside plain PyTorch, in turn, for random logits.

    python -m loadtest.sampling [--vocab 151936] [--rows 1,8,16] [--threads 1] [--repeats 15]

Flat rows (normal logits) and steep ones (six times as far apart, as a trained model's are): top-p has most of a flat
row's tokens to look at, and a few of a steep one's. Milliseconds, medians. Both choose the same tokens, or it ends.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from engine import kernels, sampling
from engine.sequence import Sampling

HOW = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
}
SPREADS = {"flat": 1.0, "steep": 6.0}


def measured(logits: torch.Tensor, how: list[Sampling], repeats: int) -> tuple[float, float]:
    """Seconds of plain PyTorch and of the operator. Raises AssertionError when they choose differently."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    chosen: dict[bool, list[int]] = {}
    for _ in range(repeats):
        for compiled, times in seconds.items():
            began = perf_counter()
            with torch.inference_mode():
                chosen[compiled] = sampling.sample(logits, how, range(len(how)), compiled=compiled)
            times.append(perf_counter() - began)
    assert chosen[True] == chosen[False]
    return statistics.median(seconds[False]), statistics.median(seconds[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8, 16])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = Table(title=f"{args.vocab} tokens, {args.threads} thread(s), {kernels.serving(torch.device('cpu'))}")
    for column in ("rows", "", "how", "plain, ms", "operator, ms", "operator / plain"):
        table.add_column(column, justify="right" if column.endswith("ms") else "left")
    for rows in args.rows:
        for shape, spread in SPREADS.items():
            logits = spread * torch.randn(rows, args.vocab, generator=torch.Generator().manual_seed(rows))
            for name, values in HOW.items():
                how = [Sampling(seed=row, **values) for row in range(rows)]  # type: ignore[arg-type]
                plain, ours = measured(logits, how, args.repeats)
                ratio = f"{ours / plain:.2f}"
                table.add_row(str(rows), shape, name, f"{plain * 1e3:.2f}", f"{ours * 1e3:.2f}", ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
