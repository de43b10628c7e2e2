"""Requests for adapters that wait for a slot, and those that need not; without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from services.adapter_slots import AdapterSlots
from tandem.errors import Busy
from tests.support.waiting import until

NAMES = ("red", "green", "blue")
SOON_S = 20.0


def slots_of(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> AdapterSlots:
    """Two slots for three adapters, which take no time to load."""

    async def load(self: AdapterSlots, slot: Any) -> None:
        pass

    monkeypatch.setattr(AdapterSlots, "_load", load)
    known = {name: SimpleNamespace(name=name, fingerprint=name.encode()) for name in NAMES}
    loop: Any = SimpleNamespace(
        engine=SimpleNamespace(model=SimpleNamespace(lora=SimpleNamespace(known=known, slots=[0, 0])))
    )
    return AdapterSlots(loop, timeout_s)


@asynccontextmanager
async def overlapping(slots: AdapterSlots, name: str) -> AsyncIterator[None]:
    """Requests for this adapter, each of which ends when the next one has asked for it."""
    first = AsyncExitStack()
    await first.enter_async_context(slots.held(name))

    async def go_on(held: AsyncExitStack) -> None:
        while True:
            later = AsyncExitStack()
            asking = asyncio.create_task(later.enter_async_context(slots.held(name)))
            await asyncio.sleep(0)
            await held.aclose()
            await asking
            held = later

    task = asyncio.create_task(go_on(first))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def begun(slots: AdapterSlots, name: str, held: AsyncExitStack) -> asyncio.Task[Any]:
    """A request that has begun to wait."""
    task = asyncio.create_task(held.enter_async_context(slots.held(name)))
    await until(lambda: slots._lock.locked() or task.done(), SOON_S)
    return task


async def test_a_request_whose_adapter_is_loaded_does_not_wait_for_one_that_needs_a_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one slot is closed until it comes free, the one with the fewest requests: later ones for its adapter wait
    behind the first."""
    slots = slots_of(monkeypatch, timeout_s=60.0)
    async with AsyncExitStack() as held, AsyncExitStack() as red:
        await red.enter_async_context(slots.held("red"))
        for _ in range(2):
            await held.enter_async_context(slots.held("green"))
        blue = await begun(slots, "blue", held)
        async with asyncio.timeout(SOON_S):
            await held.enter_async_context(slots.held("green"))
        again = asyncio.create_task(held.enter_async_context(slots.held("red")))
        await asyncio.sleep(0)
        assert not blue.done()
        assert not again.done()
        await red.aclose()
        async with asyncio.timeout(SOON_S):
            assert (await blue).fingerprint == b"blue"
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)


async def test_a_request_that_needs_a_slot_gets_one_however_many_find_theirs_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the slot that was closed first does not come free: behind half of its time, all are closed. The
    control: with none closed it is refused."""
    slots = slots_of(monkeypatch, timeout_s=3.0)
    async with slots.held("red"), overlapping(slots, "green"):
        async with slots.held("blue") as slot:
            assert slot is not None
            assert slot.fingerprint == b"blue"
    monkeypatch.setattr(AdapterSlots, "_closed", property(lambda self: set(), lambda self, value: None), raising=False)
    slots = slots_of(monkeypatch, timeout_s=0.3)
    async with slots.held("red"), overlapping(slots, "green"):
        with pytest.raises(Busy):
            async with slots.held("blue"):
                pass
