"""The first process of a host of namespaces.py: sets the host up, then reaps what ends. Run by its path, alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def main(name: str) -> None:
    socket.sethostname(name)
    for folder in ("/tmp", "/dev/shm"):  # what two hosts do not share
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
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
