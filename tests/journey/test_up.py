"""`tandem up` as a user runs it, with real Ray, Valkey and workers: it recovers from kills and ends in order, or by
SIGKILL."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import openai
import psutil
import pytest
import torch
from typer.testing import CliRunner, Result

from cli.main import app
from cluster import run_directory
from cluster.free_port import free_port
from engine import kernels
from engine.kernels.weight_cache import KEPT
from tandem.client import Client
from tandem.cluster_results import Worker
from tandem.rpc.addresses import host_port
from tests.support import oracle
from tests.support.harness import Process
from tests.support.processes import alive, kill
from tests.support.waiting import wait_until

TANDEM = str(Path(sys.executable).parent / "tandem")
pytestmark = pytest.mark.timeout(180)
CPU = torch.device("cpu")
T = TypeVar("T")


class Up:
    """One `tandem up`. Everything that it starts has a mark in its environment, by which it is found."""

    def __init__(self, model: Path | str, *arguments: str, **settings: str) -> None:
        self.mark = f"TDM_MARK={secrets.token_hex(8)}"
        self.http = ""
        self.logs = Path(settings.get("logs", "."))
        self.host = settings.get("host", "127.0.0.1")
        self.port = free_port(self.host, 0, "port")
        self.target = host_port(self.host, self.port)
        env = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
        env |= {f"TANDEM_{key.upper()}": value for key, value in settings.items()}
        env.update([self.mark.split("=")])
        self.segments = set(os.listdir("/dev/shm"))
        self._known: set[psutil.Process] = set()
        self.process = Process(
            "up",
            [TANDEM, "up", "--model", str(model), "--port", str(self.port), "--kv-blocks", "512", *arguments],
            env,
        )

    def marked(self) -> list[psutil.Process]:
        """Living processes that it started: those with the mark, and their descendants (Ray's workers write their title
        over their environment)."""
        found: set[psutil.Process] = set(self._known)
        for process in psutil.process_iter():
            try:
                if f"TDM_MARK={process.environ().get('TDM_MARK', '')}" == self.mark:
                    found |= {process, *process.children(recursive=True)}
            except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                continue
        self._known = {process for process in found if alive(process)}
        return list(self._known)

    def assert_nothing_left(self, within_s: float) -> None:
        wait_until(lambda: not self.marked(), within_s, self.marked)
        wait_until(lambda: set(os.listdir("/dev/shm")) <= self.segments, within_s)  # others may have one for a moment
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
            assert probe.connect_ex((self.host, self.port)) != 0, "the port must be free"

    def tandem(self, *arguments: str) -> Result:
        """In this process, which has imported what the command needs."""
        return CliRunner().invoke(app, [*arguments, "--target", self.target])


@contextmanager
def up(model: Path | str, *arguments: str, **settings: str) -> Iterator[Up]:
    running = Up(model, *arguments, **settings)
    try:
        yield running
    finally:
        running.process.kill()
        kill(running.marked())


def loopback() -> str:
    """That of IPv6, for which addresses are written in another way, where the machine has it."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return "::1"
    return "127.0.0.1"


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """On IPv6: requests, KV, heartbeats and metrics. All other journeys are on IPv4."""
    options = ("--dtype", "float32", "--http-port", "0", "--routers", "2")
    logs = str(tmp_path_factory.mktemp("kept") / "logs")
    with up(tiny, *options, local_prefill="never", logs=logs, host=loopback()) as running:
        running.http = running.process.wait_for("http ", 120).split()[1]
        running.process.wait_for("ready ", 120)
        yield running


def test_a_start_says_how_far_it_is(cluster: Up) -> None:
    """Each stage of each worker is reported with its seconds before the worker is ready; the last ones warm the engine
    up."""
    said = cluster.process.text()
    for worker in ("prefill-0", "decode-0"):
        told = re.findall(rf"{worker}: +[0-9.]+ s  (.*)", said.partition(f"{worker}: ready")[0])
        begins = ["libraries imported", "fingerprint", "llama loaded", "self-check passed", "measured:"]
        if kernels.serving(CPU) != kernels.REFERENCE:
            begins.insert(3, "weights:")
        assert [next(line for line in told if line.startswith(each)) for each in begins]
    assert re.search(r"router-0: +[0-9.]+ s  tokenizer loaded", said)


