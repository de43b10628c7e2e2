"""Other people's load clients: what they report is read right, and a failed request is never passed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.commands import main
from loadtest.comparison import clients
from loadtest.comparison.clients import Figures, Load
from loadtest.comparison.peer_servers import Peers
from tandem.errors import SettingsError, Unavailable

LOAD = Load("http://127.0.0.1:1", "chat", requests=4, at_once=2, output=16)
FIGURES = Figures(done=4, failed=0, tokens=64, requests_s=2.0, tokens_s=32.0, ttft=0.05, itl=0.004)


def successful(**statistics: float) -> dict[str, dict[str, float]]:
    return {"successful": statistics}


GUIDELLM = {
    "request_totals": {"successful": 4, "errored": 0, "incomplete": 0},
    "output_token_count": successful(total_sum=64.0),
    "requests_per_second": successful(mean=2.0),
    "output_tokens_per_second": successful(mean=32.0),
    "time_to_first_token_ms": successful(median=50.0),
    "inter_token_latency_ms": successful(median=4.0),
}
AIPERF = {
    "request_count": {"avg": 4.0},
    "total_usage_completion_tokens": {"avg": 64.0},
    "request_throughput": {"avg": 2.0},
    "output_token_throughput": {"avg": 32.0},
    "time_to_first_token": {"p50": 50.0},
    "inter_token_latency": {"p50": 4.0},
}
VLLM = {
    "completed": 4,
    "num_prompts": 4,
    "total_output_tokens": 64,
    "request_throughput": 2.0,
    "output_throughput": 32.0,
    "median_ttft_ms": 50.0,
    "median_itl_ms": 4.0,
}


def test_every_client_s_report_comes_to_the_same_figures() -> None:
    """Milliseconds become seconds, and each finds its counts where that client keeps them."""
    assert clients.read_guidellm({"benchmarks": [{"metrics": GUIDELLM}]}) == FIGURES
    assert clients.read_aiperf(AIPERF) == FIGURES
    assert clients.read_vllm(VLLM) == FIGURES
    assert clients.read_aiperf({**AIPERF, "error_request_count": {"avg": 1.0}}).failed == 1


def test_what_is_missing_is_said() -> None:
    """A failed, an unfinished and a shortened request are each a fault."""
    assert clients.wrong(LOAD, FIGURES) == ""
    assert "1 failed" in clients.wrong(LOAD, replace(FIGURES, failed=1))
    assert "3 of 4" in clients.wrong(LOAD, replace(FIGURES, done=3))
    assert "63 tokens" in clients.wrong(LOAD, replace(FIGURES, tokens=63))


def test_a_client_that_is_not_there_or_fails_is_an_error(tmp_path: Path) -> None:
    """Its last words are told; and without it, where its environment is expected."""
    tool, peers = clients.TOOLS["guidellm"], Peers(None, tmp_path)
    with pytest.raises(SettingsError, match="guidellm"):
        clients.run(tool, LOAD, peers)
    program = tmp_path / "guidellm" / "bin" / "guidellm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho no such endpoint; exit 3\n")
    program.chmod(0o755)
    with pytest.raises(Unavailable, match="no such endpoint"):
        clients.run(tool, LOAD, peers)


def test_an_unknown_client_is_refused_before_anything_starts() -> None:
    """Exit code 2."""
    assert main(["clients", "locust"]) == 2
