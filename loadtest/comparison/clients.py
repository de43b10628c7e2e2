"""Other load clients, unmodified, against Tandem's HTTP API: guidellm, AIPerf, and `vllm bench serve`.

Starts a router, a prefill and a decode worker with the demo model, and each client from its own environment under
`--home`, for completions and for chat. Make the environments once with

    python3 -m venv guidellm && guidellm/bin/pip install torch==2.13.0 guidellm==0.8.1
    python3 -m venv aiperf && aiperf/bin/pip install aiperf==0.13.0

Prints each client's own figures. Exits with 1 when a client failed a request or received a wrong number of tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cluster.free_port import free_port
from loadtest.comparison.peer_servers import Peers
from loadtest.harness.demo_model import DEMO
from loadtest.harness.options import PEERS_HOME, AtOnce, Home, names
from loadtest.harness.processes import Local
from loadtest.harness.section_table import FILE_WIDTH
from tandem.errors import Unavailable

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
TIMEOUT_S = 300.0
ROUTER = "router-0"


@dataclass(frozen=True)
class Load:
    """`requests` in all, `at_once`, with `input` tokens of random text and `output` to be generated."""

    url: str
    kind: str
    requests: int
    at_once: int
    input: int = 64
    output: int = 16


@dataclass(frozen=True)
class Figures:
    """A client's own figures: requests by their end, output tokens, seconds."""

    done: int
    failed: int
    tokens: int
    requests_s: float
    tokens_s: float
    ttft: float
    itl: float


@dataclass(frozen=True)
class Tool:
    """`command` has its arguments, for a folder that it may write to; `read` the file there that it leaves."""

    name: str
    program: str
    command: Callable[[Load, Path], list[str]]
    result: str
    read: Callable[[Any], Figures]
    offline: bool = True  # AIPerf takes a folder for a tokenizer only while the hub is not switched off


