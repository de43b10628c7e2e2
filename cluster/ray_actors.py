"""The Ray actors: a worker's process, the supervisor's, and the owner that ends with `tandem up`."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray
import ray._private.node
import ray._private.worker
from ray.exceptions import RayActorError

from cluster.autoscaler import Autoscaler
from cluster.exit_with_parent import exit_with_parent
from cluster.placement import POOLS, Placement, both_pools, here, needs
from cluster.ray_nodes import Gcs, assigned_gpus, nodes, on_node, where
from cluster.ray_worker import SPARE, RayWorkerProcess, answer
from cluster.state.lease import Lease
from cluster.state.registry import Registry
from cluster.supervision.reconcile_plan import role_of
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.worker_process import Event, Started, WorkerProcess
from tandem.errors import InternalError, TandemError, WorkerLost
from tandem.settings import Settings
from tandem.tasks import end, failed, forever
from tandem.telemetry import logs

log = logging.getLogger(__name__)
NAMESPACE = "tandem"


def _worker_prefix(cluster: str) -> str:
    return f"tandem-worker-{cluster}/"


def _our_actors(prefix: str = "") -> list[str]:
    """Names of live actors of this product, on the whole Ray."""
    entries = ray.util.list_named_actors(all_namespaces=True)
    names = [entry["name"] for entry in entries if entry["namespace"] == NAMESPACE]
    return [name for name in names if name.startswith(prefix)]


WORKERS_PER_ROLE = 100_000
"""Per role on this machine: the custom resources say where a role may run, not how many workers."""


class WorkerActor:
    """One worker: the process of this actor is the worker's process. A spare becomes the worker that start() names.
    Each call may be repeated, while it runs, too: its caller may have lost the connection (cluster/ray_worker.py)."""

    def __init__(self, worker_id: str, settings: Settings, launcher: str, placement: Placement) -> None:
        exit_with_parent()  # the raylet; Ray notices its death as well, unless the worker is stuck
        logs.configure(settings, worker_id)
        self._worker_id = worker_id
        self._settings = settings
        self._launcher = launcher
        self._placement = placement
        self._gpus = assigned_gpus()
        self._both_pools = False  # a worker of either may run on this node
        if placement.folder and Path(placement.folder).is_dir():  # on this host, too
            os.chdir(placement.folder)
        self._preparing: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._stages: list[str] = []
        self._new_stage = asyncio.Event()
        self._all_stages_sent = False

    async def prepare(self) -> None:
        """Imports the libraries of a worker of either pool, on a thread."""
        if self._preparing is None:
            prepare = importlib.import_module(self._launcher).prepare
            self._preparing = asyncio.create_task(asyncio.to_thread(prepare))
        await asyncio.shield(self._preparing)

    async def start(self, worker_id: str) -> Started:
        if self._worker_id == SPARE:
            self._worker_id = worker_id
        if self._worker_id != worker_id:
            raise InternalError(f"this process serves as {self._worker_id}, not as {worker_id}")
        if self._starting is None:
            self._starting = asyncio.create_task(self._launch())
        try:
            service = await asyncio.shield(self._starting)
        finally:
            self._all_stages_sent = True
            self._new_stage.set()
        can_switch = service.can_switch_role and self._both_pools
        return Started(service.address, os.getpid(), service.incarnation, can_switch)

    async def switch_role(self, worker_id: str, grace_s: float) -> Started:
        if worker_id != self._worker_id:  # otherwise the call is a repetition
            assert self._starting is not None
            self._worker_id, self._stages, self._all_stages_sent = worker_id, [], False
            self._starting = asyncio.create_task(self._launch_after(self._starting, grace_s))
        return await self.start(worker_id)

    async def serves_as(self) -> str:
        return self._worker_id

    async def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    async def _launch_after(self, before: asyncio.Task[Any], grace_s: float) -> Any:
        return await self._launch(await (await before).release(grace_s))

    async def _launch(self, engine: Any = None) -> Any:
        if self._preparing is not None:  # two threads must not import the same modules
            await asyncio.wait({self._preparing})
        launch = importlib.import_module(self._launcher).start
        loop = asyncio.get_running_loop()

        def report(line: str) -> None:  # on any thread
            loop.call_soon_threadsafe(self._add_stage, line)

        return await launch(role_of(self._worker_id), await self._settings_here(), self._worker_id, report, engine)

    async def _settings_here(self) -> Settings:
        """Asks Ray's head, which a worker that serves never does: Ray blocks the thread until a lost head is back."""
        node_id, nodes = await asyncio.to_thread(where)
        self._both_pools = both_pools(node_id, nodes, self._placement)
        node = next(node for node in nodes if node.node_id == node_id)
        return here(role_of(self._worker_id), self._settings, node, nodes, self._placement, self._gpus)

    async def stages(self, after: int) -> list[str]:
        """Stages of start() after the first `after`; waits for the next one. Empty: the start is over."""
        while len(self._stages) <= after and not self._all_stages_sent:
            self._new_stage.clear()
            await self._new_stage.wait()
        return self._stages[after:]

    def _add_stage(self, line: str) -> None:
        self._stages.append(line)
        self._new_stage.set()

    async def wait(self) -> None:
        assert self._starting is not None
        await (await self._starting).wait()

    async def stop(self, grace_s: float) -> None:
        assert self._starting is not None
        await (await self._starting).stop(grace_s)


