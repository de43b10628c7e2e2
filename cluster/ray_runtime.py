"""Ray: the only file that calls it. Ray owns processes here (start, place, notice death, end); requests never pass it.

One detached supervisor actor per cluster runs cluster.reconcile; one detached actor per worker *is* the worker's
process. A worker's end ends its pending wait() call, which is how the supervisor hears of it, without polling.

Ray on this machine is started with what Tandem uses and no more: GCS, raylet and the raylet's two agents, on loopback,
with a token of its own. Its autoscaler monitor, log monitor and API server stay off: they would cost some 250 MB and
half of the start.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

# Read by Ray when it is imported.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # workers ask Ray for no GPU, and still see them
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # no second opinion on which worker to kill

import psutil
import ray
import ray._private.node
import ray._private.worker
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.autoscale import POOLS
from cluster.lease import Lease
from cluster.lifeline import die_with_parent
from cluster.reconcile import Event, Life, Started, Supervisor
from cluster.registry import Registry
from cluster.scaling import Scaling
from cluster.supervisor import ROLES, role_of
from tandem.errors import InternalError, PreconditionFailed, SettingsError, TandemError, Unavailable, WorkerLost
from tandem.settings import Settings
from tandem.tasks import end, forever

log = logging.getLogger(__name__)
WHO_S = 5.0  # for a worker to say what it serves as
LAST_STAGES_S = 1.0  # longest wait for what a ready worker still has to tell of its start
T = TypeVar("T")
NAMESPACE = "tandem"
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # the least that Ray takes; nothing of ours is stored in it
SPARE = "spare"  # serves as nothing yet
PLACES = 100_000
"""Of each role on this machine: the custom resources say where a role may run, not how many of it."""
CONNECT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 5.0


# ---- inside the actors


class WorkerActor:
    """One worker. The process of this actor is the worker's process. A spare becomes the one that start() names."""

    def __init__(self, worker_id: str, settings: Settings, launcher: str) -> None:
        die_with_parent()  # the raylet; Ray notices its death as well, unless the worker is stuck
        self._worker_id = worker_id
        self._settings = settings
        self._launcher = launcher
        self._preparing: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._stages: list[str] = []
        self._news = asyncio.Event()
        self._told_all = False

    async def prepare(self) -> None:
        """Imports what a worker of a pool needs, beside the event loop."""
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
            self._told_all = True
            self._news.set()
        return Started(service.address, os.getpid(), service.incarnation, service.turns and _both_pools_here())

    async def turn(self, worker_id: str, grace_s: float) -> Started:
        if worker_id != self._worker_id:  # else it is asked once more
            assert self._starting is not None
            self._worker_id, self._stages, self._told_all = worker_id, [], False
            self._starting = asyncio.create_task(self._launch_after(self._starting, grace_s))
        return await self.start(worker_id)

    async def serves_as(self) -> str:
        return self._worker_id

    async def _launch_after(self, before: asyncio.Task[Any], grace_s: float) -> Any:
        return await self._launch(await (await before).release(grace_s))

    async def _launch(self, engine: Any = None) -> Any:
        if self._preparing is not None:  # two threads must not import the same
            await asyncio.wait({self._preparing})
        launch = importlib.import_module(self._launcher).start
        here = asyncio.get_running_loop()

        def say(line: str) -> None:  # on any thread
            here.call_soon_threadsafe(self._note, line)

        return await launch(role_of(self._worker_id), self._settings, self._worker_id, say, engine)

    async def stages(self, after: int) -> list[str]:
        """What start() has told beyond the first `after` lines; waits until there is something. Empty: it is over."""
        while len(self._stages) <= after and not self._told_all:
            self._news.clear()
            await self._news.wait()
        return self._stages[after:]

    def _note(self, line: str) -> None:
        self._stages.append(line)
        self._news.set()

    async def wait(self) -> None:
        assert self._starting is not None
        await (await self._starting).wait()

    async def stop(self, grace_s: float) -> None:
        assert self._starting is not None
        await (await self._starting).stop(grace_s)


