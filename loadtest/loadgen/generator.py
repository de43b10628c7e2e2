"""The open loop: every request is sent at its time, whether earlier ones have ended or not.

    requests ──▶ offer ── one task each ──▶ Target.stream ──▶ Outcome ──▶ Load

A client that is late measures itself. Each outcome therefore has the lateness of its request, and a tick every few
milliseconds measures the lateness of this event loop; a report beyond the bound in either is marked invalid.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from time import perf_counter, process_time

from loadtest.harness.goodput import Load, Objective, Outcome, Say
from loadtest.harness.stats import percentile
from loadtest.loadgen import workload
from loadtest.loadgen.targets import Message, Target
from loadtest.loadgen.workload import Request
from tandem.errors import Busy, TandemError

TICK_S = 0.01
LEAD_S = 0.05  # until the first request is sent
SAY_EVERY = 20  # ticks
ENOUGH = 100_000  # ticks that are kept: the last quarter of an hour


def patience(requests: Sequence[Request], objective: Objective) -> float:
    """Seconds after the last request in which every request that keeps the objective has ended, plus one second."""
    return objective.ttft + objective.tpot * max((request.output for request in requests), default=0) + 1.0


async def offer(
    target: Target,
    requests: Sequence[Request],
    load: Load,
    *,
    settle: float,
    prompt: Callable[[Request, int], list[int]],
    say: Say = lambda load, now: None,
) -> Load:
    """Fills `load` with what became of the `requests`, which are in the order of their times. What is not over `settle`
    seconds after the end of the load is given up, and unfinished."""
    began = perf_counter() + LEAD_S
    used = process_time()
    lags: list[float] = []
    ticking = asyncio.create_task(tick_late(lags, lambda: say(load, perf_counter() - began)))
    tasks: list[asyncio.Task[None]] = []
    try:
        for number, request in enumerate(requests):
            outcome = Outcome(request.at, request.input, request.output)
            messages = target.stream(prompt(request, number), request.output)  # built before its time, sent at it
            await asyncio.sleep(began + request.at - perf_counter())
            load.outcomes.append(outcome)
            tasks.append(asyncio.create_task(follow(messages, outcome, began)))
        await asyncio.sleep(max(0.0, began + load.until - perf_counter()))
        if tasks:
            await asyncio.wait(tasks, timeout=settle)
    finally:
        for task in [*tasks, ticking]:
            task.cancel()
        await asyncio.gather(*tasks, ticking, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()):
            raise error  # a bug: what a server can do is an outcome
    load.lag = percentile(lags or [0.0], 0.99)
    load.cores = (process_time() - used) / (perf_counter() - began)
    return load


async def follow(messages: AsyncGenerator[Message, None], outcome: Outcome, began: float) -> None:
    """Sends the request and reads its messages into `outcome`, whatever ends it."""
    outcome.sent = perf_counter() - began
    total = None
    try:
        async for message in messages:
            if message.tokens:
                outcome.times.append(perf_counter() - began)
                outcome.counts.append(message.tokens)
            if message.total is not None:
                total = message.total
            if message.receipt:
                outcome.cached, outcome.path = message.receipt.cached_tokens, message.receipt.path
        if total is not None and outcome.counts:
            outcome.counts[-1] += total - outcome.tokens
        outcome.state = "done" if outcome.tokens == outcome.output else "failed"
        if outcome.state == "failed":
            outcome.why = f"{outcome.tokens} tokens came instead of {outcome.output}"
    except Busy as error:
        outcome.state, outcome.why, outcome.retry_after = "rejected", error.message, error.retry_after
    except TandemError as error:
        outcome.state, outcome.why = "failed", f"{error.reason}: {error.message}"
    finally:
        outcome.ended = perf_counter() - began
        await messages.aclose()


async def tick_late(lags: list[float], say: Callable[[], None]) -> None:
    """Notes by how much each tick came too late, until it is cancelled."""
    number = 0
    while True:
        due = perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        lags.append(max(0.0, perf_counter() - due))
        del lags[:-ENOUGH]
        number += 1
        if number % SAY_EVERY == 0:
            say()


def prompts(salt: int, factor: int = 1, vocab: int = 256) -> Callable[[Request, int], list[int]]:
    """Prompts of one load; the same salt gives the same prompts."""
    return lambda request, number: workload.tokens(request, number, salt, factor, vocab)
