"""Ray of one `tandem up`. Ray starts, places and ends processes, and detects their death; requests never pass through
it.

One detached supervisor actor per cluster runs cluster.supervision.supervisor; one detached actor per worker *is* the
worker's process. A worker's death ends its pending wait() call: the supervisor learns of it without polling.

Ray on this machine is started with only the parts that Tandem uses (cluster/local_ray), with its own token.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Read by Ray when it is imported.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # no warning that Ray hides no device from other processes
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # Ray must not kill workers for lack of memory
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default is 15: behind every other process of the machine

import psutil
import ray
import ray._private.worker
from ray.exceptions import RayError

from cluster.local_ray.small_node import small_node
from cluster.placement import PLACED_BYTES, POOLS, Placement, check_gpus, check_registry
from cluster.ray_actors import (
    NAMESPACE,
    WORKERS_PER_ROLE,
    OwnerActor,
    SupervisorActor,
    _our_actors,
    _worker_prefix,
)
from cluster.ray_nodes import on_node, where
from cluster.ray_worker import as_tandem_error
from cluster.supervision.reconcile_plan import ROLES
from cluster.supervision.worker_process import Event
from tandem.errors import PreconditionFailed, SettingsError, Unavailable
from tandem.settings import Settings

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum; Tandem stores nothing in it
CONNECT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 5.0


def _supervisor_name(cluster: str) -> str:
    return f"tandem-supervisor-{cluster}"


class SupervisorHandle:
    """The supervisor of one cluster, from another process. The futures raise only errors of the tree."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def run(self) -> Future[None]:
        """Ends when the supervisor has stopped, or raises when it is lost for good."""
        return _future(self._actor.run.remote())

    def events(self, after: int) -> Future[list[Event]]:
        """Events after that one; waits for the first."""
        return _future(self._actor.events.remote(after))

    def stop(self, grace_s: float) -> Future[int]:
        """Drains and ends every worker. Gives the number of the last event."""
        return _future(self._actor.stop.remote(grace_s))

    def end(self) -> None:
        """Ends the supervisor's process, without its workers."""
        ray.kill(self._actor)


def _future(answer: Any) -> Future[Any]:
    """Ray's future, with errors of the tree."""
    ours: Future[Any] = Future()

    def copy(theirs: Future[Any]) -> None:
        error = theirs.exception()
        if error is None:
            ours.set_result(theirs.result())
        else:
            ours.set_exception(as_tandem_error(error, "the supervisor") if isinstance(error, RayError) else error)

    answer.future().add_done_callback(copy)
    return ours


