"""A request begins alone while no other one begins."""

from __future__ import annotations

import asyncio

import pytest

from services.decode.begin_gate import BeginGate


async def turns() -> None:
    """Enough turns of the event loop for everybody who can go on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_it_waits_for_those_that_begin_and_keeps_others_out() -> None:
    """In this order: those that begin, the one that begins alone, those that came after it."""
    gate = BeginGate()
    before = await gate.enter()
    alone = asyncio.create_task(gate.enter_alone())
    await turns()
    after = asyncio.create_task(gate.enter())
    await turns()
    assert not alone.done()
    assert not after.done()
    before.close()
    await turns()
    assert alone.done()
    assert not after.done()
    with alone.result():
        await turns()
        assert not after.done()
    (await after).close()


async def test_two_begin_alone_one_after_the_other() -> None:
    """And those that wait meanwhile have their turn as well."""
    gate = BeginGate()
    first = await gate.enter_alone()
    second = asyncio.create_task(gate.enter_alone())
    beside = asyncio.create_task(gate.enter())
    await turns()
    assert not second.done()
    first.close()
    await turns()
    for task in (beside, second):
        if not task.done():
            continue
        task.result().close()
        await turns()
    assert beside.done()
    assert second.done()


async def test_all_that_begin_alone_have_their_turn() -> None:
    """Each alone, however many wait and however long it takes."""
    gate, begin, most = BeginGate(), list[int](), 0

    async def one(number: int) -> None:
        nonlocal most
        with await gate.enter_alone():
            begin.append(number)
            most = max(most, gate._count)
            await turns()

    before = await gate.enter()
    tasks = [asyncio.create_task(one(number)) for number in range(20)]
    await turns()
    before.close()
    before.close()  # safe to repeat: the count stays right
    await asyncio.gather(*tasks)
    assert begin == list(range(20))
    assert most == 1


@pytest.mark.parametrize("held", [True, False])
async def test_a_cancelled_one_leaves_the_gate_open(held: bool) -> None:
    """Whether it waits for its turn, or for those that begin."""
    gate = BeginGate()
    before = await (gate.enter_alone() if held else gate.enter())
    waiting = asyncio.create_task(gate.enter_alone())
    await turns()
    waiting.cancel()
    await turns()
    before.close()
    async with asyncio.timeout(60):
        (await gate.enter()).close()
        (await gate.enter_alone()).close()
