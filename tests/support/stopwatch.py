"""Time for assertions on a machine that others use, too."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

_TASKS = Path("/proc/self/task")


def _waited_for_a_core() -> float:
    """Seconds for which threads of this process were ready to run and another process had the core."""
    total = 0
    for task in _TASKS.iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):  # the thread has just ended, or the kernel does not count it
            continue
    return total / 1e9


class Stopwatch:
    """Started when made. Its time is that of a machine which nobody else uses: what the threads of this process waited
    for a core does not count."""

    def __init__(self) -> None:
        self._began, self._waited = monotonic(), _waited_for_a_core()

    @property
    def seconds(self) -> float:
        return max(0.0, monotonic() - self._began - max(0.0, _waited_for_a_core() - self._waited))

    def within(self, seconds: float) -> bool:
        return monotonic() - self._began < seconds or self.seconds < seconds
