"""Processes that are there at once: copies of one that has imported the libraries, and has done nothing else.

A worker's imports take seconds of a core, and the suite starts a hundred workers. A copy is as much a process of its
own as any: it has a pid, a session, an environment and memory, and dies by SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

STOP_TIMEOUT_S = 30.0
PRELOADED = "tests.support.preloaded"
# UCX patches the functions of libc that return memory, for network cards, in 0.4 s of a core; a test has none of these.
QUICK_UCX = {"UCX_MEM_MMAP_HOOK_MODE": "none"}
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([PRELOADED])


class Copy:
    """What subprocess.Popen gives for `python -m MODULE ARGUMENTS` with pipes, in a session of its own."""

    def __init__(self, module: str, arguments: list[str], env: dict[str, str], *, stderr: bool = True) -> None:
        """With `stderr`, that goes to stdout as well."""
        self.args = [module, *arguments]
        its_input, to_it = _SERVER.Pipe(duplex=False)
        from_it, its_output = _SERVER.Pipe(duplex=False)
        self._process = _SERVER.Process(
            target=_live,
            args=(module, arguments, QUICK_UCX | env, its_input, its_output, stderr),
            name=arguments[0],
            daemon=True,
        )
        self._process.start()
        its_input.close()
        its_output.close()
        self.stdin: TextIO = os.fdopen(_taken(to_it), "w")
        self.stdout: TextIO = os.fdopen(_taken(from_it))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, None while it lives."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired([self._process.name], timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """SIGSTOP returns when no thread runs: the threads go on until the one that takes the signal gets a core."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended, and its exit code is not here yet
                os.kill(self.pid, number)
                if number == signal.SIGSTOP:
                    self._wait_stopped()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait_stopped(self) -> None:
        """By /proc: it is a child of the fork server, so waitid does not tell of it here."""
        threads = Path(f"/proc/{self.pid}/task")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not all(map(_stands, threads.iterdir())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not stopped in {STOP_TIMEOUT_S} s")
            time.sleep(0.001)


def _stands(thread: Path) -> bool:
    """Whether it runs no more: stopped, or at its end."""
    try:
        return (thread / "stat").read_text().rpartition(") ")[2][0] in "TZX"
    except (FileNotFoundError, ProcessLookupError):  # gone since its folder was listed
        return True


def _taken(connection: Connection) -> int:
    """A connection's file, which it no longer closes."""
    found = os.dup(connection.fileno())
    connection.close()
    return found


def _live(
    module: str, arguments: list[str], env: dict[str, str], given: Connection, output: Connection, stderr: bool
) -> None:
    os.setsid()
    os.dup2(given.fileno(), 0)
    os.dup2(output.fileno(), 1)
    if stderr:
        os.dup2(output.fileno(), 2)
    given.close()
    output.close()
    if PRELOADED not in sys.modules:  # a fork server passes over an ImportError, and each copy would import by itself
        raise ImportError(f"the fork server could not import {PRELOADED}")
    sys.stdin = os.fdopen(0)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
