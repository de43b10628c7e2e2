"""Processes of the product on this machine, without Ray: a registry, and workers started by the product's own command.

They end with the `with` block. If this process is killed, Linux ends them.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from time import clock_gettime, monotonic, sleep
from types import TracebackType

from cluster.exit_with_parent import bound_to_parent
from cluster.state.embedded_valkey import EmbeddedValkey
from tandem.client import Client
from tandem.errors import DeadlineExceeded, Unavailable

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
TAIL = 300  # lines
CLIENT_NICE = -10


class Process:
    """One child whose lines can be waited for. Closing its stdin asks those to end that read it."""

    def __init__(
        self,
        arguments: list[str],
        env: dict[str, str] | None = None,
        core: int | None = None,
        python: str = sys.executable,
    ) -> None:
        """`core` pins the child to that one of the usable cores (counted round), where the system can."""
        self._lines: Queue[str | None] = Queue()
        self._tail: list[str] = []
        self.popen = subprocess.Popen(
            bound_to_parent([python, "-m", *arguments], _cores(core)),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def line(self, start: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """The rest of the first line that begins with `start`. Raises Unavailable if the process ends before, with its
        last words, and DeadlineExceeded."""
        deadline = monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - monotonic()))
            except Empty:
                raise DeadlineExceeded(f"{self.popen.args!r} said no {start!r} within {timeout_s:.0f} s") from None
            if line is None:
                raise Unavailable(f"{self.popen.args!r} ended early: {self.last_words()}")
            if line.startswith(start):
                return line.removeprefix(start).strip()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Kills it if it has not ended by itself within the timeout. Safe to repeat."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.terminate()
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)

    def last_words(self) -> str:
        return "".join(self._tail)

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                self._tail = [*self._tail[-TAIL:], line]
                self._lines.put(line)
        self._lines.put(None)


class Local:
    """A registry and any number of workers and routers around it, by name."""

    def __init__(self, **settings: object) -> None:
        """`settings` of all processes; None leaves one at its default."""
        self._settings = {
            "threads": 1,
            "device": "cpu",
            "port": 0,
            "drain_grace_s": 0,
            "local_prefill": "never",
            **settings,
        }
        self._stack = ExitStack()
        self._processes: dict[str, Process] = {}
        self._address: dict[str, str] = {}

    def __enter__(self) -> Local:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        valkey = EmbeddedValkey(folder)
        self._settings["redis"] = valkey.start()
        self._stack.callback(valkey.stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def launch(
        self,
        role: str,
        name: str,
        *,
        core: int | None = None,
        program: Sequence[str] = ("services",),
        environment: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        """Starts it and does not wait. `program`: a module and its first arguments that takes the place of a role.
        `environment`: of libraries; the product's own are `settings`."""
        env = environment_of({**self._settings, **settings}) | dict(environment or {})
        process = Process([*program, role, name], env, core)
        self._processes[name] = process
        self._stack.callback(process.stop)

    def address(self, name: str) -> str:
        """Its HOST:PORT; waits until it is ready."""
        if name not in self._address:
            self._address[name] = self._processes[name].line("ready ")
        return self._address[name]

    def last_words(self, name: str) -> str:
        return self._processes[name].last_words()

    def pid(self, name: str) -> int:
        return self._processes[name].popen.pid

    def wait_seen(self, router: str, workers: int, timeout_s: float = 120.0) -> None:
        """Waits until the router sees `workers` ready workers. Raises DeadlineExceeded."""
        deadline = monotonic() + timeout_s
        with Client(self.address(router)) as client:
            while (
                sum(worker.state == "ready" and worker.role != "router" for worker in client.workers().workers)
                < workers
            ):
                if monotonic() > deadline:
                    raise DeadlineExceeded(f"{router} did not see {workers} ready workers within {timeout_s:.0f} s")
                sleep(0.05)


def environment_of(settings: Mapping[str, object]) -> dict[str, str]:
    """This process's environment with these settings of the product and no others; None leaves one at its default."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
    return env | {f"TANDEM_{key.upper()}": str(value) for key, value in settings.items() if value is not None}


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used, all its threads.

    The clock is the one that clock_getcpuclockid(3) names: nanoseconds, where /proc/PID/stat counts steps of 10 ms.
    """
    return clock_gettime(~pid << 3 | 2)


def _cores(core: int | None) -> list[int]:
    """That one of the usable ones, counted round; none where it does not matter."""
    usable = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return [] if core is None or not usable else [usable[core % len(usable)]]


@contextmanager
def precedence() -> Iterator[str]:
    """Gives this thread priority over the measured servers on shared cores, and disables garbage collection, so that
    the client does not measure its own delays. Yields a sentence for the report.

    On Linux sessions share a core as groups (sched(7), autogroup), so the group gets priority, too. Both require
    permission; without it, the sentence says so.
    """
    group, thread = Path("/proc/self/autogroup"), threading.get_native_id()
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    said_of_group = group.read_text() if group.exists() else ""  # "/autogroup-7 nice 0"; empty for a process in none
    group_nice = said_of_group.split()[-1] if said_of_group else None
    note = f"the client goes first on the cores that it shares (nice {CLIENT_NICE})"
    gc.collect()
    gc.disable()
    try:
        try:
            os.setpriority(os.PRIO_PROCESS, thread, CLIENT_NICE)
            if group_nice is not None:
                group.write_text(str(CLIENT_NICE))
        except OSError:
            note = "the client may not go first on the cores that it shares: its own delays are in the figures"
        yield note
    finally:
        gc.enable()
        with suppress(OSError):  # what could not be raised need not be lowered
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            if group_nice is not None:
                group.write_text(group_nice)
