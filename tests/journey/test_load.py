"""The load generator with a whole cluster, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loadtest.commands import main
from loadtest.harness import report as reports
from loadtest.harness.goodput import Load, Objective, Side
from loadtest.harness.report import Report
from loadtest.loadgen.plan import Plan, measure
from loadtest.loadgen.targets import Grpc, Http, Target

OBJECTIVE = Objective(ttft=30.0, tpot=1.0)  # what is not over by then is given up, and others have the cores, too
PLAN = Plan(rate=8.0, seconds=1.6, warmup=0.4, input=24, output=6)


async def loaded(target: Target) -> Load:
    async with target:
        assert target.context
        load, _ = await measure(target, PLAN, PLAN.rate, OBJECTIVE, lambda *_: None)
    return load


async def test_two_seconds_over_grpc_and_http(inside: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every token of every request arrives over both, and the two reports are read again and compared."""
    async with inside(http_port=0) as cluster:
        targets = {"grpc": Grpc(cluster.router.address), "http": Http(f"http://{cluster.router.http.address}")}
        loads = await asyncio.gather(*map(loaded, targets.values()))
    for (name, target), load in zip(targets.items(), loads, strict=True):
        assert load.count("done") == len(load.counted) > 0, reports.failures([load])
        assert {one.tokens for one in load.outcomes} == {PLAN.output}
        Report(name, OBJECTIVE, [Side(name, target.address, target.model, [load])]).write(None, tmp_path / name)
    assert {one.path for one in reports.read(tmp_path / "grpc").sides[0].loads[0].outcomes} == {"disaggregated"}
    assert (
        main(["compare", *(str(tmp_path / name) for name in targets), "--late", "9"]) == 0
    )  # this process serves, too
    assert "http / grpc, at 8/s: ttft p50" in capsys.readouterr().out
