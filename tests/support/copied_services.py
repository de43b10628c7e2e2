"""loadtest, whose workers and routers are copies of one process that has imported the libraries (copies.py): a run of
all parts starts twenty. For tests of what is measured, not of how long it takes.

    python -c "from tests.support import copied_services; copied_services.main()" bench --quick
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from loadtest import commands
from loadtest.harness import processes
from tests.support.copies import Copy


def start(command: list[str], *, env: dict[str, str], **options: Any) -> Copy | subprocess.Popen[str]:
    """Popen, for what `processes.Process` starts."""
    module, *arguments = command[command.index("-m") + 1 :]
    if module == "services":
        return Copy(module, arguments, env)
    return subprocess.Popen(command, env=env, **options)


def main() -> None:
    names = ("PIPE", "STDOUT", "TimeoutExpired")
    stand_in: Any = SimpleNamespace(Popen=start, **{name: getattr(subprocess, name) for name in names})
    processes.subprocess = stand_in
    sys.exit(commands.main(sys.argv[1:]))