class SupervisorActor:
    """One cluster's supervisor. Ray restarts it; it finds its workers again by their names."""

    def __init__(self, settings: Settings, launcher: str, run_id: str, placement: Placement, owner: str = "") -> None:
        """`run_id` names the `tandem up` for all incarnations of this supervisor; `owner` is its OwnerActor, which the
        cluster must not outlive."""
        assert settings.redis is not None
        exit_with_parent()
        logs.configure(settings, "supervisor")
        self._settings = settings
        self._grace_s = settings.drain_grace_s
        self._owner = owner
        self._registry = Registry(settings.redis, settings.cluster, settings.heartbeat_ttl_s)
        self._loop = Supervisor(
            RayHost(settings, launcher, placement),
            self._registry,
            settings.drain_grace_s,
            spares=settings.spares,
            lease=Lease(self._registry, run_id),
            start_s=settings.start_timeout_s,
        )
        self._scaling: asyncio.Task[None] | None = None
        self._run: asyncio.Task[None] | None = None
        if ray.get_runtime_context().was_current_actor_reconstructed:
            ray.get_runtime_context().current_actor.run.remote()  # its caller may be lost with its host

    async def run(self) -> None:
        """Reconciles until stop(). A restarted supervisor is called again, by Ray or by itself."""
        if self._run is None:
            self._run = asyncio.create_task(self._loop.run())
            if self._owner:
                self._ending = forever(self._end_with_owner, name="end with its owner")
            if self._settings.autoscale != "off":
                scaling = Autoscaler(self._settings, self._registry)
                self._scaling = forever(scaling.run, name="autoscaler")
        await asyncio.shield(self._run)

    async def _end_with_owner(self) -> None:
        try:
            await answer(ray.get_actor(self._owner, namespace=NAMESPACE).wait.remote)
        except (RayActorError, ValueError):  # its `tandem up` has ended, perhaps while this supervisor was restarted
            await self.stop(self._grace_s)
            ray.kill(ray.get_runtime_context().current_actor)

    async def events(self, after: int) -> list[Event]:
        return await self._loop.events(after)

    async def stop(self, grace_s: float) -> int:
        await end(self._scaling)
        last = await self._loop.stop(grace_s)
        await self._registry.close()
        return last

    async def leave(self) -> None:
        """Before another supervisor takes over: see Supervisor.leave."""
        await end(self._scaling)
        await self._loop.leave()

    async def retire(self) -> None:
        """After another cluster has replaced this one: see Supervisor.retire. This process ends with the last worker.
        If Ray restarts it before that, Ray repeats the call."""
        self._loop.retire()
        await self.run()
        await self.leave()
        ray.kill(ray.get_runtime_context().current_actor)