def _guidellm(load: Load, folder: Path) -> list[str]:
    return [
        *("run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={load.url},request_format={ENDPOINTS[load.kind]}"),
        *("--profile", f"kind=concurrent,streams={load.at_once}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={load.input},output_tokens={load.output}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    ]


def read_guidellm(report: Any) -> Figures:
    metrics = report["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    good: Callable[[str, str], float] = lambda name, statistic: metrics[name]["successful"][statistic]  # noqa: E731
    return Figures(
        done=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        tokens=round(good("output_token_count", "total_sum")),
        requests_s=good("requests_per_second", "mean"),
        tokens_s=good("output_tokens_per_second", "mean"),
        ttft=good("time_to_first_token_ms", "median") / 1e3,
        itl=good("inter_token_latency_ms", "median") / 1e3,
    )


def _aiperf(load: Load, folder: Path) -> list[str]:
    return [
        *("profile", "--model", str(DEMO), "--tokenizer", str(DEMO), "--url", load.url, "--streaming"),
        *("--endpoint-type", load.kind, "--isl", str(load.input), "--osl", str(load.output)),
        *("--concurrency", str(load.at_once), "--request-count", str(load.requests), "--ui", "none"),
        # Its own count is of the text, in which special tokens do not show.
        *("--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--output-artifact-dir", str(folder)),
    ]


def read_aiperf(report: Any) -> Figures:
    return Figures(
        done=round(report["request_count"]["avg"]),
        failed=round((report.get("error_request_count") or {"avg": 0})["avg"]),
        tokens=round(report["total_usage_completion_tokens"]["avg"]),
        requests_s=report["request_throughput"]["avg"],
        tokens_s=report["output_token_throughput"]["avg"],
        ttft=report["time_to_first_token"]["p50"] / 1e3,
        itl=report["inter_token_latency"]["p50"] / 1e3,
    )


def _vllm(load: Load, folder: Path) -> list[str]:
    backend = {"completions": "openai", "chat": "openai-chat"}[load.kind]
    return [
        *("bench", "serve", "--backend", backend, "--endpoint", ENDPOINTS[load.kind], "--model", str(DEMO)),
        *("--base-url", load.url, "--dataset-name", "random", "--ignore-eos", "--disable-tqdm"),
        *("--random-input-len", str(load.input), "--random-output-len", str(load.output)),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.at_once)),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"),
    ]


def read_vllm(report: Any) -> Figures:
    return Figures(
        done=report["completed"],
        failed=report["num_prompts"] - report["completed"],
        tokens=report["total_output_tokens"],
        requests_s=report["request_throughput"],
        tokens_s=report["output_throughput"],
        ttft=report["median_ttft_ms"] / 1e3,
        itl=report["median_itl_ms"] / 1e3,
    )


TOOLS = {
    tool.name: tool
    for tool in (
        Tool("guidellm", "guidellm", _guidellm, "guidellm.json", read_guidellm),
        Tool("aiperf", "aiperf", _aiperf, "profile_export_aiperf.json", read_aiperf, offline=False),
        Tool("vllm", "vllm", _vllm, "vllm.json", read_vllm),
    )
}


def run(tool: Tool, load: Load, peers: Peers) -> Figures:
    """Raises SettingsError without the client, Unavailable when it failed."""
    program = peers.executable(tool.name, tool.program)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if tool.offline:
        env["HF_HUB_OFFLINE"] = "1"
    else:
        env.pop("HF_HUB_OFFLINE", None)
    with tempfile.TemporaryDirectory(prefix="tandem-clients-") as name:
        folder = Path(name)
        command = [str(program), *tool.command(load, folder)]
        done = subprocess.run(command, env=env, cwd=folder, timeout=TIMEOUT_S, capture_output=True, check=False)
        result = folder / tool.result
        if done.returncode != 0 or not result.exists():
            raise Unavailable(f"{tool.name} failed ({done.returncode}): {(done.stdout + done.stderr).decode()[-3000:]}")
        return tool.read(json.loads(result.read_text()))


def wrong(load: Load, figures: Figures) -> str:
    """What a client did not get, in a sentence; empty when it got everything."""
    if figures.failed or figures.done != load.requests:
        return f"{figures.done} of {load.requests} requests were finished, {figures.failed} failed"
    if figures.tokens != load.requests * load.output:
        return f"{figures.tokens} tokens came instead of {load.requests * load.output}"
    return ""


def main(
    tools: Annotated[list[str] | None, typer.Argument(metavar="CLIENT", help=f"{', '.join(TOOLS)}; all.")] = None,
    requests: Annotated[int, typer.Option(metavar="N", min=1, help="Of each run.")] = 32,
    at_once: AtOnce = 4,
    home: Home = PEERS_HOME,
) -> int:
    chosen = names(",".join(tools), TOOLS) if tools else tuple(TOOLS)
    peers = Peers(None, home.expanduser())
    table = Table("client", "endpoint", "requests", "failed", "requests/s", "output tokens/s", "TTFT", "ITL", "wrong")
    faults = 0
    with Local(model=DEMO, kv_blocks=1024) as local:
        port = free_port("127.0.0.1", 0, "port")
        local.launch("router", ROUTER, http_port=port)
        local.launch("prefill", "prefill-0")
        local.launch("decode", "decode-0")
        local.wait_seen(ROUTER, 2)
        for name in chosen:
            for kind in ENDPOINTS:
                load = Load(f"http://127.0.0.1:{port}", kind, requests, at_once)
                figures = run(TOOLS[name], load, peers)
                fault = wrong(load, figures)
                faults += bool(fault)
                table.add_row(name, kind, *_cells(figures), fault)
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    console.print(table)
    return 1 if faults else 0


def _cells(figures: Figures) -> list[str]:
    rates = [f"{figures.requests_s:.1f}", f"{figures.tokens_s:.0f}"]
    return [
        str(figures.done),
        str(figures.failed),
        *rates,
        f"{figures.ttft * 1e3:.1f} ms",
        f"{figures.itl * 1e3:.1f} ms",
    ]
