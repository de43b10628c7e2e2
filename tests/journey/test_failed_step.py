"""An engine's step fails while twelve requests run: all continue with the tokens that they would have had."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.state.registry import State
from engine.engine import Engine
from services.worker import Worker
from tandem.errors import TandemError
from tests.support import oracle

COUNT, NEW = 12, 40


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [rng.choices(range(383), k=12 + 4 * number) for number in range(COUNT)]


async def ask(cluster: Any, prompt: list[int]) -> list[int] | TandemError:
    try:
        answer = await cluster.client.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True, timeout=60)
    except TandemError as error:
        return error
    return list(answer.token_ids)


def failing(patch: pytest.MonkeyPatch, worker: Worker, when: Callable[[int, Any], bool]) -> list[int]:
    """Makes forwards fail for which `when` is true, given their number and batch; returns the numbers of those that
    failed."""
    forward, failed = worker.engine.forward, []
    count = 0

    def broken(batch: Any) -> Any:
        nonlocal count
        count += 1
        if when(count, batch):
            failed.append(count)
            raise RuntimeError("the device had a bad moment")
        return forward(batch)

    patch.setattr(worker.engine, "forward", broken)
    return failed


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[list[int]]:
    return [oracle.greedy(tiny, prompt, NEW) for prompt in prompts()]


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_one_failed_step_costs_nobody_a_token(
    inside: Any, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """No request ends or is placed again, the worker stays, and its ledger balances."""
    async with inside() as cluster:
        failed = failing(monkeypatch, cluster.workers[victim], lambda number, _: number == 3)
        assert await asyncio.gather(*(ask(cluster, prompt) for prompt in prompts())) == plain
        assert failed == [3]
        assert all(worker.state is State.READY for worker in cluster.workers.values())
        await cluster.freed()
        assert await cluster.ledgers_balance()


async def test_control_without_the_second_try_requests_are_placed_again(
    inside: Any, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a failed step that breaks its engine loses the worker, and its requests find no other worker here."""

    def breaks(engine: Engine, plan: Any, before: Any, error: Exception) -> None:
        raise error

    monkeypatch.setattr(Engine, "_failed", breaks)
    async with inside(queue_timeout_s=0.5) as cluster:
        failing(monkeypatch, cluster.workers["decode-0"], lambda number, _: number == 3)
        assert await asyncio.gather(*(ask(cluster, prompt) for prompt in prompts())) != plain
        assert cluster.workers["decode-0"].state is not State.READY


async def test_the_prompt_that_fails_every_step_ends_alone(
    inside: Any, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with a status that says so, on whichever worker it was tried; the workers stay."""
    asked = prompts()
    poison = min(set(range(383)) - {token for tokens in (*asked, *plain) for token in tokens})
    asked[5][2] = poison
    async with inside(decode=2) as cluster:
        for worker in cluster.workers.values():
            failing(monkeypatch, worker, lambda _, batch: poison in batch.token_ids)
        answers = await asyncio.gather(*(ask(cluster, prompt) for prompt in asked))
        poisoned = answers.pop(5)
        assert isinstance(poisoned, TandemError)
        assert "the engine's step with this request failed" in poisoned.message or poisoned.reason == "KILLS_WORKERS"
        assert answers == plain[:5] + plain[6:]
        assert all(worker.state is State.READY for worker in cluster.workers.values())
        await cluster.freed()
        assert await cluster.ledgers_balance()
