"""The Job of an upgrade of a RayCluster, with an API server and a KubeRay that do only what it uses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.kuberay import upgrade
from cluster.kuberay.kubernetes_api import KubernetesApi
from cluster.kuberay.upgrade import HEAD, TEMPLATE, Pod, Pool, Release, Situation, Upgrade
from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.registry import Registry, State, WorkerRecord
from tandem.errors import Unavailable
from tandem.settings import Settings

OLD, NEW = "old", "new"
NAMESPACE = "/namespaces/here/"
Start = Callable[..., Coroutine[Any, Any, None]]


class KubeRay:
    """A RayCluster's pods and their workers. A deleted pod is gone at once; its successor has the RayCluster's
    template, and a worker if `serves`."""

    def __init__(self, registry: Registry, loop: asyncio.AbstractEventLoop) -> None:
        self.template, self.serves = NEW, True
        self.after = (0, "")  # so many deletions the RayCluster gets this template
        self.pods: dict[str, Any] = {}
        self.deleted: list[str] = []
        self.serving_before: list[int] = []  # workers, at each deletion
        self._registry, self._loop, self._made = registry, loop, 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def make(self, group: str, template: str) -> tuple[str, str]:
        """A pod's name and address."""
        self._made += 1
        name, address = f"{group}-{self._made}", f"10.0.0.{self._made}"
        labels = {"ray.io/cluster": "demo", "ray.io/group": group}
        metadata = {"name": name, "uid": f"uid-{name}", "labels": labels, "annotations": {TEMPLATE: template}}
        ready = [{"type": "Ready", "status": "True"}]
        self.pods[name] = {"metadata": metadata, "status": {"phase": "Running", "podIP": address, "conditions": ready}}
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
        self.deleted.append(name)
        self.serving_before.append(self.serving())
        pod = self.pods.pop(name)
        if len(self.deleted) == self.after[0]:
            self.template = self.after[1]
        group, former = pod["metadata"]["labels"]["ray.io/group"], pod["status"]["podIP"]
        _, address = self.make(group, self.template)
        if group != HEAD:
            moved = self._move(group, former, address)
            asyncio.run_coroutine_threadsafe(moved, self._loop).result(10)
        return 200

    async def _move(self, role: str, former: str, address: str) -> None:
        for one in await self._registry.workers():
            if one.address == f"{former}:1":
                await self._registry.withdraw(one.worker_id, one.incarnation)
                if self.serves:
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

    def start(within_s: float = 10.0) -> Coroutine[Any, Any, None]:
        pools = [Pool(cluster=registry.cluster, roles=[role], groups={role: NEW}) for role in ("prefill", "decode")]
        release = Release(ray_cluster="demo", head=NEW, pools=pools, within_s=within_s)
        return Upgrade(KubernetesApi(kuberay.url, tmp_path), release).run(settings)

    return start


def pod(number: int, template: str = OLD) -> Pod:
    return Pod(f"decode-{number}", str(number), "decode", template, f"10.0.0.{number}")


@pytest.mark.parametrize(
    ("former", "serving", "wanted", "goes"),
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
def test_a_pod_goes_when_those_before_it_are_replaced(former: int, serving: int, wanted: int, goes: bool) -> None:
    """At any time one worker fewer than wanted serves, at most."""
    situation = Situation([pod(number) for number in range(former)], serving, wanted)
    assert (situation.may_go() is not None) == goes


def test_a_pod_without_a_worker_goes_first() -> None:
    """Otherwise it would get the worker of the first one that goes, and that worker would move twice."""
    situation = Situation([pod(1), pod(2), pod(3)], 0, 2, {"10.0.0.1", "10.0.0.3"})
    assert situation.may_go() == pod(2)


async def test_the_head_goes_first_and_then_one_worker_at_a_time(kuberay: KubeRay, run: Start) -> None:
    """All pods are of the new template afterwards, at most one worker was missing at a time, and a second run, as after
    a crash at the end, deletes nothing."""
    await run()
    assert kuberay.deleted == ["headgroup-1", "prefill-2", "decode-6", "decode-3", "decode-4", "decode-5"]
    assert kuberay.serving_before == [4] * 6
    assert kuberay.templates() == {NEW}
    await run()
    assert len(kuberay.deleted) == 6


async def test_workers_that_do_not_serve_stop_an_upgrade_which_goes_on_when_they_do(
    kuberay: KubeRay, run: Start, registry: Registry
) -> None:
    """A new image whose workers do not start costs one worker of each pool at most, however often the Job is started
    again; the error says what stands."""
    kuberay.serves = False
    for _ in range(2):
        with pytest.raises(Unavailable, match="test: prefill: of 1 wanted workers 0 serve in new pods and 0 former"):
            await run(within_s=0.2)
        await registry.set_wanted({"prefill": 0})
        with pytest.raises(Unavailable, match="test: decode: of 3 wanted workers 0 serve in new pods and 2 former"):
            await run(within_s=0.2)
        await registry.set_wanted({"prefill": 1})
    assert kuberay.deleted == ["headgroup-1", "prefill-2", "decode-6", "decode-3"]
    kuberay.serves = True
    for name, described in list(kuberay.pods.items()):
        if name in ("prefill-8", "decode-10"):
            await serve(registry, name.partition("-")[0], described["status"]["podIP"])
    await run()
    assert kuberay.templates() == {NEW}
    assert min(kuberay.serving_before[4:]) == 4


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
    kuberay.after = (2, "newer")
    with pytest.raises(Unavailable, match="another release"):
        await run()
    assert kuberay.deleted == ["headgroup-1", "prefill-2"]


async def test_a_pool_whose_size_is_not_known_waits(kuberay: KubeRay, run: Start, registry: Registry) -> None:
    """An upgrade to another checkpoint makes another cluster, without sizes until its driver runs. No size is not 0:
    with 0 all pods would go at once."""
    await registry.run("wanted", "return redis.call('DEL', KEYS[1])", [])
    with pytest.raises(Unavailable, match="the driver has written no size"):
        await run(within_s=0.2)
    assert kuberay.deleted == ["headgroup-1"]


def test_a_job_without_its_release_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing requirement gives an exit status and a line, which Kubernetes keeps as the container's message."""
    monkeypatch.setattr(upgrade.tandem_settings, "load", lambda: Settings(model="fake"))
    monkeypatch.delenv(upgrade.UPGRADE, raising=False)
    assert upgrade.main() == 1
    assert "UPGRADE is not a release" in capsys.readouterr().err