class Runtime:
    """Ray for one `tandem up`: its own on this machine, or an existing cluster."""

    def __init__(self, address: str | None, directory: Path) -> None:
        self._address = address
        self._directory = directory
        self._processes: list[psutil.Process] = []
        self._connected = False
        self._placement = Placement("")
        self._owners: list[Any] = []  # they end with these handles

    def start(self) -> None:
        """From a thread that stays: Linux kills Ray's processes when the thread that started them ends."""
        if ray.is_initialized():
            raise PreconditionFailed("this process uses Ray already: one cluster for each process", reason="ALREADY_UP")
        if self._address:
            _check_address(self._address)
        self._connected = True  # a failed start leaves processes as well
        vars(ray._private.worker)["print_to_stdstream"] = _log  # otherwise Ray prints a dead worker's message to stdout
        try:
            with _quiet_and_signals_kept():
                if self._address:
                    ours = {"env_vars": {"RAY_worker_niceness": "0"}}  # Ray runs there already, with its default
                    ray.init(address=self._address, namespace=NAMESPACE, runtime_env=ours, **_quiet())
                else:
                    self._start_local()
        except (RayError, ConnectionError, RuntimeError, TimeoutError) as error:
            first_line = str(error).partition("\n")[0]
            raise Unavailable(f"Ray did not start: {first_line}", reason="RAY_UNREACHABLE") from error

    def _start_local(self) -> None:
        os.environ.pop("RAY_ADDRESS", None)  # would silently connect elsewhere
        os.environ.pop("RAY_AUTH_MODE", None)  # absent: Ray asks for a token, and reads its configuration again
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # otherwise Ray writes one to the home directory
        before = set(psutil.Process().children())
        with small_node(), _hangups_blocked():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=0,
                num_gpus=None if _torch_has_cuda() else 0,  # None: Ray counts them
                resources=dict.fromkeys(ROLES, WORKERS_PER_ROLE),
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

    def place(self, settings: Settings, clusters: Sequence[tuple[Settings, Mapping[str, int]]]) -> None:
        """Fixes where processes may run, before `supervise`. Raises SettingsError if the registry cannot be reached
        from all hosts, or if this machine has too few GPUs."""
        home, nodes = where()
        if not self._address:
            check_gpus(clusters, nodes)
            self._placement = Placement(home)
            return
        node = next(node for node in nodes if node.node_id == home)
        only_home = check_registry(settings.redis or "", node, nodes)
        workers = sum(sizes.get(role, 0) for _, sizes in clusters for role in POOLS)
        self._placement = Placement(home, only_home, os.getcwd(), workers=0 if settings.host_workers else workers)

    def supervise(self, settings: Settings, launcher: str, run_id: str) -> SupervisorHandle:
        """Starts the cluster's supervisor; `launcher` is the module that starts services in its actors, `run_id` this
        `tandem up`. Raises PreconditionFailed if there is one already."""
        options = ray.remote(SupervisorActor).options(
            name=_supervisor_name(settings.cluster),
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            memory=PLACED_BYTES,
            scheduling_strategy=on_node(self._placement.home, soft=True),  # elsewhere it ends what is left
            max_restarts=-1,
            max_task_retries=-1,
        )
        owner = self._own(settings.cluster)
        try:
            return SupervisorHandle(options.remote(settings, launcher, run_id, self._placement, owner))
        except ValueError as error:
            raise _already_up(settings.cluster) from error

    def _own(self, cluster: str) -> str:
        """The name of a new owner; none on our own Ray, which ends with this process anyway."""
        if not self._address:
            return ""
        name = f"tandem-owner-{cluster}/{secrets.token_hex(4)}"
        options = {"namespace": NAMESPACE, "num_cpus": 0, "scheduling_strategy": on_node(self._placement.home)}
        self._owners.append(ray.remote(OwnerActor).options(name=name, **options).remote())
        return name

    def end_actors(self, cluster: str) -> None:
        """Kills the actors of a cluster, the supervisor first, so that it does not start others."""
        for name in [_supervisor_name(cluster), *_our_actors(_worker_prefix(cluster))]:
            try:
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))
            except ValueError:  # it died meanwhile
                continue

    def processes(self) -> list[psutil.Process]:
        """The processes started on this machine that still run, descendants included."""
        return [child for process in self._processes for child in _family(process)]

    def stop(self) -> None:
        """Ends Ray's processes if this run started them, otherwise only the connection. Safe to repeat."""
        if not self._connected:  # this object has started nothing
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


def _torch_has_cuda() -> bool:
    """Whether torch has CUDA, by its version, because importing it takes seconds."""
    return "+cpu" not in importlib.metadata.version("torch")


def _check_address(address: str) -> None:
    """Ray itself would retry an unreachable address for minutes."""
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
def _quiet_and_signals_kept() -> Iterator[None]:
    """ray.init() logs warnings about intended settings, and installs a SIGTERM handler that exits without a drain."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # on other threads no handler can be set
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    level = logging.getLogger("ray").level
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.getLogger("ray").setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _hangups_blocked() -> Iterator[None]:
    """Processes that start inside ignore SIGHUP, which the end of a terminal sends to the whole process group, so that
    only this process acts on it, which drains first. Ray does the same for SIGINT."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
