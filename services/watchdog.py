"""Detects work that makes no progress, on a separate thread, because a blocked event loop cannot detect itself.

    every 0.25 s, for each check: has the same piece of work run for longer than it may?
         └─ no    continue
         └─ yes   `stuck(check, why)`, once; the callee fails open requests and lets the process end

The watchdog's clock counts only time in which the watchdog itself ran. So a stopped and continued process, or a
suspended machine, does not appear stuck, and on an overloaded machine detection takes longer.

Two exits do not depend on the event loop: `exit_within` ends the process even if the loop never runs again, and a
process whose interpreter runs nothing for INTERPRETER_STALL_S (native code that holds the GIL) ends itself with its
stacks and status 1. The latter is faulthandler's timer, which counts wall time: a process that was stopped for longer
may end when it continues.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import NamedTuple

import structlog

log = structlog.get_logger(__name__)
CHECK_INTERVAL_S = 0.25
LOOP_BLOCKED_LOG_S = 1.0  # an event loop that is blocked for this long is logged, with its stack
INTERPRETER_STALL_S = 60.0
MAX_LOGGED_FRAMES = 8  # of each thread in the log
MAX_LINE_S = 1.0  # for one log line of the watchdog: a stderr that blocks the event loop blocks it, too
EXIT_STATUS = 70  # EX_SOFTWARE
end_process: Callable[[int], object] = os._exit  # replaced in tests that run several workers in one process


class Check(NamedTuple):
    """`under_way` returns a value that identifies the current piece of work, and the seconds that it may take; None if
    there is none. It is called on the watchdog's thread."""

    what: str
    reason: str  # of the error that callers receive
    under_way: Callable[[], tuple[Hashable, float] | None]


class Watchdog:
    """Runs from `start` to `stop`. `stuck` is called on its thread, at most once."""

    def __init__(
        self,
        checks: Sequence[Check],
        stuck: Callable[[Check, str], object],
        loop_most_s: float,
        every_s: float = CHECK_INTERVAL_S,
    ) -> None:
        """`loop_most_s`: the longest time that the event loop may be blocked."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._checks = [*checks, Check("the event loop", "EVENT_LOOP_STUCK", lambda: (self._beats, loop_most_s))]
        self._stuck: Callable[[Check, str], object] | None = stuck
        self._every_s = every_s
        self._beats = self._asked_beat = 0  # callbacks that the event loop has run, and that it was given
        self._reported_beat = -1
        self._since: dict[Check, tuple[Hashable, float]] = {}  # several may have one name
        self._lived, self._last = 0.0, monotonic()
        self._exit_at: float | None = None
        self._end_process = end_process
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._last = monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ends the watchdog; the process continues or ends by itself."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5 * self._every_s)

    def exit_within(self, seconds: float) -> None:
        """Ends this process after `seconds` unless `stop` is called first. Safe on any thread."""
        if self._exit_at is None:
            self._exit_at = self._lived + seconds

    def observe(self, now: float) -> None:
        """Runs all checks once."""
        self._lived += min(now - self._last, 2 * self._every_s)
        self._last = now
        for check in self._checks:
            try:
                age, most_s = self._age(check)
            except Exception:  # a check that fails must not hide the others
                log.exception("watchdog.bug", what=check.what)
                continue
            if check is self._checks[-1]:
                self._ask_the_loop(age)
            if age > most_s and self._stuck is not None:
                why = f"{check.what} has made no progress for {age:.1f} s"
                _say(log.critical, "watchdog.stuck", what=check.what, seconds=round(age, 2), stacks=_stacks())
                stuck, self._stuck = self._stuck, None
                stuck(check, why)
        if self._exit_at is not None and self._lived >= self._exit_at:
            _say(log.critical, "watchdog.exit", status=EXIT_STATUS)
            self._end_process(EXIT_STATUS)

    def _age(self, check: Check) -> tuple[float, float]:
        """The seconds that the current piece of work has run, and may run."""
        current = check.under_way()
        if current is None:
            self._since.pop(check, None)
            return 0.0, 0.0
        work, most_s = current
        previous, since = self._since.get(check, (None, 0.0))
        if previous != work:
            self._since[check] = work, self._lived
            return 0.0, most_s
        return self._lived - since, most_s

    def _ask_the_loop(self, age: float) -> None:
        if self._asked_beat == self._beats:  # it has answered
            self._asked_beat += 1
            with suppress(RuntimeError):  # closed: the process is ending
                self._loop.call_soon_threadsafe(self._answer)
        elif age > LOOP_BLOCKED_LOG_S and self._reported_beat != self._beats:
            self._reported_beat = self._beats
            _say(log.warning, "watchdog.loop_blocked", seconds=round(age, 2), stack=_stacks(self._loop_thread))

    def _answer(self) -> None:
        self._beats = self._asked_beat

    def _run(self) -> None:
        hard = self._end_process is os._exit
        try:
            while not self._stopped.wait(self._every_s):
                if hard:
                    faulthandler.dump_traceback_later(INTERPRETER_STALL_S, exit=True)
                try:
                    self.observe(monotonic())
                except Exception:  # a check that fails must not leave the process unwatched
                    log.exception("watchdog.bug")
        finally:
            if hard:
                faulthandler.cancel_dump_traceback_later()


def _say(write: Callable[..., object], event: str, **about: object) -> None:
    """Logs on another thread, and waits for at most MAX_LINE_S."""
    line = threading.Thread(target=write, args=(event,), kwargs=about, name="watchdog line", daemon=True)
    with suppress(RuntimeError):  # no thread can be started: the line is lost, and the watchdog goes on
        line.start()
        line.join(MAX_LINE_S)


def _stacks(only: int | None = None) -> str:
    """The innermost frames of each thread, or of one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "; ".join(
        f"{names.get(ident, ident)}: {_innermost(frame)}"
        for ident, frame in sys._current_frames().items()
        if only in (None, ident)
    )


def _innermost(frame: FrameType) -> str:
    return " < ".join(map(_place, traceback.extract_stack(frame)[: -MAX_LOGGED_FRAMES - 1 : -1]))


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
