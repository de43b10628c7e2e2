"""The measured servers: Tandem from its own command, vLLM from the script of its installation.

Each server is started, warmed by its first load, possibly frozen during the measurement of another, and stopped with
all its processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loadtest.harness.processes import Process, environment_of
from loadtest.harness.random_checkpoints import REAL, make_checkpoint
from tandem.client import Client
from tandem.errors import SettingsError, Unavailable

MAX_LEN = 4096
VLLM_PORTS = {"pd": (8100, 8101, 8102, 5600, 5601), "aggregated": (8100,)}  # the script's own
VLLM_KV_GIB = 2
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 20.0
SIDES = ("tandem-pd", "tandem-aggregated", "tandem-replicas", "vllm-pd", "vllm-aggregated")


@dataclass(frozen=True)
class Peers:
    """Where the other engines live. `script` starts vLLM: `script aggregated|pd FOLDER`, `script stop`, with the
    environment PEERS_HOME; `home` has an environment for each engine, and keeps checkpoints for the next run.
    `settings` are Tandem's, over those that the comparison chooses."""

    script: Path | None
    home: Path
    settings: dict[str, str] = field(default_factory=dict)

    def executable(self, engine: str, name: str) -> Path:
        """A program in an engine's environment. Raises SettingsError when it is not there."""
        path = self.home / engine / "bin" / name
        if not path.exists():
            raise SettingsError(f"{path} is not there; docs/measuring.md says how to make it", field="home")
        return path

    def checkpoint(self, shape: str) -> Path:
        """A random bfloat16 checkpoint with a tokenizer: the same files for all systems."""
        folder = self.home / "checkpoints" / shape
        if not (folder / "tokenizer.json").exists():
            partial = folder.with_name(f"{shape}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_tokenizer(make_checkpoint(partial, shape, dtype="bfloat16"), REAL[shape]["vocab_size"])
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Makes every id a word, so that a load client's random text has exactly as many tokens as it wants."""
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


class Server(ABC):
    """One OpenAI-compatible endpoint on `port`, which serves `model`."""

    def __init__(self, name: str, model: Path) -> None:
        self.name = name
        self.model = str(model)
        self.port = 0

    @abstractmethod
    def start(self) -> None:
        """Returns when requests can be sent."""

    @abstractmethod
    def stop(self) -> None:
        """Ends every process of it. Safe to repeat."""

    @abstractmethod
    def processes(self) -> list[psutil.Process]: ...

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Uses no CPU inside, if it would otherwise."""
        yield

    def cpu(self) -> float:
        """CPU seconds that its living processes have used."""
        used = 0.0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used += times.user + times.system
        return used


class Tandem(Server):
    """`tandem up`. pd: prefill on the first core and decode on the second; aggregated: one worker, two threads;
    replicas: two aggregated workers, a core each.

    When idle it uses little CPU. It is never frozen, because its heartbeats would stop and its workers count as dead.
    """

    def __init__(self, mode: str, model: Path, **settings: object) -> None:
        super().__init__(f"tandem-{mode}", model)
        shape = {
            "pd": {"prefill": 1, "decode": 1, "threads": 1},
            "aggregated": {"prefill": 0, "decode": 1, "threads": 2},
            "replicas": {"prefill": 0, "decode": 2, "threads": 1},
        }[mode]
        wanted = {"port": 0, "http_port": 0, "dtype": "bfloat16", "max_model_len": MAX_LEN}
        self._settings: dict[str, object] = {"model": model, **wanted, **shape, "drain_grace_s": 0, **settings}
        self._process: Process | None = None
        self.target = ""

    def start(self) -> None:
        self._process = Process(["tandem", "up"], environment_of(self._settings))
        self.port = int(self._process.line("http ", START_TIMEOUT_S).partition("//")[2].partition("/")[0].split(":")[1])
        self.target = self._process.line("ready ").split(" ")[0]
        if self._settings["threads"] == 1:
            pin(self.workers())

    def workers(self) -> dict[str, int]:
        """Process ids of the workers and the router, by name."""
        with Client(self.target) as client:
            return {worker.worker_id: worker.pid for worker in client.workers()}

    def stop(self) -> None:
        if self._process:
            self._process.stop(STOP_TIMEOUT_S)
            self._process = None

    def processes(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        parent = psutil.Process(self._process.popen.pid)
        return [parent, *parent.children(recursive=True)]


def pin(workers: dict[str, int]) -> None:
    """Pins every worker, with all its threads, to a separate core: prefill workers first, round robin."""
    cores = sorted(os.sched_getaffinity(0))
    ours = sorted((name for name in workers if not name.startswith("router")), reverse=True)  # prefill before decode
    for place, name in enumerate(ours):
        for thread in psutil.Process(workers[name]).threads():
            with suppress(ProcessLookupError):  # it has ended meanwhile, as some do that only a start needs
                os.sched_setaffinity(thread.id, {cores[place % len(cores)]})


class Vllm(Server):
    """vLLM's CPU build: everything that the script starts is one session, and one process group."""

    def __init__(self, mode: str, model: Path, peers: Peers) -> None:
        super().__init__(f"vllm-{mode}", model)
        self.port = VLLM_PORTS[mode][0]
        self._mode = mode
        self._peers = peers
        self._session = 0

    def start(self) -> None:
        """Raises SettingsError without a script or with a port in use, Unavailable when the script fails."""
        script = self._peers.script
        if script is None or not script.exists():
            raise SettingsError(f"the script that starts vLLM is not there: {script}", field="script")
        for port in VLLM_PORTS[self._mode]:
            if not _free(port):
                raise SettingsError(
                    f"port {port} is in use; `{script.name} stop` ends what that script started", field="port"
                )
        starting = self._script(script, self._mode, self.model)
        self._session = starting.pid
        if starting.wait(START_TIMEOUT_S) != 0:
            raise Unavailable(f"vLLM ({self._mode}) did not start; its logs are in {self._peers.home / 'run'}")

    def stop(self) -> None:
        if not self._session:
            return
        assert self._peers.script is not None
        self._signal(signal.SIGCONT)
        self._script(self._peers.script, "stop").wait(STOP_TIMEOUT_S)
        _gone, left = psutil.wait_procs(self.processes(), STOP_TIMEOUT_S)
        if left:
            self._signal(signal.SIGKILL)
            psutil.wait_procs(left, STOP_TIMEOUT_S)
        self._session = 0

    def processes(self) -> list[psutil.Process]:
        return of_session(self._session) if self._session else []

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped inside: the progress threads of its NIXL agents poll without rest."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _script(self, script: Path, *arguments: str) -> subprocess.Popen[bytes]:
        env = {"KV_GIB": str(VLLM_KV_GIB), **os.environ, "PEERS_HOME": str(self._peers.home), "MAX_LEN": str(MAX_LEN)}
        env.pop("PYTHONPATH", None)
        null = subprocess.DEVNULL
        command = ["bash", str(script.resolve()), *arguments]
        return subprocess.Popen(
            command, env=env, cwd=self._peers.home, start_new_session=True, stdin=null, stdout=null, stderr=null
        )

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._session, number)


def of_session(session: int) -> list[psutil.Process]:
    """Every process of a session, those whose parent is gone included; none that has ended."""
    members = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def make(side: str, model: Path, peers: Peers) -> Server:
    """A server of `SIDES`, not started."""
    maker, _, mode = side.partition("-")
    return Tandem(mode, model, **peers.settings) if maker == "tandem" else Vllm(mode, model, peers)


@contextmanager
def started(servers: Sequence[Server]) -> Iterator[None]:
    """All of them up inside, none left after. While one starts, those before it stand still."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            with others_frozen(servers[: servers.index(server)]):
                server.start()
        yield


@contextmanager
def others_frozen(servers: Sequence[Server]) -> Iterator[None]:
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.frozen())
        yield


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
