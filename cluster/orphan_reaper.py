"""Cleans up after a `tandem up` that was killed with SIGKILL and could not do so itself.

    up ── pipe ──▶ guard        lines "pid created" while up runs; end of file when up has ended, however it ended
                     └── ends the listed processes that still run, keeps the logs if configured,
                         removes the run directory, ends

Workers and Valkey end by themselves (cluster/exit_with_parent.py). So do Ray's, some of them a moment later.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from cluster import run_directory

END_TIMEOUT_S = 5.0


class OrphanReaper:
    """The guard's process, as `up` holds it."""

    def __init__(self, directory: Path, logs: Path | None = None) -> None:
        """`logs`: the folder to which the logs are moved before the directory is removed."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.orphan_reaper", str(directory), *([str(logs)] if logs else [])],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to up's process group must not reach it
            text=True,
        )

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """Adds processes that must not outlive `up`."""
        assert self._process.stdin is not None
        for process in processes:
            try:
                self._process.stdin.write(f"{process.pid} {process.create_time()}\n")
            except psutil.NoSuchProcess:
                continue
        self._process.stdin.flush()

    def stop(self) -> None:
        """Lets the guard clean up and end. Safe to repeat."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        self._process.wait(2 * END_TIMEOUT_S)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the guard ends only after `up`
    directory, *keep = (Path(argument) for argument in sys.argv[1:])
    with suppress(FileNotFoundError):  # another start was first; the processes are still to be ended
        run_directory.hold(directory)
    watched = [(int(pid), float(created)) for pid, created in (line.split() for line in sys.stdin)]
    alive = []
    for pid, created in watched:
        try:
            process = psutil.Process(pid)
            if process.create_time() == created:  # otherwise another process has the pid now
                process.kill()
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=END_TIMEOUT_S)
    for into in keep:
        try:
            run_directory.keep_logs(directory, into)
        except OSError:  # a full disk; there is no process left to report it to
            continue
    run_directory.remove(directory)


if __name__ == "__main__":
    main()
