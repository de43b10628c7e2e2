"""A cluster on several hosts (namespaces.py), started by the commands of docs/ray.md.

head   Ray's head, Valkey, `tandem up` with router and supervisor, the clients
a      a prefill and a decode worker
b      a decode worker
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, Queue
from time import monotonic
from types import TracebackType
from typing import Any

from cluster.state.embedded_valkey import server_binary
from loadtest.scenarios.hosts.namespaces import NETWORK, NETWORK6, Host, Network
from tandem.errors import DeadlineExceeded, Unavailable

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/ray.md"
START_S = 180.0
ANSWER_S = 20.0
STOP_S = 45.0  # drain_grace_s and the margin for a worker whose host is lost and which Ray has not given up yet
TARGET = "127.0.0.1:50051"
AUTHORITY, CLUSTER, REGISTRY = "ours", "ours-cluster", "ours-registry"  # of a secured cluster
NAMES = (("cluster", "DNS:tandem-cluster"), ("registry", f"IP:{NETWORK}1"))
INNER_PORT = "6389"  # of its Valkey, on loopback


def documented(start: str) -> list[str]:
    """The commands of the page that begin so, in their order."""
    return re.findall(rf"^    ({re.escape(start)}.*)$", PAGE.read_text(), re.MULTILINE)


class Stream:
    """One answer that arrives."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.at: list[float] = []  # when each message came
        self.receipt: dict[str, Any] = {}
        self.error = ""
        self.ended = threading.Event()

    @property
    def silence_s(self) -> float:
        """The longest time between two messages."""
        return max((later - sooner for sooner, later in zip(self.at, self.at[1:], strict=False)), default=0.0)


