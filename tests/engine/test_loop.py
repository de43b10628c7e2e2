"""The engine has one thread, from its first weight to its last step."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from engine.loop import EngineLoop

IDLE: Any = SimpleNamespace(scheduler=SimpleNamespace(has_work=False))  # an engine as far as the loop looks at it


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
