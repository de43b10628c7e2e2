"""Latency of a client that keeps to its limits, during each abuse by another client.

Starts a cluster on this machine with two tenants. `polite` requests eight tokens over gRPC, again and again. `greedy`,
a process of its own, does one thing at a time:

    body          posts bodies of 4 MiB, {"messages":[0,0,...]}, one after another on one connection
    undecodable   keeps 16 requests in progress, of 1,900 tokens each that never become text
    idle          holds 500 HTTP connections open and sends nothing
    watchers      has 150 watchers of one running job

Each is measured `--rounds` times for `--seconds`, in turn with an equal time without it; for `undecodable`, greedy has
as many requests of ordinary text in progress in that time, and for `watchers` a job with one watcher. Prints the 99th
percentile of polite's requests without and with the abuse, and their ratio; with those that polite would have sent
during a stall at its median pace without the abuse. Exits with 1 if a request of polite failed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from math import inf
from statistics import median
from typing import Annotated

import typer

from loadtest.harness.options import Rounds, Seconds, names
from loadtest.harness.stats import paced, percentile
from loadtest.scenarios.two_tenants import GREEDY, Polite, Target, be_greedy, greedy, served, two_tenants
from tandem.async_client import AsyncClient
from tandem.errors import TandemError

BODY_BYTES = 4 * 1024 * 1024
UNDECODABLE = 227  # the demo model's token for the byte 0x80, which begins no code point
TEXT = 66  # and one for a letter
REQUESTS, TOKENS = 16, 1900
CONNECTIONS = 500
WATCHERS = 150


# ---- what greedy does, until it is cancelled; `outcomes` counts the results


async def body(target: Target, outcomes: Counter[str]) -> None:
    zeros = b'{"messages":[' + b",".join([b"0"] * ((BODY_BYTES - 20) // 2)) + b"]}"
    while True:
        outcomes[(await target.send("POST", "/v1/chat/completions", zeros))[0]] += 1


async def text(target: Target, outcomes: Counter[str]) -> None:
    await tokens(target, outcomes, TEXT)


async def undecodable(target: Target, outcomes: Counter[str]) -> None:
    await tokens(target, outcomes, UNDECODABLE)


async def tokens(target: Target, outcomes: Counter[str], token: int) -> None:
    """The one token, again and again, of as many requests as are allowed."""
    asked = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    asked["logit_bias"] = {str(token): 100}

    async def keep_on() -> None:
        while True:
            outcomes[(await target.send("POST", "/v1/completions", json.dumps(asked).encode()))[0]] += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(REQUESTS):
            tasks.create_task(keep_on())


async def idle(target: Target, outcomes: Counter[str]) -> None:
    async def hold() -> None:
        while True:
            reader, writer = await target.connect()
            outcomes["opened"] += 1
            await reader.read()  # until the server closes it
            outcomes["closed"] += 1
            writer.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(hold())


async def watchers(target: Target, outcomes: Counter[str]) -> None:
    await watched(target, outcomes, WATCHERS)


async def job(target: Target, outcomes: Counter[str]) -> None:
    await watched(target, outcomes, 1)


async def watched(target: Target, outcomes: Counter[str], count: int) -> None:
    """One job after another, each with `count` watchers from its first token to its last."""
    async with AsyncClient(target.grpc, api_key=GREEDY) as client:

        async def watch(job_id: str) -> None:
            try:
                async for _ in client.watch(job_id):
                    outcomes["pieces"] += 1
            except TandemError as error:
                outcomes[error.reason] += 1

        while True:
            submitted = await client.submit([5, 6, 7], max_tokens=TOKENS, ignore_eos=True)
            await asyncio.gather(*(watch(submitted.job_id) for _ in range(count)))
            outcomes["jobs"] += 1


Abuse = Callable[[Target, Counter[str]], Awaitable[None]]
ABUSES: dict[str, Abuse] = {"body": body, "undecodable": undecodable, "idle": idle, "watchers": watchers}
FAIR: dict[str, Abuse] = {"text": text, "job": job}
# greedy's load while the abuse is not measured; otherwise none
INSTEAD = {"undecodable": "text", "watchers": "job"}


# ---- what polite has of it


async def measure(polite: Polite, target: Target, seconds: float) -> None:
    async with served(target.grpc) as more:
        await asyncio.sleep(seconds)
    polite.kept += more.kept
    polite.failed += more.failed


async def compare(name: str, target: Target, rounds: int, seconds: float) -> int:
    """Prints a row. Returns how many of polite's requests failed."""
    without, during, lines = Polite(), Polite(), list[str]()
    for _ in range(rounds):
        async with greedy("abuse", INSTEAD[name], target, []) if name in INSTEAD else nullcontext():
            await measure(without, target, seconds)
        async with greedy("abuse", name, target, lines):
            await measure(during, target, seconds)
    every_s = median(without.kept or [1.0])
    p99 = [percentile(paced(polite.kept, every_s) or [0.0], 0.99) for polite in (without, during)]
    columns = [
        f"{len(polite.kept):>6} {1000 * median(polite.kept or [0.0]):7.1f} {1000 * worst:7.1f}"
        for polite, worst in zip((without, during), p99, strict=True)
    ]
    print("  ".join([f"{name:>12}", *columns, f"{p99[1] / (p99[0] or inf):5.2f}   greedy: {lines[-1]}"]), flush=True)
    failed = without.failed + during.failed
    for reason, count in failed.items():
        print(f"{'':>12}  failed: {count} {reason}", flush=True)
    return failed.total()


async def run(target: Target, names: list[str], rounds: int, seconds: float) -> int:
    """Returns how many of polite's requests failed."""
    print(f"{'':>12}  {'without p50':>14} {'p99 ms':>7}  {'with p50':>14} {'p99 ms':>7}  ratio", flush=True)
    await measure(Polite(), target, 2.0)  # what is slow once
    return sum([await compare(name, target, rounds, seconds) for name in names])


def main(
    seconds: Seconds = 10.0,
    rounds: Rounds = 3,
    only: Annotated[str, typer.Option(metavar="ABUSE,...", help="Abuses to try.")] = ",".join(ABUSES),
    as_greedy: Annotated[tuple[str, str, str] | None, typer.Option("--greedy", hidden=True)] = None,
) -> int:
    if as_greedy:
        name, *addresses = as_greedy
        outcomes: Counter[str] = Counter()
        abuse = (ABUSES | FAIR)[name](Target(*addresses), outcomes)
        asyncio.run(be_greedy([abuse], outcomes, settle_s=1.0))  # it has its connections and requests by then
        return 0
    abuses = list(names(only, ABUSES))
    with two_tenants("requests=64") as target:
        return 1 if asyncio.run(run(target, abuses, rounds, seconds)) else 0
