"""Which process becomes a worker if there are spares, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from cluster.placement import Placement
from cluster.ray_actors import SPARE, RayHost
from tandem.settings import Settings


class Process:
    """A stand-in for an actor that Ray has placed, or not yet."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id, self.placed, self.killed, self.node = worker_id, False, False, ""

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
    """The resources of a dead worker are for its successor: a spare that Ray has not placed yet ends first."""
    host = Host()
    host.keep_spares(1)
    worker = host.create("decode-0")
    spare, successor = host.made
    assert (spare.worker_id, spare.killed) == (SPARE, True)
    assert (successor.worker_id, worker) == ("decode-0", successor)
    host.keep_spares(0)


async def test_a_spare_that_runs_becomes_the_worker() -> None:
    """A running spare becomes the worker, and never a router."""
    host = Host()
    host.keep_spares(1)
    host.made[0].placed = True
    assert host.create("router-0") is not host.made[0]
    assert host.create("decode-0") is host.made[0]
    assert host.made[0].worker_id == "decode-0"
    host.keep_spares(0)


class Head:
    """A stand-in for Ray's head, where node b drains."""

    def draining(self) -> set[str]:
        return {"b"}


async def test_a_spare_on_a_node_that_ends_becomes_nobody() -> None:
    """A spare on a draining node ends, so that the node can end; the control is a spare on another node."""
    host = Host()
    host._settings = Settings(model="fake", ray_address="10.0.0.1:6379")
    host._gcs = Head()  # type: ignore[assignment]
    host.keep_spares(2)
    ends, stays = host.made
    ends.placed = stays.placed = True
    ends.node, stays.node = "b", "c"
    assert await host.leaving() == {"b"}
    assert (ends.killed, stays.killed) == (True, False)
    assert host.create("decode-0") is stays
    host.keep_spares(0)
