"""A release with `orchestrator: ray`, run by the commands in its manifests: Ray owns the workers, and may lose its head
and pods."""

from __future__ import annotations

import json
import secrets
import tempfile
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.free_port import free_port
from tandem.client import Client
from tests.deploy import kuberay
from tests.deploy.chart import NAME, Document, example, render
from tests.deploy.kubelet import Pod
from tests.deploy.test_chart import pods
from tests.support.processes import kill
from tests.support.waiting import wait_until

PROMPT = list(range(100, 140))
SOON_S = 120.0
JOINED = "Ray runtime started"
STARTS = 3
SECRETS = ("RAY_AUTH_TOKEN", "TANDEM_CLUSTER_TOKEN", "VALKEY_PASSWORD", "REDIS_PASSWORD")
STREAMS = 4  # two on each of two workers
NOT_BEGUN = " at token 0: "  # in the note of an attempt: refused, or its worker had ended, in whatever words that came
VALUES = example("laptop") | {"orchestrator": "ray"}
EITHER = VALUES | {"ray": {"switch_roles": True}}
ALONE = {"prefill": {"replicas": 0}}
MODELS = VALUES | {
    "settings": {name: value for name, value in VALUES["settings"].items() if name != "model"},
    "models": [
        {"name": name, "settings": {"model": VALUES["settings"]["model"]}, "pools": ALONE} for name in ("chat", "small")
    ],
}


class Start:
    """Starts pods of a release, and keeps what they write."""

    def __init__(self, begin: Callable[..., Pod]) -> None:
        self._begin = begin
        self.pods: list[Pod] = []

    def __call__(self, *about: str, **more: Any) -> Pod:
        pod = self._begin(*about, **more)
        self.pods.append(pod)
        return pod


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, because of sockets."""
    with tempfile.TemporaryDirectory(prefix="tdm-", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


@contextmanager
def release(folder: Path, values: Document) -> Iterator[Start]:
    """`start(component, suffix)` returns a started pod with the address that its name had before; `of` has other values
    of the release, whose secrets stay the same in an upgrade."""
    documents = render(values)
    templates = {name.removeprefix(f"{NAME}-tandem-"): template for name, template in pods(documents)}
    (cluster,) = [one for one in documents if one["kind"] == "RayCluster"]
    net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"  # a network whose ports no other test uses
    names = {
        f"{NAME}-tandem-valkey": f"{net}.2",
        f"{NAME}-tandem-tables": f"{net}.5",
        f"{NAME}-tandem-router": f"{net}.3",
        kuberay.head_service(cluster): f"{net}.4",
    }
    gcs = free_port(f"{net}.4", 0, "gcs")
    names |= {f"{net}.4:{kuberay.GCS_PORT}": f"{net}.4:{gcs}"}
    fixed = {"valkey": f"{net}.2", "router": f"{net}.3", "head": f"{net}.4", "tables": f"{net}.5"}
    with ExitStack() as stack:
        count = 0

        def begin(component: str, suffix: str = "0", container: str | None = None, of: Document = values) -> Pod:
            nonlocal count
            count += 1
            ip = fixed.setdefault(f"{component}-{suffix}", fixed.get(component, f"{net}.{count + 10}"))
            name = f"{component}-{suffix}-{count}"
            (upgraded,) = [one for one in render(of) if one["kind"] == "RayCluster"]
            rayed = kuberay.templates(upgraded, gcs, free_port(ip, 0, "port"))
            template = rayed.get(component) or templates[component]
            pod = Pod(documents, template, name, ip, names, folder, container)
            stack.callback(end, pod)
            return pod

        yield Start(begin)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with release(folder, VALUES) as begin:
        yield begin


def node(start: Start, *about: str, **more: Any) -> Pod:
    """A pod whose raylet is a node of the cluster. If it ends during the start, there is another one, as of KubeRay:
    Ray gives the agents of a raylet 15 s to start (ray-project/ray, issue 65983), of which they need 8 s on a Zen 3
    next to one worker."""
    for _ in range(STARTS):
        pod = start(*about, **more)
        wait_until(lambda said=pod.process: JOINED in said.text() or said.popen.poll() is not None, SOON_S)
        if pod.process.popen.poll() is None:
            break
    assert JOINED in pod.process.text(), pod.process.text()
    return pod


def end(pod: Pod) -> None:
    """Kills the pod and everything in it, as when its machine is lost."""
    if pod.process.popen.poll() is None:
        family = psutil.Process(pod.process.popen.pid).children(recursive=True)
        pod.process.kill()
        kill(family)


def told(router: Pod, metric: str, role: str = "") -> float | None:
    """What Prometheus would read; None: the metric has no sample."""
    with urllib.request.urlopen(f"http://{router.ip}:{router.port('metrics')}/metrics", timeout=SOON_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = [one for family in families for one in family.samples if one.name == metric]
    return next((one.value for one in found if one.labels.get("role", "") == role), None)


def router_of(start: Start) -> Pod:
    """A router that is ready; fails with the logs of all pods."""
    router = start("router")
    try:
        router.wait_ready(SOON_S)
    except AssertionError as error:
        said = "\n".join(f"{pod.name}: {pod.process.text()[-2000:]}" for pod in start.pods)
        raise AssertionError(f"{error}\n{said}") from None
    return router


def lines(pod: Pod) -> list[Document]:
    """The log of its container, without what Ray and the commands write, and long lines cut by other processes."""
    found = []
    for line in pod.process.text().splitlines():
        with suppress(json.JSONDecodeError):
            found += [json.loads(line)] if line.startswith('{"') else []
    return found


def logged(pods: list[Pod], event: str, worker: str) -> list[Document]:
    """The lines about this worker in the logs of these pods' containers."""
    said = [line for pod in pods for line in lines(pod)]
    return [line for line in said if line["event"] == event and worker in (line["process"], line.get("worker_id"))]


