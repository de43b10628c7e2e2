"""The registry with many workers, many routers and many jobs.

Workers are records with heartbeats, routers are views that follow them, jobs are keys. Prints the cost and duration of
one refresh, and the share of a core that the server uses: without changes, and while some workers change with each
heartbeat.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated

import typer

from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.job_journal import Asked, JobJournal
from cluster.state.registry import Registry, State, WorkerRecord
from loadtest.harness.options import Seconds
from loadtest.harness.stats import percentile

BEAT_S = 0.5
AT_ONCE = 64
REFRESHES = 40


def records(count: int) -> list[WorkerRecord]:
    base = WorkerRecord("", "decode", State.READY, 1, "0123456789abcdef", "10.0.0.1:50000", model="demo/model")
    full = replace(base, kv_meaning="0" * 32, max_model_len=8192, vocab_size=128_000, eos_token_ids=[1, 2, 3])
    return [replace(full, worker_id=f"decode-{number}") for number in range(count)]


async def beat_all(registry: Registry, workers: list[WorkerRecord], changed: int = 0, number: int = 0) -> None:
    """One beat of each; of the first `changed` with another load."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def beat(place: int, worker: WorkerRecord) -> None:
        async with turns:
            await registry.beat(replace(worker, running=number) if place < changed else worker)

    await asyncio.gather(*(beat(*numbered) for numbered in enumerate(workers)))


async def keep_jobs(url: str, count: int) -> None:
    journal = JobJournal(url, "scale", lease_s=3600.0, kept_s=60.0, most=count, most_bytes=1 << 26)
    for first in range(0, count, 1000):
        await journal.submit(
            [Asked(f"/{number}", b"x" * 200, "d") for number in range(first, min(first + 1000, count))]
        )
    await journal.close()


async def timed(title: str, ask: Callable[[], Awaitable[object]]) -> None:
    took, before = [], process_time()
    for _ in range(REFRESHES):
        start = perf_counter()
        await ask()
        took.append(perf_counter() - start)
    cpu = (process_time() - before) / REFRESHES
    print(
        f"{title:<42} p50 {1e3 * percentile(took, 0.5):7.2f} ms  p99 {1e3 * percentile(took, 0.99):7.2f} ms"
        f"  here {1e3 * cpu:6.2f} ms of CPU",
        flush=True,
    )


async def server_cpu(registry: Registry) -> float:
    """Seconds of CPU that the server has used."""
    async with registry._store.connection() as client:
        usage = await client.info("cpu")
    return float(usage["used_cpu_user"] + usage["used_cpu_sys"])


async def follow(registry: Registry) -> None:
    mark = ("", 0)
    async for _ in registry.changes(BEAT_S):
        mark = (await registry.changes_since(mark)).mark


async def share_of_a_core(
    url: str, registry: Registry, workers: list[WorkerRecord], routers: int, changed: int, seconds: float
) -> None:
    views = [Registry(url, "scale", ttl_s=60.0) for _ in range(routers)]
    following = [asyncio.create_task(follow(view)) for view in views]
    await asyncio.sleep(BEAT_S)
    start, before, number = perf_counter(), await server_cpu(registry), 0
    while perf_counter() - start < seconds:
        number += 1
        due = start + number * BEAT_S
        await beat_all(registry, workers, changed, number)
        await asyncio.sleep(max(0.0, due - perf_counter()))
    took, used = perf_counter() - start, await server_cpu(registry) - before
    rate = number * len(workers) / took
    print(
        f"{routers:>3} routers, {changed:>5} changes a beat: {100 * used / took:5.1f} % of a core"
        f" at {rate:5.0f} beats/s, {1e6 * used / (number * len(workers)):5.1f} us a beat",
        flush=True,
    )
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)
    for view in views:
        await view.close()


async def measure(url: str, workers: int, routers: int, jobs: int, seconds: float) -> None:
    registry, described = Registry(url, "scale", ttl_s=60.0), records(workers)
    await keep_jobs(url, jobs)
    await beat_all(registry, described)
    print(f"{workers} workers, {jobs} jobs", flush=True)
    await timed("a refresh of everything", registry.workers)
    mark = (await registry.changes_since()).mark

    async def since() -> None:
        nonlocal mark
        mark = (await registry.changes_since(mark)).mark

    async def one_percent() -> None:
        await beat_all(registry, described[: max(1, workers // 100)], workers, int(1e6 * perf_counter()))
        await since()

    await timed("a refresh without changes", since)
    await timed("1 % of the workers beat, then a refresh", one_percent)
    for count, changed in ((0, 0), (1, 0), (routers, 0), (routers, workers // 10), (routers, workers)):
        await share_of_a_core(url, registry, described, count, changed, seconds)
    await registry.close()


def main(
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Records that beat.")] = 1000,
    routers: Annotated[int, typer.Option(metavar="N", min=1, help="Views that follow them.")] = 10,
    jobs: Annotated[int, typer.Option(metavar="N", min=0, help="Keys of jobs.")] = 200_000,
    seconds: Seconds = 10.0,
) -> None:
    with tempfile.TemporaryDirectory(prefix="tandem-scale-") as folder:
        server = EmbeddedValkey(Path(folder))
        try:
            asyncio.run(measure(server.start(), workers, routers, jobs, seconds))
        finally:
            server.stop()
