"""Latency of a client that keeps to its limits, while another client has many jobs and watchers.

Starts a cluster on this machine with two tenants. `polite` requests eight tokens over gRPC, again and again. `greedy`,
a process of its own, has `--count` open jobs, and then a watcher on each. Prints the median and the 99th percentile of
polite's requests alone, during the jobs, and during the jobs with watchers. Exits with 1 if a request of polite failed.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from cluster.local_cluster import LocalCluster
from loadtest.harness.demo_model import DEMO
from loadtest.harness.options import Rounds, Seconds
from loadtest.harness.stats import percentile
from loadtest.scenarios.abuse import beside
from loadtest.scenarios.flood import GREEDY, POLITE, Polite, served
from tandem import settings
from tandem.async_client import AsyncClient
from tandem.errors import TandemError

COUNT, TOKENS = 150, 900
PER_MINUTE = 6000  # tokens of greedy: its jobs run a few at a time, or it would be their load that is measured
LOOK_S = 0.5
SETTLE_S = 3.0
ATTACKS = ("alone", "jobs", "watchers")


async def jobs(target: str, count: int, outcomes: Counter[str]) -> None:
    """Keeps `count` jobs open, until it is cancelled."""
    async with AsyncClient(target, api_key=GREEDY) as client:
        await asyncio.gather(*(_again(client, outcomes, watched=False) for _ in range(count)))


async def watchers(target: str, count: int, outcomes: Counter[str]) -> None:
    """Keeps `count` jobs open and watches each, until it is cancelled. `found` counts tokens and errors."""
    async with AsyncClient(target, api_key=GREEDY) as client:
        await asyncio.gather(*(_again(client, outcomes, watched=True) for _ in range(count)))


async def _again(client: AsyncClient, outcomes: Counter[str], watched: bool) -> None:
    while True:
        try:
            job = await client.submit([5, 6, 7], max_tokens=TOKENS, ignore_eos=True)
            outcomes["jobs"] += 1
            if watched:
                async for piece in client.watch(job.job_id):
                    outcomes["tokens"] += len(piece.token_ids)
            while True:
                if (await client.job(job.job_id)).state != "open":
                    break
                await asyncio.sleep(LOOK_S * 10)
        except TandemError as error:
            outcomes[error.reason] += 1
            await asyncio.sleep(LOOK_S)


async def be_greedy(attack: str, target: str, count: int) -> None:
    """Until the standard input ends. Says when it has begun, and in the end what became of it."""
    outcomes: Counter[str] = Counter()
    working = asyncio.ensure_future({"jobs": jobs, "watchers": watchers}[attack](target, count, outcomes))
    while True:
        if outcomes["jobs"] >= count or working.done():
            break
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(SETTLE_S)  # the cost of opening many calls at once is not measured
    print("begun", flush=True)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([working, ended], return_when=asyncio.FIRST_COMPLETED)
    working.cancel()
    print(", ".join(f"{number} {what}" for what, number in outcomes.most_common()), flush=True)


@asynccontextmanager
async def greedy(attack: str, target: str, count: int, lines: list[str]) -> AsyncIterator[None]:
    if attack == "alone":
        yield
        return
    command = [sys.executable, "-m", "loadtest", "watchers", "--greedy", attack, target, "--count", str(count)]
    async with beside(command, lines):
        yield


async def run(target: str, count: int, seconds: float, rounds: int) -> int:
    """Returns how many of polite's requests failed."""
    measured, lines = {attack: Polite() for attack in ATTACKS}, {attack: list[str]() for attack in ATTACKS}
    for _ in range(rounds):
        for attack in ATTACKS:
            async with greedy(attack, target, count, lines[attack]), served(target) as polite:
                await asyncio.sleep(seconds)
            measured[attack].kept += polite.kept
            measured[attack].failed += polite.failed
    for attack, polite in measured.items():
        quantiles = f"p50 {1000 * median(polite.kept):6.0f} ms  p99 {1000 * percentile(polite.kept, 0.99):6.0f} ms"
        failed = f"failed {dict(polite.failed)}"
        print(f"{attack:>9}  {len(polite.kept):>5} requests  {quantiles}  {failed}  {lines[attack][-1:]}")
    return sum(polite.failed.total() for polite in measured.values())


def main(
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Open jobs, and watchers.")] = COUNT,
    seconds: Seconds = 10.0,
    rounds: Rounds = 3,
    greedy: Annotated[tuple[str, str] | None, typer.Option(metavar="WAY TARGET", hidden=True)] = None,
) -> int:
    if greedy:
        attack, target = greedy
        asyncio.run(be_greedy(attack, target, count))
        return 0
    with tempfile.TemporaryDirectory(prefix="tandem-watchers-") as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"greedy {GREEDY} tokens_per_minute={PER_MINUTE}\npolite {POLITE}\n")
        overrides = settings.load(model=str(DEMO), port=0, api_keys=keys, kv_blocks=8192, max_tenant_jobs=10_000)
        with LocalCluster(overrides, lambda line: print(line, file=sys.stderr)) as cluster:
            return 1 if asyncio.run(run(cluster.target, count, seconds, rounds)) else 0
