"""The engine has one thread, from its first weight to its last step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from engine.loop import CALL_S, LEAST_STEP_S, UNKNOWN_S, EngineLoop, Watch
from engine.pace import Pace
from engine.scheduler import Chunk
from tandem.errors import StepFailed, Unavailable

# An engine as far as the loop looks at it.
IDLE: Any = SimpleNamespace(scheduler=SimpleNamespace(has_work=False), plan=[], retries=[])


def threads() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}


def compute() -> int:
    """Something that two threads do together; returns who asked for it."""
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1.0)
    return threading.get_ident()


async def test_an_engine_is_built_and_used_by_one_thread_with_one_set_of_helpers() -> None:
    """A second set would put all helpers to sleep after each operator: with two cores a step took twice as long."""
    before, built_by = threads(), []

    def make() -> Any:
        built_by.append(compute())
        return IDLE

    loop = EngineLoop(make)
    try:
        await loop.built()
        assert loop.engine is IDLE
        assert [await loop.call(compute)] == built_by
        assert len(threads() - before) == 2  # itself and one helper
        await asyncio.to_thread(compute)  # the control: another thread has a helper of its own
        assert len(threads() - before) == 4
    finally:
        loop.stop()


async def test_what_goes_wrong_while_it_is_built_reaches_who_waits_for_it() -> None:
    """And its thread ends."""

    def make() -> Any:
        raise ZeroDivisionError

    loop = EngineLoop(make)
    with pytest.raises(ZeroDivisionError):
        await loop.built()
    loop.stop()
    assert not loop._thread.is_alive()


def wait_until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    return holds()


async def test_whoever_waits_for_an_engine_that_hangs_can_be_told() -> None:
    """The call that it is in, those behind it and those that come later; what it answers after all reaches nobody."""
    loop = EngineLoop(lambda: IDLE)
    await loop.built()
    hangs, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        go_on.wait(10)

    calls = [asyncio.create_task(loop.call(what)) for what in (hang, lambda: None)]
    assert await asyncio.to_thread(hangs.wait, 5)
    assert loop.under_way is not None
    assert loop.under_way.most_s == CALL_S
    loop.abandon(Unavailable("it hangs", reason="ENGINE_STUCK"))
    loop.abandon(Unavailable("it hangs still"))
    for call in (*calls, loop.call(lambda: True)):
        with pytest.raises(Unavailable, match=r"it hangs$"):
            await call
    go_on.set()
    await asyncio.to_thread(loop._thread.join, 5)
    assert not loop.alive


async def test_a_loop_without_work_has_nothing_under_way() -> None:
    """However long ago the last call was."""
    loop = EngineLoop(lambda: IDLE)
    await loop.built()
    await loop.call(lambda: None)
    assert await asyncio.to_thread(wait_until, lambda: loop.under_way is None)
    loop.stop()


@pytest.mark.parametrize(
    ("pace", "prompt_tokens", "context", "most_s"),
    [
        (Pace(), 100, 100, UNKNOWN_S),  # nothing is known yet
        (Pace(0.005, 0.001, 2000.0), 0, 500, LEAST_STEP_S),  # a stream's step of milliseconds
        (Pace(0.1, 0.0, 2000.0), 500, 0, 3.5),  # ten times 0.1 s and 0.25 s
        (Pace(0.1, 0.0, 2000.0), 500, 8192, 10.5),  # attention to so much takes longer than was measured
    ],
)
async def test_how_long_a_step_may_take_follows_from_the_engines_own_pace(
    pace: Pace, prompt_tokens: int, context: int, most_s: float
) -> None:
    """Generous, but for a hang of a fast engine."""
    sequence = SimpleNamespace(done=context - 1, grammar=None)
    engine: Any = SimpleNamespace(
        **{**vars(IDLE), "plan": [SimpleNamespace(sequence=sequence, tokens=1)]},
        pace=pace,
        prompt_tokens=prompt_tokens,
        streams=1,
    )
    loop = EngineLoop(lambda: engine)
    await loop.built()
    assert loop._most_s() == pytest.approx(most_s)
    loop.stop()


@pytest.mark.parametrize(("reason", "failure"), [("ENGINE_STUCK", StepFailed), ("TRANSPORT_BROKEN", Unavailable)])
async def test_a_step_is_held_against_its_sequences_only_when_it_is_the_reason(
    reason: str, failure: type[Exception]
) -> None:
    """A router counts StepFailed towards poison; a transport that broke during the step is no request's fault."""
    engine: Any = SimpleNamespace(
        plan=[Chunk(SimpleNamespace(id="mine"), 1)],  # type: ignore[arg-type]
        scheduler=SimpleNamespace(has_work=False),
    )
    loop = EngineLoop(lambda: engine)
    await loop.built()
    watch = loop._watches["mine"] = Watch()
    loop._doing = "step"
    loop.abandon(Unavailable("over", reason=reason))
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable) as raised:
            await watch.next()
    assert type(raised.value) is failure