def started(pods: list[Pod], worker: str) -> int:
    """How often a supervisor has logged that this worker serves. A router learns it earlier."""
    return sum(line["kind"] == "ready" for line in logged(pods, "supervisor.worker", worker))


@contextmanager
def load(client: Client, expected: list[int], worker: str) -> Iterator[list[str]]:
    """Runs streams inside the block, which begins when two have ended on this worker. Returns the notes of attempts on
    this worker that were not the last of an ended stream. Fails if a stream fails or has other tokens."""
    again: list[str] = []
    served, stop = Counter[str](), threading.Event()

    def run() -> None:
        while not stop.is_set():
            apart: Any = {"cache_salt": secrets.token_bytes(16)}  # otherwise all could go where the prompt is cached
            length = len(expected) - secrets.randbelow(len(expected) // 2)  # or all of a worker's would end at once
            answer = client.generate(PROMPT, max_tokens=length, ignore_eos=True, timeout=SOON_S, **apart)
            assert answer.token_ids == expected[:length]
            served[answer.receipt.decode_worker] += 1
            again.extend(note for note in answer.receipt.notes if note.startswith("attempt ") and f" {worker}" in note)

    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(run) for _ in range(STREAMS)]
        try:
            wait_until(lambda: served[worker] >= 2, SOON_S, lambda: (dict(served), running))
            yield again
        finally:
            stop.set()
        for one in running:
            one.result(SOON_S)


def incarnations(client: Client) -> dict[str, str]:
    """Of the workers that the router knows now: on a busy machine one may be missing for a moment."""
    return {one.worker_id: one.incarnation for one in client.workers().workers}


def running(client: Client) -> dict[str, int]:
    """The requests of each worker."""
    return {one.worker_id: one.running for one in client.workers().workers}


def when(client: Client, wanted: dict[str, str]) -> None:
    """Waits until the workers and their hosts are these."""

    def found() -> dict[str, str]:
        workers = [one for one in client.workers().workers if one.state == "ready" and one.role != "router"]
        return {one.worker_id: one.address.rpartition(":")[0] for one in workers}

    wait_until(lambda: found() == wanted, SOON_S, found)


