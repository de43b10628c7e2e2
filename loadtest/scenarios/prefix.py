"""Placing by cached prefix compared with taking turns, on conversations of a trace.

TRACE is Mooncake's conversation trace: timestamp, input_length, output_length, and hash_ids of blocks of 512 tokens,
equal for equal beginnings. Whole conversations are taken from it at random: all requests with the same second block,
at least two (nearly all have the same first block). Lengths are divided by 32, so that its blocks become ours of 16
tokens and what is shared stays the same; each id becomes 16 pseudo-random token ids. Requests in the same three seconds
are spread over them, and all gaps are shortened until `--rate` requests arrive in a second. They are sent whether
earlier ones have ended or not.

Two prefill and two decode workers on this machine, first with the setting `place_by_prefix` on and then off, and in the
reverse order in the next round; each time a new cluster with empty caches of `--kv-blocks` each. `infinite` is the
share of hits of one cache that loses nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from loadtest.harness.goodput import Load
from loadtest.harness.options import Json, Rounds, Seed, Shape, positive
from loadtest.harness.processes import Local, precedence
from loadtest.harness.random_checkpoints import make_checkpoint
from loadtest.loadgen import traces, workload
from loadtest.loadgen.generator import offer, prompts
from loadtest.loadgen.targets import Grpc
from loadtest.loadgen.workload import Request
from tandem.errors import Unavailable

FACTOR = 32
BLOCK = workload.BLOCK // FACTOR
SALT = 1  # the same prompts for every side
SETTLE_S = 120.0  # after the last one was sent
SIDES = {"by prefix": True, "in turns": False}
LONGEST = 2048  # tokens of prompt and answer


def read(path: Path, conversations: int, rate: float, seed: int) -> list[Request]:
    """`conversations` conversations that fit into the context, in the order of their requests."""
    turns: dict[int, list[Request]] = {}
    for request in workload.scaled(traces.read(path), FACTOR):
        if len(request.blocks) > 1:
            turns.setdefault(request.blocks[1], []).append(request)
    complete = [
        those for those in turns.values() if len(those) > 1 and len(workload.fitting(those, LONGEST)[0]) == len(those)
    ]
    chosen = random.Random(seed).sample(complete, conversations)
    requests = workload.spread(
        sorted((request for those in chosen for request in those), key=lambda request: request.at)
    )
    requests = [replace(request, at=request.at - requests[0].at) for request in requests]
    return workload.faster(requests, rate / workload.mean_rate(requests))


def infinite(asked: Sequence[Request]) -> float:
    """The share of prompt tokens in one cache that keeps every full block of every prompt before."""
    seen_blocks: set[int] = set()
    hits = total = 0
    for request in asked:
        full = request.blocks[: request.input // BLOCK]
        blocks = next((place for place, number in enumerate(full) if number not in seen_blocks), len(full))
        hits += min(blocks * BLOCK, request.input - 1)
        total += request.input
        seen_blocks.update(full)
    return hits / total


async def send(target: str, asked: Sequence[Request], side: str) -> Load:
    """Raises Unavailable when a request was not answered whole: hits of the others would mean nothing."""
    load, reported_at = Load(side, 0.0, 0.0, asked[-1].at + 1.0), 0.0

    def say(load: Load, now: float) -> None:
        nonlocal reported_at
        if now > reported_at + 15.0:
            reported_at = now
            print(f"  {now:6.1f} s  {side}: {load.count('done')} of {len(asked)}", flush=True)

    async with Grpc(target) as server:
        await offer(server, asked, load, settle=SETTLE_S, prompt=prompts(SALT, FACTOR), say=say)
    if wrong := [outcome for outcome in load.outcomes if outcome.state != "done"]:
        raise Unavailable(f"{len(wrong)} of {len(asked)} requests were not answered: {wrong[0].why or wrong[0].state}")
    return load


def hits(load: Load) -> float:
    return sum(outcome.cached or 0 for outcome in load.outcomes) / sum(outcome.input for outcome in load.outcomes)


def measure(model: Path, side: str, asked: Sequence[Request], kv_blocks: int) -> Load:
    settings = {"dtype": "bfloat16", "block_size": BLOCK, "kv_blocks": kv_blocks, "max_model_len": LONGEST}
    with Local(model=model, local_prefill="measured", place_by_prefix=SIDES[side], **settings) as local:
        local.launch("router", "router-0")
        for number in range(2):
            local.launch("prefill", f"prefill-{number}", core=0)
            local.launch("decode", f"decode-{number}", core=1)
        local.wait_seen("router-0", 4, timeout_s=240.0)
        with precedence():
            return asyncio.run(send(local.address("router-0"), asked, side))


def main(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Mooncake's conversation trace.")],
    conversations: Annotated[int, typer.Option(metavar="N", help="Taken at random from the trace.")] = 100,
    rate: Annotated[float, typer.Option(metavar="R", help="Requests a second.", callback=positive)] = 1.2,
    kv_blocks: Annotated[int, typer.Option(metavar="N", help="Of each worker's cache.")] = 1000,
    seed: Seed = 1,
    rounds: Rounds = 1,
    shape: Shape = "SmolLM2-135M",
    results: Json = None,
) -> None:
    by_side: dict[str, list[Load]] = {side: [] for side in SIDES}
    asked = read(trace, conversations, rate, seed)
    best = infinite(asked)
    with tempfile.TemporaryDirectory(prefix="tandem-prefix-", dir=Path.home()) as folder:  # /tmp may be in memory
        model = make_checkpoint(Path(folder) / "model", shape)
        for number in range(rounds):
            for side in list(SIDES)[:: -1 if number % 2 else 1]:
                by_side[side].append(measure(model, side, asked, kv_blocks))
    tokens = sum(request.input for request in asked)
    print(f"\n{len(asked)} requests of {conversations} conversations, {tokens / len(asked):.0f} tokens each (mean),")
    print(f"{rate:g} a second, {kv_blocks} blocks a worker; infinite: {best:.1%}")
    show(by_side, best)
    if results:
        details = {side: [asdict(load) for load in loads] for side, loads in by_side.items()}
        results.write_text(json.dumps({"infinite": best, **details}))


def show(by_side: dict[str, list[Load]], best: float) -> None:
    for side, loads in by_side.items():
        for load in loads:
            local = sum(outcome.path == "local" for outcome in load.outcomes) / len(load.outcomes)
            ttft = load.latencies()["ttft"]
            print(
                f"  {side:10} hits {hits(load):6.1%} ({hits(load) / best:.2f} of infinite)  TTFT p50"
                f" {ttft['p50']:.2f} s, p90 {ttft['p90']:.2f} s  local {local:.0%}  late by"
                f" {load.late * 1e3:.0f} ms (p99)"
            )
    for here, there in zip(by_side["by prefix"], by_side["in turns"], strict=True):
        ratio = here.latencies()["ttft"]["p90"] / there.latencies()["ttft"]["p90"]
        print(f"  by prefix / in turns: hits {hits(here) / hits(there):.2f}, TTFT p90 {ratio:.2f}")
