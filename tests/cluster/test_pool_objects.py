"""The sizes of pools as Kubernetes objects, with an API server that implements only what the code uses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.kuberay.kubernetes_api import KubernetesApi
from cluster.kuberay.pool_objects import AGREED_CLUSTER, AGREED_SIZE, PoolObject, PoolObjects, agree
from cluster.state.registry import Registry
from tandem.errors import PreconditionFailed, Unavailable

TOKEN = "account-token"
PATH = "/apis/apps/v1/namespaces/here/deployments/"
SOON_S = 10.0


class ApiServer:
    """Two Deployments. A merge patch of one that has changed since is a conflict, as with Kubernetes."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.before_patch: Callable[[], None] | None = None
        for pool in ("prefill", "decode"):
            self.objects[f"demo-{pool}"] = {"metadata": {"resourceVersion": "1"}, "spec": {"paused": True}}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def scale(self, pool: str, size: int) -> None:
        """`kubectl scale`, an HPA and KEDA write the scale subresource, which changes only the size."""
        known = self.objects[f"demo-{pool}"]
        known["spec"]["replicas"] = size
        known["metadata"]["resourceVersion"] = str(int(known["metadata"]["resourceVersion"]) + 1)

    def size(self, pool: str) -> int:
        return int(self.objects[f"demo-{pool}"]["spec"].get("replicas", 1))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _patch(self, name: str, change: Any) -> int:
        if self.before_patch:
            self.before_patch()
        known = self.objects[name]
        if change["metadata"].pop("resourceVersion") != known["metadata"]["resourceVersion"]:
            return 409
        known["metadata"] |= change["metadata"]
        self.scale(name.removeprefix("demo-"), change["spec"]["replicas"])
        return 200

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200)

            def do_PATCH(self) -> None:
                change = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(server._patch(self.path.removeprefix(PATH), change))

            def answer(self, code: int) -> None:
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    code = 401
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(server.objects[self.path.removeprefix(PATH)]).encode())

            def log_message(self, *_: Any) -> None: ...

        return Handler


@pytest.fixture
def server() -> Iterator[ApiServer]:
    made = ApiServer()
    yield made
    made.close()


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> KubernetesApi:
    (tmp_path / "namespace").write_text("here")
    (tmp_path / "token").write_text(TOKEN)
    return KubernetesApi(server.url, tmp_path)


@pytest.mark.parametrize(
    ("replicas", "agreed", "wanted", "follows", "size"),
    [
        (1, None, 3, True, 3),  # the first round: the registry's
        (3, 3, 3, True, 3),
        (5, 3, 3, True, 5),  # kubectl scale, an HPA or KEDA
        (3, 3, 4, True, 4),  # tandem scale
        (5, 3, 4, True, 5),  # both at once
        (0, 3, 3, True, 3),  # no pool may be so small
        (5000, 3, 3, True, 3),
        (5, 3, 3, False, 3),  # Tandem's autoscaler has the pool
        (3, 3, 4, False, 4),
    ],
)
def test_whoever_changed_the_size_is_followed(
    replicas: int, agreed: int | None, wanted: int, follows: bool, size: int
) -> None:
    """The driver follows whichever of object and registry has changed; a size that is not permitted, or that another
    owner sets, is reverted."""
    assert agree(PoolObject(replicas, agreed, "1", "demo"), wanted, 1, follows, "demo") == size


async def test_a_pool_keeps_its_size_when_its_cluster_gets_another_name(
    server: ApiServer, api: KubernetesApi, registry: Registry
) -> None:
    """An upgrade to another checkpoint makes another cluster, whose wanted sizes are only the initial ones. The control
    is the same cluster."""
    await registry.set_wanted({"prefill": 1, "decode": 1})
    objects = PoolObjects(api, registry, "demo", follows=True)
    for cluster, size in (("former", 12), (registry.cluster, 1)):
        await registry.set_wanted({"decode": 1})
        server.scale("decode", 12)
        written = {AGREED_SIZE: "12", AGREED_CLUSTER: cluster}
        server.objects["demo-decode"]["metadata"]["annotations"] = written
        await objects._one("decode")
        assert (await registry.wanted())["decode"] == server.size("decode") == size
        agreed = {AGREED_SIZE: str(size), AGREED_CLUSTER: registry.cluster}
        assert server.objects["demo-decode"]["metadata"]["annotations"] == agreed


async def test_every_way_to_scale_ends_at_the_same_sizes(
    server: ApiServer, api: KubernetesApi, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool's object first gets the registry's size. Then `kubectl scale` changes the wanted size, `tandem scale`
    changes the object, and a size that a pool may not have changes neither. An upgrade of the chart writes the object
    like kubectl."""
    monkeypatch.setattr("cluster.kuberay.pool_objects.EVERY_S", 0.05)
    await registry.set_wanted({"prefill": 2, "decode": 3})
    running = asyncio.create_task(PoolObjects(api, registry, "demo", follows=True).run())

    async def until(prefill: int, decode: int) -> None:
        async with asyncio.timeout(SOON_S):
            async for _ in registry.changes(0.02):
                wanted = await registry.wanted()
                if (
                    (wanted["prefill"], wanted["decode"])
                    == (server.size("prefill"), server.size("decode"))
                    == (
                        prefill,
                        decode,
                    )
                ):
                    return

    try:
        await until(2, 3)
        server.scale("decode", 5)
        await until(2, 5)
        await registry.set_wanted({"prefill": 4})
        await until(4, 5)
        server.scale("decode", 0)
        await registry.set_wanted({"prefill": 1})
        await until(1, 5)
        assert server.objects["demo-decode"]["metadata"]["annotations"] == {
            AGREED_SIZE: "5",
            AGREED_CLUSTER: registry.cluster,
        }
        assert not running.done()
    finally:
        running.cancel()


async def test_a_change_between_reading_and_writing_is_not_lost(
    server: ApiServer, api: KubernetesApi, registry: Registry
) -> None:
    """`kubectl scale` just before the driver writes: the write is refused, and the next round takes that size."""
    await registry.set_wanted({"prefill": 1, "decode": 2})
    objects = PoolObjects(api, registry, "demo", follows=True)
    await objects._one("decode")
    await registry.set_wanted({"decode": 3})
    server.before_patch = lambda: server.scale("decode", 6)
    with pytest.raises(PreconditionFailed):
        await objects._one("decode")
    server.before_patch = None
    await objects._one("decode")
    assert (await registry.wanted())["decode"] == server.size("decode") == 6


async def test_without_an_api_server_the_sizes_stay(api: KubernetesApi, registry: Registry, tmp_path: Path) -> None:
    """An API server that does not answer, refuses the account, or answers nonsense causes a logged error and changes no
    size."""
    await registry.set_wanted({"prefill": 1, "decode": 2})
    unreachable = KubernetesApi("http://127.0.0.1:9", tmp_path)
    with pytest.raises(Unavailable, match="cannot be asked"):
        await PoolObjects(unreachable, registry, "demo", follows=True)._one("decode")
    (tmp_path / "token").write_text("another")
    with pytest.raises(Unavailable, match="401"):
        await PoolObjects(api, registry, "demo", follows=True)._one("decode")
    assert await registry.wanted() == {"prefill": 1, "decode": 2}
