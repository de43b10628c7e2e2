"""The load generator against a whole cluster, over both of its front doors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtest import report as reports
from loadtest.__main__ import main
from loadtest.goodput import Objective
from loadtest.plan import Plan, measure
from loadtest.report import Report, Side
from loadtest.targets import Grpc, Http

OBJECTIVE = Objective(ttft=0.5, tpot=0.1)


async def test_two_seconds_over_grpc_and_http(inside: Any, tmp_path: Path) -> None:
    """Every token of every request comes over both, and the two reports are read again and compared."""
    plan = Plan(rate=8.0, seconds=1.6, warmup=0.4, input=24, output=6)
    async with inside(http_port=0) as cluster:
        sides = {"grpc": Grpc(cluster.router.address), "http": Http(f"http://{cluster.router.http.address}")}
        for name, target in sides.items():
            async with target:
                load, said = await measure(target, plan, 8.0, OBJECTIVE, lambda *_: None)
                assert target.context
            assert load.count("done") == len(load.counted) > 0, reports.failures([load])
            assert {one.tokens for one in load.outcomes} == {6}
            report = Report(name, OBJECTIVE, [Side(name, target.address, target.model, [load])], said)
            report.write(None, tmp_path / f"{name}.json")
    assert {one.path for one in reports.read(tmp_path / "grpc.json").sides[0].loads[0].outcomes} == {"disaggregated"}
    page, files = tmp_path / "page.html", [str(tmp_path / f"{name}.json") for name in sides]
    assert main(["compare", *files, "--html", str(page)]) in (0, 3)  # this process serves, too, and may be late
    assert "Ratios to grpc" in page.read_text()
