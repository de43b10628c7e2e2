"""What the supervisor sees of worker processes: what starts them, what they report, and the events that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tandem.errors import TandemError


@dataclass(frozen=True, slots=True)
class Started:
    """What a worker reports once it serves."""

    address: str
    pid: int
    incarnation: str
    can_switch_role: bool = False  # to the other pool


class WorkerProcess(Protocol):
    """One worker process, which may serve as several workers in succession. Calls raise TandemErrors; WorkerLost once
    the process is dead."""

    node: str
    """Where it runs, one of those that Host.leaving() may name. Empty: not known yet."""

    async def start(self, report: Callable[[str], None]) -> Started:
        """Starts to serve; a repeated call returns the same. `report` receives the stages of the start."""

    async def wait(self) -> None:
        """Returns when the service has ended."""

    async def stop(self, grace_s: float) -> None:
        """Drains."""

    async def switch_role(self, worker_id: str, grace_s: float, report: Callable[[str], None]) -> Started:
        """Drains, which ends wait(), then serves under another id with the loaded weights; otherwise like start()."""

    def kill(self) -> None:
        """Ends the process; safe to repeat."""


class Host(Protocol):
    def create(self, worker_id: str) -> WorkerProcess:
        """Returns a new process, or a spare one."""

    def keep_spares(self, count: int) -> None:
        """Keeps `count` processes that can become a worker of either pool; they start in the background."""

    async def leaving(self) -> set[str]:
        """The nodes that will end soon. Ends the spares there. Raises Unavailable if Ray's head does not answer."""

    async def survivors(self) -> dict[str, WorkerProcess]:
        """Workers that an earlier incarnation of this supervisor started."""

    async def late_survivors(self) -> dict[str, WorkerProcess]:
        """Those of them that have said only now which workers they are. May take long."""

    @property
    def silent(self) -> bool:
        """Whether there may be survivors that have not said which workers they are."""


class Kind(StrEnum):
    STARTING = "starting"
    LOADING = "loading"  # still starting; `text` names the stage
    READY = "ready"
    STOPPED = "stopped"  # drained, on request or by itself
    FAILED = "failed"  # could not start, for a reason that a restart would not change
    DIED = "died"


@dataclass(frozen=True, slots=True)
class Event:
    """A change of one worker's state."""

    seq: int
    kind: Kind
    worker_id: str
    started: Started | None = None
    error: TandemError | None = None
    retry_in_s: float = 0.0
    text: str = ""
