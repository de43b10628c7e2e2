"""What the measurement of the harm of a prompt counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.scenarios.ttft import MAX_ASKED, Gaps, _beside


class Prompts:
    """A client whose prompts have two tokens. During the one with number `seen` a stream has a gap; after each of them
    streams have begun anew and have one."""

    def __init__(self, gaps: Gaps, seen: int) -> None:
        self.asked = 0
        self._gaps, self._seen = gaps, seen

    async def stream(self, prompt: list[int], **options: Any) -> AsyncIterator[Any]:
        self.asked += 1
        began = perf_counter()
        for receipt in (None, SimpleNamespace(cached_tokens=0)):
            yield SimpleNamespace(token_ids=[1], receipt=receipt)
        if self.asked == self._seen:
            self._gaps.append((began, began + 0.5))
        later = perf_counter() + 1.0
        self._gaps.append((later, later + 1.0))


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here runs in steps whose other tokens would have to be waited for."""
    at_once = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: at_once(0))


async def test_a_prompt_that_came_while_no_stream_ran_is_asked_again() -> None:
    """As on a busy machine, where all streams had ended at once and "nothing was measured"."""
    gaps = Gaps()
    prompts: Any = Prompts(gaps, seen=3)
    _, touched = await _beside(prompts, 100, 8, gaps)
    assert touched == [pytest.approx(0.5)]
    assert prompts.asked == 3


async def test_it_is_not_asked_for_ever() -> None:
    """Streams that are always between two of them end the measurement with a sentence."""
    gaps = Gaps()
    prompts: Any = Prompts(gaps, seen=0)
    with pytest.raises(ValueError, match="no stream ran beside a prompt of 8 tokens"):
        await _beside(prompts, 100, 8, gaps)
    assert prompts.asked == MAX_ASKED
