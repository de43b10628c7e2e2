"""Starts Tandem's router and Dynamo's frontends with workers that compute nothing, and pins their threads."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import psutil

from cluster.free_port import free_port
from loadtest.comparison.peer_servers import Peers
from loadtest.harness.demo_model import DEMO, DEMO_VOCAB
from loadtest.harness.http_connection import completion
from loadtest.harness.processes import START_TIMEOUT_S, Local, Process
from loadtest.harness.stats import Tick
from tandem.errors import DeadlineExceeded, Unavailable

TANDEM = "tandem"
MOCKED, MOCKED_TIMEOUT_S = Path(__file__).with_name("dynamo_mocker.py"), 300.0
ROUTER, WORKER = "router-0", "decode-0"


@dataclass(frozen=True)
class Side:
    """The process ids of a router and its worker."""

    name: str
    port: int
    model: str
    router: int
    worker: int

    def request(self, text: str, output: int) -> bytes:
        fields = {"max_tokens": output, "ignore_eos": True, "temperature": 0, "stream": True}
        return completion({"model": self.model, "prompt": text, "stream_options": {"include_usage": True}, **fields})


@dataclass(frozen=True)
class Workers:
    """The address of Tandem's router, and the times to first token, in seconds, of requests to the mocker."""

    address: str
    mocked: Callable[[int, int], list[float]]


@contextmanager
def started(
    peers: Peers, modes: Sequence[str], speedup: str, pace: Callable[[Side], float], tick: Tick
) -> Iterator[tuple[list[Side], Workers]]:
    """Dynamo first: `pace` derives the step time of Tandem's worker from the first side."""
    with ExitStack() as stack:
        env = _dynamo_env(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-dynamo-")))
        python = str(peers.executable("dynamo", "python"))
        theirs = _dynamo(python, env, modes, speedup, stack, tick)
        tick("starting tandem")
        local = stack.enter_context(Local(model=DEMO))
        port = free_port("127.0.0.1", 0, "port")
        local.launch("router", ROUTER, http_port=port)
        local.launch("decode", WORKER, program=("loadtest.comparison.instant_worker", str(pace(theirs[0]))))
        local.wait_seen(ROUTER, 1)
        ours = Side(TANDEM, port, str(DEMO), local.pid(ROUTER), local.pid(WORKER))

        def mocked(requests: int, prompt: int) -> list[float]:
            command = [python, str(MOCKED), str(requests), str(prompt), str(DEMO_VOCAB)]
            done = subprocess.run(
                command, env=env, timeout=MOCKED_TIMEOUT_S, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise Unavailable(f"the mocker could not be asked straight: {done.stderr[-2000:]}")
            seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
            return seconds

        yield [ours, *theirs], Workers(local.address(WORKER), mocked)


def _dynamo_env(folder: str) -> dict[str, str]:
    """Processes discover each other through files in this folder, without etcd and NATS."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" and not key.startswith("DYN_")}
    planes = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
    return env | planes | {"DYN_FILE_KV": folder, "DYN_LOG": "error", "HF_HUB_OFFLINE": "1"}


def _dynamo(
    python: str, env: dict[str, str], modes: Sequence[str], speedup: str, stack: ExitStack, tick: Tick
) -> list[Side]:
    """A mocker, and a frontend of each mode before it."""

    def start(module: str, *arguments: str) -> Process:
        process = Process([module, *arguments], env, python=python)
        stack.callback(process.stop)
        return process

    tick("starting dynamo's mocker")
    mocker = start("dynamo.mocker", "--model-path", str(DEMO), "--model-name", "demo", "--speedup-ratio", speedup)
    sides = []
    for mode in modes:
        tick(f"starting dynamo's frontend, {mode}")
        port = free_port("127.0.0.1", 0, "port")
        where = ["--http-host", "127.0.0.1", "--http-port", str(port)]
        frontend = start("dynamo.frontend", *where, "--router-mode", mode)
        side = Side(f"dynamo {mode}", port, "demo", frontend.popen.pid, mocker.popen.pid)
        _wait(side, frontend, mocker)
        sides.append(side)
    return sides


def _wait(side: Side, *processes: Process) -> None:
    """Waits until the server knows its model. Raises Unavailable, DeadlineExceeded."""
    deadline = monotonic() + START_TIMEOUT_S
    while True:
        if ended := [process for process in processes if process.popen.poll() is not None]:
            raise Unavailable(f"{ended[0].popen.args!r} ended early: {ended[0].last_words()}")
        try:
            with closing(urllib.request.urlopen(f"http://127.0.0.1:{side.port}/v1/models", timeout=5)) as response:
                if json.load(response)["data"]:
                    return
        except OSError:
            pass
        if monotonic() > deadline:
            raise DeadlineExceeded(f"{side.name} did not serve within {START_TIMEOUT_S:.0f} s")
        sleep(0.2)


def pin(sides: Sequence[Side], layout: str, cores: Sequence[int]) -> None:
    """Routers to the first core, workers and this client to the last, or all to all."""
    first, last = ({cores[0]}, {cores[-1]}) if layout == "apart" else (set(cores), set(cores))
    os.sched_setaffinity(0, last)
    for side in sides:
        for pid, where in ((side.router, first), (side.worker, last)):
            for thread in psutil.Process(pid).threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, where)