class SupervisorActor:
    """One cluster's supervisor. Ray restarts it; it finds its workers again by their names."""

    def __init__(self, settings: Settings, launcher: str, run_id: str, owner: str = "") -> None:
        """`run_id` names the `tandem up`, the same for each life of this supervisor; `owner` its OwnerActor, which this
        cluster must not outlive."""
        assert settings.redis is not None
        die_with_parent()
        self._settings = settings
        self._grace_s = settings.drain_grace_s
        self._owner = owner
        self._registry = Registry(settings.redis, settings.cluster, settings.heartbeat_ttl_s)
        self._loop = Supervisor(
            RayHost(settings, launcher),
            self._registry,
            settings.drain_grace_s,
            spares=settings.spares,
            lease=Lease(self._registry, run_id),
            start_s=settings.start_timeout_s,
        )
        self._scaling: asyncio.Task[None] | None = None
        self._run: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Reconciles until stop(). Ray repeats this call on a restarted supervisor."""
        if self._run is None:
            self._run = asyncio.create_task(self._loop.run())
            if self._owner:
                self._ending = forever(self._end_with_owner, name="end with its owner")
            if self._settings.autoscale != "off":
                scaling = Scaling(self._settings, self._registry)
                self._scaling = forever(scaling.run, name="autoscaler")
        await asyncio.shield(self._run)

    async def _end_with_owner(self) -> None:
        try:
            await ray.get_actor(self._owner, namespace=NAMESPACE).wait.remote()
        except (RayActorError, ValueError):  # its `tandem up` is gone, perhaps while this supervisor was restarted
            await self.stop(self._grace_s)
            ray.kill(ray.get_runtime_context().current_actor)

    async def events(self, after: int) -> list[Event]:
        return await self._loop.events(after)

    async def stop(self, grace_s: float) -> None:
        await end(self._scaling)
        await self._loop.stop(grace_s)
        await self._registry.close()


class OwnerActor:
    """Stands for a `tandem up` on a Ray that is not its own: not detached, so Ray ends it with that process."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


class RayHost:
    """Starts workers as named detached actors, and finds them again."""

    def __init__(self, settings: Settings, launcher: str) -> None:
        self._settings = settings
        self._launcher = launcher
        self._prefix = _worker_prefix(settings.cluster)
        self._spares: dict[RayLife, asyncio.Task[None]] = {}

    def create(self, worker_id: str) -> Life:
        if role_of(worker_id) in POOLS:
            for spare, prepared in self._spares.items():
                if spare.placed and not (prepared.done() and prepared.exception()):
                    del self._spares[spare]
                    spare.become(worker_id)
                    return spare
        return self._create(worker_id, [role_of(worker_id)])

    def keep_spares(self, count: int) -> None:
        for spare, prepared in list(self._spares.items()):
            if len(self._spares) > count or (prepared.done() and prepared.exception()):
                del self._spares[spare]
                prepared.cancel()
                spare.kill()
        while len(self._spares) < count:  # where a worker of either pool may run
            self._prepare(self._create(SPARE, POOLS))

    def _prepare(self, spare: RayLife) -> None:
        self._spares[spare] = asyncio.create_task(spare.prepare(), name="spare")

    def _create(self, worker_id: str, resources: Iterable[str]) -> RayLife:
        # The name tells lives apart: a dead actor's name is free only when Ray has noticed.
        name = f"{self._prefix}{worker_id}/{secrets.token_hex(4)}"
        actor = ray.remote(WorkerActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            resources=dict.fromkeys(resources, 1),
            max_restarts=0,  # the supervisor starts a new life in a new actor
        )
        return RayLife(actor.remote(worker_id, self._settings, self._launcher), worker_id)

    async def survivors(self) -> dict[str, Life]:
        lives: list[RayLife] = []
        for name in _our_actors(self._prefix):
            worker_id = name.removeprefix(self._prefix).partition("/")[0]
            try:
                lives.append(RayLife(ray.get_actor(name, namespace=NAMESPACE), worker_id))
            except ValueError:  # it died meanwhile
                continue
        found: dict[str, Life] = {}
        for worker_id, life in zip(await asyncio.gather(*(one.serves_as() for one in lives)), lives, strict=True):
            if worker_id == SPARE:  # or it has not said what it has become: prepare() finds out
                self._prepare(life)
            elif worker_id in found:  # it did not say what it has become
                life.kill()
            else:
                found[worker_id] = life
        return found


