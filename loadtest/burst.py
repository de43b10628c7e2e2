"""The autoscaler against fixed pools, live: on the burst of a trace, and on streams and prompts that come and go.

    python -m loadtest.burst --trace azure2023_code_min00-30.csv.gz [--json FILE]
                             [--only burst|autoscaled|streams] [--fixed P] [--least P] [--most P]
                             [--spares N]

burst    The part of the trace around its highest peak (--since to --until, in its own seconds), its time stretched and
         its lengths divided. First fixed pools with one decode worker, from --fixed prefill workers up or down until
         the smallest is known that keeps the objective; a load that has missed it already is ended early. Then the
         autoscaler, from --least prefill workers up to --most or that size. Compared are worker-seconds: how long
         processes of workers existed while the load came, starting and draining included; --spares, which wait without
         a model or a device, are not counted.
streams  Long answers, then long prompts, then little: decode goes from 1 to 3 workers and back, which lends two to
         prefill. Nothing may fail, and answers must be what is said to the same prompts when all is over.

Workers are real processes with real engines of a tiny model, each slowed down to a device of the same speed
(loadtest/slow.py), so that several of them fit on a few cores. How many cores were in use is in the report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from cluster.reconcile import Kind
from cluster.supervisor import role_of
from cluster.up import Cluster
from engine.checkpoints import make_checkpoint
from loadtest import traces, workload
from loadtest.bench import conditions
from loadtest.generator import offer, patience, prompts
from loadtest.goodput import Load, Objective
from loadtest.local import precedence
from loadtest.report import failures, lines
from loadtest.slow import LAUNCHER, Device
from loadtest.stats import percentile
from loadtest.targets import Grpc, Message
from loadtest.workload import Request
from tandem import settings
from tandem.answers import Receipt
from tandem.errors import TandemError, Unavailable

LOOK_S = 0.25  # between two counts of processes
PEAK_S = 10.0
MOST = 6  # prefill workers that are tried
CHECKED = 20  # answers of `streams` that are asked for once more
ROOT = Path(__file__).parents[1]


@dataclass
class Run:
    """One load on one cluster. At seconds since it began: `sizes`, processes of workers, and `pools`, ready ones."""

    name: str
    load: Load
    sizes: list[tuple[float, int]] = field(default_factory=list)
    pools: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    where: dict[str, int] = field(default_factory=dict)
    """Requests by the workers in their receipts."""
    ended_early: bool = False
    flips: int = 0
    differ: int = 0
    """Answers that were others when they were asked for once more."""

    @property
    def worker_seconds(self) -> float:
        until = [at for at, _ in self.sizes[1:]] + [self.load.until]
        return sum(
            count * max(0.0, min(end, self.load.until) - at) for (at, count), end in zip(self.sizes, until, strict=True)
        )


Answer = tuple[list[int], list[int], Receipt]  # the prompt and the tokens


class Keeping(Grpc):
    """Remembers answers and receipts."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.answers: list[Answer] = []

    def stream(self, prompt: Sequence[int], output: int) -> AsyncGenerator[Message, None]:
        return self._keep(list(prompt), output)

    async def _keep(self, prompt: list[int], output: int) -> AsyncGenerator[Message, None]:
        said: list[int] = []
        async for piece in self._client.stream(prompt, max_tokens=output, ignore_eos=True, temperature=0.0):
            said += piece.token_ids
            if piece.receipt:
                self.answers.append((prompt, said, piece.receipt))
            yield Message(len(piece.token_ids), receipt=piece.receipt)


