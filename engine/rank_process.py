"""The process of a rank other than rank 0.

    python -m engine.rank_process CONNECTION MEMORY RANK SIZE PARENT

CONNECTION and MEMORY are open files of rank 0 (engine/parallel/leader.py), PARENT is the id of its process. The rank
ends with that from its first instruction: the libraries, which engine/follower.py needs, take seconds to import.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """SIGKILL for this process when rank 0's engine ends, also if this one is stopped; at once if it has ended. An end
    that is asked of all processes of a terminal is for rank 0 to make."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(connection: int, memory: int, rank: int, size: int, parent: int) -> int:
    """Returns the process's exit status."""
    logging.basicConfig(format=f"rank {rank}: %(message)s")
    end_with_parent(parent)
    from engine import follower

    return follower.main(socket.socket(fileno=connection), memory, rank, size)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