class RayLife:
    """One worker actor, its errors in our words."""

    def __init__(self, actor: Any, worker_id: str) -> None:
        self._actor = actor
        self._worker_id = worker_id
        self.placed = False  # of a spare: there is such a process, and it has told that it is one

    async def prepare(self) -> None:
        """Raises an error of the tree when this is no spare, or a dead one."""
        try:
            if not self.placed and (found := await self._call(self._actor.serves_as.remote())) != SPARE:
                raise InternalError(f"it serves as {found}")
            self.placed = True
            await self._call(self._actor.prepare.remote())
        except TandemError as error:
            log.warning("a spare process is of no use: %s", error)
            raise

    def become(self, worker_id: str) -> None:
        """start() starts this worker; before, it was a spare."""
        self._worker_id = worker_id

    async def start(self, tell: Callable[[str], None]) -> Started:
        return await self._told(self._actor.start.remote(self._worker_id), tell)

    async def turn(self, worker_id: str, grace_s: float, tell: Callable[[str], None]) -> Started:
        self._worker_id = worker_id
        return await self._told(self._actor.turn.remote(worker_id, grace_s), tell)

    async def serves_as(self) -> str:
        """The worker that it is by now; an actor's name stays that of the first. The same where it does not answer:
        it is loading still, or dead, which start() will tell."""
        try:
            async with asyncio.timeout(WHO_S):
                self._worker_id = await self._call(self._actor.serves_as.remote())
            self.placed = self._worker_id == SPARE
        except (TimeoutError, TandemError) as error:
            log.warning("%s does not say what it serves as: %r", self._worker_id, error)
        return self._worker_id

    async def _told(self, answer: Awaitable[Started], tell: Callable[[str], None]) -> Started:
        """The answer; `tell` receives the stages meanwhile."""
        follow = asyncio.create_task(self._follow(tell), name=f"stages of {self._worker_id}")
        try:
            started = await self._call(answer)
            await asyncio.wait({follow}, timeout=LAST_STAGES_S)
            return started
        finally:
            await end(follow)

    async def _follow(self, tell: Callable[[str], None]) -> None:
        told = 0
        try:
            while lines := await self._call(self._actor.stages.remote(told)):
                for line in lines:
                    tell(line)
                told += len(lines)
        except TandemError:
            return  # it is dead, which start() tells

    async def wait(self) -> None:
        await self._call(self._actor.wait.remote())

    async def stop(self, grace_s: float) -> None:
        await self._call(self._actor.stop.remote(grace_s))

    def kill(self) -> None:
        ray.kill(self._actor)

    async def _call(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except RayError as error:
            raise _in_our_words(error, self._worker_id) from error


def _both_pools_here() -> bool:
    """Whether this node may run workers of either pool."""
    here = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return any(node["NodeID"] == here and set(POOLS) <= set(node["Resources"]) for node in nodes)


def _supervisor_name(cluster: str) -> str:
    return f"tandem-supervisor-{cluster}"


def _worker_prefix(cluster: str) -> str:
    return f"tandem-worker-{cluster}/"


def _our_actors(prefix: str = "") -> list[str]:
    """Names of live actors of this product, on the whole Ray."""
    entries = ray.util.list_named_actors(all_namespaces=True)
    names = [entry["name"] for entry in entries if entry["namespace"] == NAMESPACE]
    return [name for name in names if name.startswith(prefix)]


def _in_our_words(error: RayError, who: str) -> TandemError:
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, TandemError):
            return cause
        return InternalError(f"{who} failed: {type(cause).__name__}: {cause}")
    if isinstance(error, RayActorError):
        return WorkerLost(f"{who}: its process died")
    return Unavailable(f"{who}: Ray cannot reach it: {error}")


# ---- outside: what `tandem up` uses


class SupervisorHandle:
    """The supervisor of one cluster, from another process. The futures raise only errors of the tree."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def run(self) -> Future[None]:
        """Ends when the supervisor has stopped, or raises when it is lost for good."""
        return _future(self._actor.run.remote())

    def events(self, after: int) -> Future[list[Event]]:
        """What happened after that event; waits until something did."""
        return _future(self._actor.events.remote(after))

    def stop(self, grace_s: float) -> Future[None]:
        """Drains and ends every worker."""
        return _future(self._actor.stop.remote(grace_s))


def _future(answer: Any) -> Future[Any]:
    """Ray's future with its errors in our words."""
    ours: Future[Any] = Future()

    def copy(theirs: Future[Any]) -> None:
        error = theirs.exception()
        if error is None:
            ours.set_result(theirs.result())
        else:
            ours.set_exception(_in_our_words(error, "the supervisor") if isinstance(error, RayError) else error)

    answer.future().add_done_callback(copy)
    return ours


