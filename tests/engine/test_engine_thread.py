"""The engine has one thread, from its first weight to its last step."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from engine.core.progress import Progress
from engine.core.scheduler import Chunk
from engine.core.step_time import StepTime
from engine.decoding.speculative import Drafting
from engine.engine_thread import (
    CALL_S,
    GRAMMAR_S,
    GRAMMAR_TOKEN_S,
    LEAST_STEP_S,
    TIMES,
    UNKNOWN_S,
    EngineThread,
    SequenceStream,
    StepOutput,
)
from tandem.errors import InternalError, StepFailed, Unavailable
from tests.support.waiting import until

# The parts of an engine that the loop reads.
NO_MASKS = SimpleNamespace(waits=0)
IDLE: Any = SimpleNamespace(has_work=False, plan=[], retries=[], masks=NO_MASKS, speculation=None, ranks=None)


def threads() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}


def compute() -> int:
    """Work for two threads; returns the calling thread's id."""
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1.0)
    return threading.get_ident()


async def test_an_engine_is_built_and_used_by_one_thread_with_one_set_of_helpers() -> None:
    """A second set would put all helpers to sleep after each operator: with two cores a step took twice as long."""
    before, built_by = threads(), []

    def make() -> Any:
        built_by.append(compute())
        return IDLE

    loop = EngineThread(make)
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
    """And the thread ends."""

    def make() -> Any:
        raise ZeroDivisionError

    loop = EngineThread(make)
    with pytest.raises(ZeroDivisionError):
        await loop.built()
    loop.stop()
    assert not loop._thread.is_alive()


async def test_whoever_waits_for_an_engine_that_hangs_can_be_told() -> None:
    """The current call, the queued ones and later ones fail; an answer that still comes is dropped."""
    loop = EngineThread(lambda: IDLE)
    await loop.built()
    hangs, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        go_on.wait(60)

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
    assert not loop._thread.is_alive()


async def test_a_loop_without_work_has_nothing_under_way() -> None:
    """However long ago the last call was."""
    loop = EngineThread(lambda: IDLE)
    await loop.built()
    await loop.call(lambda: None)
    await until(lambda: loop.under_way is None, 5)
    loop.stop()


@pytest.mark.parametrize(
    ("pace", "prompt_tokens", "context", "most_s"),
    [
        (StepTime(), 100, 100, UNKNOWN_S),  # nothing is known yet
        (StepTime(0.005, 0.001, 2000.0), 0, 500, LEAST_STEP_S),  # a stream's step of milliseconds
        (StepTime(0.1, 0.0, 2000.0), 500, 0, 3.5),  # ten times 0.1 s and 0.25 s
        (StepTime(0.1, 0.0, 2000.0), 500, 8192, 10.5),  # attention over 8,192 tokens takes longer than measured
    ],
)
async def test_how_long_a_step_may_take_follows_from_the_engines_own_pace(
    pace: StepTime, prompt_tokens: int, context: int, most_s: float
) -> None:
    """Generous, yet short enough to detect a hang of a fast engine."""
    sequence = SimpleNamespace(num_computed=context - 1, grammar=None)
    engine: Any = SimpleNamespace(
        **{**vars(IDLE), "plan": [SimpleNamespace(sequence=sequence, tokens=1)]},
        pace=pace,
        prompt_tokens=prompt_tokens,
        streams=1,
        model=SimpleNamespace(latent=False),
    )
    loop = EngineThread(lambda: engine)
    await loop.built()
    assert loop._most_s(False, Drafting()) == pytest.approx(most_s)
    loop.stop()