@pytest.mark.skipif(kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build")
def test_workers_map_one_file_of_weights(cluster: Up) -> None:
    """The same inode in both, and in no other process."""
    files: dict[int, set[str]] = {}
    for process in cluster.marked():
        with suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            files[process.pid] = {line.split()[4] for line in lines if line.endswith(KEPT)}
    assert [len(found) for found in files.values() if found] == [1, 1]
    assert len(set().union(*files.values())) == 1


def test_the_openai_sdk_works_at_the_printed_address(cluster: Up, tiny: Path) -> None:
    """`--http-port` serves the same tokens; the address is printed before the line that says "ready"."""
    prompt = oracle.prompts(tiny, [40])[0]
    extra = {"ignore_eos": True, "return_token_ids": True}
    with openai.OpenAI(base_url=cluster.http, api_key="none") as client:
        model = client.models.list().data[0].id
        done = client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0.0, extra_body=extra)
    assert done.choices[0].token_ids == oracle.greedy(tiny, prompt, 8)


def test_every_command_answers(cluster: Up, tiny: Path) -> None:
    """generate, workers, audit and doctor exit with 0 and print facts as JSON; tokens equal transformers'."""
    prompt = oracle.prompts(tiny, [40], seed=7)[0]  # new here: no worker has it cached
    text = " ".join(map(str, prompt))
    asked = ["generate", "--output", "json", "--token-ids", "--ignore-eos", "--max-tokens", "8", text]
    command = [TANDEM, *asked, "--target", cluster.target]
    done = json.loads(subprocess.run(command, capture_output=True, timeout=90, check=True).stdout)
    assert done["token_ids"] == oracle.greedy(tiny, prompt, 8)
    assert done["receipt"]["path"] == "disaggregated"
    assert done["receipt"]["transfer"]["transport"].startswith("nixl:")
    workers = json.loads(cluster.tandem("workers", "--output", "json").stdout)
    assert {one["worker_id"] for one in workers["workers"]} == {"prefill-0", "decode-0", "router-0", "router-1"}
    for name in ("audit", "doctor"):
        out = cluster.tandem(name, "--output", "json")
        assert out.exit_code == 0, out.output
        json.loads(out.stdout)
    bad = cluster.tandem("generate", "--token-ids", "1 2 999999")
    assert bad.exit_code == 1
    assert "token_ids[2]" in bad.stderr


def decode_worker(client: Client, but: str = "") -> Worker:
    """decode-0 in an incarnation that serves, other than `but`."""

    def serving() -> list[Worker]:
        lives = [one for one in client.workers() if one.worker_id == "decode-0" and one.state == "ready"]
        return [one for one in lives if one.incarnation != but]

    return wait_until(serving, 60)[0]


def killed_in_stream(client: Client, prompt: list[int], expected: list[int]) -> bool:
    """Kills the decode worker of a stream after its first tokens, and checks that the stream is right and that another
    incarnation serves. False: the last token had been computed before the signal arrived."""
    before = decode_worker(client)
    ids: list[int] = []
    receipt = None
    for piece in client.stream(prompt, max_tokens=len(expected), ignore_eos=True, timeout=90):
        if not ids:
            os.kill(before.pid, signal.SIGKILL)
        ids += piece.token_ids
        receipt = piece.receipt or receipt
    assert ids == expected
    assert receipt is not None
    assert decode_worker(client, but=before.incarnation).pid != before.pid
    audit = client.audit()
    assert audit.balanced, audit
    return receipt.attempts > 1


def test_a_killed_decode_worker_comes_back_and_the_stream_never_notices(cluster: Up, tiny: Path) -> None:
    """After SIGKILL in mid-stream the supervisor starts a new incarnation, and the stream continues with the same
    tokens."""
    prompt = oracle.prompts(tiny, [30], seed=2)[0]
    expected = oracle.greedy(tiny, prompt, 900)
    with Client(cluster.target) as client:
        assert any(killed_in_stream(client, prompt, expected) for _ in range(3)), "each kill came after the last token"


def prefills_are(client: Client, count: int) -> bool:
    return sum(one.role == "prefill" and one.state == "ready" for one in client.workers()) == count


def test_the_pools_scale_under_load_without_a_failed_request(cluster: Up, tiny: Path) -> None:
    """The prefill pool grows by one worker and shrinks again while requests run, each of which is right."""
    prompt = oracle.prompts(tiny, [50], seed=3)[0]
    expected = oracle.greedy(tiny, prompt, 20)
    with Client(cluster.target) as client:
        stop, wrong = threading.Event(), []

        def load() -> None:
            while not stop.wait(0.02):  # the cores are for the worker that comes
                if client.generate(prompt, max_tokens=20, ignore_eos=True, timeout=60).token_ids != expected:
                    wrong.append(1)

        loads = [threading.Thread(target=load) for _ in range(2)]
        for one in loads:
            one.start()
        try:
            for wanted in (2, 1):
                assert cluster.tandem("scale", f"prefill={wanted}").exit_code == 0
                wait_until(partial(prefills_are, client, wanted), 60)
        finally:
            stop.set()
            for one in loads:
                one.join(60)
        assert not wrong


