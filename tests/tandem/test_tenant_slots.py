"""Places for jobs: bounded, in rotation of tenants, and never lost."""

from __future__ import annotations

import asyncio

import pytest

from tandem.tenancy.tenant_slots import TenantSlots


class Places:
    def __init__(self, slots: TenantSlots) -> None:
        self._slots = slots
        self.got: list[str] = []
        self._ends: dict[asyncio.Task[None], asyncio.Event] = {}

    def ask(self, tenant: str) -> asyncio.Task[None]:
        over = asyncio.Event()

        async def run() -> None:
            async with self._slots.slot(tenant):
                self.got.append(tenant)
                await over.wait()

        task = asyncio.create_task(run())
        self._ends[task] = over
        return task

    async def end(self, task: asyncio.Task[None]) -> None:
        self._ends[task].set()
        await task
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_tenants_take_turns(places: Places) -> None:
    """Whoever has asked for a hundred places waits behind somebody's first."""
    crowd = [places.ask("a") for _ in range(5)]
    await settled()
    assert places.got == ["a", "a"]
    other = places.ask("b")
    await places.end(crowd[0])
    await places.end(crowd[1])
    assert sorted(places.got[2:]) == ["a", "b"]
    assert not other.done()
    for task in [*crowd[2:], other]:
        await places.end(task)
    assert places.got.count("a") == 5


async def test_a_tenant_has_no_more_than_its_part(places: Places) -> None:
    """Also when places are free; who has no name may have all."""
    places._slots = TenantSlots(3, 2)
    crowd = [places.ask("a") for _ in range(3)]
    await settled()
    assert places.got == ["a", "a"]
    b = places.ask("b")
    await settled()
    assert places.got == ["a", "a", "b"]
    for task in [*crowd, b]:
        await places.end(task)
    places._slots, places.got = TenantSlots(3, 2), []
    nameless = [places.ask("") for _ in range(3)]
    await settled()
    assert len(places.got) == 3
    for task in nameless:
        await places.end(task)


@pytest.mark.parametrize("served", [False, True], ids=["waiting", "just served"])
async def test_who_gives_up_keeps_no_place(places: Places, served: bool) -> None:
    """Cancelled while it waits, or in the moment in which its turn comes."""
    first, second, third = (places.ask("a") for _ in range(3))
    await settled()
    if served:
        places._ends[first].set()
        await asyncio.sleep(0)  # the place is given on now
    third.cancel()
    await settled()
    for task in (first, second):
        await places.end(task)
    assert (places._slots._free, dict(places._slots._held), places._slots._waiting) == (2, {}, {})


@pytest.fixture
def places() -> Places:
    return Places(TenantSlots(2, 2))
