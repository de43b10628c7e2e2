"""The placer's account between two beats: what this router did since is added, and forgotten with the next beat."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from cluster.registry import State, WorkerRecord
from services.decode import servicer
from services.router import placer
from services.router.placer import Placer
from services.router.policy import Placement, Rules
from services.view import ClusterView
from tandem.errors import Busy, DeadlineExceeded, NoWorker

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


def test_a_decode_worker_reserves_the_room_that_the_router_counts() -> None:
    """Router and worker have the number each, because the router loads no torch."""
    assert placer.AHEAD_TOKENS == servicer.AHEAD_TOKENS


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


# ---- waiting at the router for a prefill worker that would begin soon

DECODE = replace(RECORD, max_running=16, blocks_total=10_000, prompt_rate=1000.0)
PREFILL = replace(DECODE, worker_id="prefill-0", role="prefill")


class Asked:
    """Requests to one placer: where each went, and the end of each by hand."""

    def __init__(self, queue_timeout_s: float = 5.0) -> None:
        self.placer = Placer(seen(DECODE, PREFILL), queue_timeout_s, Rules("never"))
        self.placed: list[tuple[int, Placement]] = []  # (tokens, placement) in the order of placing
        self.third = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, *prompts: int) -> None:
        for tokens in prompts:
            self._tasks.append(asyncio.create_task(self._one(tokens)))
            await self.settle()

    async def _one(self, tokens: int) -> None:
        async with self.placer.placed(tokens, tokens + 10, 60.0) as placement:
            self.placed.append((tokens, placement))
            if len(self.placed) == 3:
                self.third.set()
            await asyncio.Event().wait()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def first_token(self, number: int) -> None:
        await self.placer.prefilled(self.placed[number][1])
        await self.settle()

    @property
    def order(self) -> list[int]:
        return [tokens for tokens, _ in self.placed]

    async def __aenter__(self) -> Asked:
        return self

    async def __aexit__(self, *about: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_a_prompt_waits_at_the_router_until_a_prefill_worker_would_begin_soon() -> None:
    """Two prompts keep it busy; the third holds no blocks anywhere until one of them has its first token."""
    async with Asked() as asked:
        await asked.ask(900, 900, 900, 900)
        assert asked.order == [900, 900]
        await asked.first_token(0)
        assert asked.order == [900] * 3
        await asked.first_token(1)
        assert asked.order == [900] * 4


async def test_control_short_work_is_not_kept_back() -> None:
    """A worker gets as many small prompts as it can pack into its next steps."""
    async with Asked() as asked:
        await asked.ask(*[40] * 10)
        assert asked.order == [40] * 10


async def test_who_waits_is_placed_shortest_first_but_nobody_is_overtaken_by_more_than_it_has() -> None:
    """A prompt of 800 tokens that waits lets one of 400 pass; then what is left to it is no more than the next has."""
    async with Asked() as asked:
        await asked.ask(900, 900, 800, 400, 400, 400)
        for number in range(6):
            await asked.first_token(number)
        assert asked.order == [900, 900, 400, 800, 400, 400]


async def test_patience_ends_with_the_queue_timeout() -> None:
    """It is an optimisation, no limit: where there is room, nobody is refused for it."""
    async with Asked(queue_timeout_s=0.02) as asked:
        await asked.ask(900, 900, 900)
        async with asyncio.timeout(5):
            await asked.third.wait()
        assert asked.order == [900] * 3


async def test_one_who_leaves_while_waiting_leaves_nothing() -> None:
    """Its place in the order is free, and the next one is placed in its turn."""
    async with Asked() as asked:
        await asked.ask(900, 900, 500, 600)
        asked._tasks[2].cancel()
        await asked.settle()
        await asked.first_token(0)
        assert asked.order == [900, 900, 600]


# ---- who would wait for too long is told at once


def slow(**about: Any) -> ClusterView:
    """A decode and a prefill worker; the latter computes 1000 tokens a second."""
    return seen(DECODE, replace(PREFILL, **about))


async def refusal(placer: Placer, tokens: int, **about: Any) -> Busy:
    with pytest.raises(Busy) as refused:
        async with asyncio.timeout(1.0), placer.placed(tokens, tokens + 10, about.pop("remaining_s", 60.0), **about):
            pass
    return refused.value


@pytest.mark.parametrize("about", [{"ttft_s": 2.5}, {"remaining_s": 2.5}, {}])
async def test_who_cannot_have_its_first_token_in_time_is_refused_at_once(about: dict[str, Any]) -> None:
    """By its own objective, its deadline, or the cluster's objective: 2 s of others, 1 s of its own, 2.5 s allowed."""
    placer = Placer(slow(), 60.0, Rules("never", ttft=None if about else 2.5))
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(placer.placed(1000, 1010, 60.0))
        refused = await refusal(placer, 1000, **about)
        assert refused.reason == "OVERLOADED"
        assert refused.retry_after == pytest.approx(0.5)
        with pytest.raises(TimeoutError):  # what is shorter comes before them, and waits for its turn
            async with asyncio.timeout(0.05), placer.placed(400, 410, about.pop("remaining_s", 60.0), **about):
                pass