@pytest.mark.parametrize(
    ("prompt_rate", "drafted", "prompt_tokens", "latent", "least_s"),
    [
        (1000.0, 8192, 0, False, 8.0),  # a drafter that catches up with a long prompt in one forward
        (0.0, 1000, 0, False, 10.0),  # likewise on a worker that has computed no prompt yet
        (0.0, 0, 1000, False, 10.0),  # its first prompt
        (1000.0, 0, 0, True, 16 * 2.0),  # 16 streams, each step of which expands 20,000 latents
    ],
)
async def test_work_that_was_not_measured_has_its_time(
    prompt_rate: float, drafted: int, prompt_tokens: int, latent: bool, least_s: float
) -> None:
    """A healthy worker is not ended for a step that takes as long as its tokens would take as a prompt."""
    sequences = [SimpleNamespace(num_computed=19_999 if latent else 100, grammar=None) for _ in range(16)]
    engine: Any = SimpleNamespace(
        **{**vars(IDLE), "plan": [SimpleNamespace(sequence=one, tokens=1) for one in sequences]},
        pace=StepTime(0.01, 0.0, prompt_rate),
        prompt_tokens=prompt_tokens,
        streams=16,
        model=SimpleNamespace(latent=latent),
    )
    loop = EngineThread(lambda: engine)
    await loop.built()
    assert least_s <= loop._most_s(False, Drafting(1, drafted)) <= 10 * TIMES * least_s
    loop.stop()


@pytest.mark.parametrize(("raised", "reason"), [("RANK_LOST", "RANK_LOST"), ("RANK_0_FAILED", "ENGINE_BROKEN")])
async def test_a_lost_rank_is_the_reason_also_if_the_step_fails_first(raised: str, reason: str) -> None:
    """Otherwise the step's requests would be suspected of it: rank 0 may fail before `on_lost` is called. In the
    control rank 0 failed, and the others with it."""
    loop = EngineThread(lambda: IDLE)
    await loop.built()

    def fail() -> None:
        raise Unavailable("of a step", reason=raised)

    loop.after_iteration = fail
    with suppress(Unavailable):
        await loop.call(lambda: None)
    await until(lambda: loop.broken is not None, 5)
    assert loop.broken is not None
    assert loop.broken.reason == reason
    loop.stop()


async def test_each_forward_of_a_drafter_has_its_own_time() -> None:
    """Catching up with a prompt in many forwards makes one long step, which is not a hang."""
    drafter = SimpleNamespace(under_way=Drafting())
    engine: Any = SimpleNamespace(
        **{
            **vars(IDLE),
            "plan": [SimpleNamespace(sequence=SimpleNamespace(num_computed=9, grammar=None), tokens=1)],
            "speculation": SimpleNamespace(drafter=drafter, tokens=4),
        },
        pace=StepTime(0.01, 0.0, 1000.0),
        prompt_tokens=0,
        streams=1,
        model=SimpleNamespace(latent=False),
    )
    loop = EngineThread(lambda: engine)
    await loop.built()
    loop._begin("step")
    seen = []
    for drafter.under_way in (Drafting(), Drafting(1, 512), Drafting(2, 512), Drafting(3)):
        assert loop.under_way is not None
        seen.append(loop.under_way)
    assert len({one.number for one in seen}) == 4
    assert [one.most_s > LEAST_STEP_S for one in seen] == [False, True, True, False]
    loop.stop()


async def test_only_a_step_that_waits_for_its_masks_has_a_grammars_time() -> None:
    """A step counts as hung after 2 s, with a grammar, too; filling a mask may take longer and has its own bounds."""
    sequence = SimpleNamespace(num_computed=100, grammar=object(), tokens=[7] * 30, prompt_len=10)
    masks = SimpleNamespace(waits=0)
    engine: Any = SimpleNamespace(
        has_work=False,
        plan=[SimpleNamespace(sequence=sequence, tokens=1)],
        pace=StepTime(0.005, 0.001, 2000.0),
        prompt_tokens=0,
        streams=1,
        masks=masks,
        speculation=None,
        ranks=None,
        model=SimpleNamespace(latent=False),
    )
    loop = EngineThread(lambda: engine)
    await loop.built()
    loop._begin("step")
    seen = []
    for masks.waits in range(3):  # before, while it waits, and after
        assert loop.under_way is not None
        seen.append(loop.under_way)
    assert [one.most_s for one in seen] == [
        LEAST_STEP_S,
        LEAST_STEP_S + GRAMMAR_S + 20 * GRAMMAR_TOKEN_S,
        LEAST_STEP_S,
    ]
    assert len({one.number for one in seen}) == 3, "each of them has all of its own time"
    loop.stop()


