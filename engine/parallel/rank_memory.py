"""How much memory a rank takes: as it says when it has loaded, and as operators read it in the worker's log."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

M_MMAP_THRESHOLD = -3  # malloc.h
WHILE_LOADING, AFTERWARDS = 256 << 10, 32 << 20  # bytes; 32 MiB is the most that glibc chooses by itself
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Of one process, in bytes: resident before it loaded its part (libraries and operators), resident afterwards, and
    the peak on the way there."""

    before: int
    after: int
    peak: int


class Loading:
    """A rank loads inside; `memory` says what it took.

    Large pieces are mappings of their own meanwhile, which go back to the system when they are freed. In glibc's heaps
    the end of a thread's own, with pieces of up to 64 MiB, stays: transformers reads weights by threads.
    """

    def __init__(self) -> None:
        with suppress(OSError):  # Linux resets the peak where the process may
            CLEAR.write_text("5")
        self._before = _status("VmRSS")

    def __enter__(self) -> Loading:
        _map_from(WHILE_LOADING)
        return self

    def __exit__(self, *_: object) -> None:
        _map_from(AFTERWARDS)

    def memory(self) -> RankMemory:
        return RankMemory(self._before, _status("VmRSS"), _status("VmHWM"))


def described(ranks: Sequence[RankMemory]) -> str:
    """A line for the log."""
    each = ", ".join(f"{(rank.after - rank.before) >> 20} (peak {(rank.peak - rank.before) >> 20})" for rank in ranks)
    return f"MiB of each rank beyond the {max(rank.before for rank in ranks) >> 20} of its libraries: {each}"


def _map_from(nbytes: int) -> None:
    """From which size on glibc gives a piece a mapping of its own; other C libraries have no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, nbytes)


def _status(name: str) -> int:
    """A number of kB in /proc/self/status, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10
