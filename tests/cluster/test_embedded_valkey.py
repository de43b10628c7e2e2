"""The embedded server is private, has no disk, and ends with its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.registry import Registry
from tandem.errors import Unavailable

ROOT = Path(__file__).parents[2]
SOON_S = 30.0


async def test_it_answers_on_a_private_socket_and_opens_no_port(valkey: EmbeddedValkey, directory: Path) -> None:
    """Only this user can reach the server: it has a unix socket with mode 0700 and no TCP port."""
    registry = Registry(valkey.url, "test", 1.0)
    assert await registry.ping() < SOON_S
    await registry.close()
    assert stat.S_IMODE((directory / "valkey.sock").stat().st_mode) == 0o700
    assert valkey.pid
    assert psutil.Process(valkey.pid).net_connections("tcp") == []


def test_stop_leaves_nothing_and_may_be_repeated(directory: Path) -> None:
    """No process, no socket, no dump."""
    server = EmbeddedValkey(directory)
    server.start()
    pid = server.pid
    server.stop()
    server.stop()
    assert pid
    assert not psutil.pid_exists(pid)
    assert list(directory.iterdir()) == []


def test_it_dies_with_a_killed_parent(directory: Path) -> None:
    """SIGKILL of the parent leaves no server."""
    code = (
        "import sys, pathlib; from cluster.state.embedded_valkey import EmbeddedValkey;"
        "v = EmbeddedValkey(pathlib.Path(sys.argv[1])); v.start(); print(v.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout
        server = psutil.Process(int(parent.stdout.readline()))
        assert server.is_running()
        parent.kill()
    psutil.wait_procs([server], timeout=SOON_S)
    assert not server.is_running()


def test_its_death_is_told_and_it_can_be_started_again(directory: Path) -> None:
    """A killed server is noticed at once; an orderly stop does not count as a death."""
    died = threading.Event()
    server = EmbeddedValkey(directory, on_death=died.set)
    url = server.start()
    assert server.pid
    os.kill(server.pid, signal.SIGKILL)
    assert died.wait(SOON_S)
    died.clear()
    assert server.start() == url
    server.stop()
    assert not died.is_set()


def test_a_server_that_cannot_start_says_why(directory: Path) -> None:
    """The error has the last lines of the server's output."""
    with pytest.raises(Unavailable, match=r"(?i)socket"):
        EmbeddedValkey(directory / ("x" * 120)).start()


def test_servers_that_are_killed_before_they_answer_are_started_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated kills during the start do not end a cluster, which continues without its registry meanwhile. Only the
    death of a server that had answered is reported, so that none is started twice."""
    deaths: list[int | None] = []
    dead = threading.Event()

    def died() -> None:
        deaths.append(server.pid)
        dead.set()

    server = EmbeddedValkey(directory, on_death=died)
    server.start()
    first = server.pid
    answers, killed = server._answers, []

    def killed_before() -> bool:
        if len(killed) < 3:
            assert server.pid
            os.kill(server.pid, signal.SIGKILL)
            killed.append(server.pid)
        return answers()

    assert first
    os.kill(first, signal.SIGKILL)
    assert dead.wait(SOON_S)
    monkeypatch.setattr(server, "_answers", killed_before)
    server.restart()
    assert server.pid not in (first, None, *killed)
    assert len(killed) == 3
    assert deaths == [first]
    server.stop()


def test_control_without_another_attempt_one_kill_more_is_the_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with a single attempt, as `tandem up` had before."""
    monkeypatch.setattr("cluster.state.embedded_valkey.RESTART_DELAYS_S", ())
    server = EmbeddedValkey(directory)
    monkeypatch.setattr(server, "_answers", lambda: False)
    with pytest.raises(Unavailable):
        server.restart()