@pytest.mark.parametrize(
    ("reason", "others", "failure"),
    [
        ("ENGINE_STUCK", [], "STEP_FAILED"),
        ("ENGINE_STUCK", ["other"], "SHARED_STEP_FAILED"),
        ("TRANSPORT_BROKEN", [], "TRANSPORT_BROKEN"),
    ],
)
async def test_a_step_is_held_against_its_sequences_only_when_it_is_the_reason(
    reason: str, others: list[str], failure: str
) -> None:
    """A router counts StepFailed towards poison, as proof where the sequence was the only one; a transport that broke
    during the step is not a request's fault."""
    engine: Any = SimpleNamespace(
        plan=[Chunk(SimpleNamespace(id=name), 1) for name in ("mine", *others)],  # type: ignore[arg-type]
        has_work=False,
        masks=NO_MASKS,
        ranks=None,
    )
    loop = EngineThread(lambda: engine)
    await loop.built()
    watch = loop._watches["mine"] = SequenceStream()
    loop._doing = "step"
    loop.abandon(Unavailable("over", reason=reason))
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable) as raised:
            await watch.next()
    assert raised.value.reason == failure
    assert isinstance(raised.value, StepFailed) == (reason == "ENGINE_STUCK")


async def test_a_request_of_an_engine_that_broke_keeps_its_own_error() -> None:
    """Its clean-up has nothing to free, and raises nothing that would replace it. Other calls fail, as the control."""
    loop = EngineThread(lambda: IDLE)
    await loop.built()
    loop.abandon(Unavailable("it hangs", reason="ENGINE_STUCK"))
    await loop.drop("mine")
    with pytest.raises(Unavailable, match="it hangs"):
        await loop.call(lambda: None)


async def test_an_error_comes_after_the_tokens_of_its_own_step() -> None:
    """Drafts may give some before the place where no token is possible; without drafts the client gets these, too."""
    loop, taken = EngineThread(lambda: IDLE), list[int | None]()
    await loop.built()
    one: Any = SimpleNamespace(id="one")
    watch = loop._watches["one"] = SequenceStream()

    def take(outputs: list[StepOutput]) -> bool:
        taken.extend(output.progress.token for output in outputs)
        return False

    following = asyncio.create_task(watch.follow(take))
    await asyncio.sleep(0)
    loop._deliver([Progress(one, 5, 7, None), Progress(one, 6, None, None, error=InternalError("no"))], 0.0, 1.0)
    async with asyncio.timeout(60):
        with pytest.raises(InternalError):
            await following
    assert taken == [7]
    loop.stop()


async def test_a_step_that_was_queued_began_when_the_one_before_it_had_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device computed it while the host did other things: workers are chosen by what a step takes the device."""
    progress = SimpleNamespace(sequence=SimpleNamespace(id="nobody's"))
    engine: Any = SimpleNamespace(
        **(vars(IDLE) | {"plan": [1], "failures": 0, "prompt_tokens": 0, "streams": 1, "pace": StepTime()}),
        ahead=SimpleNamespace(flight=None),
        step=lambda: [progress],
    )
    loop = EngineThread(lambda: engine)
    await loop.built()
    seconds: list[float] = []
    loop.after_step = lambda _prompts, _streams, took: seconds.append(took)
    clock = iter([10.0, 12.0, 15.0, 100.0, 101.0])
    monkeypatch.setattr("engine.engine_thread.monotonic", lambda: next(clock))
    for queued in (False, True, False):
        engine.ahead.flight = queued or None
        loop._step()
    assert seconds == [2.0, 3.0, 1.0]
    monkeypatch.undo()
    loop.stop()
