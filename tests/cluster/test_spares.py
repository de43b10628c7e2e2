"""Which process becomes a worker where there are spares, without a Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from cluster.placement import Placement
from cluster.ray_actors import SPARE, RayHost
from tandem.settings import Settings


class Process:
    """Stands for an actor that Ray has placed, or not yet."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id, self.placed, self.killed = worker_id, False, False

    async def prepare(self) -> None:
        await asyncio.Event().wait()

    def become(self, worker_id: str) -> None:
        self.worker_id = worker_id

    def kill(self) -> None:
        self.killed = True


class Host(RayHost):
    def __init__(self) -> None:
        super().__init__(Settings(model="fake"), "fake", Placement("home"))
        self.made: list[Process] = []

    def _create(self, worker_id: str, roles: Collection[str]) -> Any:
        self.made.append(Process(worker_id))
        return self.made[-1]


async def test_a_spare_that_waits_for_room_does_not_take_a_workers() -> None:
    """The room that a dead worker leaves is its successor's: a spare that Ray has not placed yet ends before."""
    host = Host()
    host.keep_spares(1)
    worker = host.create("decode-0")
    spare, successor = host.made
    assert (spare.worker_id, spare.killed) == (SPARE, True)
    assert (successor.worker_id, worker) == ("decode-0", successor)
    host.keep_spares(0)


async def test_a_spare_that_runs_becomes_the_worker() -> None:
    """And a router never takes one."""
    host = Host()
    host.keep_spares(1)
    host.made[0].placed = True
    assert host.create("router-0") is not host.made[0]
    assert host.create("decode-0") is host.made[0]
    assert host.made[0].worker_id == "decode-0"
    host.keep_spares(0)