async def test_what_arrives_is_counted_also_where_it_is_refused() -> None:
    """An autoscaler sees what is wanted, not what is served: a request that is refused counts, what is cached and what
    has begun does not. What waits is told as well."""
    placer = Placer(slow(), 60.0, Rules("never"))
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(placer.placed(1000, 1010, 60.0))
        await refusal(placer, 1000, ttft_s=2.5)
        assert (placer.arrived, placer.waiting_tokens()) == (3000, 0)
        await refusal(placer, 1000, ttft_s=1.1, cached=lambda record: 600)
        assert placer.arrived == 3400
        waits = asyncio.create_task(stack.enter_async_context(placer.placed(1000, 1010, 60.0, begun=True)))
        await asyncio.sleep(0)
        assert (placer.arrived, placer.waiting_tokens()) == (3400, 1000)
        waits.cancel()
        await asyncio.wait({waits})


async def test_control_without_an_objective_it_waits() -> None:
    """And so does one whose client has had tokens already, whatever the objective."""
    for rules, begun in ((Rules("never"), False), (Rules("never", ttft=2.5), True)):
        placer = Placer(slow(), 60.0, rules)
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(placer.placed(1000, 1010, 60.0))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), placer.placed(1000, 1010, 60.0, begun=begun):
                    pass


async def test_nobody_is_refused_for_a_prompt_that_is_late_by_itself() -> None:
    """An idle cluster serves a prompt that takes longer than the cluster's objective; only its own one refuses it."""
    placer = Placer(slow(), 60.0, Rules("never", ttft=0.5))
    async with placer.placed(1000, 1010, 60.0):
        pass
    assert (await refusal(placer, 1000, ttft_s=0.5)).reason == "OVERLOADED"


async def test_a_deadline_that_no_cluster_could_keep_is_over_at_once() -> None:
    """1 s of computing within 0.5 s: to come again later would not help, so nobody is told to."""
    placer = Placer(slow(), 60.0, Rules("never"))
    with pytest.raises(DeadlineExceeded) as over:
        async with placer.placed(1000, 1010, 0.5):
            pass
    assert over.value.retry_after is None
    async with placer.placed(400, 410, 0.5):  # and it has left the queue
        pass


async def test_the_wait_ends_when_it_is_of_no_more_use() -> None:
    """Expected to be in time, and then it was not: no place is taken for an answer that nobody wants."""
    view = slow(prompt_rate=0.0)
    placer = Placer(view, 60.0, Rules("never"))
    view.workers["decode-0"] = replace(DECODE, running=DECODE.max_running, prompt_rate=0.0)
    assert (await refusal(placer, 100, ttft_s=0.05)).reason == "QUEUE_TIMEOUT"
