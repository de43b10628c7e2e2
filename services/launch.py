"""Starts a worker or a router in this process: the only interface of `services` for the supervisor and tests."""

from __future__ import annotations

import asyncio
import gc
import importlib
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, Protocol

import structlog

from tandem.errors import SettingsError
from tandem.settings import Settings
from tandem.telemetry import logs

log = structlog.get_logger(__name__)

# Imported on demand, because the router must not load torch.
_MODULES = {
    "router": "services.router.server",
    "decode": "services.decode.servicer",
    "prefill": "services.prefill.servicer",
}

MIDDLE_GC_THRESHOLD = 2  # collections of the youngest objects before one of the middle generation
FULL_GC_THRESHOLD = 5000  # collections of the middle generation before a full one
MOST_FILES = 65_536  # that a router may open, if its hard limit permits
# Looks up the names of hosts, instead of the threads of asyncio.to_thread, which digest KV and hash prompts: while no
# name server answers, each attempt to reach the registry leaves a thread in its lookup for 10 to 20 s, and a router
# makes some 40 attempts in that time.
LOOKUPS = ThreadPoolExecutor(64, "names")


class Stages:
    """Reports each completed stage of a start with its duration."""

    def __init__(self, worker_id: str, say: Callable[[str], None]) -> None:
        self._worker_id, self._say = worker_id, say
        self._since = monotonic()

    def __call__(self, line: str) -> None:
        now = monotonic()
        took, self._since = now - self._since, now
        log.info("worker.stage", worker=self._worker_id, stage=line, seconds=round(took, 3))
        self._say(f"{took:5.1f} s  {line}")


class Service(Protocol):
    address: str
    incarnation: str
    can_switch_role: bool
    """Whether it may become a worker of the other pool: services.worker.Worker.release it, and `start` that with the
    engine which this returns."""

    async def wait(self) -> None:
        """Returns after a drain, raises if the service breaks."""

    async def stop(self, grace_s: float) -> None:
        """Waits at most `grace_s` seconds for requests to finish, then ends. Safe to call twice."""


def prepare() -> None:
    """Imports the libraries of a worker of either pool, so that its `start` is faster."""
    with importing():
        for role in ("decode", "prefill"):
            importlib.import_module(_MODULES[role])


async def start(
    role: str,
    settings: Settings,
    worker_id: str,
    say: Callable[[str], None] = lambda line: None,
    engine: Any = None,
) -> Service:
    """A running, registered service. Raises the errors of its role's `start`.

    `engine`: released by an earlier incarnation in this process, so nothing is loaded. `say` receives a line for each
    stage, with its duration, on any thread; the log has them, too.
    """
    logs.configure(settings, worker_id)
    look_up_apart()
    stages = Stages(worker_id, say)
    if role not in _MODULES:
        raise SettingsError(f"unknown role {role!r}", field="role", bound=", ".join(_MODULES))
    if role == "router":
        allow_files()
    with importing():
        module = importlib.import_module(_MODULES[role])
    stages("libraries imported")
    if engine is None:
        service: Service = await module.start(settings, worker_id, stages)
    else:
        service = await module.start(settings, worker_id, stages, engine)
        stages("serves with the engine that was loaded before")
        gc.unfreeze()  # frees the objects of the previous incarnation
    short_collections()
    return service


def allow_files() -> None:
    """A shell or systemd begins a process with a soft limit of 1,024 open files, and lets it raise that by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))


def look_up_apart() -> None:
    """Looks up the names of hosts on LOOKUPS wherever the event loop does."""
    loop: Any = asyncio.get_running_loop()

    async def getaddrinfo(host: Any, port: Any, **options: int) -> Any:
        return await loop.run_in_executor(LOOKUPS, partial(socket.getaddrinfo, host, port, **options))

    loop.getaddrinfo = getaddrinfo


@contextmanager
def importing() -> Iterator[None]:
    """What is imported inside lives as long as the process: the garbage collector does not visit it, neither during the
    imports nor during the load."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def short_collections() -> None:
    """Python's garbage collector stops every stream of the process while it runs.

    A full collection visits all objects of torch and transformers, which takes some 200 ms. So the present objects are
    collected once and then excluded. A full collection still visits all requests (80 ms if 5,000 wait), so it runs only
    after millions of new objects. The time of a middle-generation collection grows with the objects since the last one,
    so it runs five times as often as by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], MIDDLE_GC_THRESHOLD, FULL_GC_THRESHOLD)
