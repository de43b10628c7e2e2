"""`python -m loadtest blocking` notices what holds an event loop, and says what it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, thread_time
from typing import Any

import pytest

from loadtest.scenarios.blocking import bodies
from loadtest.scenarios.blocking.run import ALL, LIMIT_S, Greedy, Held
from loadtest.scenarios.blocking.timed_loop import NOTED_S, note_callbacks
from services.router.preprocess import json_limits
from tandem.errors import InvalidRequest
from tests.support.stopwatch import no_collection


def work(seconds: float) -> None:
    """Of the processor, whatever else runs on this machine."""
    end = thread_time() + seconds
    while thread_time() < end:
        pass


async def holding(seconds: float) -> None:
    work(seconds)
    await asyncio.sleep(0)


@pytest.fixture
def noted(tmp_path: Path) -> Iterator[Path]:
    end = note_callbacks(tmp_path / "callbacks")
    with no_collection():  # which is work of the callback in which it comes
        yield tmp_path / "callbacks"
    end()


async def test_a_coroutine_that_holds_the_loop_is_noted_with_its_time_and_name(noted: Path) -> None:
    """What yields in between, or works on a thread, is not."""
    since = monotonic()
    for _ in range(4):
        await asyncio.create_task(holding(NOTED_S / 4))
    await asyncio.to_thread(work, 2 * LIMIT_S)
    assert Held.read(noted, since, monotonic()).over == 0
    await asyncio.create_task(holding(LIMIT_S))
    found = Held.read(noted, since, monotonic())
    assert (found.over, "holding" in found.what) == (1, True)
    assert LIMIT_S <= found.longest_cpu_s <= found.longest_wall_s + 1e-3
    assert Held.read(noted, monotonic(), monotonic()).longest_cpu_s == 0


def test_every_door_has_bodies_and_the_largest_ones_are_read() -> None:
    """A door whose bodies are all refused by their size would show nothing of what follows."""
    for name, (_, made) in bodies.DOORS.items():
        raws = [json.dumps(body).encode() for body in made()]
        assert max(map(len, raws)) > 200_000, name
        assert any(_read(raw) for raw in raws), name
    assert all(hasattr(Greedy, f"_{name}") for name in bodies.CALLS)
    assert len(ALL) == len(bodies.DOORS) + len(bodies.CALLS)
    assert 7 * bodies.MIB < len(bodies.batch_input()) < 8 * bodies.MIB


def _read(raw: bytes) -> Any:
    try:
        json_limits.check(raw, 9 * 2**16)
    except InvalidRequest:
        return False
    return len(raw) <= 4 * bodies.MIB
