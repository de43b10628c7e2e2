"""Checks of the images: the chart's laptop example, run on this machine and used as in operation.

Each step is a function of a running Release. It returns a line for people, and raises AssertionError when a promise is
broken.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.client import Client
from tandem.results import Receipt
from tests.deploy.chart import NAME, Document, example, render
from tests.deploy.images import build
from tests.deploy.images.node import Node, Played
from tests.deploy.test_docker import USER

PROMPT = list(range(100, 140))
ORDER = ("valkey", "router", "prefill", "decode")
LONG = 4000  # tokens of a stream that must not end before a pod does
REQUEST_S = 120.0
BUSY_S = 5.0


class Release:
    """Valkey, a router and a pod of each pool, started."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.valkey, self.router, self.prefill, self.decode = (node.start(one, "a") for one in ORDER)

    def client(self) -> Client:
        return Client(f"{self.router.ip}:{self.router.port('grpc')}")


def manifests() -> list[Document]:
    """The laptop example with the images of this machine; every prompt goes through the prefill pool."""
    values = example("laptop")
    values["settings"]["local_prefill"] = "never"
    values["image"] = {"registry": "localhost", "tag": build.TAG}
    values["valkey"] = {**values["valkey"], "image": build.name("valkey")}
    return render(values)


@contextmanager
def played(say: build.Say) -> Iterator[Release]:
    """The running release; nothing of it is left afterwards."""
    node = Node(manifests())
    node.open()
    try:
        release = Release(node)
        for pod in (release.valkey, release.prefill, release.decode, release.router):
            pod.wait_ready()
            say(f"ready: {pod.name} at {pod.ip}")
        yield release
    finally:
        node.close()


def requests(release: Release) -> str:
    """Sends requests over gRPC through both pools, twice with the same tokens, and over HTTP."""
    with release.client() as client:
        first, again = (client.generate(PROMPT, max_tokens=16, ignore_eos=True, timeout=REQUEST_S) for _ in range(2))
    receipt = first.receipt
    assert receipt.path == "disaggregated", receipt.notes
    assert (receipt.prefill_worker, receipt.decode_worker) == (release.prefill.name, release.decode.name)
    assert receipt.transfer is not None
    assert receipt.transfer.transport == "nixl:ucx:tcp"  # pods share no memory
    assert again.token_ids == first.token_ids
    body = {"model": "demo/model", "messages": [{"role": "user", "content": "What does os.path.join do?"}]}
    url = f"http://{release.router.ip}:{release.router.port('http')}/v1/chat/completions"
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=REQUEST_S) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    assert text
    carried = f"{receipt.transfer.bytes} bytes of KV over {receipt.transfer.transport}"
    return f"gRPC: {receipt.prefill_worker} → {receipt.decode_worker}, {carried}; HTTP: {text!r}"


def hardened(release: Release) -> str:
    """No process is root or has a capability, images are read-only, and the compiled operators are used."""
    for pod in (release.router, release.prefill, release.decode, release.valkey):
        status = dict(line.split(":\t", 1) for line in pod.exec("cat", "/proc/1/status").splitlines() if ":\t" in line)
        assert status["Uid"].split() == [str(USER)] * 4, status["Uid"]
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        mounts = [one["mountPath"] for one in pod.container["volumeMounts"]]
        for folder in ("/", "/usr/local/bin", "/home"):
            assert "Read-only" in pod.exec("sh", "-c", f"touch {folder}/x 2>&1", check=False), folder
        pod.exec("sh", "-c", f"for each in {' '.join(mounts)}; do touch $each/x && rm $each/x || exit 1; done")
    logs = "\n".join(pod.log() for pod in (release.prefill, release.decode))
    levels = set(re.findall(r"operators: (\w+)", logs))
    assert len(levels) == 1
    assert levels & {"avx512_bf16", "avx512", "avx2"}, levels
    return f"user {USER}, no capability, read-only; operators {levels.pop()}"


def executed(release: Release) -> str:
    """`kubectl exec` in a router's pod needs no option; in another pod it needs the router's address."""
    workers = release.router.exec("tandem", "workers")
    assert all(pod.name in workers for pod in (release.prefill, release.decode)), workers
    release.router.exec("tandem", "audit")
    target = f"{NAME}-tandem-router:{release.router.port('grpc')}"
    doctor = release.decode.exec("tandem", "doctor", "--target", target, check=False)
    assert release.prefill.name in doctor, doctor
    return f"tandem workers, audit and doctor by exec:\n{workers}"


