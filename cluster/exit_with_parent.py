"""Makes Linux kill a process when its parent ends, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def exit_with_parent(parent: int | None = None) -> None:
    """SIGKILL for this process when the *thread* that started it ends: start children from a thread that stays.

    `parent` is the parent's pid before the fork; if it has already ended, this process ends here.
    """
    if _libc is None:  # macOS has no such call: there an orderly stop is the only cleanup
        return
    if _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def bound_to_parent(command: Sequence[str], cores: Iterable[int] = ()) -> list[str]:
    """The same command for a child that dies with the thread that starts it, on these cores only if any are named.

    A small Python sets that up and becomes the command. Popen's preexec_fn would do it without one, but then Popen
    forks, and runs code in a copy of this process in which gRPC may poll the connections of the original: a forked copy
    that reads from them takes messages away.
    """
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), ",".join(map(str, cores)), *command]


def _become(parent: int, cores: str, command: Sequence[str]) -> None:
    exit_with_parent(parent)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
