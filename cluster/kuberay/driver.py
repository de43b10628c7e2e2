"""`python -m cluster.kuberay.driver`: keeps a cluster's supervisor running on an external Ray, such as KubeRay's.

    no supervisor                ─▶ start one: a detached actor on the head's node
    one with these settings      ─▶ follow it
    one with other settings      ─▶ replace it; the new one finds the workers, which keep the settings that they have
    one of a former cluster      ─▶ retire it: its model was removed, or has another checkpoint, hence another cluster

Unlike `tandem up`, this process ends no worker: it may be killed and started again, with or without Ray's head, while
streams run. Workers end with their Ray nodes. The settings have the initial sizes; later sizes in the registry, from
`tandem scale` or the autoscaler, stay.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from cluster.kuberay.kubernetes_api import KubernetesApi
from cluster.kuberay.pool_objects import PREFIX, PoolObjects
from cluster.placement import Placement
from cluster.ray_actors import NAMESPACE, SupervisorActor, _our_actors
from cluster.ray_runtime import Runtime, SupervisorHandle, _supervisor_name
from cluster.state.registry import Registry
from tandem import settings as tandem_settings
from tandem.errors import SettingsError, TandemError, Unavailable
from tandem.model_settings import model_of
from tandem.settings import Settings
from tandem.telemetry import logs

T = TypeVar("T")
LAUNCHER = "services.pod_launch"
HEAD = "node:__internal_head__"  # a resource that Ray gives to the head's node
OF_THIS_POD = {"advertise_host", "ray_address"}
RETRY_S = 2.0
LEAVE_S = 5.0  # for a replaced supervisor to release its lease
EITHER_POOL = "EITHER_POOL"  # environment variable: the pods of the RayCluster serve either pool
RELEASE_CLUSTERS = "RELEASE_CLUSTERS"  # environment variable: the clusters of all models of the release, in JSON


def main(launcher: str = LAUNCHER) -> int:
    """Runs until SIGTERM, which ends only this process. Returns 1 if the supervisor has ended, or if Valkey or Ray's
    head does not answer within `start_timeout_s`."""
    # The first process of a container ignores signals without a handler; `_follow` has its own.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        settings = tandem_settings.load()
        logs.configure(settings, "driver")
        for name in ("ray_address", "redis", "cluster_token"):
            if getattr(settings, name) is None:
                raise SettingsError(f"the driver needs {name}", field=name, bound="set")
        _once_it_answers(lambda: asyncio.run(_want(settings)), settings.start_timeout_s)
        runtime = _once_it_answers(lambda: _connected(settings), settings.start_timeout_s)
        try:
            supervisor, ended = _supervisor(settings, launcher), SimpleQueue[Future[None] | None]()
            _keep_sizes_equal(settings, ended)
            return _follow(supervisor, ended)
        finally:
            runtime.stop()
    except TandemError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1


def _once_it_answers(call: Callable[[], T], within_s: float) -> T:
    """Repeats a call of Valkey or of Ray's head, which start at the same time as this process."""
    until, said = monotonic() + within_s, ""
    while True:
        try:
            return call()
        except Unavailable as error:
            if monotonic() >= until:
                raise
            if error.message != said:
                print(f"waiting: {error.message}", file=sys.stderr, flush=True)
            said = error.message
            sleep(RETRY_S)


def _connected(settings: Settings) -> Runtime:
    runtime = Runtime(settings.ray_address, Path(tempfile.gettempdir()))
    try:
        runtime.start()
    except TandemError:
        runtime.stop()
        raise
    return runtime


async def _want(settings: Settings) -> None:
    """Writes the initial sizes of pools without one. Ray does not run the routers here."""
    registry = Registry(settings.redis or "", settings.cluster, settings.heartbeat_ttl_s)
    try:
        await registry.keep_wanted({"prefill": settings.prefill, "decode": settings.decode})
    finally:
        await registry.close()


def _supervisor(settings: Settings, launcher: str) -> SupervisorHandle:
    """The supervisor with these settings; ends all others of this cluster, without their workers, and retires those of
    the release's former clusters."""
    base = _supervisor_name(settings.cluster)
    placement = placement_of(settings, os.environ)
    described = settings.model_dump_json(exclude=OF_THIS_POD) + str(placement)
    name = f"{base}/{hashlib.sha256(described.encode()).hexdigest()[:12]}"
    for other in _our_actors(f"{base}/"):
        if other != name:
            _replace(ray.get_actor(other, namespace=NAMESPACE))
    for former in _former(json.loads(os.environ.get(RELEASE_CLUSTERS, "[]"))):
        with suppress(ValueError):  # it has ended meanwhile
            ray.get_actor(former, namespace=NAMESPACE).retire.remote()  # it answers after the end of its last worker
    options: Any = ray.remote(SupervisorActor).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={HEAD: 0.001},  # on another node it would prevent that node from leaving
        max_restarts=-1,
        max_task_retries=-1,
    )
    return SupervisorHandle(options.remote(settings, launcher, secrets.token_hex(8), placement))


def _former(clusters: list[str]) -> list[str]:
    """The supervisors that drivers have started on this Ray for other clusters than these, which are all of the
    release's; none if they are not known."""
    base = _supervisor_name("")
    of = {name: name.removeprefix(base).rpartition("/")[0] for name in _our_actors(base)}  # empty: of a `tandem up`
    return [name for name, cluster in of.items() if clusters and cluster and cluster not in clusters]


def placement_of(settings: Settings, environment: Mapping[str, str]) -> Placement:
    """Where its workers may run, in the pods of a RayCluster."""
    either_pool, model = bool(environment.get(EITHER_POOL)), model_of(settings.cluster)
    return Placement(home="", pools_only=True, either_pool=either_pool, model=model)


def _replace(supervisor: Any) -> None:
    """Ends a supervisor without its workers. If it does not answer, the next one waits until the lease expires."""
    with suppress(RayError):
        ray.get(supervisor.leave.remote(), timeout=LEAVE_S)
    ray.kill(supervisor)


def _keep_sizes_equal(settings: Settings, ended: SimpleQueue[Future[None] | None]) -> None:
    """Keeps the pools' objects in Kubernetes, if there are any, and their wanted sizes equal, on a separate thread.
    Puts its failure into `ended`."""
    if not (prefix := os.environ.get(PREFIX, "")):
        return
    over: Future[None] = Future()
    over.add_done_callback(ended.put)

    async def run() -> None:
        registry = Registry(settings.redis or "", settings.cluster, settings.heartbeat_ttl_s)
        await PoolObjects(KubernetesApi(), registry, prefix, follows=settings.autoscale == "off").run()

    def thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001, the driver ends with it
            over.set_exception(error)

    threading.Thread(target=thread, name="pool objects", daemon=True).start()


def _follow(supervisor: SupervisorHandle, ended: SimpleQueue[Future[None] | None]) -> int:
    """Waits for a signal, or for the supervisor's end, which is a failure."""
    running = supervisor.run()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.put(None))
    running.add_done_callback(ended.put)
    print("ready: the supervisor runs", flush=True)
    run = ended.get()
    if run is None:
        return 0
    if run is running and not isinstance(run.exception(), Unavailable):
        supervisor.end()  # its run cannot restart, and the next driver would find it by name
    run.result()  # raises the reason
    raise Unavailable("the supervisor has ended", reason="SUPERVISOR_ENDED")


if __name__ == "__main__":
    sys.exit(main())
