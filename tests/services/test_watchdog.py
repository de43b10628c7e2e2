"""The watchdog finds work that makes no progress, and takes nothing else for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Hashable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services import watchdog
from services.watchdog import EXIT_STATUS, Check, Watchdog

ROOT = Path(__file__).parents[2]
MOST_S = 2.0


class Work:
    """What a check sees, and what the watchdog found."""

    def __init__(self) -> None:
        self.under_way: tuple[Hashable, float] | None = None
        self.found: list[str] = []

    def watched(self) -> Watchdog:
        check = Check("the engine", "ENGINE_STUCK", lambda: self.under_way)
        return Watchdog([check], lambda check, why: self.found.append(check.reason), loop_most_s=1e9)


def look(dog: Watchdog, seconds: float, every_s: float = 0.25) -> None:
    """As often as its thread would."""
    start = dog._last
    for turn in range(1, round(seconds / every_s) + 1):
        dog.observe(start + turn * every_s)


async def test_the_same_work_for_too_long_is_stuck() -> None:
    """Found once, within half a second of the bound."""
    work = Work()
    dog = work.watched()
    work.under_way = ("step 7", MOST_S)
    look(dog, MOST_S)
    assert work.found == []
    look(dog, 0.5)
    assert work.found == ["ENGINE_STUCK"]
    look(dog, 10.0)
    assert work.found == ["ENGINE_STUCK"]


@pytest.mark.parametrize("other", [None, ("step 3", 1e9)])
async def test_checks_of_one_name_are_each_watched(other: tuple[Hashable, float] | None) -> None:
    """A decode worker has one for each layout that it converts from: one that idles or works hides no other."""
    found: list[str] = []
    checks = [Check("the KV transport", "TRANSPORT_STUCK", lambda work=work: work) for work in (("call 7", 2.0), other)]
    look(Watchdog(checks, lambda check, why: found.append(check.reason), loop_most_s=1e9), MOST_S + 0.5)
    assert found == ["TRANSPORT_STUCK"]


async def test_work_that_goes_on_or_ends_is_not_stuck() -> None:
    """However long all of it takes."""
    work = Work()
    dog = work.watched()
    for step in range(10):
        work.under_way = (step, MOST_S)
        look(dog, MOST_S)
    work.under_way = None
    look(dog, 10.0)
    work.under_way = (9, MOST_S)  # the same number again, after a time in which there was nothing
    look(dog, MOST_S)
    assert work.found == []


async def test_a_process_that_was_stopped_finds_nothing_stuck() -> None:
    """Its clock went on, and nothing of it ran, the watchdog as little as the work."""
    work = Work()
    dog = work.watched()
    work.under_way = ("step 7", MOST_S)
    look(dog, 1.0)
    dog.observe(dog._last + 60.0)
    assert work.found == []
    look(dog, 1.0)
    assert work.found == ["ENGINE_STUCK"]  # the control: not because it looked once only


async def test_a_check_that_fails_leaves_the_others_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread goes on."""
    found = asyncio.Event()
    here = asyncio.get_running_loop()
    calls = 0

    def fails_at_first() -> tuple[Hashable, float]:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise ZeroDivisionError
        return "step 7", 0.01

    monkeypatch.setattr(watchdog, "end_process", lambda status: None)
    dog = Watchdog(
        [Check("the engine", "ENGINE_STUCK", fails_at_first)],
        lambda *_: here.call_soon_threadsafe(found.set),
        loop_most_s=1e9,
        every_s=0.005,
    )
    dog.start()
    async with asyncio.timeout(60):
        await found.wait()
    dog.stop()


async def test_a_blocked_event_loop_is_logged_with_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each time that it is blocked."""
    monkeypatch.setattr(watchdog, "LOOP_BLOCKED_LOG_S", 0.05)
    monkeypatch.setattr(watchdog, "end_process", lambda status: None)
    dog = Watchdog([], lambda *_: None, loop_most_s=1e9, every_s=0.01)
    here = "MainThread: test_a_blocked_event_loop"
    with capture_logs() as logs:
        dog.start()
        await asyncio.sleep(0.1)
        while here not in str(logs):
            time.sleep(0.01)  # noqa: ASYNC251, this is the fault
        time.sleep(0.1)  # noqa: ASYNC251, some more looks
        await asyncio.sleep(0.1)
    dog.stop()
    stacks = [entry["stack"] for entry in logs if entry["event"] == "watchdog.loop_blocked"]
    # On a busy machine the loop itself is late, too, and stands elsewhere.
    assert sum(stack.startswith(here) for stack in stacks) == 1, stacks


ENDS = """
import asyncio, sys, time
from services.watchdog import Watchdog

async def main():
    dog = Watchdog([], lambda check, why: dog.exit_within(0.0), loop_most_s=0.2, every_s=0.02)
    dog.start()
    await asyncio.sleep(0.1)
    time.sleep(60)

asyncio.run(main())
"""


def test_a_process_whose_event_loop_is_blocked_ends_without_it() -> None:
    """At once and with a status of its own: whoever supervises it starts another one."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", ENDS], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == EXIT_STATUS
    assert time.monotonic() - began < 20
    assert "watchdog.stuck" in done.stdout + done.stderr


UNREAD = """
import asyncio, os
from contextlib import suppress
from services.watchdog import Watchdog

async def main():
    dog = Watchdog([], lambda check, why: dog.exit_within(0.0), loop_most_s=0.2, every_s=0.02)
    dog.start()
    os.set_blocking(1, False)
    with suppress(BlockingIOError):
        while True:
            os.write(1, b"x" * 4096)
    os.set_blocking(1, True)
    await asyncio.sleep(0.1)
    print("a line of the log", flush=True)

asyncio.run(main())
"""


def test_a_process_whose_log_nobody_reads_ends() -> None:
    """Its event loop hangs in a line of the log, where the watchdog's own lines would hang as well."""
    command = [sys.executable, "-c", UNREAD]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.wait(60) == EXIT_STATUS
        finally:
            process.kill()
