"""Cost of moving KV: NIXL reads between two processes and the digest, compared with one memcpy in this process.

The other process, which offers a region until its stdin ends, is
`python -m loadtest.microbench.link BLOCK_BYTES BLOCKS`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer.factory import make_transport
from kvtransfer.types import Peer, Region, digest
from loadtest.harness.processes import Process
from loadtest.harness.stats import Row, Section, Spread, Tick, ratios, taken

LAYOUT = "loadtest"
CONTEXT = bytes(16)  # stands for a block's chained hash
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Plan:
    """`total` bytes are moved at a time, in blocks of each of these sizes. 360 KiB is SmolLM2's block in bfloat16."""

    total: int = 64 * 2**20
    blocks: tuple[int, ...] = (16 * 2**10, 64 * 2**10, 360 * 2**10, 2**20)
    repeats: int = 11

    @property
    def ticks(self) -> int:
        return len(self.blocks)


def run(plan: Plan, tick: Tick) -> Section:
    """Raises Unavailable where NIXL cannot run."""
    rows: list[Row] = []
    for size in plan.blocks:
        tick(f"blocks of {size >> 10} KiB")
        rows += asyncio.run(_of_size(size, plan))
    read = "rates divided by the rate of memcpy: 1 is as fast as copying within one process"
    note = f"{plan.total >> 20} MiB at a time, remote and local blocks shuffled; one numpy copy of it is the memcpy"
    return Section("NIXL pull between two processes, and the digest, against memcpy", read, rows, [note])


async def _of_size(size: int, plan: Plan) -> list[Row]:
    count = plan.total // size
    pages = np.ones((count, size), dtype=np.uint8)
    source, target = np.ones_like(pages), np.ones_like(pages)
    other = Process(["loadtest.microbench.link", str(size), str(count)])
    try:
        peer = _peer(json.loads(other.line("peer ")))
        transport = make_transport("nixl", _region(pages), "bench-sink", "1", LAYOUT)
        try:
            await transport.connect(peer, TIMEOUT_S)
            pulls: list[float] = []
            copies: list[float] = []
            digests: list[float] = []
            for round_ in range(plan.repeats + 1):
                pairs = list(zip(random.sample(range(count), count), random.sample(range(count), count), strict=True))
                copy = taken(lambda: np.copyto(target, source))
                start = perf_counter()
                await transport.read(peer, pairs, TIMEOUT_S)
                pull = perf_counter() - start
                verify = taken(lambda: [digest(memoryview(pages[block]), CONTEXT) for block in range(count)])
                if round_:  # the first one only warms up
                    copies, pulls, digests = [*copies, copy], [*pulls, pull], [*digests, verify]
            link = transport.link(peer)
        finally:
            transport.close()
    finally:
        other.stop()
    both = [pull + verify for pull, verify in zip(pulls, digests, strict=True)]
    beside = {"memcpy": _rate(count * size, copies)}
    return [
        Row(f"{name}, {size >> 10} KiB", ratios(copies, times), {name: _rate(count * size, times), **beside})
        for name, times in ((f"pull over {link}", pulls), ("digest", digests), ("pull + digest", both))
    ]


def _rate(moved: int, seconds: list[float]) -> tuple[Spread, str]:
    return Spread.of([moved / second for second in seconds]), "B/s"


def _region(pages: npt.NDArray[np.uint8]) -> Region:
    return Region(pages.ctypes.data, pages.shape[0], pages.shape[1], keepalive=pages)


def _peer(values: dict[str, Any]) -> Peer:
    return Peer(**{**values, "metadata": bytes.fromhex(values["metadata"])})


def main() -> None:
    """The other process."""
    size, count = int(sys.argv[1]), int(sys.argv[2])
    pages = np.random.default_rng(0).integers(0, 256, (count, size), dtype=np.uint8)
    transport = make_transport("nixl", _region(pages), "bench-source", "1", LAYOUT)
    peer = transport.peer()
    with transport.serving():
        print("peer", json.dumps({**vars(peer), "metadata": peer.metadata.hex()}), flush=True)
        sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    main()
