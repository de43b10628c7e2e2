"""`make peers`: Tandem compared with other servers and engines on this machine, as ratios of sides measured in turn.

docs/measuring.md describes each part and the installation of the peers. All processes that it starts end with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic
from typing import Annotated, Any, Literal

import typer

from loadtest.comparison import engines, interference, serve, soak
from loadtest.comparison.peer_servers import SIDES, Peers
from loadtest.harness import machine
from loadtest.harness.machine import conditions
from loadtest.harness.options import PEERS_HOME, Home, Json, Quick, Script, names, numbers
from loadtest.harness.progress import progress
from loadtest.harness.section_table import finish
from tandem.settings import Settings

PARTS: dict[str, Any] = {"serve": serve, "interference": interference, "engines": engines, "soak": soak}  # modules


@dataclass(frozen=True)
class Changes:
    """What the command line changes of the plans."""

    quick: Quick = False
    runs: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of each side (not for soak).")] = None
    requests: Annotated[int | None, typer.Option(metavar="N", min=1, help="Of soak.")] = None
    shape: Annotated[str, typer.Option(metavar="A,B", help=f"Of serve, engines: {','.join(serve.Plan.shapes)}.")] = ""
    series: Annotated[str, typer.Option(metavar="A,B", help=f"Of serve: {','.join(serve.SERIES)}.")] = ""
    sides: Annotated[str, typer.Option(metavar="A,B", help=f"Of interference: {','.join(SIDES)}.")] = ""
    engines: Annotated[str, typer.Option(metavar="A,B", help=f"Of engines: {','.join(engines.ENGINES)}.")] = ""
    concurrency: Annotated[str, typer.Option(metavar="N,N", help="Of serve: 1,8,16.")] = ""
    waves: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Of serve: requests behind one another at each place.")
    ] = None
    threads: Annotated[str, typer.Option(metavar="N,N", help="Of engines: 1,2.")] = ""


def planned(changes: Changes) -> dict[str, Any]:
    """The plan of each part by name: its defaults or those of --quick, changed by the command line."""
    quick = changes.quick
    plans: dict[str, Any] = {
        "serve": serve.Plan(shapes=("SmolLM2-135M",), runs=1, waves=1) if quick else serve.Plan(),
        "interference": interference.Plan(rounds=1, seconds=20.0, settle=3.0) if quick else interference.Plan(),
        "engines": engines.Plan(rounds=2, steps=6) if quick else engines.Plan(),
        "soak": soak.Plan(requests=200, samples=10) if quick else soak.Plan(),
    }
    summaries: dict[str, dict[str, Any]] = {
        "serve": {
            "shapes": changes.shape and names(changes.shape, serve.Plan.shapes),
            "series": changes.series and names(changes.series, serve.SERIES),
            "concurrency": changes.concurrency and numbers(changes.concurrency),
            "runs": changes.runs,
            "waves": changes.waves,
        },
        "interference": {"sides": changes.sides and names(changes.sides, SIDES), "rounds": changes.runs},
        "engines": {
            "engines": changes.engines and names(changes.engines, engines.ENGINES),
            "shapes": changes.shape and names(changes.shape, engines.SHAPES),
            "threads": changes.threads and numbers(changes.threads),
            "rounds": changes.runs,
        },
        "soak": {"requests": changes.requests},
    }
    return {
        part: replace(plans[part], **{name: value for name, value in summaries[part].items() if value})
        for part in PARTS
    }


def main(
    part: Annotated[Literal["serve", "interference", "engines", "soak"], typer.Argument()],
    changes: Changes,
    results: Json = None,
    settings: Annotated[str, typer.Option("--set", metavar="NAME=VALUE,...", help="Settings of Tandem.")] = "",
    script: Script = None,
    home: Home = PEERS_HOME,
) -> int:
    plan, chosen = planned(changes)[part], _settings(settings)
    before, began = conditions(), monotonic()
    with progress(part, plan.ticks) as (tick, _):
        about = machine.measure(machine.usable_threads(), machine.QUICK if changes.quick else machine.Plan())
        sections = PARTS[part].run(Peers(script, home.expanduser(), chosen), plan, tick)
    by_title = {section.title: section for section in sections}
    finish(about, by_title, before, began, results, plan=vars(plan), set=chosen)
    return 0


def _settings(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    if wrong := [name for name, _, value in pairs if name not in Settings.model_fields or not value]:
        raise typer.BadParameter(f"{', '.join(wrong)}: give a setting of docs/operations.md and its value")
    return {name: value for name, _, value in pairs}