class Runtime:
    """Ray for one `tandem up`: its own on this machine, or an existing cluster."""

    def __init__(self, address: str | None, directory: Path) -> None:
        self._address = address
        self._directory = directory
        self._processes: list[psutil.Process] = []
        self._connected = False
        self._owner: Any = None  # it lives as long as this handle

    def start(self) -> None:
        """From a thread that stays: Linux kills Ray's processes when the thread that started them ends."""
        if ray.is_initialized():
            raise PreconditionFailed("this process uses Ray already: one cluster for each process", reason="ALREADY_UP")
        if self._address:
            _check_address(self._address)
        self._connected = True  # a start that breaks halfway leaves processes as well
        vars(ray._private.worker)["print_to_stdstream"] = _log  # Ray's own word on a dead worker, else on our stdout
        try:
            with _quiet_and_signals_kept():
                if self._address:
                    ray.init(address=self._address, namespace=NAMESPACE, **_quiet())
                else:
                    self._start_local()
        except (RayError, ConnectionError, RuntimeError, TimeoutError) as error:
            first_line = str(error).partition("\n")[0]
            raise Unavailable(f"Ray did not start: {first_line}", reason="RAY_UNREACHABLE") from error

    def _start_local(self) -> None:
        os.environ.pop("RAY_ADDRESS", None)  # would quietly connect elsewhere
        os.environ.pop("RAY_AUTH_MODE", None)  # absent: Ray asks for a token, and reads its configuration again
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else it writes one to the home directory
        before = set(psutil.Process().children())
        with _small_node():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=0,
                num_gpus=0,
                resources=dict.fromkeys(ROLES, PLACES),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _temp_dir=str(self._directory),
                **_quiet(),
            )
        self._processes = [process for process in psutil.Process().children() if process not in before]

    def check_free(self, cluster: str) -> None:
        """Raises PreconditionFailed if the cluster has a supervisor already."""
        if _supervisor_name(cluster) in _our_actors():
            raise _already_up(cluster)

    def supervise(self, settings: Settings, launcher: str, run_id: str) -> SupervisorHandle:
        """Starts the cluster's supervisor; `launcher` is the module that starts services in its actors, `run_id` this
        `tandem up`. Raises PreconditionFailed if there is one already."""
        options = ray.remote(SupervisorActor).options(
            name=_supervisor_name(settings.cluster),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
        )
        try:
            return SupervisorHandle(options.remote(settings, launcher, run_id, self._own(settings.cluster)))
        except ValueError as error:
            raise _already_up(settings.cluster) from error

    def _own(self, cluster: str) -> str:
        """The name of a new owner; none on our own Ray, which ends with this process anyway."""
        if not self._address:
            return ""
        name = f"tandem-owner-{cluster}/{secrets.token_hex(4)}"
        self._owner = ray.remote(OwnerActor).options(name=name, namespace=NAMESPACE, num_cpus=0).remote()
        return name

    def end_actors(self, cluster: str) -> None:
        """Kills what a cluster still has on Ray, supervisor first so that it starts nothing more."""
        for name in [_supervisor_name(cluster), *_our_actors(_worker_prefix(cluster))]:
            try:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))
            except ValueError:  # it died meanwhile
                continue

    def processes(self) -> list[psutil.Process]:
        """What was started on this machine and still runs, descendants included."""
        return [child for process in self._processes for child in _family(process)]

    def stop(self) -> None:
        """Ends Ray's processes if they are ours; else only the connection. Safe to repeat."""
        if not self._connected:  # whatever runs is not of this object's making
            return
        family = self.processes()
        ray.shutdown()
        _, alive = psutil.wait_procs(family, timeout=END_TIMEOUT_S)
        for process in alive:
            _kill(process)
        psutil.wait_procs(alive, timeout=END_TIMEOUT_S)
        self._processes = []
        self._connected = False


def _already_up(cluster: str) -> PreconditionFailed:
    return PreconditionFailed(
        f"the Ray cluster has a supervisor for cluster {cluster!r} already", reason="ALREADY_UP", field="cluster"
    )


def _check_address(address: str) -> None:
    """Ray itself would try an address where nobody listens for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise SettingsError(f"ray_address: {address!r}", field="ray_address", bound="host:port of a GCS, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise Unavailable(f"no Ray at {address}: {error}", reason="RAY_UNREACHABLE") from error


def _log(data: dict[str, Any], **_: Any) -> None:
    for line in data["lines"]:
        log.info(line)


def _quiet() -> dict[str, Any]:
    return {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}


@contextmanager
def _small_node() -> Iterator[None]:
    """Within, ray.init() starts only what is needed, on loopback. It has no arguments for that; a Ray in which these
    attributes have changed fails tests/cluster/test_up.py."""

    class SmallNode(ray._private.node.Node):
        def __init__(self, ray_params: Any, *args: Any, **kwargs: Any) -> None:
            ray_params.update_if_absent(node_ip_address="127.0.0.1")
            ray_params.no_monitor = True
            ray_params.include_log_monitor = False
            super().__init__(ray_params, *args, **kwargs)

        def start_api_server(self, **_: Any) -> None:
            """Would do nothing here: without the dashboard it only loads usage statistics."""

    original = ray._private.node.Node
    vars(ray._private.node)["Node"] = SmallNode
    try:
        yield
    finally:
        vars(ray._private.node)["Node"] = original


@contextmanager
def _quiet_and_signals_kept() -> Iterator[None]:
    """ray.init() warns of what is meant so, and takes SIGTERM for itself, to exit without a drain."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # elsewhere neither Ray nor we may set any
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    level = logging.getLogger("ray").level
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.getLogger("ray").setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
