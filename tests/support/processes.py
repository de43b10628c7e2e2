"""Processes of others, each of which may end while it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import psutil

T = TypeVar("T")


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def below(read: Callable[[psutil.Process], T], pid: int | None = None) -> dict[psutil.Process, T]:
    """What `read` gives of each process that this one, or `pid`, has started, without those that have ended."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[process] = read(process)
    return found


def named(part: str, pid: int | None = None) -> list[psutil.Process]:
    return [process for process, name in below(psutil.Process.name, pid).items() if part in name]


def kill(processes: Iterable[psutil.Process]) -> None:
    """Those that have not ended: the end of one may be that of the next."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
