"""Each request has one line in the router's log, and no line contains its text or its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tandem.async_client import AsyncClient
from tandem.errors import Busy, InvalidRequest, Unauthenticated
from tests.support.faults import slow_down
from tests.support.harness import Process, local_cluster
from tests.support.talking import LINE
from tests.support.waiting import wait_until

ANNA, OPS = "anna-key-0123456789", "ops-key-0123456789"
DEMO = Path(__file__).parents[2] / "demo/model"
SECRET = "a sentence that nobody else may read"


def lines(capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    """The lines of requests and refusals, and the whole log."""
    text = capsys.readouterr().err
    said = [json.loads(line) for line in text.splitlines()]
    return [line for line in said if line["event"] in ("request", "http.refused", "grpc.refused")], text


async def test_a_request_has_one_line_however_it_ends(
    inside: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has, over gRPC and HTTP, tenant, request, outcome, tokens and times; for a refused request the reason;
    for one whose client disconnected the tokens that it got. Control: a lower level writes none of these lines."""
    monkeypatch.setattr("services.router.tenancy.api_keys.RECHECK_S", 0.0)
    monkeypatch.setattr("services.router.tenancy.api_keys.MAX_LOOK_S", 30.0)
    keys = tmp_path / "keys"
    keys.write_text(f"anna {ANNA} requests=1\nops {OPS} admin\n")
    async with inside(api_keys=keys, http_port=0, log_format="json") as cluster:
        async with (
            AsyncClient(cluster.router.address, api_key=ANNA) as anna,
            AsyncClient(cluster.router.address, api_key="wrong-key-0123456789") as nobody,
            httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}") as http,
        ):
            capsys.readouterr()
            slow_down(cluster.workers["decode-0"], 0.03)  # the stream is not over before its client leaves it
            await anna.generate([7, 8, 9], max_tokens=5, ignore_eos=True, request_id="first")
            with pytest.raises(InvalidRequest):
                await anna.generate([7, 8, 9], max_tokens=0, request_id="second")
            with pytest.raises(Unauthenticated):
                await nobody.generate([7, 8, 9], max_tokens=5)
            async for _ in anna.stream([7, 8, 9], max_tokens=200, ignore_eos=True, request_id="left"):
                with pytest.raises(Busy):
                    await anna.generate([7, 8, 9], max_tokens=1, request_id="beyond")
                break
            given = {"authorization": f"Bearer {ANNA}"}
            bad = await http.post("/v1/completions", json={"prompt": SECRET, "top_p": SECRET}, headers=given)
            assert bad.status_code == 400
            assert (await http.post("/v1/completions", json={"prompt": SECRET})).status_code == 401
            await cluster.freed()
            said, whole = lines(capsys)
        first, second, unknown, beyond, left, broken, keyless = sorted(said, key=order)
        assert (first["request"], first["tenant"], first["status"], first["reason"]) == ("first", "anna", "ok", "")
        assert (first["prompt_tokens"], first["completion_tokens"]) == (3, 5)
        assert 0 < first["ttft_s"] < first["duration_s"]
        assert first["model"] == cluster.settings.model_names[0]
        assert (second["request"], second["tenant"], second["status"]) == ("second", "anna", "refused")
        assert (second["reason"], second["ttft_s"]) == ("INVALID_REQUEST", None)
        assert (unknown["event"], unknown["reason"]) == ("grpc.refused", "UNAUTHENTICATED")
        assert (beyond["request"], beyond["reason"]) == ("beyond", "TENANT_REQUESTS")
        assert (left["request"], left["status"]) == ("left", "cancelled")
        assert 0 < left["completion_tokens"] < 200
        assert (broken["path"], broken["status"]) == ("/v1/completions", 400)
        assert (keyless["path"], keyless["status"]) == ("/v1/completions", 401)
        for secret in (SECRET, ANNA, OPS, "wrong-key"):
            assert secret not in whole
        totals = cluster.router.ended
        assert totals.outcomes == {"ok": 1, "refused": 2, "cancelled": 1}
        assert [one.request_id for one in totals.failures] == ["second", "beyond"]
    async with inside(log_format="json", log_level="warning") as cluster:
        capsys.readouterr()
        await cluster.client.generate([7, 8, 9], max_tokens=2)
        assert lines(capsys)[0] == []


def test_the_lines_of_a_request_have_its_id_in_every_process() -> None:
    """Without a trace, the client's id leads from the router's line to those of the decode and the prefill worker, for
    each of its completions. Control: at the same workers, the lines of another request have the other id, and that of
    the connection, which both use, has none; no line has the prompt."""

    def said(process: Process, *events: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in process.text().splitlines() if line.startswith('{"')]
        return [line for line in lines if line["event"] in events]

    def begun(process: Process) -> list[str]:
        return [line["request"] for line in said(process, LINE, "request")]

    with local_cluster(DEMO, module="tests.support.talking", log_format="json") as cluster:
        client = cluster.client()
        client.generate(SECRET, n=2, max_tokens=2, request_id="a.b/1")
        client.generate(SECRET, max_tokens=2, request_id="other")
        ours = {
            "router-0": ["a.b/1", "other"],
            "decode-0": ["a.b/1", "a.b/1", "other"],
            "prefill-0": ["a.b/1", "other"],  # one prompt for both completions
        }
        logs = [cluster.processes[name] for name in ours]
        wait_until(lambda: {log.name: begun(log) for log in logs} == ours, explain=lambda: [log.text() for log in logs])
        (connected,) = said(cluster.processes["decode-0"], "source.connected")
        assert "request" not in connected
        assert not [log.name for log in logs if SECRET in log.text()]


def order(line: dict[str, Any]) -> int:
    names = ["first", "second", "grpc.refused", "beyond", "left", 400, 401]
    return names.index(line.get("request") or (line["status"] if line["event"] == "http.refused" else line["event"]))