def killed(release: Release) -> str:
    """After SIGKILL of a decode pod in mid-stream, the stream continues in another one with the same tokens, and the
    pod is started again."""
    pods = {pod.name: pod for pod in (release.decode, release.node.start("decode", "b"))}
    for pod in pods.values():
        pod.wait_ready()
    with release.client() as client:
        expected = _long(client)
        pids = {pod.name: pod.pid() for pod in pods.values()}
        tokens, receipt = _through(release, client, lambda name: os.kill(pids[name], signal.SIGKILL))
    assert tokens == expected, "the tokens differ"
    assert receipt.attempts == 2, receipt
    for pod in pods.values():
        pod.wait_ready()
    counts = [release.node.podman("inspect", "--format={{.RestartCount}}", pod.id) for pod in pods.values()]
    assert sorted(counts) == ["0", "1"], counts
    return f"SIGKILL in mid-stream: {len(tokens)} equal tokens, the rest by {receipt.decode_worker}; restarted"


def scaled(release: Release) -> str:
    """The prefill pool grows by a pod and shrinks by the old one, the decode pool shrinks by the pod that has a stream:
    they drain and end with 0, and the stream has the same tokens."""
    release.node.start("prefill", "b").wait_ready()
    ended: dict[str, int] = {}
    with release.client() as client:
        expected = _long(client)
        for pool in ("prefill", "decode"):
            leaving: list[Played] = []

            def delete(busy: str, pool: str = pool, leaving: list[Played] = leaving) -> None:
                leaving.append(release.node.played[busy] if pool == "decode" else release.prefill)
                leaving[0].terminate()

            tokens, _ = _through(release, client, delete)
            assert tokens == expected, "the tokens differ"
            ended[leaving[0].name] = leaving[0].ended()
            leaving[0].remove()
        left = {worker.worker_id for worker in client.workers().workers}
    assert set(ended.values()) == {0}, ended
    assert not left & ended.keys(), left
    return f"deleted in mid-stream, exit codes {ended}; left: {', '.join(sorted(left))}"


def helm_test(release: Release) -> str:
    """Runs the chart's own test as its pod."""
    tester = release.node.start("test", "a")
    code = tester.ended()
    assert code == 0, tester.log()
    return "helm test: exit code 0"


def drained(release: Release) -> str:
    """The router and Valkey end by themselves on SIGTERM."""
    codes = {}
    for pod in (release.router, release.valkey):
        pod.terminate()
        codes[pod.name] = pod.ended()
    assert set(codes.values()) == {0}, codes
    return f"ended: {codes}"


STEPS: tuple[Callable[[Release], str], ...] = (requests, hardened, executed, killed, scaled, helm_test, drained)


def _long(client: Client) -> list[int]:
    return client.generate(PROMPT, max_tokens=LONG, ignore_eos=True, timeout=REQUEST_S).token_ids


def _through(release: Release, client: Client, during: Callable[[str], None]) -> tuple[list[int], Receipt]:
    """Tokens and receipt of a long stream; when it has begun, `during` gets the name of the decode pod that has it."""
    tokens: list[int] = []
    receipt: Receipt | None = None
    for piece in client.stream(PROMPT, max_tokens=LONG, ignore_eos=True, timeout=REQUEST_S):
        if not tokens:
            during(_busy(release))
        tokens += piece.token_ids
        receipt = piece.receipt
    assert receipt is not None
    return tokens, receipt


def _busy(release: Release) -> str:
    """The busy decode pod, by the workers' metrics, which are current; the registry learns of a stream with the next
    heartbeat."""
    decode = [pod for name, pod in release.node.played.items() if "-decode-" in name]
    deadline = time.monotonic() + BUSY_S
    while time.monotonic() < deadline:
        for pod in decode:
            with urllib.request.urlopen(f"http://{pod.ip}:{pod.port('metrics')}/metrics", timeout=BUSY_S) as answer:
                found = re.search(r"^tandem_inflight_requests(?:{.*})? (\S+)$", answer.read().decode(), re.MULTILINE)
            if found and float(found[1]):
                return pod.name
    raise AssertionError("no decode worker has the stream")
