"""`tandem up`: starts one cluster on this machine, and removes every trace of it at the end.

    folder there? port free? ─▶ run directory ─▶ Valkey ─▶ Ray ─▶ supervisor ─▶ workers ─▶ ready
    each step pushes its cleanup on a stack; stop() drains, then unwinds the stack, whatever failed before

If this process is killed with SIGKILL, Linux ends its workers (cluster/exit_with_parent.py), and a reaper process ends
the rest (cluster/orphan_reaper.py).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from cluster import run_directory
from cluster.free_port import free_port
from cluster.model_clusters import check_folders, pool_name, supervised_clusters, want
from cluster.orphan_reaper import OrphanReaper
from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.supervision.reconcile_plan import pool_of, role_of
from cluster.supervision.supervisor import STOP_MARGIN_S
from cluster.supervision.worker_process import Event, Kind
from tandem.errors import Cancelled, DeadlineExceeded, TandemError
from tandem.model_settings import settings_of_models
from tandem.rpc.addresses import host_port
from tandem.settings import Settings

if TYPE_CHECKING:
    from cluster.ray_runtime import Runtime, SupervisorHandle

MIN_START_TIMEOUT_S = 600.0  # of the whole start, where `start_timeout_s` is shorter
DEFAULT_LAUNCHER = "services.launch"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Notice(Enum):
    """Items of the inbox other than the supervisor's answers."""

    SIGNAL = "signal"
    STOPPED = "stopped"
    VALKEY_DIED = "valkey died"


@dataclass(eq=False, slots=True)
class _Supervised:
    """A supervisor, and the number of its last event."""

    handle: SupervisorHandle
    seq: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    """A supervisor's answer: events, or the error that ended its run."""

    of: _Supervised
    events: Future[Any]


