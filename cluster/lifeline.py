"""A process that must not outlive another: Linux kills it when its parent goes, however the parent goes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int | None = None) -> None:
    """SIGKILL for this process when the *thread* that started it ends: start children from a thread that stays.

    `parent` is the pid that the parent had before the fork; if it is gone already, this process ends here.
    """
    if _libc is None:  # macOS has nothing alike: there an orderly stop is the only cleanup
        return
    if _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def before_exec() -> Callable[[], None]:
    """For Popen's preexec_fn."""
    parent = os.getpid()
    return lambda: die_with_parent(parent)
