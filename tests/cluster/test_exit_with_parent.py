"""A child process that ends with its parent: the same command in the same process, killed when its parent ends."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from cluster.exit_with_parent import bound_to_parent
from tests.support.processes import alive
from tests.support.waiting import wait_until

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def test_the_command_takes_the_place_of_what_starts_it() -> None:
    """The command runs with its arguments, output and exit status, under the pid that Popen has, on the cores that were
    named."""
    core = min(os.sched_getaffinity(0))
    code = "import os, sys; print(os.getpid(), sorted(os.sched_getaffinity(0)), sys.argv[1:]); sys.exit(3)"
    command = bound_to_parent([sys.executable, "-c", code, "--a", "b c"], [core])
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output, _ = child.communicate(timeout=30)
    assert output.strip() == f"{child.pid} [{core}] ['--a', 'b c']"
    assert child.returncode == 3


def test_it_is_killed_when_its_parent_is() -> None:
    """The child ends however the parent ends. In the control, a child that is not bound continues."""
    code = (
        "import subprocess, sys, time; from cluster.exit_with_parent import bound_to_parent\n"
        f"command = {SLEEPER!r}\n"
        "both = (bound_to_parent(command), command)\n"
        "bound, free = (subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in both)\n"
        "bound.stdout.readline(), free.stdout.readline()\n"
        "print(bound.pid, free.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    bound, free = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
    parent.kill()
    parent.wait(30)
    wait_until(lambda: not alive(bound), 10)
    assert free.is_running()
    free.kill()


def test_one_whose_parent_is_gone_already_does_not_begin() -> None:
    """The parent may end between the start of the child and the moment at which the kernel watches it."""
    command = bound_to_parent([sys.executable, "-c", "print('began')"])
    command[4] = str(2**22 + 1)  # a pid that no process has
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == ""
    assert done.returncode == -9
