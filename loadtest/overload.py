"""Three times as much as can be done: what is let in still comes in time, and the rest is told at once.

    python -m loadtest.overload [--seconds 60] [--ramp 20] [--ttft 2.0] [--tpot 0.1] [--factor 3] [--json FILE]

One prefill and one decode worker on this machine. First so many requests at a time as keep both busy: what they
finish in a second is the capacity. Then requests that come by chance (Poisson), at 0.5, 0.75 and 1 times the capacity,
and then at `--factor` times; they are sent whether earlier ones have ended or not. Goodput is those that came within
both objectives, a second; whoever was refused missed them. The same once more without the objectives in the settings,
as a control.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep

import psutil

from engine.checkpoints import REAL, make_checkpoint
from loadtest.local import Local, precedence
from loadtest.stats import percentile
from tandem.client import AsyncClient, Client
from tandem.errors import Busy, TandemError

PROMPT, NEW = 256, 32  # tokens
BUSY = 16  # requests at a time that keep both workers busy
RAMP = (0.5, 0.75, 1.0)
FREED_S = 5.0  # after the last request, until nobody holds a block


@dataclass
class Load:
    """What became of the requests of one rate."""

    rate: float
    seconds: float
    ttft: list[float] = field(default_factory=list)  # of those that ended well
    tpot: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)  # seconds until the refusal
    untold: int = 0  # refused without a time to come back
    failed: list[str] = field(default_factory=list)
    unfinished: int = 0  # when the time was up
    late: float = 0.0  # the longest time by which a request was sent too late

    def goodput(self, ttft: float, tpot: float) -> float:
        good = sum(a <= ttft and b <= tpot for a, b in zip(self.ttft, self.tpot, strict=True))
        return good / self.seconds


class Prompts:
    """New ones each time: nothing is cached."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._random = random.Random(0)

    def next(self) -> list[int]:
        return [self._random.randrange(100, self._vocab) for _ in range(PROMPT)]


async def ask(client: AsyncClient, prompt: list[int], load: Load) -> None:
    sent, first = perf_counter(), 0.0
    try:
        async for piece in client.stream(prompt, max_tokens=NEW, ignore_eos=True):
            if piece.token_ids and not first:
                first = perf_counter()
    except Busy as error:
        load.refused.append(perf_counter() - sent)
        load.untold += not error.retry_after
    except TandemError as error:
        load.failed.append(f"{error.reason}: {error.message}")
    except asyncio.CancelledError:
        load.unfinished += 1
        raise
    else:
        load.ttft.append(first - sent)
        load.tpot.append((perf_counter() - first) / (NEW - 1))


async def capacity(client: AsyncClient, prompts: Prompts, seconds: float) -> float:
    """Requests a second that end while `BUSY` are in progress."""
    load = Load(0.0, seconds)
    until = perf_counter() + seconds

    async def place() -> None:
        while perf_counter() < until:
            await ask(client, prompts.next(), load)

    began = perf_counter()
    await asyncio.gather(*(place() for _ in range(BUSY)))
    return len(load.ttft) / (perf_counter() - began)


async def offered(client: AsyncClient, prompts: Prompts, rate: float, seconds: float, settle: float) -> Load:
    """Requests for so many seconds, and `settle` more for the last ones to end."""
    load, chance = Load(rate, seconds), random.Random(1)
    tasks: list[asyncio.Task[None]] = []
    at = perf_counter()
    until = at + seconds
    while (at := at + chance.expovariate(rate)) < until:
        await asyncio.sleep(at - perf_counter())
        load.late = max(load.late, perf_counter() - at)
        tasks.append(asyncio.create_task(ask(client, prompts.next(), load)))
    await asyncio.sleep(max(0.0, until - perf_counter()))
    _, left = await asyncio.wait(tasks, timeout=settle)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    return load


