"""The commands, environment, probes and hooks of the laptop example, run as they are in its manifests."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import pytest

from tandem.client import Client
from tandem.errors import PreconditionFailed
from tests.deploy import kuberay
from tests.deploy.chart import NAME, ROOT, example, render
from tests.deploy.kubelet import Pod
from tests.deploy.test_chart import pods
from tests.support.harness import Process
from tests.support.waiting import wait_until

PROMPT = list(range(100, 140))
Start = Callable[[str, str], Pod]
STUCK = """
import sys, time
from services import __main__ as entry, launch
async def start(*_):
    print("loading", flush=True)
    time.sleep(60)  # as native code does that loads a model
launch.start = start
sys.argv = ["services", "prefill", "prefill-0"]
sys.exit(entry.main())
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(component, suffix)` gives a started pod of the release."""
    documents = render(example("laptop"))
    templates = {name.removeprefix(f"{NAME}-tandem-"): template for name, template in pods(documents)}
    net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"  # a network whose ports no other test uses
    names = {f"{NAME}-tandem-valkey": f"{net}.2", f"{NAME}-tandem-router": f"{net}.3"}
    with ExitStack() as stack:
        count = 10

        def begin(component: str, suffix: str) -> Pod:
            nonlocal count
            count += 1
            ip = names.get(f"{NAME}-tandem-{component}", f"{net}.{count}")
            pod = Pod(documents, templates[component], f"{component}-{suffix}", ip, names, tmp_path)
            stack.callback(pod.process.kill)
            return pod

        yield begin


class Load:
    """Sends requests one after another in some threads until it is ended."""

    def __init__(self, client: Client, expected: list[int]) -> None:
        self.done, self.wrong = 0, list[object]()
        self._client, self._expected = client, expected
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(2)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        while not self._stop.wait(0.02):  # the cores are for the pod that comes
            try:
                tokens = self._client.generate(PROMPT, max_tokens=16, ignore_eos=True, timeout=30).token_ids
            except Exception as error:  # noqa: BLE001
                self.wrong.append(error)
                return
            self.done += 1
            if tokens != self._expected:
                self.wrong.append(tokens)


def states(client: Client) -> dict[str, str]:
    return {worker.worker_id: worker.state for worker in client.workers().workers}


def test_a_release_starts_scales_and_drains_without_a_failed_request(start: Start) -> None:
    """Pods find each other through the registry alone, a pool grows and shrinks under load, and every process ends in
    order."""
    valkey = start("valkey", "0")
    valkey.wait_ready()
    router, decode = start("router", "a"), start("decode", "a")
    first, second = start("prefill", "a"), start("prefill", "b")
    assert not decode.answers("readinessProbe")  # the control: it cannot be ready yet
    for pod in (router, first, decode):
        pod.wait_ready()
        wait_until(lambda alive=pod: alive.answers("livenessProbe"))
    with Client(f"{router.ip}:{router.port('grpc')}") as client:
        expected = client.generate(PROMPT, max_tokens=16, ignore_eos=True, timeout=30).token_ids
        with Load(client, expected) as load:
            tester = start("test", "0")  # helm test
            second.wait_ready()  # scaled up
            ready = dict.fromkeys(["decode-a", "prefill-a", "prefill-b", "router-a"], "ready")
            wait_until(lambda: states(client) == ready, explain=lambda: states(client))
            first.terminate()  # scaled down
            assert first.ended() == 0
            before = load.done
            assert "prefill-a" not in states(client)
            while load.done < before + 2 and not load.wrong:
                client.workers()
                time.sleep(0.01)
        assert not load.wrong
        assert tester.process.popen.wait(60) == 0, tester.process.text()
        for pod, metric in ((router, "tandem_requests_total"), (decode, 'tandem_worker_state{model="model"')):
            with urllib.request.urlopen(f"http://{pod.ip}:{pod.port('metrics')}/metrics", timeout=30) as answer:
                assert metric in answer.read().decode()
        with pytest.raises(PreconditionFailed, match="kubectl"):
            client.scale(prefill=2)
        tokens = 0
        for piece in client.stream(PROMPT, max_tokens=200, ignore_eos=True, timeout=30):
            if not tokens:
                decode.terminate()  # with a stream that it may finish
            tokens += len(piece.token_ids)
        assert tokens == 200
        assert decode.ended() == 0
        left = threading.Event()
        timer = threading.Timer(router.prestop(), left.set)
        timer.start()
        while not left.wait(0.05):
            client.workers()  # the hook: it still serves clients that do not know yet
        router.terminate()
        second.terminate()
    assert router.ended() == 0
    assert second.ended() == 0
    assert valkey.process.popen.poll() is None


def test_a_pod_that_is_deleted_while_it_loads_ends_at_once() -> None:
    """The first process of a container receives no signal without a handler, and would keep its GPU for the whole grace
    period. 143 is this handler's exit code; without it the code would be -15 here, and the process would not end in a
    container."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
    env |= {"PYTHONPATH": str(ROOT), "TANDEM_MODEL": "m"}
    ends_by_its_handler(Process("stuck", [sys.executable, "-c", STUCK], env), "loading")


def test_a_driver_that_waits_for_valkey_ends_at_once() -> None:
    """Its pod is deleted meanwhile. The exit code is as in the test above."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
    nowhere = "127.0.0.1:1"
    env |= {"TANDEM_MODEL": "m", "TANDEM_REDIS": f"redis://{nowhere}", "TANDEM_RAY_ADDRESS": nowhere}
    env |= {"TANDEM_CLUSTER_TOKEN": secrets.token_hex(16), "PYTHONPATH": str(ROOT)}
    driver = Process("driver", [sys.executable, "-m", "cluster.kuberay.driver"], env)
    ends_by_its_handler(driver, "waiting: the registry does not answer")


def ends_by_its_handler(process: Process, line: str) -> None:
    """Ends the process after this line of its output."""
    try:
        process.wait_for(line)
        process.signal(signal.SIGTERM)
        assert process.popen.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()


def parsed(command: list[str]) -> dict[str, object]:
    """The options as parsed by the program itself, which refuses unknown ones."""
    program, verb, *words = command
    if program == "ray":
        from ray.scripts.scripts import cli

        found = cli.commands[verb]
    else:
        from huggingface_hub.cli.hf import app

        found = app.get_command(None, verb).materialize()
    return dict(found.make_context(verb, list(words)).params)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within Ray
def test_other_programs_know_the_options_that_they_get() -> None:
    """The programs are Ray, whose commands KubeRay makes from the RayCluster, and the hub's client, which is not run
    here."""
    documents = render(example("ray"))
    (cluster,) = [one for one in documents if one["kind"] == "RayCluster"]
    nodes = kuberay.templates(cluster, kuberay.GCS_PORT, 6380)
    found = {}
    for name, template in {**dict(pods(documents)), **nodes}.items():
        for one in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            if one.get("command", ["python"])[0] in ("ray", "hf"):
                found[name, one["name"]] = parsed([*one["command"], *one.get("args", [])])
    # Ray's head and nodes; downloads of the routers and the job, and of each pool as it is written and as it runs.
    assert len(found) == 3 + 2 + 4
    for pool in ("prefill", "decode"):
        node = found[pool, "worker"]
        assert (json.loads(str(node["resources"])), node["block"]) == ({pool: 1}, True)
        assert node["address"] == f"{NAME}-tandem-head-svc:6379"
        assert found[pool, "model-0"]["repo_id"] == "Qwen/Qwen3-8B"
    with pytest.raises(click.exceptions.NoSuchOption):  # the control
        parsed(["ray", "start", "--heat"])
