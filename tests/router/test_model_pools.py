"""When a router knows that it reaches a decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cluster.state.registry import State, WorkerRecord
from services.grpc_server import Channels
from services.router import model_pools
from services.router.model_pools import ModelPools
from tandem.errors import WorkerLost
from tandem.settings import Settings
from tandem.tasks import end, forever
from tests.support.waiting import until

ONE = WorkerRecord("decode-0", "decode", State.READY, pid=1, incarnation="a", address="h:1")
OTHER = replace(ONE, worker_id="decode-1", address="h:2")


class Muxes:
    """Decode workers that answer, are silent, or refuse."""

    def __init__(self, **answers: bool) -> None:
        self.answers = {name.replace("_", "-"): answers[name] for name in answers}
        self.asked: list[str] = []

    async def of(self, worker: WorkerRecord) -> None:
        self.asked.append(worker.worker_id)
        if worker.worker_id not in self.answers:
            await asyncio.Event().wait()
        if not self.answers[worker.worker_id]:
            raise WorkerLost("another certificate")

    async def close(self) -> None: ...


@asynccontextmanager
async def reaching(muxes: Muxes, *records: WorkerRecord) -> AsyncIterator[ModelPools]:
    nothing: Any = None
    pools = ModelPools(Settings(model="toy", redis="redis://127.0.0.1:9"), Channels(), lambda: nothing)
    pools.muxes = muxes  # type: ignore[assignment]
    pools.view.workers = {record.worker_id: record for record in records}
    task = forever(pools._reach, name="reach")
    await pools.view.nudge()
    yield pools
    await end(task)


async def test_a_silent_worker_does_not_delay_the_one_that_answers() -> None:
    """As after the loss of a host, while the registry still has its worker."""
    async with reaching(Muxes(decode_1=True), ONE, OTHER) as pools:
        await until(lambda: pools.reached, 2.0)


async def test_a_worker_that_refuses_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another process at this address soon, or the network be open."""
    monkeypatch.setattr(model_pools, "REACH_AGAIN_S", 0.0)
    muxes = Muxes(decode_0=False)
    async with reaching(muxes, ONE) as pools:
        await until(lambda: muxes.asked, 2.0)
        assert not pools.reached
        muxes.answers["decode-0"] = True
        await pools.view.nudge()
        await until(lambda: pools.reached, 5.0)
        asked = len(muxes.asked)
        await pools.view.nudge()
        await asyncio.sleep(0.05)
        assert len(muxes.asked) == asked, "it was reached: nobody is asked any more"


async def test_only_ready_decode_workers_are_asked() -> None:
    """One that loads has no service yet, and no request goes to one that drains."""
    muxes = Muxes(decode_0=True, decode_1=True, prefill_0=True)
    starting, draining = replace(ONE, state=State.STARTING), replace(OTHER, state=State.DRAINING)
    prefill = replace(ONE, worker_id="prefill-0", role="prefill")
    async with reaching(muxes, starting, draining, prefill) as pools:
        await asyncio.sleep(0.05)
        assert not muxes.asked
        pools.view.workers = {"decode-0": ONE}
        await pools.view.nudge()
        await until(lambda: pools.reached, 2.0)