@dataclass
class Side:
    """With or without the objectives."""

    capacity: float
    loads: list[Load]
    memory: list[float]  # MiB of the router, after the ramp and after the overload
    held: int  # blocks, when all was over for `FREED_S`

    def summary(self, ttft: float, tpot: float) -> str:
        *ramp, over = self.loads
        peak = max(load.goodput(ttft, tpot) for load in ramp)
        lines = [f"capacity {self.capacity:.2f} requests/s"]
        for load in self.loads:
            told = f", refusals after {percentile(load.refused, 0.5) * 1e3:.0f} ms (p99" if load.refused else ""
            told += f" {percentile(load.refused, 0.99) * 1e3:.0f} ms)" if load.refused else ""
            p90 = f"{percentile(load.ttft, 0.9):.2f} s" if load.ttft else "-"
            lines.append(
                f"  {load.rate:5.2f} a second for {load.seconds:.0f} s: goodput {load.goodput(ttft, tpot):.2f},"
                f" ended {len(load.ttft)}, refused {len(load.refused)}, failed {len(load.failed)}, unfinished"
                f" {load.unfinished}, TTFT p90 {p90}{told}, sent late by {load.late * 1e3:.0f} ms at most"
            )
        lines.append(f"  goodput at the last rate / peak before: {over.goodput(ttft, tpot) / peak:.2f}")
        lines.append(
            f"  router {self.memory[0]:.0f} MiB, then {self.memory[1]:.0f}; blocks held in the end: {self.held}"
        )
        lines.append(f"  refused without a time to come back: {sum(load.untold for load in self.loads)}")
        lines += [f"  failed: {why}" for why in sorted({why for load in self.loads for why in load.failed})[:5]]
        return "\n".join(lines)


async def drive(target: str, memory: Callable[[], float], given: argparse.Namespace, vocab: int) -> Side:
    prompts, settle = Prompts(vocab), given.ttft + NEW * given.tpot
    async with AsyncClient(target) as client:
        await capacity(client, prompts, 3.0)  # warms up
        most = await capacity(client, prompts, given.ramp)
        loads = []
        for factor in RAMP:
            loads.append(await offered(client, prompts, factor * most, given.ramp, settle))
        before = memory()
        loads.append(await offered(client, prompts, given.factor * most, given.seconds, settle))
        return Side(most, loads, [before, memory()], 0)


def measure(model: Path, given: argparse.Namespace, vocab: int, objectives: bool) -> Side:
    settings: dict[str, object] = {"dtype": "bfloat16", "block_size": 16, "kv_blocks": 6000, "max_model_len": 1024}
    if objectives:
        settings |= {"slo_ttft_s": given.ttft, "slo_tpot_s": given.tpot}
    with Local(model=model, local_prefill="measured", **settings) as local:
        local.launch("router", "router-0")
        local.launch("prefill", "prefill-0", core=0)
        local.launch("decode", "decode-0", core=1)
        local.wait_seen("router-0", 2, timeout_s=240.0)
        router = psutil.Process(local.pid("router-0"))
        with precedence():
            found = asyncio.run(
                drive(local.address("router-0"), lambda: router.memory_info().rss / 2**20, given, vocab)
            )
        with Client(local.address("router-0")) as client:
            until = perf_counter() + FREED_S
            while (held := sum(one.blocks_held for one in client.workers())) and perf_counter() < until:
                sleep(0.1)  # records are half a second old
        found.held = held
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ramp", type=float, default=20.0)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--ttft", type=float, default=2.0)
    parser.add_argument("--tpot", type=float, default=0.1)
    parser.add_argument("--shape", default="SmolLM2-135M", choices=sorted(REAL))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Side] = {}
    with tempfile.TemporaryDirectory(prefix="tandem-overload-", dir=Path.home()) as folder:  # /tmp may be in memory
        model = make_checkpoint(Path(folder) / "model", given.shape)
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        for side, objectives in (("with objectives", True), ("without", False)):
            found[side] = measure(model, given, vocab, objectives)
            print(f"{side}: {found[side].summary(given.ttft, given.tpot)}\n", flush=True)
    if given.json:
        plain = {side: {**vars(one), "loads": list(map(vars, one.loads))} for side, one in found.items()}
        given.json.write_text(json.dumps(plain))


if __name__ == "__main__":
    main()