class HttpStream:
    """A streamed completion on its own connection, to any of the routers. It begins when it is created."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int) -> None:
        self.ids: list[int] = []
        self.complete = False
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
        extra = {"ignore_eos": True, "return_token_ids": True}
        self._connection = http.client.HTTPConnection(url.split("/")[2], timeout=60)
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps({**body, **extra}), headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self._take(self._answer.readline())

    def is_served_by(self, pid: int) -> bool:
        port = self._connection.sock.getsockname()[1]
        return any(one.raddr and one.raddr.port == port for one in psutil.Process(pid).net_connections("tcp"))

    def rest(self) -> None:
        """Reads until its end, or until the router is gone."""
        with suppress(http.client.HTTPException, OSError):
            while line := self._answer.readline():
                self._take(line)
        self._connection.close()

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data: [DONE]"):
            self.complete = True
        elif line.startswith(b"data: "):
            for choice in json.loads(line[6:])["choices"]:
                self.ids += choice["token_ids"]


def test_a_killed_router_ends_its_own_streams_and_no_others(cluster: Up, tiny: Path) -> None:
    """Two routers share the address. Streams of the other one stay right, new connections are served at once, and a job
    continues, whichever router had it."""
    prompt = oracle.prompts(tiny, [30], seed=4)[0]
    expected = oracle.greedy(tiny, prompt, 600)
    with Client(cluster.target) as client:
        routers = {one.worker_id: one for one in client.workers() if one.role == "router"}
        job = client.submit(prompt, max_tokens=600, ignore_eos=True)
    streams: list[HttpStream] = []
    here: list[bool] = []
    while not here or not here[-1] or all(here):  # until both have some, and the killed one the last
        streams.append(HttpStream(cluster.http, prompt, 600))
        here.append(streams[-1].is_served_by(routers["router-0"].pid))
    killed = psutil.Process(routers["router-0"].pid)
    killed.kill()
    # The system closes the connections of a process before its listening socket, and resets what came there meanwhile.
    wait_until(lambda: not alive(killed), 30)
    for stream in streams:
        stream.rest()
        assert stream.ids == expected[: len(stream.ids)]
    assert not streams[-1].complete
    others = [stream for stream, lost in zip(streams, here, strict=True) if not lost]
    assert all(stream.complete and len(stream.ids) == 600 for stream in others)
    for _ in range(4):
        again = HttpStream(cluster.http, prompt, 8)
        again.rest()
        assert again.complete
        assert again.ids == expected[:8]
    with Client(cluster.target) as client:
        assert [token for piece in client.watch(job.job_id) for token in piece.token_ids] == expected
        wait_until(lambda: client.audit().balanced, 10, client.audit)


def starts(process: psutil.Process) -> bool:
    """Whether it is a process of Ray that has no task or actor yet."""
    with suppress(psutil.NoSuchProcess):
        return any(word.endswith("default_worker.py") for word in process.cmdline()[:2])
    return False


def test_sigkill_leaves_nothing(cluster: Up) -> None:
    """No process can clean up, and still everything ends at once, also a worker that Ray has just begun to start: no
    process, shared memory, port or folder is left, but for the logs that a setting keeps. The last test of the shared
    cluster; tests/loadtest/test_bench.py and test_hosts.py have the orderly end."""
    [raylet] = (one for one in cluster.marked() if one.name() == "raylet")
    with Client(cluster.target) as client:
        os.kill(next(one.pid for one in client.workers() if one.role == "router"), signal.SIGKILL)
    wait_until(lambda: any(map(starts, raylet.children(recursive=True))), 30)
    cluster.process.signal(signal.SIGKILL)
    cluster.process.popen.wait(30)
    cluster.assert_nothing_left(10)
    assert not list(run_directory._parent().glob(f"tandem-{cluster.process.pid}-*"))
    assert list(cluster.logs.glob("logs-*/worker-*.err"))


def test_a_checkpoint_that_cannot_be_served_ends_it_with_one_sentence(tmp_path: Path) -> None:
    """The exit code is not 0, the error is one sentence, and nothing is left. A refusal by the workers is in
    tests/cluster/test_local_cluster.py, all reasons are in tests/engine/test_refusals.py."""
    with up(tmp_path / "model") as running:
        assert running.process.popen.wait(90) != 0
        running.process.kill()
        errors = [line for line in running.process.output if line.startswith("error:")]
        assert len(errors) == 1, running.process.text()
        assert "Traceback" not in running.process.text()
        running.assert_nothing_left(30)


def test_a_port_in_use_is_said_at_once(tiny: Path) -> None:
    """It is reported before anything is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        out = subprocess.run(
            [TANDEM, "up", "--model", str(tiny), "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert out.returncode != 0
    assert "port" in out.stderr
