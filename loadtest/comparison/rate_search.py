"""Goodput: the highest rate of requests that keeps the objective, of systems on this machine in turn.

512 tokens in and 64 out of a random model of SmolLM2-135M's shape. Each system is started, searched over HTTP and
stopped again, in each round. docs/measuring.md explains the sides and the report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from loadtest.comparison.peer_servers import SIDES, Peers, Server, make, started
from loadtest.harness.goodput import Objective, Say, Side
from loadtest.harness.machine import conditions
from loadtest.harness.options import PEERS_HOME, Home, Quick, Script, names
from loadtest.harness.processes import precedence
from loadtest.harness.progress import progress
from loadtest.harness.report import Report
from loadtest.harness.stats import Tick
from loadtest.loadgen.load import Output
from loadtest.loadgen.plan import Plan, Search, search
from loadtest.loadgen.targets import Http

OURS, VLLM = ("tandem-replicas", "tandem-pd"), ("vllm-aggregated", "vllm-pd")
SHAPE = "SmolLM2-135M"


@dataclass(frozen=True)
class Sizes:
    plan: Plan
    search: Search
    rounds: int


FULL = Sizes(Plan(input=512, output=64, seconds=60.0, warmup=8.0), Search(start=1.0), rounds=2)
QUICK = Sizes(Plan(input=128, output=8, seconds=4.0, warmup=1.0), Search(start=2.0, tries=3), rounds=1)


def searched(peers: Peers, sides: Sequence[str], sizes: Sizes, objective: Objective, tick: Tick, say: Say) -> Report:
    """Every side in each round, the order turned round each time. Raises SettingsError, Unavailable."""
    by_side = {side: Side(side, "HTTP", SHAPE) for side in sides}
    objectives = {"slo_ttft_s": str(objective.ttft), "slo_tpot_s": str(objective.tpot)}
    peers = replace(peers, settings={**objectives, **peers.settings})
    notes: list[str] = []
    for number in range(sizes.rounds):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            tick(f"starting {side}, round {number + 1} of {sizes.rounds}")
            server = make(side, peers.checkpoint(SHAPE), peers)
            with started([server]), precedence() as priority_note:
                tick(f"searching {side}, round {number + 1} of {sizes.rounds}")
                notes = [*asyncio.run(_search(server, sizes, objective, say, by_side[side])), priority_note]
    notes += [
        f"{SHAPE} with the same random weights in bfloat16; client, routers and Ray share the cores with the servers",
        "pd: a prefill and a decode worker, a core each; replicas: two workers that do both, a core each; aggregated: "
        "one server on all cores",
        "Tandem knows the objective (slo_ttft_s, slo_tpot_s): it refuses what would be late",
        f"{sizes.rounds} search{'es' * (sizes.rounds > 1)} of each side, in turn, each on a system newly started",
    ]
    return Report("Goodput: " + " against ".join(sides), objective, list(by_side.values()), notes, conditions())


async def _search(server: Server, sizes: Sizes, objective: Objective, say: Say, side: Side) -> list[str]:
    async with Http(f"http://127.0.0.1:{server.port}", server.model) as target:
        return await search(target, sizes.plan, sizes.search, objective, say, side)


def main(
    command_line: typer.Context,
    objective: Objective,
    to: Output,
    quick: Quick = False,
    vllm: Annotated[bool, typer.Option("--vllm", help="Also vLLM's CPU build.")] = False,
    sides: Annotated[str, typer.Option(metavar="A,B", help=f"The first is the baseline; of {', '.join(SIDES)}.")] = "",
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Searches of each side.")] = None,
    script: Script = None,
    home: Home = PEERS_HOME,
) -> int:
    chosen = names(sides, SIDES) if sides else (*OURS, *(VLLM if vllm else ()))
    sizes = QUICK if quick else FULL
    sizes = replace(sizes, rounds=rounds or sizes.rounds)
    with progress("goodput") as (tick, say):
        report = searched(Peers(script, home.expanduser()), chosen, sizes, objective, tick, say)
    if quick:
        report.notes.insert(0, "--quick: it shows that everything works; the numbers mean nothing")
    return to.finish(report, command_line)
