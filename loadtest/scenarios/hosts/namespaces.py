"""Several hosts on one machine: namespaces of Linux around a switch that is one, too.

    switch (a network namespace with a bridge)
      ├── port of a ── eth0 of host a     network, PID, IPC, UTS and mount namespaces of its own: UCX takes TCP
      └── port of b ── eth0 of host b     with `wire`: a process carries the frames, with delay and loss (wire.py)

Nothing has a name on the machine, no traffic leaves the namespaces, and all of it is gone with this process. A host is
killed with its first process; frozen by SIGSTOP of all others, while its kernel still answers; cut from the switch
while both ends keep their link, so that nobody is told.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from cluster.exit_with_parent import bound_to_parent
from tandem.errors import Unavailable

NETWORK, NETWORK6 = "10.77.0.", "fd00:77::"  # the number of a host follows
OF_A_HOST = ("--net", "--pid", "--ipc", "--uts", "--mount")
MTU = 9000
PATIENCE_S = 10.0
SENT = 8  # the column of /proc/net/dev with the bytes that a device has sent


def forbidden() -> str:
    """Why hosts cannot be made here; empty if they can."""
    steps = "ip link add br0 type bridge && ip link add v0 type veth peer name v1 && mount -t tmpfs tmpfs /tmp"
    if not sys.platform.startswith("linux"):
        return "namespaces need Linux"
    try:
        command = ["unshare", *OF_A_HOST, "--fork", "--mount-proc", "sh", "-c", steps]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces cannot be made: {error}"
    return f"namespaces are forbidden: {done.stderr.strip()}" if done.returncode else ""


class _Space:
    """The namespaces of one process."""

    def __init__(self, kinds: Sequence[str], command: Sequence[str]) -> None:
        self._popen = subprocess.Popen(
            bound_to_parent(["unshare", *kinds, "--fork", "--kill-child=KILL", *command]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # some versions of unshare complain when they are killed
            start_new_session=True,
        )
        assert self._popen.stdout
        if self._popen.stdout.readline() != b"up\n":
            self._popen.kill()
            raise Unavailable(f"a namespace could not be made: {self._popen.communicate()[1]!r}")
        self.first = psutil.Process(self._popen.pid).children()[0]
        self._kinds = kinds

    def enter(self, command: Sequence[str]) -> list[str]:
        kinds = [kind for kind in self._kinds if kind != "--mount-proc"]
        return ["nsenter", "-t", str(self.first.pid), *kinds, "--", *command]

    def do(self, *command: str) -> str:
        """Runs a command to its end, and returns its output. Raises CalledProcessError."""
        done = subprocess.run(self.enter(command), check=True, capture_output=True, text=True, timeout=PATIENCE_S)
        return done.stdout

    def end(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.first.kill()
        self._popen.wait(PATIENCE_S)


class Host:
    def __init__(self, network: Network, name: str, number: int, wire: str) -> None:
        self.name, self.address, self._number = name, f"{NETWORK}{number}", number
        self._network = network
        self._port = f"p-{name}"
        self._wire_options = wire
        self._wire: subprocess.Popen[str] | None = None
        self._space: _Space | None = None
        self.boot()

    def boot(self) -> None:
        """Starts it, or starts it again after `kill`."""
        first = str(Path(__file__).with_name("first_process.py"))
        command = [sys.executable, "-I", "-S", first, self.name]
        self._space = _Space((*OF_A_HOST, "--mount-proc"), command)
        self._connect(self._space)
        self._space.do("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self._space.do("ip", "addr", "add", f"{NETWORK6}{self._number}/64", "dev", "eth0", "nodad")
        self._space.do("ip", "link", "set", "eth0", "mtu", str(MTU), "up")
        self._network.switch.do("ip", "link", "set", self._port, "mtu", str(MTU), "master", "br0", "up")

    def _connect(self, space: _Space) -> None:
        if not self._wire_options:
            to = ["peer", "name", "eth0", "netns", str(space.first.pid)]
            self._network.switch.do("ip", "link", "add", self._port, "type", "veth", *to)
            return
        command = [sys.executable, str(Path(__file__).with_name("wire.py")), str(space.first.pid), "eth0"]
        command += [str(self._network.switch.first.pid), self._port]
        pipe = subprocess.PIPE
        self._wire = subprocess.Popen(bound_to_parent(command), stdin=pipe, stdout=pipe, text=True)
        assert self._wire.stdout
        if self._wire.stdout.readline() != "up\n":
            raise Unavailable("the wire could not be made")
        self.wire(self._wire_options)

    def wire(self, options: str) -> None:
        """Of a host with one: `delay 5` (ms, each way), `loss 0.01`."""
        assert self._wire is not None
        assert self._wire.stdin
        self._wire.stdin.write(f"{options}\n")
        self._wire.stdin.flush()

    def received(self) -> int:
        """Bytes that the switch has sent to it since its boot: what a limit has let through."""
        devices = Path(f"/proc/{self._network.switch.first.pid}/net/dev").read_text().splitlines()
        counts = next(line.partition(":")[2] for line in devices if line.strip().startswith(f"{self._port}:"))
        return int(counts.split()[SENT])

    # ---- processes

    def start(self, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """In this process's working directory."""
        assert self._space is not None
        there = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *command]
        return subprocess.Popen(bound_to_parent(self._space.enter(there)), text=True, **more)

    def do(self, *command: str) -> str:
        assert self._space is not None
        return self._space.do(*command)

    def send(self, started: subprocess.Popen[str], number: int) -> None:
        """A signal to what `start` has started: nsenter's child."""
        for child in psutil.Process(started.pid).children():
            child.send_signal(number)

    def runs(self, title: str) -> bool:
        """Whether one of its processes has a title that begins so."""
        assert self._space is not None
        titles = (process.cmdline() for process in self._space.first.children(recursive=True))
        return any(words[0].startswith(title) for words in titles if words)

    # ---- faults

    def kill(self) -> None:
        """All of its processes at once, and its end of the network."""
        assert self._space is not None
        self._space.end()
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait(PATIENCE_S)

    def freeze(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def cut(self) -> None:
        self._network.switch.do("ip", "link", "set", self._port, "nomaster")

    def join(self) -> None:
        self._network.switch.do("ip", "link", "set", self._port, "master", "br0")

    def limit(self, rate: str) -> None:
        """Both directions of its link, as tc writes a rate: 1gbit; empty: no limit."""
        assert self._space is not None
        for space, device in ((self._space, "eth0"), (self._network.switch, self._port)):
            if rate:
                shape = ["rate", rate, "burst", "64kb", "latency", "100ms"]
                space.do("tc", "qdisc", "replace", "dev", device, "root", "tbf", *shape)
            else:
                space.do("tc", "qdisc", "del", "dev", device, "root")

    def _signal_all(self, number: int) -> None:
        assert self._space is not None
        own = os.readlink(f"/proc/{self._space.first.pid}/ns/pid")
        for pid in psutil.pids():
            with suppress(OSError):
                if pid != self._space.first.pid and os.readlink(f"/proc/{pid}/ns/pid") == own:
                    os.kill(pid, number)


class Network:
    """`wires` names the hosts whose frames a process carries, with its options: {"b": "delay 5"}."""

    def __init__(self, names: Sequence[str], wires: dict[str, str] | None = None) -> None:
        self._names = names
        self._wires = wires or {}
        self._undo = ExitStack()
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Network:
        with ExitStack() as undo:
            self.switch = _Space(("--net",), ["sh", "-c", "echo up; exec sleep infinity"])
            undo.callback(self.switch.end)
            self.switch.do("ip", "link", "add", "br0", "type", "bridge")
            self.switch.do("ip", "link", "set", "br0", "mtu", str(MTU), "up")
            for number, name in enumerate(self._names, 1):
                self.hosts[name] = Host(self, name, number, self._wires.get(name, ""))
                undo.callback(self.hosts[name].kill)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()
