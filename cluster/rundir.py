"""The private directory of one `tandem up`: sockets, Ray's session, logs. Its name says whose it is, so that the next
start removes what a killed one could not."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

ROOM_FOR_RAY = 66  # /session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store
UNIX_SOCKET_LIMIT = 107
_NAME = re.compile(r"^tandem-(\d+)-(\d+)$")


def create() -> Path:
    """A new directory with mode 0700, after removing those whose process is gone."""
    remove_stale()
    path = _parent() / f"tandem-{os.getpid()}-{int(psutil.Process().create_time())}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # a file may vanish meanwhile; what stays is stale at the next start


def remove_stale() -> list[Path]:
    """Removes the directories of this user's processes that no longer run."""
    stale = [path for path in _parent().glob("tandem-*") if _is_stale(path)]
    for path in stale:
        remove(path)
    return stale


def _parent() -> Path:
    """The system's temporary directory, unless it is too deep for a unix socket."""
    path = Path(tempfile.gettempdir())
    longest = len(str(path)) + len("/tandem-1234567-1234567890") + ROOM_FOR_RAY
    return path if longest <= UNIX_SOCKET_LIMIT else Path("/tmp")


def _is_stale(path: Path) -> bool:
    match = _NAME.match(path.name)
    try:
        if not match or path.is_symlink() or path.stat().st_uid != os.getuid():
            return False
    except FileNotFoundError:  # removed by another start
        return False
    pid, created = int(match[1]), int(match[2])
    try:
        # create_time is derived from the boot time, whose rounding may differ by a second between processes.
        return abs(psutil.Process(pid).create_time() - created) > 2
    except psutil.NoSuchProcess:
        return True
