"""Records and views of workers for tests of the request scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.state.registry import State, WorkerRecord
from services.router.routing.placement import Placement
from services.router.routing.request_scheduler import RequestScheduler
from services.worker_liveness import WorkerLiveness

RECORD = WorkerRecord(
    "decode-0",
    "decode",
    State.READY,
    pid=1,
    incarnation="a",
    address="h:1",
    computes_with="L",
    max_model_len=1024,
    block_size=16,
    max_running=2,
    blocks_total=100,
    beat=1.0,
)
SILENT: Any = None  # the registry of a view that is filled by hand


def seen(*records: WorkerRecord) -> WorkerLiveness:
    view = WorkerLiveness(SILENT, 1.0)
    view.workers = {record.worker_id: record for record in records}
    return view


def two(role: str) -> list[WorkerRecord]:
    return [replace(RECORD, worker_id=f"{role}-{number}", role=role) for number in range(2)]


async def once(scheduler: RequestScheduler, **more: Any) -> Placement:
    async with scheduler.placed(10, 20, 5.0, **more) as placement:
        return placement