class Clients:
    """host_client.py on a host."""

    def __init__(self, host: Host, env: dict[str, str], target: str = TARGET) -> None:
        program = [sys.executable, "-m", "loadtest.scenarios.hosts.host_client", target]
        self._popen = host.start(program, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._streams: dict[int, Stream] = {}
        self._answers: dict[int, Queue[dict[str, Any]]] = {}
        self._next = 0
        self._news = threading.Condition()
        threading.Thread(target=self._read, name="clients", daemon=True).start()

    def stream(self, prompt: Sequence[int], **options: Any) -> Stream:
        stream = self._streams[self._next] = Stream()
        self._order(call="stream", prompt=list(prompt), options=options)
        return stream

    def ask(self, call: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Raises Unavailable and DeadlineExceeded."""
        answers = self._answers[self._next] = Queue()
        self._order(call=call)
        try:
            answer = answers.get(timeout=timeout_s)
        except Empty as error:
            raise DeadlineExceeded(f"{call} was not answered") from error
        if "error" in answer:
            raise Unavailable(answer["error"])
        return answer

    def until(self, true: Callable[[], bool], timeout_s: float) -> None:
        """Looks after each line that arrives. Raises DeadlineExceeded."""
        with self._news:
            if not self._news.wait_for(true, timeout_s):
                raise DeadlineExceeded("the streams did not get so far")

    def _order(self, **order: Any) -> None:
        assert self._popen.stdin
        self._popen.stdin.write(json.dumps({"order": self._next, **order}) + "\n")
        self._popen.stdin.flush()
        self._next += 1

    def _read(self) -> None:
        assert self._popen.stdout
        for line in self._popen.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                with self._news:
                    self._take(answer)
                    self._news.notify_all()

    def _take(self, answer: dict[str, Any]) -> None:
        if (answers := self._answers.get(answer["order"])) is not None:
            answers.put(answer)
            return
        stream = self._streams[answer["order"]]
        if "tokens" in answer:
            stream.tokens += answer["tokens"]
            stream.at.append(monotonic())
            return
        stream.receipt, stream.error = answer.get("answer", {}), answer.get("error", "")
        stream.ended.set()


class RayHosts:
    """`settings` are of `tandem up` and Ray, in the environment of all hosts; `wires` as in Network; `up_on` is the
    host of Valkey, `tandem up` and the clients. `ipv6`: the hosts know each other by addresses of IPv6. `secured`: a
    folder with certificates (harness/certificates.py), by which the registry and all calls are encrypted."""

    def __init__(
        self,
        model: str,
        settings: Mapping[str, str],
        wires: dict[str, str] | None = None,
        up_on: str = "head",
        *,
        ipv6: bool = False,
        secured: Path | None = None,
    ) -> None:
        self.network = Network(names := ["head", "a", "b"], wires)
        self._up_on, self._ipv6, self._secured = up_on, ipv6, secured
        password = secrets.token_hex(8)
        registry = f"{password}@{NETWORK}{names.index(up_on) + 1}:"
        self._up = documented("tandem up")[0].replace(f"PASSWORD@{NETWORK}1:", registry).replace("demo/model", model)
        if secured:
            self._up = self._up.replace("redis://", "rediss://").replace(
                "/0'", f"/0?ssl_ca_certs={secured}/{AUTHORITY}.pem'"
            )
            named = {"CERT": f"{CLUSTER}.pem", "KEY": f"{CLUSTER}.key", "CA": f"{AUTHORITY}.pem"}
            settings = {**settings, **{f"TANDEM_CLUSTER_{key}": f"{secured}/{file}" for key, file in named.items()}}
        self._password, self.registry_port = password, re.findall(r"@[\d.]+:(\d+)", self._up)[0]
        self._logs: dict[str, Path] = {}
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "RAY_"))},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            **settings,
        }
        self._undo = ExitStack()

    @property
    def hosts(self) -> dict[str, Host]:
        return self.network.hosts

    def __enter__(self) -> RayHosts:
        with ExitStack() as undo:
            undo.enter_context(self.network)
            self._start()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _start(self) -> None:
        home = self.hosts[self._up_on]
        address = *self._words(home.address), self.registry_port
        if self._secured:
            address = self._encrypted(home, *address)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        options = ["--requirepass", self._password, "--bind", address[0], "--port", address[1]]
        home.start([str(server_binary()), "--save", "", "--appendonly", "no", *options], **quiet)
        self.ray_start("head")
        joining = [threading.Thread(target=self.ray_start, args=(name,)) for name in ("a", "b")]
        for thread in joining:
            thread.start()
        for thread in joining:
            thread.join()
        self.up = home.start(self._words(self._up), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.said: list[str] = []
        ready = threading.Event()
        threading.Thread(target=self._read, args=(self.up.stderr, ready), daemon=True).start()
        threading.Thread(target=self._read, args=(self.up.stdout, ready), daemon=True).start()
        if not ready.wait(START_S) or self.up.poll() is not None:
            raise Unavailable("the cluster did not start: " + "".join(self.said[-20:]))
        self.clients = Clients(home, self.env)

    def _encrypted(self, home: Host, address: str, port: str) -> tuple[str, str]:
        """A TLS proxy at the registry's address, because this Valkey is built without TLS; returns where Valkey is."""
        at = f"{self._secured}/{REGISTRY}"
        proxy = [
            sys.executable,
            "-m",
            "loadtest.scenarios.hosts.tls_proxy",
            address,
            port,
            INNER_PORT,
            f"{at}.pem",
            f"{at}.key",
        ]
        home.start(proxy, env=self.env, stdout=subprocess.DEVNULL)
        return "127.0.0.1", INNER_PORT

    def _words(self, command: str) -> list[str]:
        """A command of the page, which has addresses of IPv4."""
        if self._ipv6:
            command = re.sub(rf"{re.escape(NETWORK)}(\d+):", rf"[{NETWORK6}\1]:", command)
            command = re.sub(rf"{re.escape(NETWORK)}(\d+)", rf"{NETWORK6}\1", command)
        return shlex.split(command)

    def _read(self, lines: Any, ready: threading.Event) -> None:
        for line in lines:
            self.said.append(line)
            if line.startswith("ready "):
                ready.set()

    def ray_start(self, name: str) -> None:
        """By the page's command for this host, which names its address. Raises Unavailable."""
        host = self.hosts[name]
        command = next(one for one in documented("ray start") if f"--node-ip-address={host.address} " in one)
        begun = host.start(self._words(command), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = begun.communicate(timeout=START_S)[0]
        if begun.returncode:
            raise Unavailable(f"Ray did not start on {name}: {said}")

    def stop(self) -> int:
        """`tandem up`, by SIGTERM; returns its exit status."""
        self.hosts[self._up_on].send(self.up, signal.SIGTERM)
        return self.up.wait(STOP_S)
