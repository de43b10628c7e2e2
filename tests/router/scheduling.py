"""Records and views of workers for tests of the request scheduler."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from cluster.state.registry import State, WorkerRecord
from services.router.routing.placement import Placement
from services.router.routing.request_scheduler import RequestScheduler
from services.router.routing.waiting_request import WaitingRequest
from services.worker_liveness import WorkerLiveness
from tandem.settings import RESERVED_OUTPUT_TOKENS

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


def request_place(
    scheduler: RequestScheduler, tokens: int, limit: int, remaining_s: float, **about: Any
) -> AbstractAsyncContextManager[Placement]:
    """Asks for a place for a prompt that may grow to `limit` tokens. `about`: fields of a WaitingRequest, and what
    `placed` takes beside one."""
    beside = {name: about.pop(name) for name in ("ttft_s", "spent_s", "follows") if name in about}
    waiting = WaitingRequest(tokens, ahead=min(RESERVED_OUTPUT_TOKENS, limit - tokens), **about)
    return scheduler.placed(waiting, remaining_s, **beside)


async def once(scheduler: RequestScheduler, **more: Any) -> Placement:
    async with request_place(scheduler, 10, 20, 5.0, **more) as placement:
        return placement
