"""A whole cluster of real processes on this machine, without Ray: for tests that want to be quick and to hurt it.

Everything that the product would start is started by the product's own command (`python -m services`), against a real
Valkey; only the supervision is the test's, so that it can kill and restart as it likes. What that command would import
is there already (tests/support/copies.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from weakref import WeakSet

from cluster import run_directory
from cluster.state.embedded_valkey import EmbeddedValkey
from tandem.client import Client
from tests.support.copies import Copy
from tests.support.waiting import wait_until

START_TIMEOUT_S = 90.0
SHOWN_CHARACTERS = 1500  # of each output and log of a failed test
_processes: WeakSet[Process] = WeakSet()


def outputs() -> list[tuple[str, str]]:
    """What the processes of the current test, or of its module, have written last: for the report of a failure."""
    shown = []
    for process in list(_processes):
        shown.append((f"output of {process.name}", process.text()[-SHOWN_CHARACTERS:]))
        for run in run_directory._parent().glob(f"tandem-{process.pid}-*"):  # of a `tandem up`
            for log in sorted(run_directory.logs(run).glob("worker-*.err")):
                shown.append((log.name, log.read_text(errors="replace")[-SHOWN_CHARACTERS:]))
    return [(name, text) for name, text in shown if text.strip()]


class Process:
    """One child process whose output is kept, and whose lines can be waited for."""

    def __init__(self, name: str, arguments: list[str] | Copy, env: dict[str, str] | None = None) -> None:
        """`arguments` of a command with this environment, or what has been started already."""
        self.name = name
        self.output: list[str] = []
        _processes.add(self)
        self._lines: Queue[str | None] = Queue()
        self.popen: Copy | subprocess.Popen[str]
        if isinstance(arguments, Copy):
            self.popen = arguments
        else:
            pipe, both = subprocess.PIPE, subprocess.STDOUT
            self.popen = subprocess.Popen(
                arguments, env=env, stdout=pipe, stderr=both, text=True, start_new_session=True
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    def wait_for(self, start: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """The first line that begins with `start`. Fails with the whole output if the process ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"{self.name}: no line {start!r} in {timeout_s} s:\n{self.text()}") from None
            if line is None:
                raise AssertionError(f"{self.name} ended ({self.popen.wait(10)}) before {start!r}:\n{self.text()}")
            if line.startswith(start):
                return line

    def text(self) -> str:
        return "".join(self.output)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.popen.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended, and a copy's exit code is not here yet
                os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(30)
        self._reader.join(30)

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)


class LocalCluster:
    """Valkey, a router, and workers by name; `kill` and `start_worker` as the test pleases."""

    def __init__(
        self,
        model: Path | str,
        *,
        prefill: int = 1,
        decode: int = 1,
        step_s: float = 0.0,
        module: str = "services",
        **settings: object,
    ) -> None:
        """`step_s`: seconds by which each step of every engine takes longer until `hurry` (tests/support/slowly.py).
        `module`: what each process runs if its steps are not slower."""
        # Prompts go to prefill workers, always: a test of the seam must cross it.
        fixed = {"threads": 1, "kv_blocks": 512, "device": "cpu", "local_prefill": "never"}
        self._settings = {"model": str(model), **fixed, **settings}
        self._step_s, self._module = step_s, module
        self._folder = tempfile.TemporaryDirectory(prefix="tdm-")
        self._quick = Path(self._folder.name) / "quick"
        self._valkey = EmbeddedValkey(Path(self._folder.name))
        self.processes: dict[str, Process] = {}
        self.address: dict[str, str] = {}
        self._first = [f"prefill-{n}" for n in range(prefill)] + [f"decode-{n}" for n in range(decode)]
        self._clients: list[Client] = []

    def __enter__(self) -> LocalCluster:
        self.redis = self._valkey.start()
        try:
            names = ["router-0", *self._first]
            for name in names:
                self.launch(name)
            for name in names:
                self.wait_ready(name)
            wait_until(lambda: len(self.ready()) == len(self._first), explain=self.ready)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for client in self._clients:
            client.close()
        for process in self.processes.values():
            process.kill()
        self._valkey.stop()
        self._folder.cleanup()

    def launch(self, name: str, *, step_s: float | None = None, **settings: object) -> None:
        """Start a worker's process, without waiting. `step_s`: of this one, other than the cluster's."""
        role = name.rsplit("-", 1)[0]
        given = {**self._settings, "redis": self.redis, "port": 0, **settings}
        chosen = {f"TANDEM_{key.upper()}": str(value) for key, value in given.items() if value is not None}
        env = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
        slower = self._step_s if step_s is None else step_s
        if slower:
            chosen |= {"TESTS_STEP_S": str(slower), "TESTS_QUICK": str(self._quick)}
        module = "tests.support.slowly" if slower else self._module
        self.processes[name] = Process(name, Copy(module, [role, name], env | chosen))

    def wait_ready(self, name: str) -> None:
        self.address[name] = self.processes[name].wait_for("ready ").split()[1]

    def start_worker(self, name: str, **settings: object) -> None:
        self.launch(name, **settings)
        self.wait_ready(name)

    def hurry(self) -> None:
        """What was to happen in slow steps has happened: from now on no step of any engine is slowed down."""
        self._quick.touch()

    def slow_again(self) -> None:
        """After `hurry`."""
        self._quick.unlink(missing_ok=True)

    def kill(self, name: str) -> None:
        """SIGKILL, and proof that it worked."""
        process = self.processes[name]
        process.signal(signal.SIGKILL)
        assert process.popen.wait(30) == -signal.SIGKILL

    @property
    def target(self) -> str:
        return self.address["router-0"]

    def client(self) -> Client:
        client = Client(self.target)
        self._clients.append(client)
        return client

    def ready(self) -> list[str]:
        return [w.worker_id for w in self._admin().workers().workers if w.state == "ready" and w.role != "router"]

    def audit_faults(self) -> list[str]:
        """Everything that keeps the books from balancing now; held blocks count, so ask when nothing runs."""
        audit = self._admin().audit()
        faults = [f"{worker}: {why}" for worker, why in audit.unreachable.items()]
        for ledger in audit.ledgers:
            faults += [f"{ledger.worker_id}: {fault}" for fault in ledger.faults]
            faults += [f"{ledger.worker_id}: {entry.owner} holds {len(entry.blocks)}" for entry in ledger.entries]
            if ledger.free + ledger.cached + ledger.held != ledger.total:
                faults.append(f"{ledger.worker_id}: {ledger}")
        return faults

    def wait_balanced(self, timeout_s: float = 30.0) -> float:
        """Seconds until no block is held anywhere."""
        start = time.monotonic()
        wait_until(lambda: not self.audit_faults(), timeout_s, self.audit_faults)
        return time.monotonic() - start

    def _admin(self) -> Client:
        if not self._clients:
            self.client()
        return self._clients[0]


@contextmanager
def local_cluster(model: Path | str, **settings: object) -> Iterator[LocalCluster]:
    with LocalCluster(model, **settings) as cluster:  # type: ignore[arg-type]
        yield cluster