class OwnerActor:
    """Represents a `tandem up` on an external Ray: not detached, so Ray ends it with that process."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


class RayHost:
    """Starts workers as named detached actors, and finds them again."""

    def __init__(self, settings: Settings, launcher: str, placement: Placement) -> None:
        self._settings = settings
        self._launcher = launcher
        self._placement = placement
        self._prefix = _worker_prefix(settings.cluster)
        self._spares: dict[RayWorkerProcess, asyncio.Task[None]] = {}
        self._silent: list[RayWorkerProcess] = []  # survivors that have not said which workers they are
        self._gcs: Gcs | None = None

    def create(self, worker_id: str) -> WorkerProcess:
        if role_of(worker_id) in POOLS:
            for spare, prepared in self._spares.items():
                if spare.placed and not failed(prepared):
                    del self._spares[spare]
                    spare.become(worker_id)
                    return spare
            for spare in [spare for spare in self._spares if not spare.placed]:
                self._forget(spare)  # it waits for the room that this worker needs
        return self._create(worker_id, {role_of(worker_id)})

    def keep_spares(self, count: int) -> None:
        for spare, prepared in list(self._spares.items()):
            if len(self._spares) > count or failed(prepared):
                self._forget(spare)
        while len(self._spares) < count:  # on a node where a worker of either pool may run
            self._prepare(self._create(SPARE, POOLS))

    def _prepare(self, spare: RayWorkerProcess) -> None:
        self._spares[spare] = asyncio.create_task(spare.prepare(), name="spare")

    def _forget(self, spare: RayWorkerProcess) -> None:
        self._spares.pop(spare).cancel()
        spare.kill()

    def _create(self, worker_id: str, roles: Collection[str]) -> RayWorkerProcess:
        wanted = needs(roles, self._settings, nodes(), self._placement)
        # Unique per actor: a dead actor's name is free only after Ray has noticed the death.
        name = f"{self._prefix}{worker_id}/{secrets.token_hex(4)}"
        actor = ray.remote(WorkerActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            memory=wanted.memory,
            num_gpus=wanted.gpus,
            resources=dict(wanted.resources),
            scheduling_strategy=on_node(wanted.node) if wanted.node else "SPREAD",
            max_restarts=0,  # the supervisor starts a new actor instead
        )
        process = actor.remote(worker_id, self._settings, self._launcher, self._placement)
        return RayWorkerProcess(process, worker_id, wanted)

    async def leaving(self) -> set[str]:
        if not self._settings.ray_address:  # this host is the only node
            return set()
        if self._gcs is None:
            self._gcs = Gcs(ray.get_runtime_context().gcs_address)
        draining = await asyncio.to_thread(self._gcs.draining)
        for spare in [spare for spare in self._spares if spare.node in draining]:
            self._forget(spare)
        return draining

    async def survivors(self) -> dict[str, WorkerProcess]:
        processes: list[RayWorkerProcess] = []
        for name in _our_actors(self._prefix):
            worker_id = name.removeprefix(self._prefix).rpartition("/")[0]
            try:
                processes.append(RayWorkerProcess(ray.get_actor(name, namespace=NAMESPACE), worker_id))
            except ValueError:  # it died meanwhile
                continue
        return await self._living(processes)

    async def late_survivors(self) -> dict[str, WorkerProcess]:
        asked = len(self._silent)
        found = await self._living(list(self._silent))  # those that are silent again are behind these now
        del self._silent[:asked]
        return found

    @property
    def silent(self) -> bool:
        return bool(self._silent)

    async def _living(self, processes: Collection[RayWorkerProcess]) -> dict[str, WorkerProcess]:
        survivors: dict[str, WorkerProcess] = {}
        worker_ids = await asyncio.gather(*(self._asked(process) for process in processes))
        # Those that wait for room last: a worker that serves may have the id for which they were made.
        for worker_id, process in sorted(zip(worker_ids, processes, strict=True), key=lambda one: not one[1].begun):
            if not worker_id:
                continue
            if worker_id == SPARE:
                self._prepare(process)
            elif worker_id in survivors:  # it has become a worker without reporting that
                process.kill()
            else:
                survivors[worker_id] = process
        return survivors

    async def _asked(self, process: RayWorkerProcess) -> str:
        """The id of its worker. Empty: it is dead, or does not say."""
        try:
            return await process.serves_as()
        except WorkerLost:
            return ""
        except TandemError as error:  # by its name it could be a spare, or a worker's second process, which are killed
            log.error("%s; it is left alone until it does", error.message)
            self._silent.append(process)
            return ""