class LocalCluster:
    """A running cluster. Start it from a thread that outlives the cluster: its processes die with that thread.

    `launcher` is the module that starts a worker's service in its process; tests use a small one.
    """

    def __init__(
        self,
        settings: Settings,
        report: Callable[[str], None] | None = None,
        *,
        launcher: str = DEFAULT_LAUNCHER,
        start_timeout_s: float | None = None,
    ) -> None:
        self.settings = settings
        self.target = ""
        self.directory: Path | None = None
        self._report_to = report
        self._launcher = launcher
        self._start_timeout_s = start_timeout_s or max(MIN_START_TIMEOUT_S, settings.start_timeout_s)
        self._began = monotonic()
        self._undo = ExitStack()
        self._inbox: SimpleQueue[_Answer | _Notice] = SimpleQueue()
        self._guard: OrphanReaper | None = None
        self._valkey: EmbeddedValkey | None = None
        self._supervised: list[_Supervised] = []  # the routers' cluster first
        self._failed = False
        self._ready: dict[str, Event] = {}
        self._kept: Path | None = None

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = _is_failure(error)
        self.stop()

    def start(self) -> None:
        """Returns when requests can be sent. If a worker cannot start, raises its error and undoes everything except
        the logs."""
        try:
            self._start()
        except BaseException as error:
            self._failed = _is_failure(error)
            self.stop(grace_s=0.0)
            raise

    def stop(self, grace_s: float | None = None) -> None:
        """Drains, then ends every process and removes every file. Safe to repeat. A signal ends the grace period
        early."""
        try:
            self._drain(self.settings.drain_grace_s if grace_s is None else grace_s)
        finally:
            stopping, self._supervised = bool(self._supervised), []
            self._undo.close()
            if stopping:
                self._report("stopped, nothing is left" + (" but the logs" if self._kept else ""))

    @property
    def http(self) -> str:
        """The URL of the OpenAI API, once started; empty when it is off."""
        port, scheme = self.settings.http_port, "https" if self.settings.tls_cert else "http"
        return "" if port is None else f"{scheme}://{host_port(self.settings.host, port)}/v1"

    @property
    def workers(self) -> dict[str, Event]:
        """The latest READY event of each serving worker, by id, as of the last call of events()."""
        return dict(self._ready)

    def events(self, timeout_s: float | None = None) -> list[Event]:
        """Waits for the next changes; empty when none arrived in time. Raises Cancelled on a signal."""
        try:
            item = self._inbox.get(timeout=timeout_s)
        except Empty:
            return []
        if item is _Notice.SIGNAL:
            raise Cancelled("ended by a signal")
        if item is _Notice.VALKEY_DIED:
            self._restart_valkey()
            return []
        if item is _Notice.STOPPED:
            return []
        assert isinstance(item, _Answer)
        events: list[Event] = item.events.result(timeout=0)
        for event in events:
            self._note(item.of, event)
        self._listen(item.of)
        return events

    def interrupt(self) -> None:
        """Ends start(), events() or the grace of stop(). Safe in a signal handler."""
        self._inbox.put(_Notice.SIGNAL)

    # ---- start

    def _start(self) -> None:
        self._began = monotonic()
        models = settings_of_models(self.settings)
        if not self.settings.ray_address:  # on an external Ray the folder may exist only where the workers run
            for own in models.values():
                check_folders(own)
        ports = {"port": free_port(self.settings.host, self.settings.port, "port")}
        if self.settings.http_port is not None:
            ports["http_port"] = free_port(self.settings.host, self.settings.http_port, "http_port")
        token = self.settings.cluster_token or SecretStr(secrets.token_hex(16))
        self.settings = self.settings.model_copy(update={**ports, "cluster_token": token})
        logs = run_directory.writable(self.settings.logs)
        self.directory = run_directory.create()
        self._undo.callback(run_directory.remove, self.directory)
        self._guard = OrphanReaper(self.directory, logs)
        self._undo.callback(self._guard.stop)
        self._undo.callback(self._keep_logs, self.directory, logs)
        if self.settings.redis is None:
            self._valkey = EmbeddedValkey(self.directory, on_death=lambda: self._inbox.put(_Notice.VALKEY_DIED))
            self._undo.callback(self._valkey.stop)
            self.settings = self.settings.model_copy(update={"redis": self._valkey.start()})
            self._report("registry: embedded Valkey")
        runtime = self._start_ray()
        clusters = supervised_clusters(self.settings)
        runtime.place(self.settings, clusters)
        for own, _ in clusters:
            runtime.check_free(own.cluster)
        run_id = secrets.token_hex(8)
        for own, wanted in clusters:
            asyncio.run(want(own, run_id, wanted))
        for own, _ in clusters:
            handle = runtime.supervise(own, self._launcher, run_id)
            if own.ray_address:
                self._undo.callback(runtime.end_actors, own.cluster)
            self._supervised.append(supervised := _Supervised(handle))
            self._watch(supervised)
            self._listen(supervised)
        self._await_ready({pool_name(own, role): size for own, wanted in clusters for role, size in wanted.items()})

    def _start_ray(self) -> Runtime:
        from cluster.ray_runtime import Runtime  # takes half a second; a refused port is reported before it

        assert self.directory is not None
        runtime = Runtime(self.settings.ray_address, self.directory)
        self._undo.callback(runtime.stop)
        runtime.start()
        if self.settings.ray_address:
            self._report(f"Ray: connected to {self.settings.ray_address}")
        else:
            assert self._guard is not None
            self._guard.watch(runtime.processes())
            self._report(f"Ray: on this machine, logs in {run_directory.logs(self.directory)}")
        return runtime

    def _await_ready(self, wanted: dict[str, int]) -> None:
        deadline = self._began + self._start_timeout_s
        while not all(self._count(pool) >= size for pool, size in wanted.items()):
            left = deadline - monotonic()
            if left <= 0:
                waiting = ", ".join(f"{self._count(pool)} of {size} {pool}" for pool, size in wanted.items())
                raise DeadlineExceeded(
                    f"not ready within {self._start_timeout_s:g} s: {waiting}; start_timeout_s allows more"
                )
            for event in self.events(left):
                if event.kind is Kind.FAILED and event.error:
                    raise event.error

    def _count(self, pool: str) -> int:
        return sum(pool_of(worker_id) == pool for worker_id in self._ready)

    # ---- events of the supervisors

    def _listen(self, to: _Supervised) -> None:
        to.handle.events(to.seq).add_done_callback(lambda events: self._inbox.put(_Answer(to, events)))

    def _watch(self, supervised: _Supervised) -> None:
        """Puts a failed run of a supervisor into the inbox, so that events() raises its error."""

        def lost(ended: Future[Any]) -> None:
            if ended.exception():
                self._inbox.put(_Answer(supervised, ended))

        supervised.handle.run().add_done_callback(lost)

    def _note(self, supervised: _Supervised, event: Event) -> None:
        supervised.seq = event.seq
        if event.kind is Kind.READY and event.started:
            self._ready[event.worker_id] = event
            self._report(f"{event.worker_id}: ready on {event.started.address}")
            if role_of(event.worker_id) == "router":
                self.target = event.started.address
            return
        if event.kind is Kind.LOADING:
            self._report(f"{event.worker_id}: {event.text}")
            return
        if event.kind is Kind.STARTING:
            return
        self._ready.pop(event.worker_id, None)
        text = f"{event.worker_id}: {event.kind}"
        if event.error:
            text += f": {event.error.message}"
        if event.retry_in_s:
            text += f"; starting again in {event.retry_in_s:.1f} s"
        self._report(text)

    def _restart_valkey(self) -> None:
        """The registry's content is restored by the workers' heartbeats and by the supervisor, which writes the wanted
        sizes again. Requests are served meanwhile."""
        assert self._valkey is not None
        self._valkey.restart()
        self._report("registry: the embedded Valkey died and was started again")

    # ---- stop

    def _drain(self, grace_s: float) -> None:
        """Waits until the supervisors have stopped, the routers' first, so that no new request arrives; ends with the
        grace period or a signal."""
        if not self._supervised:
            return
        self._report("stopping")
        deadline = monotonic() + grace_s
        for batch in (self._supervised[:1], self._supervised[1:]):
            stopping = [one.handle.stop(max(0.0, deadline - monotonic())) for one in batch]
            for stopped in stopping:
                stopped.add_done_callback(lambda _: self._inbox.put(_Notice.STOPPED))
            while any(map(_still_reports, batch, stopping)):
                left = deadline + 2 * STOP_MARGIN_S - monotonic()
                if left <= 0:
                    break
                try:
                    self.events(left)
                except TandemError as error:  # a second signal, or the supervisor is lost
                    self._report(f"stopping at once, running requests are cut off: {error.message}")
                    return
            for failure in (stopped.exception() for stopped in stopping if stopped.done()):
                if failure:
                    self._report(f"the drain failed, running requests are cut off: {failure}")

    def _keep_logs(self, directory: Path, logs: Path | None) -> None:
        """Keeps the logs of a failed run, or of every run if the setting `logs` names a folder."""
        if not logs and not self._failed:
            return
        try:
            self._kept = run_directory.keep_logs(directory, logs or run_directory.failed_runs())
        except OSError as error:
            self._report(f"the logs could not be kept: {error}")
            return
        if self._kept:
            self._report(f"the logs are in {self._kept}")

    def _report(self, text: str) -> None:
        if self._report_to:
            with suppress(OSError):  # a full disk, or a terminal that is gone, must not end the cluster
                self._report_to(f"{monotonic() - self._began:6.1f} s  {text}")