class Bench:
    """Clusters of slow workers, one after another, and what is measured on each."""

    def __init__(self, model: Path, device: Device, objective: Objective, hold_s: float) -> None:
        self._given: dict[str, Any] = {
            **{"model": str(model), "port": 0, "threads": 1, "device": "cpu", "kv_blocks": 2000, "max_num_seqs": 32},
            **{"drain_grace_s": 20.0, "autoscale_hold_s": hold_s},
            **{"slo_ttft_s": objective.ttft, "slo_tpot_s": objective.tpot},
        }
        self._device = device
        self._answers: list[Answer] = []
        self.objective = objective
        self.runs: list[Run] = []
        self.notes = [
            f"a device computes {device.prompt_rate:g} prompt tokens/s; a step takes {device.step_s * 1e3:g} ms"
        ]

    def fixed(self, prefill: int, decode: int) -> dict[str, Any]:
        given = {name: value for name, value in self._given.items() if name != "autoscale_hold_s"}
        return {**given, "prefill": prefill, "decode": decode}

    def scaled(self, prefill: int, decode: int, least: int = 1, spares: int = 0) -> dict[str, Any]:
        """From `least` prefill workers and one decode worker."""
        limits = {"prefill": least, "prefill_max": prefill, "decode_max": decode, "spares": spares}
        return {**self._given, "autoscale": "on", **limits}

    def run(
        self,
        name: str,
        given: dict[str, Any],
        requests: Sequence[Request],
        seconds: float,
        *,
        hopeless: bool = False,
        check: bool = False,
    ) -> Run:
        """`hopeless`: end it when so many have missed that the objective cannot be kept any more. `check`: ask for some
        of the answers once more."""
        run = Run(name, Load(name, len(requests) / seconds, 0.0, seconds))
        say(f"{name}: starting")
        with self._environment(), Cluster(settings.load(**given), launcher=LAUNCHER) as cluster:
            say(f"{name}: {len(requests)} requests in {seconds:.0f} s")
            self._watch(cluster, run, requests, hopeless)
            if check:
                run.differ = asyncio.run(self._differ(cluster.target))
        self.runs.append(run)
        say(f"{name}: {run.load.attainment(self.objective):.1%} kept, {run.worker_seconds:.0f} worker-seconds")
        return run

    def _watch(self, cluster: Cluster, run: Run, requests: Sequence[Request], hopeless: bool) -> None:
        """Counts processes and notes events in this thread, for the cluster is this thread's; the load has its own."""
        failed: list[BaseException] = []

        def drive() -> None:
            try:
                with precedence():
                    asyncio.run(self._drive(cluster.target, run, requests, hopeless))
            except BaseException as error:  # noqa: BLE001, raised in the other thread
                failed.append(error)

        thread = threading.Thread(target=drive, name="load", daemon=True)
        began = monotonic()
        known = set(cluster.workers)
        alive = {one for one in known if role_of(one) != "router"}
        thread.start()
        while thread.is_alive():
            now = monotonic() - began
            # Among the processes are spares, and who turns lives under two names: neither is one worker more.
            run.sizes.append((now, min(_workers(), len(alive))))
            run.cores.append(psutil.cpu_percent() / 100 * (os.cpu_count() or 1))
            for event in cluster.events(LOOK_S):
                if event.kind is Kind.LOADING and "with the weights" in event.text:
                    run.flips += 1
                if event.kind is Kind.STARTING:
                    alive.add(event.worker_id)
                elif event.kind in (Kind.STOPPED, Kind.DIED, Kind.FAILED):
                    alive.discard(event.worker_id)
                if event.kind in (Kind.READY, Kind.STARTING, Kind.STOPPED, Kind.DIED, Kind.FAILED):
                    run.events.append((monotonic() - began, f"{event.worker_id} {event.kind}"))
                    say(f"  {monotonic() - began:6.1f} s  {event.worker_id} {event.kind}")
            if set(cluster.workers) != known or not run.pools:
                known = set(cluster.workers)
                run.pools.append((now, dict(Counter(role_of(one) for one in known if role_of(one) != "router"))))
        thread.join()
        if failed:
            raise failed[0]

    async def _drive(self, target: str, run: Run, requests: Sequence[Request], hopeless: bool) -> None:
        async with Keeping(target) as server:
            offering = asyncio.create_task(
                offer(server, requests, run.load, settle=patience(requests, self.objective), prompt=prompts(7))
            )
            while not (await asyncio.wait({offering}, timeout=1.0))[0]:
                missed = sum(one.ended > 0 and not one.kept(self.objective) for one in run.load.outcomes)
                if hopeless and missed > (1 - self.objective.attainment) * len(requests):
                    run.ended_early = True
                    offering.cancel()
            if not offering.cancelled():
                offering.result()
            hops = [hop for *_, told in server.answers for hop in (told.prefill_worker, told.decode_worker) if hop]
            run.where = dict(sorted(Counter(hops).items()))
            self._answers = server.answers

    async def _differ(self, target: str) -> int:
        """Of answers spread over the whole load, how many are not what is said now."""
        sample = self._answers[:: max(1, len(self._answers) // CHECKED)][:CHECKED]
        async with Keeping(target) as server:
            for prompt, tokens, _ in sample:
                async for _ in server.stream(prompt, len(tokens)):
                    pass
            return sum(before[1] != now[1] for before, now in zip(sample, server.answers, strict=True))

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Ray's workers inherit it."""
        wanted = {**self._device.environment(), "PYTHONPATH": str(ROOT)}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def burst(bench: Bench, given: argparse.Namespace) -> None:
    """Fixed pools, and then the autoscaler up to the smallest of them that keeps the objective."""
    whole = traces.read(given.trace)
    part = [one for one in whole if given.since <= one.at < given.until]
    moved = [Request((one.at - given.since) * given.stretch, one.input, one.output) for one in part]
    requests, seconds = workload.scaled(moved, given.scale), (given.until - given.since) * given.stretch
    over, within = (peak(one) / workload.mean_rate(one) for one in (whole, part))
    bench.notes += [
        f"{given.trace.name}: its 10 s peak is {over:.1f} times its mean; {within:.1f} times in the part from second"
        f" {given.since:g} to {given.until:g}, which is taken",
        f"time stretched by {given.stretch:g}, lengths divided by {given.scale}",
    ]
    if given.only == "autoscaled":
        sizes = bench.scaled(given.most, 1, given.least, given.spares)
        bench.run(named(given.most, given.least), sizes, requests, seconds)
        return
    tried: dict[int, Run] = {}
    size = given.fixed
    while size not in tried:
        run = bench.run(f"fixed, {size} prefill + 1 decode", bench.fixed(size, 1), requests, seconds, hopeless=True)
        tried[size] = run
        if not kept(run, bench.objective):
            size += 1
            if size > MOST:
                raise Unavailable(f"{MOST} prefill workers do not keep the objective either")
        elif size > 1:
            size -= 1
    best = min(one for one, run in tried.items() if kept(run, bench.objective))
    most = given.most or best
    scaled = bench.run(named(most, given.least), bench.scaled(most, 1, given.least, given.spares), requests, seconds)
    fixed = tried[best]
    share = 1 - scaled.worker_seconds / fixed.worker_seconds
    told = "keeps" if kept(scaled, bench.objective) else "DOES NOT KEEP"
    bench.notes.append(
        f"the smallest fixed pool that keeps the objective has {best} prefill workers and 1 decode worker;"
        f" the autoscaled one {told} it, with {share:.0%} fewer worker-seconds"
    )


def named(most: int, least: int) -> str:
    return f"autoscaled, {least} to {most} prefill + 1 decode"


def streams(bench: Bench) -> None:
    """Decode from 1 worker to 3 and back, with two of them in the prefill pool meanwhile."""
    chance = workload.poisson
    requests = sorted(
        [
            *(Request(at, 32, 150) for at in chance(3.2, 35.0, 1)),
            *(Request(at, 200, 8) for at in chance(0.5, 130.0, 2)),
            *(Request(55.0 + at, 600, 2) for at in chance(2.6, 30.0, 3)),
        ],
        key=lambda one: one.at,
    )
    given = {**bench.scaled(3, 3), "max_num_seqs": 8, "autoscale_hold_s": 30.0}
    del given["slo_ttft_s"]  # nobody is refused for being late
    run = bench.run("streams", given, requests, 130.0, check=True)
    whole = sum(one.state == "done" for one in run.load.counted)
    bench.notes.append(
        f"{run.flips} workers changed their pool; {whole} of {len(run.load.counted)} answers came whole;"
        f" {run.differ} of {CHECKED} answers were others when asked for once more"
    )


def kept(run: Run, objective: Objective) -> bool:
    return not run.ended_early and run.load.attainment(objective) >= objective.attainment


def peak(requests: Sequence[Request]) -> float:
    """Requests a second in the fullest 10 s."""
    first, most = 0, 0
    for last, one in enumerate(requests):
        while one.at - requests[first].at >= PEAK_S:
            first += 1
        most = max(most, last + 1 - first)
    return most / PEAK_S


def _workers() -> int:
    """Processes of prefill and decode workers; the one router is an actor like them."""
    found = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += "WorkerActor" in process.name()
    return found - 1


def say(line: str) -> None:
    print(f"{monotonic() - BEGAN:7.1f} s  {line}", file=sys.stderr, flush=True)


def table(runs: Sequence[Run], objective: Objective) -> Table:
    found = Table(title_justify="left")
    columns = ("pools", "kept", "TTFT p50", "p90", "worker-seconds", "most", "rejected", "failed", "cores p50", "p95")
    for column in columns:
        found.add_column(column, justify="left" if column == "pools" else "right")
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
        found.add_row(*cells)
    return found


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.burst", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device, objective = Device(), Objective(ttft=8.0, tpot=0.2)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Azure's code trace; not for streams")
    parser.add_argument("--only", choices=("burst", "autoscaled", "streams"), help="autoscaled: without fixed pools")
    parser.add_argument(
        "--most", type=int, metavar="P", help="prefill workers of the autoscaler [the smallest fixed pool's]"
    )
    parser.add_argument("--least", type=int, default=1, metavar="P", help="and its fewest [1]")
    parser.add_argument("--spares", type=int, default=0, metavar="N", help="processes that wait for the autoscaler [0]")
    parser.add_argument("--since", type=float, default=810.0, metavar="S")
    parser.add_argument("--until", type=float, default=900.0, metavar="S")
    parser.add_argument("--stretch", type=float, default=2.5)
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--fixed", type=int, default=3, metavar="P", help="prefill workers that are tried first [3]")
    parser.add_argument("--hold", type=float, default=15.0, metavar="S", help="autoscale_hold_s [15]")
    parser.add_argument(
        "--rate", type=float, default=device.prompt_rate, metavar="R", help="prompt tokens/s of a device"
    )
    parser.add_argument("--ttft", type=float, default=objective.ttft, metavar="S", help="objective [8]")
    parser.add_argument("--tpot", type=float, default=objective.tpot, metavar="S", help="objective [0.2]")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if given.trace is None and given.only != "streams":
        parser.error("burst needs a --trace")
    if given.most is None and given.only == "autoscaled":
        parser.error("without fixed pools nobody knows the --most")
    device = Device(prompt_rate=given.rate)
    objective = Objective(given.ttft, given.tpot)
    code = 0
    with tempfile.TemporaryDirectory(prefix="tandem-burst-") as folder:
        bench = Bench(make_checkpoint(Path(folder) / "model", "tiny-llama"), device, objective, given.hold)
        try:
            if given.only != "streams":
                burst(bench, given)
            if given.only in (None, "streams"):
                streams(bench)
        except TandemError as error:
            print(f"error: {error.message}", file=sys.stderr)
            code = 1
        except KeyboardInterrupt:
            print("stopped; nothing was left running", file=sys.stderr)
            code = 130
    runs, notes = bench.runs, bench.notes
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(table(runs, objective))
    for run in runs:
        for line in lines([run.load], objective):
            console.print(line, markup=False)
        console.print(f"    pools: {', '.join(f'{at:.0f} s {sizes}' for at, sizes in run.pools)}", markup=False)
        console.print(f"    requests by worker: {run.where}", markup=False)
        for count, why in failures([run.load]):
            console.print(f"    {count} times: {why}", markup=False)
    for note in notes:
        console.print(note, markup=False)
    if given.json:
        told = {"notes": notes, "conditions": conditions(), "objective": asdict(objective), "device": asdict(device)}
        one = [{**asdict(run), "worker_seconds": run.worker_seconds} for run in runs]
        given.json.write_text(json.dumps({**told, "runs": one}) + "\n")
    return code


BEGAN = monotonic()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
