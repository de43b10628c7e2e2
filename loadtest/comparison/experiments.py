"""Reference experiments: systems on this machine, each started, measured over HTTP and stopped in one run.

`disaggregated`: the highest rate that keeps the objective, and goodput by rate.
`interference`: the effect of long prompts on steady streams (loadtest/comparison/interference.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import typer

from loadtest.comparison import interference
from loadtest.comparison.peer_servers import SIDES, Peers, Server, make, started
from loadtest.harness.goodput import Load, Objective, Side
from loadtest.harness.machine import conditions
from loadtest.harness.options import PEERS_HOME, Home, Quick, Script, names
from loadtest.harness.processes import precedence
from loadtest.harness.report import Report
from loadtest.harness.stats import Tick
from loadtest.loadgen.generator import Say
from loadtest.loadgen.load import Output, progress
from loadtest.loadgen.plan import Plan, Search, search
from loadtest.loadgen.targets import Http

TITLES = {
    "tandem-pd": "Tandem, disaggregated",
    "tandem-replicas": "Tandem, aggregated",
    "tandem-aggregated": "Tandem, aggregated (one worker)",
    "vllm-pd": "vLLM, disaggregated",
    "vllm-aggregated": "vLLM, aggregated",
}
OURS, VLLM = ("tandem-replicas", "tandem-pd"), ("vllm-aggregated", "vllm-pd")
SHAPE = "SmolLM2-135M"


@dataclass(frozen=True)
class Sizes:
    """Of both experiments."""

    plan: Plan
    search: Search
    rounds: int
    streams: interference.Plan


FULL = Sizes(
    Plan(input=512, output=64, seconds=60.0, warmup=8.0),
    Search(start=1.0),
    rounds=2,
    streams=interference.Plan(seconds=60.0),
)
QUICK = Sizes(
    Plan(input=128, output=8, seconds=4.0, warmup=1.0),
    Search(start=2.0, tries=3),
    rounds=1,
    streams=interference.Plan(seconds=9.0, settle=2.0, streams=4, output=64, long=1000, every=4.0),
)


def disaggregated(
    peers: Peers, sides: Sequence[str], sizes: Sizes, objective: Objective, tick: Tick, say: Say
) -> Report:
    """Every side in each round, the order turned round each time. Raises SettingsError, Unavailable."""
    by_side = {side: Side(TITLES[side], "", SHAPE) for side in sides}
    objectives = {"slo_ttft_s": str(objective.ttft), "slo_tpot_s": str(objective.tpot)}
    peers = replace(peers, settings={**objectives, **peers.settings})
    notes: list[str] = []
    for number in range(sizes.rounds):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            tick(f"starting {side}, round {number + 1} of {sizes.rounds}")
            server = make(side, peers.checkpoint(SHAPE), peers)
            with started([server]):
                tick(f"searching {side}, round {number + 1} of {sizes.rounds}")
                with precedence() as priority_note:
                    notes = [*asyncio.run(_search(server, sizes, objective, say, by_side[side])), priority_note]
    notes = [
        *notes,
        *_same(sides),
        "Tandem knows the objective (slo_ttft_s, slo_tpot_s): it refuses what would be late",
        f"{sizes.rounds} search{'es' * (sizes.rounds > 1)} of each side, in turn, each on a system newly started",
    ]
    title = "Goodput: " + " against ".join(TITLES[side] for side in sides)
    return Report(title, objective, list(by_side.values()), notes, conditions())


async def _search(server: Server, sizes: Sizes, objective: Objective, say: Say, side: Side) -> list[str]:
    async with Http(f"http://127.0.0.1:{server.port}", server.model) as target:
        side.target = "HTTP"
        return await search(target, sizes.plan, sizes.search, objective, say, side)


def steady(peers: Peers, sides: Sequence[str], sizes: Sizes, objective: Objective, tick: Tick, say: Say) -> Report:
    """Streams alone, then with long prompts, on one side after another. Raises SettingsError, Unavailable."""
    plan, results = sizes.streams, []
    notes: list[str] = []
    for side in sides:
        tick(f"starting {side}")
        server = make(side, peers.checkpoint(SHAPE), peers)
        with started([server]):
            tick(f"measuring {side}")
            with precedence() as priority_note:
                loads = asyncio.run(_steady(server, plan))
        results.append(Side(TITLES[side], "HTTP", SHAPE, loads))
        notes = [priority_note]
    notes = [interference.describe(plan), *notes, *_same(sides)]
    title = "Long prompts beside steady streams: " + " against ".join(TITLES[side] for side in sides)
    return Report(title, objective, results, notes, conditions())


async def _steady(server: Server, plan: interference.Plan) -> list[Load]:
    warm = replace(plan, settle=0.0)
    await interference.observe(server, warm, seconds=min(5.0, plan.seconds), disturb=True)
    return [
        await interference.observe(server, plan, seconds=plan.seconds, disturb=disturb) for disturb in (False, True)
    ]


def _same(sides: Sequence[str]) -> list[str]:
    """What makes the sides equal."""
    notes = [f"the shape of {SHAPE} with the same random weights in bfloat16 for everybody"]
    if "tandem-replicas" in sides:
        notes.append("aggregated: two workers that prefill in chunks and decode, a core and a thread each")
    if "tandem-pd" in sides:
        notes.append("disaggregated: a prefill and a decode worker, a core and a thread each")
    if "tandem-aggregated" in sides:
        notes.append("one worker: two threads")
    if set(sides) & set(VLLM):
        notes.append("vLLM: aggregated is one server on all cores, disaggregated two servers of a core each")
    return [*notes, "client, routers and Ray share those cores"]


def main(
    command_line: typer.Context,
    name: Annotated[Literal["disaggregated", "interference"], typer.Argument(help="The experiment.")],
    objective: Objective,
    to: Output,
    quick: Quick = False,
    vllm: Annotated[bool, typer.Option("--vllm", help="Also vLLM's CPU build.")] = False,
    sides: Annotated[str, typer.Option(metavar="A,B", help=f"The first is the baseline; of {', '.join(SIDES)}.")] = "",
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of disaggregated.")] = None,
    script: Script = None,
    home: Home = PEERS_HOME,
) -> int:
    chosen = names(sides, SIDES) if sides else (*OURS, *(VLLM if vllm else ()))
    sizes = QUICK if quick else FULL
    sizes = replace(sizes, rounds=rounds or sizes.rounds)
    what = {"disaggregated": disaggregated, "interference": steady}[name]
    with progress(name) as (tick, say):
        report = what(Peers(script, home.expanduser()), chosen, sizes, objective, tick, say)
    if quick:
        report.notes.insert(0, "--quick: it shows that everything works; the numbers mean nothing")
    return to.finish(report, command_line)
