"""The other ranks of a worker as copies of a process that has imported everything (tests/support/copies.py)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.reduction import DupFd
from typing import Any

import pytest

from engine import follower
from engine.parallel import leader
from engine.runner import captured_steps
from tests.support.copies import _SERVER


class RankCopy:
    """What subprocess.Popen gives."""

    def __init__(self, connection: socket.socket, memory: int, rank: int, size: int) -> None:
        its = (connection, _Duplicated(memory), rank, size, captured_steps.LARGEST["cpu"])
        self._process = _SERVER.Process(target=_live, args=its, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self._process.join(0)
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(["rank"], timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class _Duplicated:
    """An open file on its way to another process."""

    def __init__(self, file: int) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return _taken, (DupFd(self.file),)


def _taken(duplicate: Any) -> int:
    file: int = duplicate.detach()
    return file


def _live(connection: socket.socket, memory: int, rank: int, size: int, most_rows: int) -> None:
    captured_steps.LARGEST["cpu"] = most_rows  # all ranks of a worker capture the same steps
    sys.exit(follower.main(connection, memory, rank, size))


def start_copy(rank: int, size: int, memory: int) -> tuple[socket.socket, Any]:
    """In the place of engine.parallel.leader.start_rank."""
    ours, its = socket.socketpair()
    with its:
        return ours, RankCopy(its, memory, rank, size)


@contextmanager
def rank_copies() -> Iterator[list[Any]]:
    """Ranks are copies inside; gives those that were started."""
    started: list[Any] = []

    def start(rank: int, size: int, memory: int) -> tuple[socket.socket, Any]:
        ours, process = start_copy(rank, size, memory)
        started.append(process)
        return ours, process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader, "start_rank", start)
        yield started
    for process in started:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