@pytest.mark.timeout(800)
def test_ray_owns_the_workers_of_a_release_and_may_lose_its_head(start: Start, folder: Path) -> None:
    """A worker runs where a node offers its pool, at the address of its pod, and `tandem scale` adds workers. Its lines
    are in the log of its pod's container, those of the supervisor in that of the head's, and no log has a secret. The
    head and the driver are lost in the middle of a stream and come back: no token is lost, and no worker restarts.

    Then a pod is deleted under load: its worker drains, so that no request is computed again, its node ends by itself,
    and another worker starts in the next pod. The control: a pod that is lost costs its requests a second attempt.

    Finally an upgrade lets pods serve either pool: a worker in such a pod changes its pool in its process, and one in
    an older pod does not. A router's metrics tell of the workers, and of the supervisor's end with the head."""
    driver = start("head", container="driver")  # a sidecar: before Valkey and Ray
    driver.process.wait_for("waiting")
    for stored in ("valkey", "tables"):
        start(stored).wait_ready()
    head = node(start, "head", container="head")
    head.wait_ready()
    nodes = {}
    for pool in ("prefill", "decode"):  # one after the other: in one folder two at once may choose the same socket
        nodes[pool] = node(start, pool)
        nodes[pool].wait_ready()
    router = router_of(start)
    with Client(f"{router.ip}:{router.port('grpc')}") as client:
        workers = {"prefill-0": nodes["prefill"].ip, "decode-0": nodes["decode"].ip}
        when(client, workers)
        for pool in nodes:
            wait_until(lambda worker=f"{pool}-0", pod=nodes[pool]: logged([pod], "worker.ready", worker), SOON_S)
            wait_until(lambda worker=f"{pool}-0", pod=head: started([pod], worker), SOON_S)
        wait_until(lambda: lines(driver), SOON_S)  # without an API server it warns
        assert {line["process"] for line in lines(driver)} == {"driver"}
        files = [path.name for path in (folder / "r/ray/session_latest/logs").iterdir() if path.is_file()]
        assert [name for name in files if name.startswith(("worker", "python-core", "raylet", "gcs_server"))] == []
        expected = client.generate(PROMPT, max_tokens=400, ignore_eos=True, timeout=SOON_S).token_ids
        client.scale(decode=2)
        nodes["decode-1"] = node(start, "decode", "1")
        when(client, workers | {"decode-1": nodes["decode-1"].ip})
        lives = incarnations(client)
        tokens: list[int] = []
        head_lost = threading.Event()
        for piece in client.stream(PROMPT, max_tokens=400, ignore_eos=True, timeout=SOON_S):
            tokens += piece.token_ids
            if not head_lost.is_set():
                head_lost.set()
                end(head)
                end(driver)
        assert tokens == expected
        (folder / "r/ray/ray_current_cluster").unlink()  # a new pod has an empty folder
        head = node(start, "head", container="head")
        driver = start("head", container="driver")
        driver.process.wait_for("ready")
        wait_until(lambda: incarnations(client) == lives, SOON_S, lambda: (incarnations(client), lives))
        leaves = nodes["decode-1"]
        with load(client, expected, "decode-1") as again:
            hook = leaves.delete()
            assert hook.popen.wait(leaves.spec["terminationGracePeriodSeconds"]) == 0, hook.text()
            leaves.terminate()
            leaves.ended()
        assert [note for note in again if NOT_BEGUN not in note] == []
        assert logged(start.pods, "worker.drain_cut", "decode-1") == []
        lost = node(start, "decode", "2")
        when(client, workers | {"decode-2": lost.ip})
        with load(client, expected, "decode-2") as again:
            wait_until(lambda: running(client).get("decode-2", 0) >= 2, SOON_S)  # it has none between two streams
            end(lost)
            wait_until(lambda: bool(again), SOON_S, lambda: (client.workers().workers, router.process.text()[-4000:]))
        driver.terminate()
        assert driver.process.popen.wait(SOON_S) == 0
        when(client, workers)  # the end of the driver ends nothing
        driver = start("head", container="driver", of=EITHER)
        driver.process.wait_for("ready")
        before = started(start.pods, "decode-1")
        either = node(start, "decode", "3", of=EITHER)
        when(client, workers | {"decode-1": either.ip})
        wait_until(lambda: started(start.pods, "decode-1") > before, SOON_S)  # before that its start is not over
        process = {one.worker_id: one.pid for one in client.workers().workers}["decode-1"]
        client.scale(prefill=2, decode=1)
        when(client, workers | {"prefill-1": either.ip})
        assert {one.worker_id: one.pid for one in client.workers().workers}["prefill-1"] == process
        assert client.generate(PROMPT, max_tokens=400, ignore_eos=True, timeout=SOON_S).token_ids == expected
        wait_until(lambda: told(router, "tandem_ready_workers", "prefill") == 2, SOON_S, lambda: router.process.text())
        assert told(router, "tandem_wanted_workers", "prefill") == 2
        assert told(router, "tandem_supervisor_up") == 1
        end(head)
        wait_until(lambda: told(router, "tandem_supervisor_up") == 0, SOON_S, lambda: router.process.text())
    kept_secret = {value for pod in start.pods for name, value in pod.env.items() if name in SECRETS}
    assert len(kept_secret) == 3
    assert not [pod.name for pod in start.pods if any(secret in pod.process.text() for secret in kept_secret)]


@pytest.mark.timeout(800)
def test_each_model_of_a_release_has_its_workers_in_pods_of_its_own_pools(folder: Path) -> None:
    """Two supervisors share a Ray. Each starts its worker where a node offers its model's pool, and routers find both
    by their models; `tandem scale` of one model does not change the other."""
    with release(folder, MODELS) as start:
        for stored in ("valkey", "tables"):
            start(stored).wait_ready()
        node(start, "head", container="head").wait_ready()
        drivers = [start("head", model, container=f"driver-{model}") for model in ("chat", "small")]
        for driver in drivers:
            driver.process.wait_for("ready")
        nodes = {model: node(start, f"{model}-decode") for model in ("small", "chat")}
        router = router_of(start)
        with Client(f"{router.ip}:{router.port('grpc')}") as client:

            def hosts() -> dict[str, str]:
                workers = [one for one in client.workers().workers if one.role != "router" and one.state == "ready"]
                return {one.model: one.address.rpartition(":")[0] for one in workers}

            wait_until(lambda: hosts() == {model: pod.ip for model, pod in nodes.items()}, SOON_S, hosts)
            for model in nodes:
                assert len(client.generate(PROMPT, max_tokens=4, ignore_eos=True, model=model).token_ids) == 4
            client.scale(pools={"chat/decode": 0})
            wait_until(lambda: hosts() == {"small": nodes["small"].ip}, SOON_S, hosts)
