"""Clusters of slow workers, one after another, and the sizes of their pools during a load."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from cluster.local_cluster import LocalCluster
from cluster.supervision.reconcile_plan import role_of
from cluster.supervision.worker_process import Kind
from loadtest.harness.goodput import Load, Objective
from loadtest.harness.processes import precedence
from loadtest.loadgen.generator import offer, patience, prompts
from loadtest.loadgen.targets import Grpc, Message
from loadtest.loadgen.workload import Request
from loadtest.scenarios.slow_device import LAUNCHER, Device
from tandem import settings
from tandem.results import Receipt

LOOK_S = 0.25  # between two counts of processes
ROOT = Path(__file__).parents[2]
BEGAN = monotonic()


@dataclass
class Run:
    """One load on one cluster. At seconds since it began: `sizes`, processes of workers, and `pools`, ready ones."""

    name: str
    load: Load
    sizes: list[tuple[float, int]] = field(default_factory=list)
    pools: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    where: dict[str, int] = field(default_factory=dict)
    """Requests by the workers in their receipts."""
    ended_early: bool = False

    @property
    def worker_seconds(self) -> float:
        until = [at for at, _ in self.sizes[1:]] + [self.load.until]
        return sum(
            count * max(0.0, min(end, self.load.until) - at) for (at, count), end in zip(self.sizes, until, strict=True)
        )


class Keeping(Grpc):
    """Remembers receipts."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.receipts: list[Receipt] = []

    async def _messages(self, pieces: AsyncGenerator[Any, None]) -> AsyncGenerator[Message, None]:
        async for message in super()._messages(pieces):
            if message.receipt:
                self.receipts.append(message.receipt)
            yield message


class PoolBench:
    """Clusters of slow workers, one after another, and what is measured on each."""

    def __init__(self, model: Path, device: Device, objective: Objective, hold_s: float) -> None:
        self._overrides: dict[str, Any] = {
            **{"model": str(model), "port": 0, "threads": 1, "device": "cpu", "kv_blocks": 2000, "max_num_seqs": 32},
            **{"drain_grace_s": 20.0, "autoscale_hold_s": hold_s},
            **{"slo_ttft_s": objective.ttft, "slo_tpot_s": objective.tpot},
        }
        self._device = device
        self.objective = objective
        self.runs: list[Run] = []
        self.notes = [
            f"a device computes {device.prompt_rate:g} prompt tokens/s; a step takes {device.step_s * 1e3:g} ms"
        ]

    def fixed(self, prefill: int, decode: int) -> dict[str, Any]:
        overrides = {name: value for name, value in self._overrides.items() if name != "autoscale_hold_s"}
        return {**overrides, "prefill": prefill, "decode": decode}

    def scaled(self, prefill: int, decode: int, least: int = 1, spares: int = 0) -> dict[str, Any]:
        """From `least` prefill workers and one decode worker."""
        limits = {"prefill": least, "prefill_max": prefill, "decode_max": decode, "spares": spares}
        return {**self._overrides, "autoscale": "on", **limits}

    def run(
        self,
        name: str,
        overrides: dict[str, Any],
        requests: Sequence[Request],
        seconds: float,
        *,
        hopeless: bool = False,
    ) -> Run:
        """`hopeless`: ends the run when the objective cannot be kept any more."""
        run = Run(name, Load(name, len(requests) / seconds, 0.0, seconds))
        say(f"{name}: starting")
        with self._environment(), LocalCluster(settings.load(**overrides), launcher=LAUNCHER) as cluster:
            say(f"{name}: {len(requests)} requests in {seconds:.0f} s")
            self._watch(cluster, run, requests, hopeless)
        self.runs.append(run)
        say(f"{name}: {run.load.attainment(self.objective):.1%} kept, {run.worker_seconds:.0f} worker-seconds")
        return run

    def _watch(self, cluster: LocalCluster, run: Run, requests: Sequence[Request], hopeless: bool) -> None:
        """Counts processes and notes events in this thread, for the cluster is this thread's; the load has its own."""
        failed: list[BaseException] = []

        def drive() -> None:
            try:
                with precedence():
                    asyncio.run(self._drive(cluster.target, run, requests, hopeless))
            except BaseException as error:  # noqa: BLE001, raised in the other thread
                failed.append(error)

        thread = threading.Thread(target=drive, name="load", daemon=True)
        began = monotonic()
        known = set(cluster.workers)
        alive = {worker_id for worker_id in known if role_of(worker_id) != "router"}
        thread.start()
        while thread.is_alive():
            now = monotonic() - began
            # Some processes are spares, and a worker that switches roles has two ids: neither is an additional worker.
            run.sizes.append((now, min(_workers(), len(alive))))
            run.cores.append(psutil.cpu_percent() / 100 * (os.cpu_count() or 1))
            for event in cluster.events(LOOK_S):
                if event.kind is Kind.STARTING:
                    alive.add(event.worker_id)
                elif event.kind in (Kind.STOPPED, Kind.DIED, Kind.FAILED):
                    alive.discard(event.worker_id)
                if event.kind in (Kind.READY, Kind.STARTING, Kind.STOPPED, Kind.DIED, Kind.FAILED):
                    run.events.append((monotonic() - began, f"{event.worker_id} {event.kind}"))
                    say(f"  {monotonic() - began:6.1f} s  {event.worker_id} {event.kind}")
            if set(cluster.workers) != known or not run.pools:
                known = set(cluster.workers)
                run.pools.append(
                    (now, dict(Counter(role_of(worker_id) for worker_id in known if role_of(worker_id) != "router")))
                )
        thread.join()
        if failed:
            raise failed[0]

    async def _drive(self, target: str, run: Run, requests: Sequence[Request], hopeless: bool) -> None:
        async with Keeping(target) as server:
            offering = asyncio.create_task(
                offer(server, requests, run.load, settle=patience(requests, self.objective), prompt=prompts(7))
            )
            while not (await asyncio.wait({offering}, timeout=1.0))[0]:
                missed = sum(outcome.ended > 0 and not outcome.kept(self.objective) for outcome in run.load.outcomes)
                if hopeless and missed > (1 - self.objective.attainment) * len(requests):
                    run.ended_early = True
                    offering.cancel()
            if not offering.cancelled():
                offering.result()
            hops = [hop for each in server.receipts for hop in (each.prefill_worker, each.decode_worker) if hop]
            run.where = dict(sorted(Counter(hops).items()))

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Ray's workers inherit it."""
        wanted = {**self._device.environment(), "PYTHONPATH": str(ROOT)}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _workers() -> int:
    """Processes of prefill and decode workers; the one router is an actor like them."""
    count = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            count += "WorkerActor" in process.name()
    return count - 1


def say(line: str) -> None:
    print(f"{monotonic() - BEGAN:7.1f} s  {line}", file=sys.stderr, flush=True)
