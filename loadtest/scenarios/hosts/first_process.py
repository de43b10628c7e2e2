"""The first process of a host of namespaces.py: sets the host up, then reaps what ends. Run by its path, alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path


def main(name: str) -> None:
    socket.sethostname(name)
    root = Path(__file__).resolve().parents[3]  # this checkout, which may be below /tmp itself
    checkout = os.open(root, os.O_PATH)
    for folder in ("/tmp", "/dev/shm"):  # what two hosts do not share
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    if not root.exists():
        root.mkdir(parents=True)  # -c: mount would look up the path of the descriptor, which is this folder
        subprocess.run(
            ["mount", "-c", "--bind", f"/proc/self/fd/{checkout}", str(root)], check=True, pass_fds=[checkout]
        )
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=False)  # of this network; not permitted everywhere
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    print("up", flush=True)
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue


if __name__ == "__main__":
    main(sys.argv[1])
