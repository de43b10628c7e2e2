"""The placer's account between two beats: what this router did since is added, and forgotten with the next beat."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from cluster.registry import State, WorkerRecord
from services.router.placer import Placer
from services.router.policy import Placement, Rules
from services.view import ClusterView
from tandem.errors import Busy, NoWorker

RECORD = WorkerRecord(
    "decode-0",
    "decode",
    State.READY,
    pid=1,
    incarnation="a",
    address="h:1",
    layout_hash="L",
    max_model_len=1024,
    block_size=16,
    max_running=2,
    blocks_total=100,
    beat=1.0,
)
SILENT: Any = None  # the view is filled by hand; nobody asks a registry


def seen(*records: WorkerRecord) -> ClusterView:
    view = ClusterView(SILENT, 1.0)
    view.workers = {record.worker_id: record for record in records}
    return view


def two(role: str) -> list[WorkerRecord]:
    return [replace(RECORD, worker_id=f"{role}-{number}", role=role) for number in range(2)]


async def once(placer: Placer) -> Placement:
    async with placer.placed(10, 20, 5.0) as placement:
        return placement


async def test_requests_one_after_another_take_turns() -> None:
    """On an idle cluster each pool's workers are used in turn, not the first one always."""
    placer = Placer(seen(*two("decode"), *two("prefill")), 5.0, Rules())
    placements = [await once(placer) for _ in range(4)]
    assert [one.decode.worker_id for one in placements] == ["decode-0", "decode-1"] * 2
    assert [one.prefill and one.prefill.worker_id for one in placements] == ["prefill-0", "prefill-1"] * 2


async def test_what_was_placed_since_the_last_beat_counts() -> None:
    """A record is never old enough to overfill a worker: the third request waits for one of two places."""
    placer = Placer(seen(RECORD), 5.0, Rules())
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(placer.placed(10, 20, 5.0))
        third = asyncio.create_task(once(placer))
        await asyncio.sleep(0)
        assert not third.done()
        await stack.aclose()
        assert (await third).decode.worker_id == "decode-0"


async def test_a_new_beat_replaces_the_account() -> None:
    """Else a request would be counted twice, by the worker and by the router."""
    view = seen(RECORD)
    placer = Placer(view, 0.05, Rules())
    async with placer.placed(10, 20, 5.0):
        view.workers["decode-0"] = replace(RECORD, beat=2.0, running=1)
        assert (await once(placer)).decode.running == 1


async def test_who_said_no_or_failed_is_left_alone() -> None:
    """Until its next beat for the first, until its next life for the second; the other worker serves meanwhile."""
    view = seen(*two("decode"))
    placer = Placer(view, 0.05, Rules())
    first = await once(placer)
    placer.suspect(first.decode)
    assert {(await once(placer)).decode.worker_id for _ in range(3)} == {"decode-1"}
    placer.said_no((await once(placer)).decode)
    view.workers["decode-0"] = replace(view.workers["decode-0"], incarnation="b")
    assert (await once(placer)).decode.incarnation == "b"


async def test_the_wait_ends_with_the_reason() -> None:
    """No worker at all and no room are different answers; both say when to come back."""
    with pytest.raises(NoWorker) as nobody:
        await once(Placer(seen(), 0.01, Rules()))
    full = seen(replace(RECORD, running=2))
    with pytest.raises(Busy) as busy:
        await once(Placer(full, 0.01, Rules()))
    assert nobody.value.retry_after
    assert busy.value.retry_after
