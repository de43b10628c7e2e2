"""The Job of an upgrade of a RayCluster, with an API server and a KubeRay that do only what it uses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.kuberay import upgrade
from cluster.kuberay.kubernetes_api import KubernetesApi
from cluster.kuberay.upgrade import HEAD, TEMPLATE, Pod, Pool, Release, Situation, Upgrade
from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.registry import Registry, State, WorkerRecord
from tandem.errors import PreconditionFailed, Unavailable
from tandem.settings import Settings

OLD, NEW = "old", "new"
NAMESPACE = "/namespaces/here/"
MOMENT_S = 0.06  # longer than the Job waits between two looks
SOON_S = 1.5  # for a step of the Job that does not succeed
Start = Callable[..., Coroutine[Any, Any, None]]


class KubeRay:
    """A RayCluster's pods and their workers. A deleted pod drains for a moment, then it is gone; its successor has the
    RayCluster's template, is ready a moment later, and then has a worker if `serves`."""

    def __init__(self, registry: Registry, loop: asyncio.AbstractEventLoop) -> None:
        self.template, self.serves = NEW, True
        self.superseded = (0, "")  # at this number of deletions the RayCluster gets another template, this one
        self.pods: dict[str, Any] = {}
        self.api: KubernetesApi
        self.deleted: list[str] = []
        self.ready_heads: list[int] = []  # the number of deletions when a new head was ready
        self.serving_before: list[int] = []  # workers, at each deletion
        self._registry, self._loop, self._made = registry, loop, 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def make(self, group: str, template: str, *, ready: bool = True) -> tuple[str, str]:
        """A pod's name and address."""
        self._made += 1
        name, address = f"{group}-{self._made}", f"10.0.0.{self._made}"
        labels = {"ray.io/cluster": "demo", "ray.io/group": group}
        metadata = {"name": name, "uid": f"uid-{name}", "labels": labels, "annotations": {TEMPLATE: template}}
        status = {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": str(ready)}]}
        self.pods[name] = {"metadata": metadata, "status": status}
        return name, address

    def serving(self) -> int:
        found = asyncio.run_coroutine_threadsafe(self._registry.workers(), self._loop).result(10)
        return len(found)

    def templates(self) -> set[str]:
        return {pod["metadata"]["annotations"][TEMPLATE] for pod in self.pods.values()}

    def spec(self) -> Any:
        template = {"metadata": {"annotations": {TEMPLATE: self.template}}}
        groups = [{"groupName": name, "template": template} for name in ("prefill", "decode")]
        return {"spec": {"headGroupSpec": {"template": template}, "workerGroupSpecs": groups}}

    def delete(self, name: str, uid: str) -> int:
        if name not in self.pods or self.pods[name]["metadata"]["uid"] != uid:
            return 404 if name not in self.pods else 409
        assert "deletionTimestamp" not in self.pods[name]["metadata"], "it leaves already"
        self.deleted.append(name)
        self.serving_before.append(self.serving())
        self.pods[name]["metadata"]["deletionTimestamp"] = "now"
        if len(self.deleted) == self.superseded[0]:
            self.template = self.superseded[1]
        asyncio.run_coroutine_threadsafe(self._end(name), self._loop)
        return 200

    async def _end(self, name: str) -> None:
        metadata, status = self.pods[name]["metadata"], self.pods[name]["status"]
        role, workers = metadata["labels"]["ray.io/group"], await self._registry.workers()
        had = [one for one in workers if one.address == f"{status['podIP']}:1"]
        for one in had:
            await self._registry.withdraw(one.worker_id, one.incarnation)
        await asyncio.sleep(MOMENT_S)
        del self.pods[name]
        await asyncio.sleep(MOMENT_S)
        successor, address = self.make(role, self.template, ready=False)
        await asyncio.sleep(MOMENT_S)
        self.pods[successor]["status"]["conditions"][0]["status"] = "True"
        if role == HEAD:
            self.ready_heads.append(len(self.deleted))
        elif had and self.serves:
            await serve(self._registry, role, address)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        ray = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == f"/apis/ray.io/v1{NAMESPACE}rayclusters/demo":
                    self.answer(200, ray.spec())
                elif self.path == f"/api/v1{NAMESPACE}pods?labelSelector=ray.io/cluster=demo":
                    self.answer(200, {"items": list(ray.pods.values())})
                else:
                    self.answer(404, {})

            def do_DELETE(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = self.path.removeprefix(f"/api/v1{NAMESPACE}pods/")
                self.answer(ray.delete(name, body["preconditions"]["uid"]), {})

            def answer(self, code: int, body: Any) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None: ...

        return Handler


async def serve(registry: Registry, role: str, address: str) -> None:
    await registry.beat(WorkerRecord(f"{role}-{address}", role, State.READY, 1, address, f"{address}:1"))


@pytest.fixture
async def kuberay(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeRay]:
    """A head, one prefill and three decode workers, all in former pods, and a former decode pod without a worker."""
    monkeypatch.setattr(upgrade, "EVERY_S", 0.02)
    made = KubeRay(registry, asyncio.get_running_loop())
    made.make(HEAD, OLD)
    await registry.set_wanted({"prefill": 1, "decode": 3})
    for role in ("prefill", "decode", "decode", "decode"):
        _, address = made.make(role, OLD)
        await serve(registry, role, address)
    made.make("decode", OLD)
    yield made
    made.close()


@pytest.fixture
def run(kuberay: KubeRay, registry: Registry, valkey: EmbeddedValkey, tmp_path: Path) -> Start:
    (tmp_path / "namespace").write_text("here")
    (tmp_path / "token").write_text("token")
    settings = Settings(model="fake", redis=valkey.url)

    kuberay.api = KubernetesApi(kuberay.url, tmp_path)

    def start(within_s: float = 10.0) -> Coroutine[Any, Any, None]:
        pools = [Pool(cluster=registry.cluster, roles=[role], groups={role: NEW}) for role in ("prefill", "decode")]
        release = Release(ray_cluster="demo", head=NEW, pools=pools, within_s=within_s)
        return Upgrade(kuberay.api, release).run(settings)

    return start


def pod(number: int, template: str = OLD) -> Pod:
    return Pod(f"decode-{number}", str(number), "decode", template, f"10.0.0.{number}")


@pytest.mark.parametrize(
    ("former", "new", "wanted", "goes"),
    [
        (3, 0, 3, True),  # the first one
        (2, 0, 3, False),  # its successor does not serve
        (2, 1, 3, True),
        (1, 2, 3, True),
        (1, 2, 4, False),  # somebody wants one more meanwhile
        (3, 0, 2, True),  # one of them has no worker
        (3, 0, 5, False),  # two cannot be started: no capacity is lost on top
        (0, 3, 3, False),
    ],
)
def test_a_pod_goes_when_those_before_it_are_replaced(former: int, new: int, wanted: int, goes: bool) -> None:
    """At any time one worker fewer than wanted serves, at most. While a pod leaves, no other one goes."""
    old, others = [pod(number) for number in range(former)], [pod(10 + number) for number in range(new)]
    workers = {one.address: True for one in [*old, *others]}
    situation = Situation(old, others, 0, wanted, workers)
    assert (situation.may_go(former + new, 0) is not None) == goes
    assert replace(situation, leaving=1).may_go(former + new, 0) is None


def test_a_worker_that_moved_to_another_former_pod_is_waited_for() -> None:
    """The supervisor places it where there is room. What counts before the next deletion is that it serves."""
    moving = Situation([pod(1), pod(2)], [], 0, 2, {"10.0.0.1": True, "10.0.0.2": False})
    assert moving.may_go(2, 1) is None
    assert replace(moving, workers={"10.0.0.1": True, "10.0.0.2": True}).may_go(2, 1) is not None


def test_a_pod_without_a_serving_worker_goes_first() -> None:
    """Otherwise it would get the worker of the first one that goes, and that worker would move twice."""
    situation = Situation([pod(1), pod(2), pod(3)], [], 0, 2, {"10.0.0.1": True, "10.0.0.3": True})
    assert situation.may_go(2, 0) == pod(2)
    starting = replace(situation, workers={"10.0.0.1": True, "10.0.0.2": True, "10.0.0.3": False})
    assert starting.may_go(2, 0) == pod(3)


@pytest.mark.parametrize(("new", "deleted"), [(1, 0), (0, 1), (1, 1)])
def test_after_a_change_of_the_checkpoint_the_new_workers_come_first(new: int, deleted: int) -> None:
    """They are another cluster, which knows nothing of eight workers in former pods and wants one at first. One pod
    makes room for it; no other one goes until it serves."""
    old, others = [pod(number) for number in range(8)], [pod(10 + number) for number in range(new)]
    assert Situation(old, [], 0, 1, {}).may_go(0, 0) is not None
    assert Situation(old, others, 0, 1, {}).may_go(0, deleted) is None
    assert Situation(old, [pod(10)], 0, 1, {"10.0.0.10": True}).may_go(0, deleted) is not None


async def test_the_head_goes_first_and_then_one_worker_at_a_time(kuberay: KubeRay, run: Start) -> None:
    """All pods are of the new template afterwards, at most one worker was missing at a time, and a second run, as after
    a crash at the end, deletes nothing."""
    await run()
    assert kuberay.deleted == ["headgroup-1", "prefill-2", "decode-6", "decode-3", "decode-4", "decode-5"]
    assert kuberay.serving_before == [4] * 6
    assert kuberay.ready_heads == [1]  # before the next deletion
    assert kuberay.templates() == {NEW}
    await run()
    assert len(kuberay.deleted) == 6


async def test_workers_that_do_not_serve_stop_an_upgrade_which_goes_on_when_they_do(
    kuberay: KubeRay, run: Start, registry: Registry
) -> None:
    """A new image whose workers do not start costs one worker of each pool at most, however often the Job is started
    again; the error says what stands, and a pool that fails stops the other one of its cluster."""
    kuberay.serves = False
    for failing in (
        "test: prefill: 0 of 1 wanted workers serve in new pods, 0 former",
        *["test: decode: 0 of 3 wanted workers serve in new pods, 2 former"] * 2,
    ):
        with pytest.raises(Unavailable, match=failing):
            await run(SOON_S)
    assert kuberay.deleted == ["headgroup-1", "prefill-2", "decode-6", "decode-3"]
    kuberay.serves = True
    for name, described in list(kuberay.pods.items()):
        if name in ("prefill-8", "decode-10"):
            await serve(registry, name.partition("-")[0], described["status"]["podIP"])
    await run()
    assert kuberay.templates() == {NEW}
    assert min(kuberay.serving_before[4:]) == 4


async def test_only_the_pools_own_workers_count(kuberay: KubeRay, run: Start, registry: Registry) -> None:
    """With those of the other pool and routers, the next pod would go although its pool lacks a worker."""
    (pool,) = [Pool(cluster=registry.cluster, roles=["decode"], groups={"decode": NEW})]
    await registry.beat(WorkerRecord("router-0", "router", State.READY, 1, "r", "10.0.0.99:1"))
    upgrade_of = Upgrade(kuberay.api, Release(ray_cluster="demo", head=NEW, pools=[pool], within_s=1.0))
    assert (await upgrade_of._situation(pool, registry)).all_serving == 3


async def test_pods_of_a_group_that_is_no_more_go_last(kuberay: KubeRay, run: Start) -> None:
    """A release without one of its former models. KubeRay leaves the pods of a removed group running, with their
    GPUs."""
    left, _ = kuberay.make("chat-decode", OLD)
    await run()
    assert kuberay.deleted[-1] == left


async def test_an_install_deletes_nothing(kuberay: KubeRay, run: Start) -> None:
    """The Job is part of every release, and the first one has no former pods."""
    for described in kuberay.pods.values():
        described["metadata"]["annotations"][TEMPLATE] = NEW
    await run()
    assert not kuberay.deleted


async def test_nothing_is_deleted_before_the_raycluster_has_the_templates(
    kuberay: KubeRay, run: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KubeRay would make the same pods again. Helm applies the RayCluster after the Job, or refuses to."""
    kuberay.template = OLD
    monkeypatch.setattr(upgrade, "APPLIED_WITHIN_S", 0.1)
    with pytest.raises(Unavailable, match="force-conflicts"):
        await run()
    assert not kuberay.deleted
    monkeypatch.setattr(upgrade, "APPLIED_WITHIN_S", 10.0)
    waiting = asyncio.create_task(run())
    await asyncio.sleep(0)
    kuberay.template = NEW
    await waiting
    assert kuberay.templates() == {NEW}


async def test_a_job_deletes_nothing_of_the_release_after_its_own(kuberay: KubeRay, run: Start) -> None:
    """Helm ends the former Job only when the new manifests are applied. To the former one the new pods would be former
    ones."""
    kuberay.superseded = (2, "newer")
    with pytest.raises(PreconditionFailed, match="another release"):
        await run()
    assert kuberay.deleted == ["headgroup-1", "prefill-2"]


async def test_a_pool_whose_size_is_not_known_waits(kuberay: KubeRay, run: Start, registry: Registry) -> None:
    """An upgrade to another checkpoint makes another cluster, without sizes until its driver runs. No size is not 0:
    with 0 all pods would go at once."""
    await registry.run("wanted", "return redis.call('DEL', KEYS[1])", [])
    with pytest.raises(Unavailable, match="the driver has written no size"):
        await run(SOON_S)
    assert kuberay.deleted == ["headgroup-1"]


def test_a_job_without_its_release_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing requirement gives an exit status and a line, which Kubernetes keeps as the container's message."""
    monkeypatch.setattr(upgrade.tandem_settings, "load", lambda: Settings(model="fake"))
    monkeypatch.delenv(upgrade.UPGRADE, raising=False)
    assert upgrade.main() == 1
    assert "UPGRADE is not a release" in capsys.readouterr().err
