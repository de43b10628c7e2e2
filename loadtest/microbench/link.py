"""Cost of moving KV: reads between two processes, over NIXL and over Gloo, and the digest, compared with one memcpy in
this process. The other process is `loadtest/microbench/kv_source.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from kvtransfer.factory import make_transport
from kvtransfer.transport import Transport
from kvtransfer.types import Peer, digest
from loadtest.harness.processes import Process
from loadtest.harness.stats import Row, Section, Spread, Tick, ratios, taken
from loadtest.microbench.kv_source import LAYOUT, Dialler, pages_of, peer_from_json, region_of

CONTEXT = bytes(16)  # stands for a block's chained hash
TIMEOUT_S = 30.0
KINDS = ("nixl", "nccl")  # the second is Gloo here: the regions are in host memory


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
    return Section("KV read between two processes, and the digest, against memcpy", read, rows, [note])


async def _of_size(size: int, plan: Plan) -> list[Row]:
    count = plan.total // size
    pages = np.ones((count, size), dtype=np.uint8)
    source, target = np.ones_like(pages), np.ones_like(pages)
    copies: list[float] = []
    digests: list[float] = []
    pulls: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(connected(kind, pages)) for kind in KINDS]
        for round_ in range(plan.repeats + 1):
            pairs = list(zip(random.sample(range(count), count), random.sample(range(count), count), strict=True))
            copy = taken(lambda: np.copyto(target, source))
            verify = taken(lambda: [digest(memoryview(pages[block]), CONTEXT) for block in range(count)])
            for transport, peer, _ in ways:
                start = perf_counter()
                await transport.read(peer, pairs, TIMEOUT_S)
                pull = perf_counter() - start
                if round_:  # the first one only warms up
                    pulls.setdefault(transport.link(peer), []).append(pull)
            if round_:
                copies, digests = [*copies, copy], [*digests, verify]
    beside = {"memcpy": _rate(count * size, copies)}
    named = [(f"pull over {link}", times) for link, times in pulls.items()]
    named += [("digest", digests)]
    named += [
        (f"pull over {link} + digest", [pull + verify for pull, verify in zip(times, digests, strict=True)])
        for link, times in pulls.items()
    ]
    return [
        Row(f"{name}, {size >> 10} KiB", ratios(copies, times), {name: _rate(count * size, times), **beside})
        for name, times in named
    ]


async def between_sizes(ranks: int, size: int, plan: Plan) -> dict[tuple[int, int], list[float]]:
    """Seconds of a pull over NIXL, by the number of ranks of the worker that has the blocks and of the one that pulls,
    1 or `ranks`; in turn. A block is the same whatever the ranks; the memory that it lies in is not."""
    count = plan.total // size
    sizes = [(source, sink) for source in (1, ranks) for sink in (1, ranks)]
    seconds: dict[tuple[int, int], list[float]] = {each: [] for each in sizes}
    async with AsyncExitStack() as stack:
        ways = {}
        for source, sink in sizes:
            pages = pages_of(sink, size, count)
            pages[:] = 1
            ways[source, sink] = await stack.enter_async_context(connected("nixl", pages, source))
        for round_ in range(plan.repeats + 1):
            pairs = list(zip(random.sample(range(count), count), random.sample(range(count), count), strict=True))
            for each, (transport, peer, _) in ways.items():
                start = perf_counter()
                await transport.read(peer, pairs, TIMEOUT_S)
                if round_:  # the first one only warms up
                    seconds[each].append(perf_counter() - start)
    return seconds


@asynccontextmanager
async def connected(
    kind: str, pages: npt.NDArray[np.uint8], ranks: int = 1
) -> AsyncIterator[tuple[Transport, Peer, Process]]:
    """A transport over `pages`, and a source of as many blocks in a process of its own, with the memory of `ranks`."""
    count, size = pages.shape
    other = Process(["loadtest.microbench.kv_source", kind, *map(str, (size, count, ranks))])
    try:
        said = json.loads(other.line("peer "))
        peer = peer_from_json(said["peer"])
        transport = make_transport(kind, region_of(pages), "bench-sink", "1", LAYOUT)
        transport.dial = dial = Dialler()
        dial.addresses[peer.agent_name] = said["links"]
        try:
            await transport.connect(peer, TIMEOUT_S)
            yield transport, peer, other
        finally:
            transport.close()
            await dial.channels.close()
    finally:
        other.stop()


def _rate(moved: int, seconds: list[float]) -> tuple[Spread, str]:
    return Spread.of([moved / second for second in seconds]), "B/s"
