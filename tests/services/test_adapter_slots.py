"""Requests for adapters that wait for a slot, and those that need not; without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from engine.loading import lora_loader
from services.adapter_slots import AdapterSlots
from services.runtime_adapters import READING
from tandem.errors import Busy, CheckpointRefused
from tests.support.waiting import until

NAMES = ("red", "green", "blue")
SOON_S = 20.0


def slots_of(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> AdapterSlots:
    """Two slots for three adapters, which take no time to load."""

    async def load(self: AdapterSlots, slot: Any) -> None:
        pass

    monkeypatch.setattr(AdapterSlots, "_load", load)
    known = {name: SimpleNamespace(name=name, fingerprint=name.encode()) for name in NAMES}
    engine_thread: Any = SimpleNamespace(
        engine=SimpleNamespace(model=SimpleNamespace(lora=SimpleNamespace(known=known, slots=[0, 0])))
    )
    runtime_adapters: Any = SimpleNamespace(served={})
    return AdapterSlots(engine_thread, timeout_s, runtime_adapters)


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


async def test_requests_for_an_adapter_that_cannot_be_loaded_take_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: each tries again in the slot that the last one could not fill, so that idle adapters of
    others stay loaded."""
    slots, loads = slots_of(monkeypatch, timeout_s=60.0), list[str]()

    async def load(self: AdapterSlots, slot: Any) -> None:
        loads.append(slot.adapter.name)
        if slot.adapter.name == "blue":
            raise CheckpointRefused("its folder has changed")

    monkeypatch.setattr(AdapterSlots, "_load", load)
    for name in ("red", "blue", "blue", "red"):
        with pytest.raises(CheckpointRefused) if name == "blue" else nullcontext():
            async with slots.held(name):
                pass
    assert loads == ["red", "blue", "blue"]


def reading_slots(monkeypatch: pytest.MonkeyPatch, read_again: Callable[[Any], None]) -> AdapterSlots:
    """Slots that read files as in a worker, by `read_again`."""
    monkeypatch.setattr(lora_loader, "read_again", read_again)
    load = AdapterSlots._load
    slots = slots_of(monkeypatch, timeout_s=60.0)
    monkeypatch.setattr(AdapterSlots, "_load", load)
    return slots


async def test_an_adapter_whose_file_cannot_be_read_holds_up_no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of KV are computed on asyncio's own threads. A file system that hangs holds none of them."""
    reading, over = threading.Event(), threading.Event()

    def read_again(_: Any) -> None:
        reading.set()
        over.wait(SOON_S)
        raise CheckpointRefused("it was not there")

    slots = reading_slots(monkeypatch, read_again)
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        async with AsyncExitStack() as held:
            asking = asyncio.create_task(held.enter_async_context(slots.held("red")))
            try:
                await until(reading.is_set, SOON_S)
                async with asyncio.timeout(SOON_S / 2):
                    await asyncio.to_thread(lambda: None)
            finally:
                over.set()
                await asyncio.gather(asking, return_exceptions=True)


async def test_adapters_whose_files_cannot_be_read_hold_up_no_other_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in a slot and one that is prepared, on a file system that hangs; the adapter of the other slot is read."""
    begun, over = set[str](), threading.Event()

    def read_again(adapter: Any) -> None:
        begun.add(adapter.name)
        if adapter.name == "red":
            over.wait(SOON_S)
        raise CheckpointRefused("it was not there")

    slots = reading_slots(monkeypatch, read_again)
    READING.submit(over.wait, SOON_S)  # as `prepare` does
    async with AsyncExitStack() as held:
        asking = asyncio.create_task(held.enter_async_context(slots.held("red")))
        try:
            await until(lambda: "red" in begun, SOON_S)
            with pytest.raises(CheckpointRefused):
                async with asyncio.timeout(SOON_S / 2):
                    await held.enter_async_context(slots.held("green"))
        finally:
            over.set()
            await asyncio.gather(asking, return_exceptions=True)
