"""The private directory of one `tandem up`: sockets, Ray's session, logs. Its name identifies the process, so that the
next start removes the directory of a killed one, unless its guard (cluster/orphan_reaper.py) is still at work."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import psutil

from tandem.errors import PreconditionFailed, SettingsError

RAY_SOCKET_CHARACTERS = 66  # /session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store
MAX_SOCKET_CHARACTERS = 107
MAX_FAILED_RUNS = 10
_NAME = re.compile(r"^tandem-(\d+)-(\d+)$")


def create() -> Path:
    """A new directory with mode 0700, after removing those whose process is gone. Raises PreconditionFailed if
    another user owns the path: the name is predictable, and that user could serve a fake registry from it."""
    remove_stale()
    path = _parent() / f"tandem-{os.getpid()}-{int(psutil.Process().create_time())}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)  # an earlier run of this process may have left it
    except OSError as error:
        raise _not_private(path) from error
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise _not_private(path)
    return path


def _not_private(path: Path) -> PreconditionFailed:
    return PreconditionFailed(
        f"{path} is not a private directory of this user's; remove it, or set TMPDIR to a folder of your own",
        reason="RUN_DIRECTORY_TAKEN",
    )


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # a file may vanish meanwhile; what stays is stale at the next start


def hold(path: Path) -> None:
    """Keeps other starts from removing the directory, as long as this process lives."""
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)


def _is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def logs(path: Path) -> Path:
    """The folder in which Ray writes the logs of all processes of this run; an external Ray has its own."""
    return path / "session_latest" / "logs"


def keep_logs(path: Path, into: Path) -> Path | None:
    """Moves the logs of a run out of its directory after its processes have ended. Returns the new folder; None without
    logs."""
    source = logs(path).resolve()
    if not source.is_dir():
        return None
    target = into / path.name.replace("tandem-", "logs-")  # a name that does not look like a stale run directory
    shutil.copytree(source, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    shutil.rmtree(source, ignore_errors=True)
    return target


def failed_runs() -> Path:
    """This user's directory for the logs of failed runs; removes the oldest ones."""
    into = _parent() / f"tandem-logs-{os.getuid()}"
    into.mkdir(mode=0o700, exist_ok=True)
    if into.is_symlink() or into.stat().st_uid != os.getuid():  # another user created it, in a world-writable directory
        raise PermissionError(f"{into} is not this user's")
    for old in sorted(into.iterdir(), key=_changed_at)[: -MAX_FAILED_RUNS + 1]:
        remove(old)
    return into


def _changed_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:  # removed by another run that failed
        return 0.0


def remove_stale() -> None:
    """Removes the directories of this user's processes that no longer run."""
    for path in filter(_is_stale, _parent().glob("tandem-*")):
        remove(path)


def _parent() -> Path:
    """The system's temporary directory, unless it is too deep for a unix socket."""
    path = Path(tempfile.gettempdir())
    longest = len(str(path)) + len("/tandem-1234567-1234567890") + RAY_SOCKET_CHARACTERS
    return path if longest <= MAX_SOCKET_CHARACTERS else Path("/tmp")


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
        if abs(psutil.Process(pid).create_time() - created) <= 2:
            return False
    except psutil.NoSuchProcess:
        pass
    try:
        return not _is_held(path)
    except FileNotFoundError:  # removed by its guard
        return False


def writable(folder: Path | None) -> Path | None:
    """The folder's absolute path; creates it. Raises SettingsError."""
    if folder is None:
        return None
    try:
        folder.expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"logs cannot be kept in {folder}: {error.strerror}", field="logs", bound="a folder that can be written"
        ) from error
    return folder.expanduser().resolve()
