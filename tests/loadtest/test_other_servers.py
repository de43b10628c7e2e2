"""Servers of others: each is started, measured by the same client and stopped."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster.free_port import free_port
from loadtest.comparison import interference, peer_servers, rate_search
from loadtest.comparison.peer_servers import Peers
from loadtest.comparison.rate_search import Sizes, searched
from loadtest.harness.goodput import Objective
from loadtest.loadgen.plan import Plan, Search
from tandem.errors import Unavailable

# Answers as vLLM's server does, token ids and all, a token every few milliseconds; it knows how to answer one thing.
SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply("application/json")
        self.wfile.write(json.dumps({"data": [{"id": sys.argv[2], "max_model_len": 4096}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if sys.argv[3] == "broken":
            return self.send_error(500)
        assert body["model"] == sys.argv[2] and body["stream"] and body["ignore_eos"]
        self.reply("text/event-stream")
        for number in range(body["max_tokens"]):
            self.say({"choices": [{"text": "x", "token_ids": [number]}]})
            time.sleep(0.004)
        self.wfile.write(b"data: [DONE]\\n\\n")

    def say(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")

    def reply(self, kind):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()

    def log_message(self, *_): ...

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("ready", flush=True)
server.serve_forever()
"""
SCRIPT = """
case $1 in
  aggregated|pd)
    mkfifo "$PEERS_HOME/said.$$"
    {python} "$PEERS_HOME/server.py" {port} "$2" {manner} > "$PEERS_HOME/said.$$" 2> "$PEERS_HOME/log" &
    echo $! > "$PEERS_HOME/pid"
    read line < "$PEERS_HOME/said.$$" ;;
  stop) kill "$(cat "$PEERS_HOME/pid")" ;;
esac
"""
OBJECTIVE = Objective(ttft=30.0, tpot=10.0)  # which a busy machine keeps, too
SIZES = Sizes(Plan(input=4, output=3, seconds=0.3, warmup=0.0), Search(start=20.0, tries=1), rounds=1)
WHOLE_S = 1.0  # in which a stream begins however late this process and the server run
STREAMS = interference.Plan(
    sides=("vllm-aggregated",), rounds=1, seconds=0.3, settle=0.1, streams=2, prompt=4, output=8, long=16, every=0.1
)


def vllm(folder: Path, monkeypatch: pytest.MonkeyPatch, manner: str = "whole") -> Peers:
    """Stands in for vLLM's script, on a port that is free."""
    port = free_port("127.0.0.1", 0, "port")
    monkeypatch.setattr(peer_servers, "VLLM_PORTS", {"aggregated": (port,), "pd": (port,)})
    monkeypatch.setattr(Peers, "checkpoint", lambda self, shape: folder / "model")
    monkeypatch.setattr(interference, "REST_S", 0.0)
    script = folder / "vllm.sh"
    script.write_text(SCRIPT.format(python=sys.executable, port=port, manner=manner))
    (folder / "server.py").write_text(SERVER)
    return Peers(script, folder)


def left(folder: Path) -> list[psutil.Process]:
    """Processes of what was started from there."""
    return [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or ())]


def test_other_servers_are_measured_by_the_same_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both modes of vLLM, started by its script, one after the other; each is searched, and no process is left."""
    ticks: list[str] = []
    peers = vllm(tmp_path, monkeypatch)
    report = searched(peers, rate_search.VLLM, SIZES, OBJECTIVE, ticks.append, lambda *_: None)
    assert [tick.split(",")[0] for tick in ticks if tick.startswith("starting")] == [
        *(f"starting vllm-{mode}" for mode in ("aggregated", "pd"))
    ]
    assert [side.bests for side in report.sides] == [[20.0], [20.0]]
    assert all(one.state == "done" for side in report.sides for load in side.loads for one in load.counted)
    assert left(tmp_path) == []


async def test_long_prompts_are_sent_and_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps are those of the streams."""
    peers = vllm(tmp_path, monkeypatch)
    server = peer_servers.make("vllm-aggregated", tmp_path / "model", peers)
    plan = replace(STREAMS, seconds=WHOLE_S, every=WHOLE_S / 3)
    with peer_servers.started([server]):
        load = await interference.observe(server, plan, seconds=plan.seconds, disturb=True)
    assert sum(one.beside for one in load.outcomes) == 3
    assert min(load.gaps()) > 0
    assert {one.input for one in load.counted} == {4}


def test_each_window_is_compared_with_one_without_long_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section for each server, and the ratios of its readers' times."""
    plan = replace(STREAMS, seconds=WHOLE_S)
    [section] = interference.run(vllm(tmp_path, monkeypatch), plan, lambda _: None)
    assert section.rows[0].what == "vllm-aggregated: ITL p99"
    assert all(row.ratio.median > 0 for row in section.rows)
    assert left(tmp_path) == []


def test_a_stream_that_fails_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the measurement with what the server said, and the server with it."""
    with pytest.raises(Unavailable, match="answered 500"):
        interference.run(vllm(tmp_path, monkeypatch, "broken"), STREAMS, lambda _: None)
    assert left(tmp_path) == []
