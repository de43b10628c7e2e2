"""The autoscaler compared with fixed pools, on the burst of a trace.

The part of Azure's code trace around its highest peak, its time stretched and its lengths divided. First fixed pools
with one decode worker, from --fixed prefill workers up or down until the smallest pool that keeps the objective is
known; a load that has already missed it is ended early. Then the autoscaler, from --least prefill workers up to that
size. Worker-seconds are compared: the time for which worker processes
existed during the load, including start and drain, but without --spares, which wait without a model or a device.

Workers are real processes with real engines of a tiny model, each slowed down to a device of the same speed
(loadtest/scenarios/slow_device.py), so that several of them fit on a few cores. The report shows the cores in use.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from loadtest.harness.goodput import Objective
from loadtest.harness.machine import conditions
from loadtest.harness.options import Json, Tpot, Ttft
from loadtest.harness.random_checkpoints import make_checkpoint
from loadtest.harness.report import failures, lines
from loadtest.harness.stats import console, percentile
from loadtest.loadgen import traces, workload
from loadtest.loadgen.workload import Request
from loadtest.scenarios.pool_bench import PoolBench, Run
from loadtest.scenarios.slow_device import Device
from tandem.errors import TandemError, Unavailable

PEAK_S = 10.0
MOST = 6  # prefill workers that are tried
SINCE_S, UNTIL_S = 810.0, 900.0  # the part of the trace
STRETCH, SCALE = 2.5, 8  # its times are multiplied, its lengths divided


@dataclass(frozen=True)
class Options:
    trace: Annotated[Path, typer.Option(metavar="FILE", help="Azure's code trace.")]
    fixed: Annotated[int, typer.Option(metavar="P", min=1, help="Prefill workers of the first fixed pool.")] = 3
    least: Annotated[int, typer.Option(metavar="P", help="Prefill workers of the autoscaler at first.")] = 1
    spares: Annotated[int, typer.Option(metavar="N", help="Processes that wait for the autoscaler.")] = 0


def burst(bench: PoolBench, options: Options) -> None:
    """Fixed pools, and then the autoscaler up to the smallest of them that keeps the objective."""
    full_trace = traces.read(options.trace)
    part = [request for request in full_trace if SINCE_S <= request.at < UNTIL_S]
    moved = [Request((request.at - SINCE_S) * STRETCH, request.input, request.output) for request in part]
    requests, seconds = workload.scaled(moved, SCALE), (UNTIL_S - SINCE_S) * STRETCH
    over, within = (peak(requests) / workload.mean_rate(requests) for requests in (full_trace, part))
    bench.notes += [
        f"{options.trace.name}: its 10 s peak is {over:.1f} times its mean; {within:.1f} times in the part from second"
        f" {SINCE_S:g} to {UNTIL_S:g}, which is taken",
        f"time stretched by {STRETCH:g}, lengths divided by {SCALE}",
    ]
    tried: dict[int, Run] = {}
    size = options.fixed
    while size not in tried:
        run = bench.run(f"fixed, {size} prefill + 1 decode", bench.fixed(size, 1), requests, seconds, hopeless=True)
        tried[size] = run
        if not kept(run, bench.objective):
            size += 1
            if size > MOST:
                raise Unavailable(f"{MOST} prefill workers do not keep the objective either")
        elif size > 1:
            size -= 1
    best = min(size for size, run in tried.items() if kept(run, bench.objective))
    name = f"autoscaled, {options.least} to {best} prefill + 1 decode"
    scaled = bench.run(name, bench.scaled(best, 1, options.least, options.spares), requests, seconds)
    share = 1 - scaled.worker_seconds / tried[best].worker_seconds
    verdict = "keeps" if kept(scaled, bench.objective) else "DOES NOT KEEP"
    bench.notes.append(
        f"the smallest fixed pool that keeps the objective has {best} prefill workers and 1 decode worker;"
        f" the autoscaled one {verdict} it, with {share:.0%} fewer worker-seconds"
    )


def kept(run: Run, objective: Objective) -> bool:
    return not run.ended_early and run.load.attainment(objective) >= objective.attainment


def peak(requests: Sequence[Request]) -> float:
    """Requests a second in the fullest 10 s."""
    first, most = 0, 0
    for last, request in enumerate(requests):
        while request.at - requests[first].at >= PEAK_S:
            first += 1
        most = max(most, last + 1 - first)
    return most / PEAK_S


def table(runs: Sequence[Run], objective: Objective) -> Table:
    table = Table(title_justify="left")
    columns = ("pools", "kept", "TTFT p50", "p90", "worker-seconds", "most", "rejected", "failed", "cores p50", "p95")
    for column in columns:
        table.add_column(column, justify="left" if column == "pools" else "right")
    for run in runs:
        times = run.load.values("ttft") or [0.0]
        cells = [
            run.name,
            "no, ended early" if run.ended_early else f"{run.load.attainment(objective):.1%}",
            f"{percentile(times, 0.5):.2f} s",
            f"{percentile(times, 0.9):.2f} s",
            "" if run.ended_early else f"{run.worker_seconds:.0f}",
            str(max((count for _, count in run.sizes), default=0)),
            str(run.load.count("rejected")),
            str(run.load.count("failed") + run.load.count("unfinished")),
            f"{percentile(run.cores[1:] or [0.0], 0.5):.2f}",
            f"{percentile(run.cores[1:] or [0.0], 0.95):.2f}",
        ]
        table.add_row(*cells)
    return table


def main(
    options: Options,
    hold: Annotated[float, typer.Option(metavar="S", help="autoscale_hold_s.")] = 15.0,
    rate: Annotated[float, typer.Option(metavar="R", help="Prompt tokens/s of a device.")] = Device.prompt_rate,
    ttft: Ttft = 8.0,
    tpot: Tpot = 0.2,
    results: Json = None,
) -> int:
    objective, device = Objective(ttft, tpot), Device(prompt_rate=rate)
    code = 0
    with tempfile.TemporaryDirectory(prefix="tandem-burst-") as folder:
        bench = PoolBench(make_checkpoint(Path(folder) / "model", "tiny-llama"), device, objective, hold)
        try:
            burst(bench, options)
        except TandemError as error:  # what was measured before is shown all the same
            print(f"error: {error.message}", file=sys.stderr)
            code = 1
    show(bench, objective)
    if results:
        content = {"notes": bench.notes, "conditions": conditions(), "objective": asdict(objective)}
        runs = [{**asdict(run), "worker_seconds": run.worker_seconds} for run in bench.runs]
        results.write_text(json.dumps({**content, "device": asdict(device), "runs": runs}) + "\n")
    return code


def show(bench: PoolBench, objective: Objective) -> None:
    out = console(200)
    out.print(table(bench.runs, objective))
    for run in bench.runs:
        pools = ", ".join(f"{at:.0f} s {sizes}" for at, sizes in run.pools)
        told = [*lines([run.load], objective), f"    pools: {pools}", f"    requests by worker: {run.where}"]
        told += [f"    {count} times: {why}" for count, why in failures([run.load])]
        for line in told:
            out.print(line, markup=False, highlight=False)
    for note in bench.notes:
        out.print(note, markup=False, highlight=False)
