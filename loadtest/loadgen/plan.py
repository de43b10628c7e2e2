"""One load after another: a command line becomes requests, requests become a Load, and loads a Side."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from loadtest.harness.goodput import Load, Objective, Say, Side, highest, next_rate
from loadtest.harness.options import Seed, positive
from loadtest.loadgen import traces, workload
from loadtest.loadgen.generator import offer, patience, prompts
from loadtest.loadgen.targets import Target
from loadtest.loadgen.workload import Request
from tandem.errors import SettingsError


@dataclass(frozen=True)
class Plan:
    """`rate` and `speed` may both be absent for a trace: then it comes as it was recorded."""

    trace: Annotated[Path | None, Option(metavar="FILE", help="Of Azure, Mooncake or ServeGen; else Poisson.")] = None
    rate: Annotated[float | None, Option(metavar="R", help="Requests a second, on average.", callback=positive)] = None
    speed: Annotated[float | None, Option(metavar="S", help="Of a trace: 2 halves all gaps.", callback=positive)] = None
    by_chance: Annotated[bool, Option("--poisson", help="A trace's lengths at times of a Poisson process.")] = False
    bursts: Annotated[bool, Option("--bursts", help="A trace's equal times as recorded, not spread.")] = False
    """A trace's requests of the same moment together, as recorded; otherwise spread until the next moment."""
    scale: Annotated[int, Option(metavar="N", min=1, help="Divides a trace's lengths.")] = 1
    input: Annotated[int, Option(metavar="N", min=1, help="Tokens of a prompt, without a trace.")] = 256
    output: Annotated[int, Option(metavar="N", min=1, help="Tokens of an answer, without a trace.")] = 32
    seconds: Annotated[float, Option(metavar="S", help="Counted part of the load.", callback=positive)] = 60.0
    warmup: Annotated[float, Option(metavar="S", help="Before it, not counted.")] = 5.0
    context: Annotated[int | None, Option(metavar="N", min=1, help="Tokens of the longest request (the server's).")] = (
        None
    )
    vocab: Annotated[int, Option(metavar="N", min=1, help="Token ids are below it.")] = 256
    seed: Seed = 1

    def requests(self, rate: float | None, context: int | None) -> tuple[list[Request], float, list[str]]:
        """Those of one load, the rate that they have, and what the report must say of them. Raises SettingsError."""
        until, context = self.warmup + self.seconds, self.context or context
        if self.trace is None:
            if rate is None:
                raise SettingsError("without a trace there must be a rate", field="rate")
            single, dropped = workload.fitting([Request(0.0, self.input, self.output)], context)
            if dropped:
                raise SettingsError(f"{self.input} tokens in and {self.output} out are over {context}", field="context")
            notes = [f"Poisson arrivals, {self.input} tokens in, {self.output} out"]
            return workload.by_chance(rate, until, self.seed, [(single[0].input, single[0].output)]), rate, notes
        trace_requests = workload.scaled(traces.read(self.trace), self.scale)
        chosen, dropped = workload.fitting(trace_requests, context)
        notes = [f"{self.trace.name}: lengths divided by {self.scale}"]
        if dropped:
            notes.append(
                f"{dropped} of its {len(trace_requests)} requests do not fit into {context} tokens and were left out"
            )
        if self.by_chance:
            if rate is None:
                raise SettingsError("random arrivals need a rate", field="rate")
            notes.append("lengths of the trace in its order, Poisson arrivals")
            return (
                workload.by_chance(rate, until, self.seed, [(request.input, request.output) for request in chosen]),
                rate,
                notes,
            )
        if not self.bursts and (even := workload.spread(chosen)) != chosen:
            notes.append("requests of the same moment were spread evenly until the next moment")
            chosen = even
        recorded = workload.mean_rate(chosen)
        speed = rate / recorded if rate else self.speed or 1.0
        notes.append(f"arrivals as recorded ({recorded:.3g} a second), {speed:.3g} times as fast")
        chosen = workload.faster(chosen, speed)
        if chosen[-1].at < until:
            raise SettingsError(
                f"at this rate the trace lasts {chosen[-1].at:.1f} s, and warm-up and load {until:g} s", field="seconds"
            )
        return [request for request in chosen if request.at < until], recorded * speed, notes


async def measure(
    target: Target, plan: Plan, rate: float | None, objective: Objective, say: Say, name: str = ""
) -> tuple[Load, list[str]]:
    """One load, and notes for the report. Its prompts are new each time, so no cache has them."""
    requests, rate, notes = plan.requests(rate, target.context)
    load = Load(name or f"at {rate:.3g}/s", rate, plan.warmup, plan.seconds)
    prompt = prompts(int.from_bytes(os.urandom(6)), plan.scale, plan.vocab)
    await offer(target, requests, load, settle=patience(requests, objective), prompt=prompt, say=say)
    return load, notes


@dataclass(frozen=True)
class Search:
    """Where it begins, how close it comes, and how many rates it tries at most."""

    start: Annotated[float, Option(metavar="R", help="The first rate tried.", callback=positive)] = 1.0
    precision: Annotated[float, Option(metavar="P", help="How close to the highest rate.", callback=positive)] = 0.1
    tries: Annotated[int, Option(metavar="N", min=1, help="Rates at most.")] = 12


async def search(
    target: Target,
    plan: Plan,
    how: Search,
    objective: Objective,
    say: Say,
    side: Side,
    done: Callable[[Load], None] = lambda load: None,
) -> list[str]:
    """Adds a load for each rate that it tries to `side`, and the highest rate that was kept (0: none was)."""
    tried: list[tuple[float, bool]] = []
    notes: list[str] = []
    while (rate := next_rate(tried, how.start, how.precision, how.tries)) is not None:
        load, notes = await measure(target, plan, rate, objective, say)
        tried.append((rate, load.attainment(objective) >= objective.attainment))
        side.loads.append(load)
        done(load)
    side.bests.append(highest(tried) or 0.0)
    return [*notes, f"search from {how.start:g} requests/s to within {how.precision:.0%}, {how.tries} rates at most"]
