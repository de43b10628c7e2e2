"""Goodput at three times the capacity: admitted requests must still meet the objective, others are refused at once.

One prefill and one decode worker on this machine. The capacity is the rate at which they finish requests when enough
are in progress to keep both busy. Then requests arrive at random times (Poisson), at 0.5, 0.75 and 1 times the
capacity, and then at `--factor` times; they are sent whether earlier ones have ended or not. Goodput is the rate of
requests within both objectives; a refused request counts as missed. The control is the same load without the objectives
in the settings.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated

import psutil
import typer

from loadtest.harness.goodput import Load, Objective, Outcome
from loadtest.harness.options import Json, Seconds, Shape, Tpot, Ttft, positive
from loadtest.harness.processes import Local, precedence
from loadtest.harness.random_checkpoints import make_checkpoint
from loadtest.harness.report import failures, lines
from loadtest.harness.stats import percentile
from loadtest.loadgen import workload
from loadtest.loadgen.generator import follow, offer
from loadtest.loadgen.targets import Grpc
from tandem.client import Client

PROMPT, NEW, VOCAB = 256, 32, 49152  # tokens
BUSY = 16  # requests at a time that keep both workers busy
RAMP = (0.5, 0.75, 1.0)
FREED_S = 5.0  # after the last request, until no block is held


@dataclass(frozen=True)
class Plan:
    seconds: Seconds = 60.0
    ramp: Annotated[float, typer.Option(metavar="S", help="Length of each load before.", callback=positive)] = 20.0
    factor: Annotated[float, typer.Option(metavar="F", help="Overload: times the capacity.", callback=positive)] = 3.0
    ttft: Ttft = 2.0
    tpot: Tpot = 0.1


def prompt() -> list[int]:
    """New each time: nothing is cached."""
    return random.choices(range(workload.FIRST_ID, VOCAB), k=PROMPT)


async def capacity(target: Grpc, seconds: float) -> float:
    """Requests a second that end while `BUSY` are in progress."""
    began, done = perf_counter(), 0

    async def place() -> None:
        nonlocal done
        while perf_counter() < began + seconds:
            outcome = Outcome(perf_counter() - began, PROMPT, NEW)
            await follow(target.stream(prompt(), NEW), outcome, began)
            done += outcome.state == "done"

    await asyncio.gather(*(place() for _ in range(BUSY)))
    return done / (perf_counter() - began)


async def offered(target: Grpc, name: str, rate: float, seconds: float, objective: Objective) -> Load:
    requests = workload.by_chance(rate, seconds, 1, [(PROMPT, NEW)])
    load, settle = Load(name, rate, 0.0, seconds), objective.ttft + NEW * objective.tpot
    return await offer(target, requests, load, settle=settle, prompt=lambda *_: prompt())


@dataclass
class Side:
    """With or without the objectives."""

    capacity: float
    loads: list[Load]
    memory: list[float]  # MiB of the router, after the ramp and after the overload
    held: int  # blocks, when all was over for `FREED_S`

    def summary(self, objective: Objective) -> str:
        *ramp, over = self.loads
        peak = max(load.goodput(objective) for load in ramp)
        report = [f"capacity {self.capacity:.2f} requests/s", *lines(self.loads, objective)]
        for load in self.loads:
            rejected = [outcome.ended - outcome.sent for outcome in load.counted if outcome.state == "rejected"]
            if rejected:
                times = f"{percentile(rejected, 0.5) * 1e3:.0f} ms (p99 {percentile(rejected, 0.99) * 1e3:.0f} ms)"
                report.append(f"  {load.name}: refusals after {times}")
        untold = sum(
            outcome.state == "rejected" and not outcome.retry_after for load in self.loads for outcome in load.counted
        )
        return "\n".join(
            [
                *report,
                f"  goodput at the last rate / peak before: {over.goodput(objective) / peak:.2f}",
                f"  router {self.memory[0]:.0f} MiB, then {self.memory[1]:.0f}; blocks held in the end: {self.held}",
                f"  refused without a time to come back: {untold}",
                *(f"  {count} times: {why}" for count, why in failures(self.loads)),
            ]
        )


async def drive(target: str, memory: Callable[[], float], load: Plan) -> Side:
    objective = Objective(load.ttft, load.tpot)
    async with Grpc(target) as server:
        await capacity(server, 3.0)  # warms up
        most = await capacity(server, load.ramp)
        loads = []
        for factor in RAMP:
            loads.append(await offered(server, f"{factor:g} of capacity", factor * most, load.ramp, objective))
        before, name = memory(), f"{load.factor:g} of capacity"
        loads.append(await offered(server, name, load.factor * most, load.seconds, objective))
        return Side(most, loads, [before, memory()], 0)


def measure(model: Path, load: Plan, objectives: bool) -> Side:
    settings: dict[str, object] = {"dtype": "bfloat16", "block_size": 16, "kv_blocks": 6000, "max_model_len": 1024}
    if objectives:
        settings |= {"slo_ttft_s": load.ttft, "slo_tpot_s": load.tpot}
    with Local(model=model, local_prefill="measured", **settings) as local:
        local.launch("router", "router-0")
        local.launch("prefill", "prefill-0", core=0)
        local.launch("decode", "decode-0", core=1)
        local.wait_seen("router-0", 2, timeout_s=240.0)
        router = psutil.Process(local.pid("router-0"))
        with precedence():
            measured = asyncio.run(drive(local.address("router-0"), lambda: router.memory_info().rss / 2**20, load))
        with Client(local.address("router-0")) as client:
            until = perf_counter() + FREED_S
            while (held := sum(worker.blocks_held for worker in client.workers())) and perf_counter() < until:
                sleep(0.1)  # records are half a second old
        measured.held = held
        return measured


def main(load: Plan, shape: Shape = "SmolLM2-135M", results: Json = None) -> None:
    sides: dict[str, Side] = {}
    objective = Objective(load.ttft, load.tpot)
    with tempfile.TemporaryDirectory(prefix="tandem-overload-", dir=Path.home()) as folder:  # /tmp may be in memory
        model = make_checkpoint(Path(folder) / "model", shape)
        for side, objectives in (("with objectives", True), ("without", False)):
            sides[side] = measure(model, load, objectives)
            print(f"{side}: {sides[side].summary(objective)}\n", flush=True)
    if results:
        results.write_text(json.dumps({side: asdict(measured) for side, measured in sides.items()}))
