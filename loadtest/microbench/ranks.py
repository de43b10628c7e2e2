"""A worker of several ranks against one worker with all threads: seconds of a step, in turn in one run, the share of
its sums over ranks, the memory of each process, and KV between workers of one rank and of several.

The sums are measured alone, by ranks that are threads of this process and do nothing else: as many as a step has, of
its size. A rank that waits for a slower one adds to that.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer

from engine.attention.forward_context import Batch
from engine.builder import build_engine
from engine.engine import Engine
from engine.parallel.rank_group import RankGroup, group_memory
from loadtest.harness.options import Repeats
from loadtest.harness.random_checkpoints import make_checkpoint
from loadtest.harness.stats import Spread, in_turn, ratios, taken
from loadtest.microbench import link
from tandem.settings import Settings

BLOCK_SIZE = 16
KV_BLOCK = 360 << 10  # bytes
STEPS = {"decode of 1": (1, 1, 128), "decode of 8": (8, 1, 128), "prefill of 512": (1, 512, 0)}  # rows, new, done


def batch_of(sequences: int, new: int, done: int) -> Batch:
    batch, width = Batch(), -(-(done + new) // BLOCK_SIZE)
    for number in range(sequences):
        table = list(range(number * width, (number + 1) * width))
        batch.add([at % 1000 for at in range(new)], done, table, [new - 1])
    return batch


def memory(pid: int) -> str:
    """MiB: own, of files, shared with other ranks, and the peak of all."""
    status = Path(f"/proc/{pid}/status").read_text()
    kinds = {"RssAnon": "own", "RssFile": "of files", "RssShmem": "shared", "VmHWM": "at most"}
    found = {word: int(re.search(rf"{key}:\s+(\d+)", status)[1]) >> 10 for key, word in kinds.items()}  # type: ignore[index]
    return ", ".join(f"{mib} MiB {word}" for word, mib in found.items())


def sums(size: int, count: int, rows: int, width: int, dtype: torch.dtype) -> float:
    """Seconds of so many sums of `[rows, width]` over `size` ranks."""
    file = group_memory(size)
    groups = [RankGroup(rank, size, file) for rank in range(size)]
    os.close(file)
    part = torch.zeros(rows, width, dtype=dtype)

    def all_of(group: RankGroup) -> None:
        for site in range(count):
            group.all_reduce(part, site)

    with ThreadPoolExecutor(size) as pool:
        seconds = min(taken(lambda: list(pool.map(all_of, groups))) for _ in range(5))
    for group in groups:
        group.close()
    return seconds


def main(
    shape: Annotated[str, typer.Option(metavar="SHAPE", help="Of the model.")] = "Qwen3-0.6B",
    ranks: Annotated[int, typer.Option(metavar="N", help="Ranks, and threads of the one worker.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    repeats: Repeats = 7,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, shape, dtype="bfloat16")
        settings = Settings(
            model=folder, device="cpu", dtype=dtype, threads=ranks, kv_blocks=256, weight_cache="off", max_num_seqs=16
        )
        print(f"{shape}, {dtype}: {ranks} ranks of one thread against one worker of {ranks} threads")
        engines: dict[str, Engine] = {}
        try:
            for side, size in (("one", 1), ("ranks", ranks)):
                engines[side] = build_engine(settings, lambda line: None, ranks=size)
            for number, child in enumerate(psutil.Process().children(), 1):
                print(f"rank {number}: {memory(child.pid)}")
            for what, (sequences, new, done) in STEPS.items():
                show(what, engines, batch_of(sequences, new, done), ranks, repeats)
        finally:
            for engine in engines.values():
                engine.model.close()
    transfers(ranks, repeats)


def transfers(ranks: int, repeats: int) -> None:
    """Pulls of blocks between workers of one rank and of several, as shares of the bandwidth between equal ones."""
    seconds = asyncio.run(link.between_sizes(ranks, KV_BLOCK, link.Plan(repeats=repeats)))
    for (source, sink), times in seconds.items():
        rate = link.Plan.total / Spread.of(times).median / 1e9
        equal = ratios(seconds[source, source], times).median
        print(f"KV from {source} to {sink} ranks: {rate:.1f} GB/s, {equal:.2f} of {source} to {source}")


def seconds_of(engine: Engine, batch: Batch, ranks: int) -> float:
    """Of one step of a few in a row. One before them: the other side's helper threads still spin then. The number of
    threads is the process's, which has both sides: each gets its own."""
    torch.set_num_threads(ranks // engine.model.size)
    engine.forward(batch)
    count = max(2, 32 // len(batch.token_ids))
    return taken(lambda: [engine.forward(batch) for _ in range(count)]) / count


def show(what: str, engines: dict[str, Engine], batch: Batch, ranks: int, repeats: int) -> None:
    steps: dict[str, Callable[[], float]] = {
        side: partial(seconds_of, engine, batch, ranks) for side, engine in engines.items()
    }
    seconds = in_turn(steps, repeats)
    config = engines["one"].model.config.get_text_config()
    count, rows = 2 * config.num_hidden_layers, len(batch.token_ids)
    alone = sums(ranks, count, rows, config.hidden_size, engines["one"].model.dtype)
    one, several = (Spread.of(seconds[side]).median for side in ("one", "ranks"))
    print(
        f"{what}: {several * 1e3:.1f} ms against {one * 1e3:.1f} ms, ratio"
        f" {ratios(seconds['ranks'], seconds['one']).median:.2f}; {count} sums {alone * 1e3:.2f} ms,"
        f" {alone / several:.1%} of the step"
    )