def run_forever(
    settings: Settings,
    report: Callable[[str], None] | None = None,
    *,
    launcher: str = DEFAULT_LAUNCHER,
    as_json: bool = False,
) -> int:
    """Runs a cluster until SIGINT, SIGTERM or SIGHUP; a second signal ends the grace. Prints `ready ...`, or the same
    as a JSON object, when requests can be sent. Progress goes to `report` (default: stderr). Raises any other error
    that ends the cluster."""
    cluster = LocalCluster(
        settings, report or (lambda line: print(line, file=sys.stderr, flush=True)), launcher=launcher
    )
    with _signals(cluster.interrupt):
        try:
            with cluster:
                print(json.dumps(_ready(cluster)) if as_json else _ready_lines(cluster), flush=True)
                while True:
                    cluster.events()
        except Cancelled:
            return 0


def _ready(cluster: LocalCluster) -> dict[str, Any]:
    settings = cluster.settings
    http = {"http": cluster.http} if settings.http_port is not None else {}
    if settings.models:
        return {"target": cluster.target, **http, "routers": settings.routers, "models": list(settings.models)}
    sizes = {"routers": settings.routers, "prefill": settings.prefill, "decode": settings.decode}
    return {"target": cluster.target, **http, **sizes, "model": settings.model}


def _ready_lines(cluster: LocalCluster) -> str:
    settings = cluster.settings
    http = f"http {cluster.http}\n" if settings.http_port is not None else ""
    routers = f"{settings.routers} routers, " if settings.routers > 1 else ""
    if settings.models:
        return f"{http}ready {cluster.target} ({routers}models {', '.join(settings.models)})"
    workers = f"{settings.prefill} prefill, {settings.decode} decode"
    return f"{http}ready {cluster.target} ({routers}{workers}, model {settings.model})"


def _still_reports(supervised: _Supervised, stopped: Future[int]) -> bool:
    """Whether its end, or an event before that, has not been reported yet."""
    return not stopped.done() or (stopped.exception() is None and supervised.seq < stopped.result())


@contextmanager
def _signals(act: Callable[[], None]) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        act()

    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {number: signal.signal(number, handle) for number in SIGNALS if not (nohup and number == signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_failure(error: BaseException | None) -> bool:
    """Whether the logs are worth keeping: not after a deliberate stop."""
    return error is not None and not isinstance(error, Cancelled | KeyboardInterrupt | SystemExit)
