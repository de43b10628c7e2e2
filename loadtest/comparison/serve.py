"""Tandem's and vLLM's servers under vLLM's own load client, in turn: A B A B ...; each ratio is of two neighbouring
runs."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from loadtest.comparison.peer_servers import Peers, Server, make, others_frozen, started
from loadtest.harness.processes import precedence
from loadtest.harness.stats import Row, Section, Spread, Tick, ratios
from tandem.errors import Unavailable

CLIENT_TIMEOUT_S = 1200.0
# Sides that are up together. vLLM's two modes are not: its script uses the same port for both.
SERIES = {"pd": ("vllm-pd", "tandem-pd"), "aggregated": ("vllm-aggregated", "tandem-aggregated", "tandem-pd")}
METRICS = {"output": "output tokens/s", "ttft": "TTFT median", "tpot": "TPOT median", "itl": "ITL p99"}
# What docs/performance.md promises of ours / theirs: (ours, theirs, metric) -> concurrency -> bound.
AT_LEAST = {
    ("tandem-pd", "vllm-pd", "output"): {8: 1.5, 16: 1.5},
    ("tandem-aggregated", "vllm-aggregated", "output"): {8: 1.2},
    ("tandem-pd", "vllm-aggregated", "output"): {8: 1.0},
}
AT_MOST = {
    ("tandem-pd", "vllm-pd", "ttft"): {1: 0.9, 8: 0.7, 16: 0.7},
    ("tandem-pd", "vllm-pd", "tpot"): {1: 0.6},
    ("tandem-pd", "vllm-pd", "itl"): {1: 1.0, 8: 1.0, 16: 1.0},
    ("tandem-aggregated", "vllm-aggregated", "tpot"): {1: 0.7},
}


@dataclass(frozen=True)
class Plan:
    """`runs` of each side at each of `concurrency`, each of `prompts(concurrency)` requests."""

    shapes: tuple[str, ...] = ("SmolLM2-135M", "Qwen3-0.6B")
    series: tuple[str, ...] = tuple(SERIES)
    concurrency: tuple[int, ...] = (1, 8, 16)
    runs: int = 5
    input: int = 512
    output: int = 64
    waves: int = 3  # consecutive requests of each client; twice as many with one client

    def prompts(self, concurrency: int) -> int:
        return self.waves * concurrency * (2 if concurrency == 1 else 1)

    @property
    def ticks(self) -> int:
        sides = sum(len(SERIES[name]) for name in self.series)
        return len(self.shapes) * (len(self.series) + sides * (1 + self.runs * len(self.concurrency)))


@dataclass(frozen=True)
class Run:
    """What the client measured: tokens a second, and seconds."""

    output: float
    ttft: float
    tpot: float
    itl: float


def run(peers: Peers, plan: Plan, tick: Tick) -> list[Section]:
    """A section for each shape and series. Raises SettingsError, Unavailable."""
    return [_series(peers, plan, shape, name, tick) for shape in plan.shapes for name in plan.series]


def _series(peers: Peers, plan: Plan, shape: str, name: str, tick: Tick) -> Section:
    tick(f"starting {', '.join(SERIES[name])} with {shape}")
    model = peers.checkpoint(shape)
    servers = [make(side, model, peers) for side in SERIES[name]]
    runs_by_side: dict[tuple[str, int], list[Run]] = {}
    idle: dict[str, list[float]] = {server.name: [] for server in servers}  # cores, while another one was measured
    with started(servers):
        for number in range(plan.runs + 1):
            for concurrency in plan.concurrency if number else (max(plan.concurrency),):
                for server in servers:
                    tick(f"{shape}: {server.name}, {concurrency} at once, {f'run {number}' if number else 'warm-up'}")
                    others = [other for other in servers if other is not server]
                    with others_frozen(others):
                        measured, cores = _load(peers, plan, server, others, concurrency)
                    if number:  # the first run warms up
                        runs_by_side.setdefault((server.name, concurrency), []).append(measured)
                        for other, used in cores.items():
                            idle[other].append(used)
    theirs, *ours = SERIES[name]
    rows = [
        row
        for side in ours
        for concurrency in plan.concurrency
        for row in compare(
            side, theirs, concurrency, runs_by_side[side, concurrency], runs_by_side[theirs, concurrency]
        )
    ]
    read = "ours / theirs: over 1, Tandem has more of it. In brackets what is promised, and whether it is kept"
    notes = [
        f"{plan.input} tokens in, {plan.output} out, bfloat16, two cores; the load client has them, too; new prompts in"
        f" each run, {plan.waves} behind one another; {plan.runs} runs in turn after one that warms up",
        *(
            f"{side} used {Spread.of(used).median:.2f} cores (median; {max(used):.2f} at most) while another one was"
            " measured"
            for side, used in idle.items()
        ),
    ]
    details = {f"{side} {count}": [vars(run) for run in runs] for (side, count), runs in runs_by_side.items()}
    return Section(f"{shape}: {' and '.join(ours)} against {theirs}", read, rows, notes, details)


def compare(ours: str, theirs: str, concurrency: int, our_runs: list[Run], other: list[Run]) -> list[Row]:
    """A row for each metric: the ratios of neighbouring runs."""
    rows = []
    for metric, title in METRICS.items():
        a, b = ([getattr(run, metric) for run in runs] for runs in (our_runs, other))
        ratio, unit = ratios(a, b), "1" if metric == "output" else "s"
        promise = promised(ours, theirs, metric, concurrency, ratio.median)
        what = f"{ours} / {theirs}, {concurrency} at once: {title}{f' ({promise})' if promise else ''}"
        rows.append(Row(what, ratio, {ours: (Spread.of(a), unit), theirs: (Spread.of(b), unit)}))
    return rows


def promised(ours: str, theirs: str, metric: str, concurrency: int, ratio: float) -> str:
    """The bound and whether the ratio keeps it; nothing where nothing is promised."""
    key = (ours, theirs, metric)
    least, most = (bounds.get(key, {}).get(concurrency) for bounds in (AT_LEAST, AT_MOST))
    if least is not None:
        return f"≥ {least:g}: {'kept' if ratio >= least else 'NOT KEPT'}"
    if most is not None:
        return f"≤ {most:g}: {'kept' if ratio <= most else 'NOT KEPT'}"
    return ""


def _load(
    peers: Peers, plan: Plan, server: Server, others: Iterable[Server], concurrency: int
) -> tuple[Run, dict[str, float]]:
    """One run of `vllm bench serve`; and the cores that each of the others used meanwhile, the client's start
    included."""
    prompts = plan.prompts(concurrency)
    with tempfile.TemporaryDirectory(prefix="tandem-peers-") as folder:
        result = Path(folder) / "result.json"
        command = [
            *(peers.executable("vllm", "vllm"), "bench", "serve", "--backend", "openai", "--model", server.model),
            *("--base-url", f"http://127.0.0.1:{server.port}", "--dataset-name", "random", "--ignore-eos"),
            *("--random-input-len", plan.input, "--random-output-len", plan.output, "--num-prompts", prompts),
            *("--max-concurrency", concurrency, "--seed", _seed(), "--temperature", 0, "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", 99),
            *("--save-result", "--result-dir", folder, "--result-filename", result.name),
        ]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        before, began = {other.name: other.cpu() for other in others}, monotonic()
        with precedence():  # the load client inherits it
            done = subprocess.run(
                list(map(str, command)), env=env, cwd=folder, timeout=CLIENT_TIMEOUT_S, capture_output=True, check=False
            )
        if done.returncode != 0 or not result.exists():
            raise Unavailable(f"vllm bench serve failed against {server.name}: {done.stderr.decode()[-2000:]}")
        report = json.loads(result.read_text())
        cores = {other.name: (other.cpu() - before[other.name]) / (monotonic() - began) for other in others}
    return read_result(report, prompts, plan.output), cores


def _seed() -> int:
    """New in each run, because every side caches prefixes."""
    return int.from_bytes(os.urandom(4)) >> 1


def read_result(report: dict[str, float], prompts: int, output: int) -> Run:
    """The client's JSON. Raises Unavailable when a request failed or was cut short: then its rates mean nothing."""
    if report["completed"] != prompts or report["total_output_tokens"] != prompts * output:
        raise Unavailable(
            f"{report['completed']} of {prompts} requests were finished, with {report['total_output_tokens']} tokens"
            f" instead of {prompts * output}"
        )
    ms = [report[name] / 1e3 for name in ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms")]
    return Run(report["output_throughput"], *ms)
