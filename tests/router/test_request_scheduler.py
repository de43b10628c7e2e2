"""The scheduler's account between two beats: what this router did since is added, and forgotten with the next beat."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from cluster.state.registry import WorkerRecord
from services.router.routing import request_scheduler as module
from services.router.routing import worker_table
from services.router.routing.placement import Placement, RoutingConfig
from services.router.routing.request_scheduler import RequestScheduler
from services.router.routing.useful_wait import PROBE_S
from services.router.routing.waiting_request import WaitingRequest
from services.router.routing.worker_selector import choose_prefill
from services.worker_liveness import WorkerLiveness
from tandem.errors import Busy, DeadlineExceeded, NoWorker
from tests.router.scheduling import RECORD, once, request_place, seen, two


async def test_requests_one_after_another_take_turns() -> None:
    """On an idle cluster each pool's workers are used in turn, not the first one always."""
    scheduler = RequestScheduler(seen(*two("decode"), *two("prefill")), 5.0, RoutingConfig())
    placements = [await once(scheduler) for _ in range(4)]
    assert [one.decode.worker_id for one in placements] == ["decode-0", "decode-1"] * 2
    assert [one.prefill and one.prefill.worker_id for one in placements] == ["prefill-0", "prefill-1"] * 2


async def test_what_was_placed_since_the_last_beat_counts() -> None:
    """A record is never old enough to overfill a worker: the third request waits for one of two places."""
    scheduler = RequestScheduler(seen(RECORD), 5.0, RoutingConfig())
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(request_place(scheduler, 10, 20, 5.0))
        third = asyncio.create_task(once(scheduler))
        await asyncio.sleep(0)
        assert not third.done()
        await stack.aclose()
        assert (await third).decode.worker_id == "decode-0"


async def test_a_new_beat_replaces_the_account() -> None:
    """Else a request would be counted twice, by the worker and by the router."""
    view = seen(RECORD)
    scheduler = RequestScheduler(view, 0.05, RoutingConfig())
    async with request_place(scheduler, 10, 20, 5.0):
        view.workers = {**view.workers, "decode-0": replace(RECORD, beat=2.0, running=1)}
        assert (await once(scheduler)).decode.running == 1


async def test_a_beat_that_knows_nothing_of_a_request_makes_no_room_when_it_ends() -> None:
    """The record was written before the request came to the worker, and seen while it ran: no worker has more free
    blocks than it has, or it would be preferred to all others until its next beat."""
    view = seen(*two("decode"))
    scheduler = RequestScheduler(view, 0.05, RoutingConfig())
    async with request_place(scheduler, 10, 20, 5.0) as first:
        view.workers = {name: replace(one, beat=2.0) for name, one in view.workers.items()}
        await scheduler.keep_up()
    second = await once(scheduler)
    assert second.decode.worker_id != first.decode.worker_id
    assert (await once(scheduler)).decode.free_blocks == RECORD.blocks_total


@pytest.mark.parametrize("admitted", [True, False])
async def test_what_a_worker_never_counted_is_not_taken_from_its_record(admitted: bool) -> None:
    """A request that was refused before the worker accounted for it, while a record came: the load in that is of
    others. One that was admitted is counted there, and its end makes room before the next beat."""
    view = seen(RECORD)
    scheduler = RequestScheduler(view, 0.05, RoutingConfig())
    async with request_place(scheduler, 10, 20, 5.0) as placement:
        if admitted:
            scheduler.admitted(placement)
        view.workers = {"decode-0": replace(RECORD, beat=2.0, running=1, blocks_held=40)}
        await scheduler.keep_up()
    decode = (await once(scheduler)).decode
    assert (decode.running, decode.free_blocks > 60) == ((0, True) if admitted else (1, False))


async def test_a_prefill_worker_is_relieved_once_of_a_prompt() -> None:
    """Its record has counted the prompt and its end long before the stream ends: the load in it is of others."""
    view = seen(RECORD, *two("prefill"))
    scheduler = RequestScheduler(view, 5.0, RoutingConfig())
    async with request_place(scheduler, 10, 20, 5.0) as first:
        scheduler.admitted(first)
        scheduler.prefilled(first)
        assert first.prefill
        name = first.prefill.worker_id
        view.workers = {
            **view.workers,
            name: replace(view.workers[name], beat=2.0, begun=3, running=2, blocks_held=40),
        }
        await scheduler.keep_up()
    scheduler._workers.settle()
    prefill = scheduler._workers.prefills.workers[name]
    assert (prefill.running, prefill.free_blocks) == (2, 60)


async def test_what_is_taken_back_was_added() -> None:
    """A refusal without a new record leaves the account as it was."""
    scheduler = RequestScheduler(seen(replace(RECORD, running=1, blocks_held=40)), 0.05, RoutingConfig())
    for _ in range(3):
        decode = (await once(scheduler)).decode
        assert (decode.running, decode.free_blocks) == (1, 60)


async def test_who_said_no_or_failed_is_left_alone() -> None:
    """Until its next beat for the first, until its next life for the second; the other worker serves meanwhile."""
    view = seen(*two("decode"))
    scheduler = RequestScheduler(view, 0.05, RoutingConfig())
    first = await once(scheduler)
    scheduler.suspect(first.decode)
    assert {(await once(scheduler)).decode.worker_id for _ in range(3)} == {"decode-1"}
    scheduler.rejected(await once(scheduler), full=True)
    view.workers = {**view.workers, "decode-0": replace(view.workers["decode-0"], incarnation="b")}
    assert (await once(scheduler)).decode.incarnation == "b"


async def test_a_worker_that_is_full_is_usable_again_when_something_of_ours_ends_there() -> None:
    """Without a beat. The end of the very request that it refused is no such thing: it would be asked again at once."""
    scheduler = RequestScheduler(seen(RECORD), 0.02, RoutingConfig())
    async with request_place(scheduler, 10, 20, 5.0) as held:
        scheduler.admitted(held)
        async with request_place(scheduler, 10, 20, 5.0) as refused:
            scheduler.rejected(refused, full=True)
        with pytest.raises(Busy):
            await once(scheduler)
    assert (await once(scheduler)).decode.worker_id == "decode-0"


async def test_a_request_that_was_refused_counts_once() -> None:
    """For its tenant's turn, and for what has arrived: it comes again."""
    view = seen(replace(RECORD, max_running=1, running=1))
    scheduler, order = RequestScheduler(view, 5.0, RoutingConfig()), list[str]()

    async def ask(tenant: str, tokens: int, refusals: int = 0) -> None:
        async with request_place(scheduler, tokens, tokens + 10, 5.0, tenant=tenant) as placement:
            order.append(tenant)
            if refusals:
                scheduler.rejected(placement, full=True)
        if refusals:
            await ask(tenant, tokens, refusals - 1)

    tasks = [asyncio.create_task(ask("unlucky", 100, refusals=1))]
    tasks += [asyncio.create_task(ask(*about)) for about in (("unlucky", 300), ("other", 150), ("other", 200))]
    async with asyncio.timeout(60):
        for beat in range(2, 4):
            await asyncio.sleep(0)
            view.workers = {"decode-0": replace(RECORD, max_running=1, beat=float(beat))}
            await scheduler.keep_up()
            for _ in range(20):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    assert order == ["unlucky", "unlucky", "other", "unlucky", "other"]
    assert scheduler.arrived == 100 + 300 + 150 + 200


async def test_accounts_of_workers_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long absence, or with the worker's next life. Not after a short one: the registry may have forgotten, and
    what runs there still runs."""
    now = 100.0
    monkeypatch.setattr(worker_table, "monotonic", lambda: now)
    view = seen(*two("decode"))
    scheduler, both = RequestScheduler(view, 5.0, RoutingConfig()), view.workers
    async with request_place(scheduler, 10, 20, 5.0) as first:
        view.workers = {name: one for name, one in both.items() if name != first.decode.worker_id}
        await scheduler.keep_up()
        now += worker_table.MAX_ABSENCE_S
        view.workers = dict(both)
        await scheduler.keep_up()
        assert scheduler._workers.decodes.workers[first.decode.worker_id].running == 1
        view.workers = {}
        await scheduler.keep_up()
        now += worker_table.MAX_ABSENCE_S + 1
        view.workers = {}
        await scheduler.keep_up()
        assert len(scheduler._workers._local) == 0
    for life in range(3):
        view.workers = {"decode-0": replace(RECORD, incarnation=f"life-{life}")}
        await scheduler.keep_up()
        assert len(scheduler._workers._local) == 1


async def test_what_changed_in_the_view_is_taken_over_a_few_workers_at_a_time() -> None:
    """So that streams have their turn in between; and what comes in the middle of it is not lost."""
    records = [replace(RECORD, worker_id=f"decode-{number}") for number in range(10 * worker_table.RECORDS_PER_SLICE)]
    view = seen(*records)
    scheduler, turns = RequestScheduler(view, 0.01, RoutingConfig()), 0
    keeping = asyncio.create_task(scheduler.keep_up())
    while not keeping.done():
        await asyncio.sleep(0)
        turns += 1
        if turns == 5:
            view.workers = {one.worker_id: replace(one, running=2, beat=2.0) for one in records}
    assert turns > 10
    with pytest.raises(Busy):
        await once(scheduler)
    view.workers = {one.worker_id: one for one in records[:3]}
    await scheduler.keep_up()
    assert set(scheduler._workers.decodes.workers) == set(view.workers)


async def test_whoever_waits_is_placed_when_the_view_shows_room() -> None:
    """Without looking for it."""
    view = seen(replace(RECORD, running=2))
    scheduler = RequestScheduler(view, 5.0, RoutingConfig())
    waits = asyncio.create_task(once(scheduler))
    await asyncio.sleep(0)
    view.workers = {"decode-0": replace(RECORD, beat=2.0)}
    await scheduler.keep_up()
    assert (await waits).decode.worker_id == "decode-0"


async def test_the_wait_ends_with_the_reason() -> None:
    """No worker at all and no room are different answers; both say when to come back."""
    with pytest.raises(NoWorker) as nobody:
        await once(RequestScheduler(seen(), 0.01, RoutingConfig()))
    full = seen(replace(RECORD, running=2))
    with pytest.raises(Busy) as busy:
        await once(RequestScheduler(full, 0.01, RoutingConfig()))
    assert nobody.value.retry_after == 5.0, "a process has to start"
    assert (busy.value.reason, busy.value.retry_after) == ("QUEUE_TIMEOUT", 1.0)


async def test_the_only_worker_that_failed_is_still_of_use() -> None:
    """It lives, and nobody else could serve. With another one it is left alone."""
    for count, expected in ((1, "decode-0"), (2, "decode-1")):
        scheduler = RequestScheduler(seen(*two("decode")[:count]), 0.05, RoutingConfig())
        first = await once(scheduler)
        assert first.decode.worker_id == "decode-0"
        scheduler.suspect_unless_alone(first.decode, "decode")
        assert {(await once(scheduler)).decode.worker_id for _ in range(3)} == {expected}


async def test_the_worker_that_has_the_beginning_is_asked_first() -> None:
    """Whoever has it is named by role; the request counts there with what is left to compute."""
    scheduler = RequestScheduler(seen(DECODE, *two_fast()), 5.0, RoutingConfig("never"))
    about: dict[str, Any] = {
        "cached": lambda record: 600 if record.worker_id == "prefill-1" else 0,
        "holders": lambda role: ["prefill-1"] if role == "prefill" else [],
    }
    async with request_place(scheduler, 1000, 1010, 60.0, **about) as placement:
        assert placement.prefill
        assert placement.prefill.worker_id == "prefill-1"
        scheduler._workers.settle()
        assert scheduler._workers.prefills.workers["prefill-1"].prompts == (400,)
        assert scheduler.arrived == 400
    scheduler._workers.settle()
    assert scheduler._workers.prefills.workers["prefill-1"].prompts == ()


async def test_a_request_holds_the_room_that_it_reserves() -> None:
    """Its tokens and 64 of output, or as many as it may generate; where its KV is, one block for its tokens."""
    scheduler = RequestScheduler(seen(DECODE), 5.0, RoutingConfig("always"))
    for tokens, limit, kv_holder, blocks in (
        (100, 110, "", 7),
        (100, 400, "", 11),
        (112, 128, "", 8),
        (100, 400, "decode-0", 5),
    ):
        async with request_place(scheduler, tokens, limit, 60.0, kv_holder=kv_holder):
            scheduler._workers.settle()
            held = scheduler._workers.decodes.workers["decode-0"]
            assert DECODE.blocks_total - held.free_blocks == blocks
            assert held.running == 1
        scheduler._workers.settle()
        assert scheduler._workers.decodes.workers["decode-0"].free_blocks == DECODE.blocks_total


async def test_a_copy_of_recurrent_states_takes_room_where_kv_arrives() -> None:
    """Beside the prompt's blocks, and not where the decode worker computes the prompt itself. Who follows another
    answer to a prompt begins with no state that a worker still has, so it is placed like all others."""
    decode, prefill = replace(DECODE, state_blocks=3), replace(PREFILL, state_blocks=3)
    for rules, blocks in (("never", 14), ("always", 11)):
        scheduler = RequestScheduler(seen(decode, prefill), 5.0, RoutingConfig(rules))  # type: ignore[arg-type]
        async with request_place(scheduler, 100, 400, 60.0, kv_holder="decode-0") as placement:
            scheduler._workers.settle()
            free = scheduler._workers.decodes.workers["decode-0"].free_blocks
            assert decode.blocks_total - free == blocks
            assert (placement.prefill is None) == (rules == "always")
    full = replace(decode, blocks_total=11)
    with pytest.raises(Busy):
        async with request_place(RequestScheduler(seen(full, prefill), 0.01, RoutingConfig()), 100, 400, 60.0):
            pass


# ---- waiting at the router for a prefill worker that would begin soon

DECODE = replace(RECORD, max_running=16, blocks_total=10_000, prompt_rate=1000.0)
PREFILL = replace(DECODE, worker_id="prefill-0", role="prefill")


def two_fast() -> list[WorkerRecord]:
    return [replace(PREFILL, worker_id=f"prefill-{number}") for number in range(2)]


class Asked:
    """Requests to one scheduler: where each went, and the end of each by hand."""

    def __init__(self, queue_timeout_s: float = 5.0, **about: Any) -> None:
        self._about = about
        self.scheduler = RequestScheduler(seen(DECODE, PREFILL), queue_timeout_s, RoutingConfig("never"))
        self.placed: list[tuple[int, Placement]] = []  # (tokens, placement) in the order of placing
        self.third = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, *prompts: int) -> None:
        for tokens in prompts:
            self._tasks.append(asyncio.create_task(self._one(tokens)))
            await self.settle()

    async def _one(self, tokens: int) -> None:
        async with request_place(self.scheduler, tokens, tokens + 10, 60.0, **self._about) as placement:
            self.placed.append((tokens, placement))
            if len(self.placed) == 3:
                self.third.set()
            await asyncio.Event().wait()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def first_token(self, number: int) -> None:
        self.scheduler.prefilled(self.placed[number][1])
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


@pytest.mark.parametrize("follows", [False, True])
async def test_patience_ends_with_the_queue_timeout(follows: bool) -> None:
    """It is an optimisation, no limit: where there is room, nobody is refused for it, nor waits until the deadline."""
    async with Asked(queue_timeout_s=0.02, follows=follows) as asked:
        await asked.ask(900, 900, 900)
        async with asyncio.timeout(30):
            await asked.third.wait()
        assert asked.order == [900] * 3


async def test_a_place_that_comes_free_is_tried_for_those_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for none of the 200 behind them, nor does each that comes have it tried for the first."""
    tried: list[int] = []
    place = RequestScheduler._place

    def counted(self: RequestScheduler, one: Any, behind: int) -> Placement | None:
        tried.append(one.tokens)
        return place(self, one, behind)

    monkeypatch.setattr(RequestScheduler, "_place", counted)
    async with Asked() as asked:
        await asked.ask(900, 900, *range(1000, 1200))
        assert len(tried) <= 4
        for number in range(5):
            tried.clear()
            await asked.first_token(number)
            assert tried == [1000 + number, 1001 + number]


async def test_many_who_can_be_placed_are_placed_some_in_each_turn_of_the_loop() -> None:
    """A whole pool came free: tokens of streams do not wait until everybody has a place."""
    view = seen(replace(RECORD, running=100, max_running=100, blocks_total=10_000))
    scheduler, placed = RequestScheduler(view, 5.0, RoutingConfig()), list[int]()

    async def ask() -> None:
        async with request_place(scheduler, 10, 20, 5.0):
            placed.append(1)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(ask()) for _ in range(50)]
    await asyncio.sleep(0)
    view.workers = {"decode-0": replace(view.workers["decode-0"], running=0, beat=2.0)}
    await scheduler.keep_up()
    most = 0
    while len(placed) < 50:
        before = scheduler.waiting()
        await asyncio.sleep(0)
        most = max(most, before - scheduler.waiting())
    assert most == module.PLACEMENTS_PER_SLICE
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_who_leaves_while_waiting_leaves_nothing() -> None:
    """Its place in the order is free, and the next one is placed in its turn."""
    async with Asked() as asked:
        await asked.ask(900, 900, 500, 600)
        asked._tasks[2].cancel()
        await asked.settle()
        await asked.first_token(0)
        assert asked.order == [900, 900, 600]


# ---- who would wait for too long is told at once


def slow(**about: Any) -> WorkerLiveness:
    """A decode and a prefill worker; the latter computes 1000 tokens a second."""
    return seen(DECODE, replace(PREFILL, **about))


async def refusal(scheduler: RequestScheduler, tokens: int, **about: Any) -> Busy:
    with pytest.raises(Busy) as refused:
        async with (
            asyncio.timeout(30.0),
            request_place(scheduler, tokens, tokens + 10, about.pop("remaining_s", 60.0), **about),
        ):
            pass
    return refused.value


class Held:
    """Requests to a scheduler with one place, which each keeps until its end."""

    def __init__(self) -> None:
        self.scheduler = RequestScheduler(seen(replace(RECORD, max_running=1)), 60.0, RoutingConfig())
        self.order: list[str] = []
        self._ends: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, tenant: str, tokens: int) -> None:
        self._tasks.append(asyncio.create_task(self._one(tenant, tokens)))
        await self.settle()

    async def _one(self, tenant: str, tokens: int) -> None:
        async with request_place(self.scheduler, tokens, tokens + 10, 60.0, tenant=tenant):
            self.order.append(tenant)
            self._ends.append(asyncio.Event())
            await self._ends[-1].wait()

    async def next(self) -> None:
        """The one that has the place ends."""
        self._ends[-1].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_where_no_rate_is_known_the_wait_is_as_long_as_places_took_to_come_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four in the last 6 s, and three who wait before it: it would be placed in about 6 s, and 4.5 s are allowed."""
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    held = Held()
    for _ in range(8):
        await held.ask("", 10)
    for _ in range(4):
        now[0] += 2.0
        await held.next()
    assert held.scheduler.waiting() == 3
    refused = await refusal(held.scheduler, 10, ttft_s=4.5)
    assert (refused.reason, refused.retry_after) == ("OVERLOADED", pytest.approx(1.5))
    await held.close()


async def test_what_a_tenant_was_sent_counts_for_its_turn() -> None:
    """A short prompt of one that had much generated comes after a long one of another."""
    held = Held()
    await held.ask("first", 10)
    await held.ask("writer", 10)
    await held.ask("reader", 100)
    held.scheduler.generated("writer", 200)
    await held.next()
    await held.next()
    assert held.order == ["first", "reader", "writer"]
    await held.close()


async def test_a_request_that_nobody_waits_behind_costs_what_it_takes_itself() -> None:
    """10 tokens at 1,000 a second, on either path: the prefill worker computes them. Nothing is left of it then."""
    scheduler = RequestScheduler(seen(DECODE, PREFILL), 5.0, RoutingConfig())
    placement = await once(scheduler)
    assert placement.prefill
    assert placement.estimate
    assert placement.estimate.remote_cost_s == pytest.approx(0.01)
    assert not scheduler._placed


@pytest.mark.parametrize("about", [{"ttft_s": 2.5}, {"remaining_s": 2.5}, {}])
async def test_who_cannot_have_its_first_token_in_time_is_refused_at_once(about: dict[str, Any]) -> None:
    """By its own objective, its deadline, or the cluster's objective: 2 s of others, 1 s of its own, 2.5 s allowed."""
    scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never", ttft=None if about else 2.5))
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(request_place(scheduler, 1000, 1010, 60.0))
        refused = await refusal(scheduler, 1000, **about)
        assert refused.reason == "OVERLOADED"
        assert refused.retry_after == pytest.approx(0.5)
        with pytest.raises(TimeoutError):  # what is shorter comes before them, and waits for its turn
            async with (
                asyncio.timeout(0.05),
                request_place(scheduler, 400, 410, about.pop("remaining_s", 60.0), **about),
            ):
                pass


async def test_what_arrives_is_counted_also_where_it_is_refused() -> None:
    """An autoscaler sees what is wanted, not what is served: a request that is refused counts, what is cached and what
    has begun does not. What waits is told as well."""
    scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never"))
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(request_place(scheduler, 1000, 1010, 60.0))
        await refusal(scheduler, 1000, ttft_s=2.5)
        assert (scheduler.arrived, scheduler.waiting_tokens()) == (3000, 0)
        await refusal(scheduler, 1000, ttft_s=1.1, cached=lambda record: 600)
        assert scheduler.arrived == 3400
        waits = asyncio.create_task(stack.enter_async_context(request_place(scheduler, 1000, 1010, 60.0, begun=True)))
        await asyncio.sleep(0)
        assert (scheduler.arrived, scheduler.waiting_tokens()) == (3400, 1000)
        waits.cancel()
        await asyncio.wait({waits})


async def test_a_jobs_prompt_arrives_when_it_is_placed() -> None:
    """Until then it asks again. Counted while they ask, a thousand jobs would look like a burst, and later like
    nothing."""
    scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never"))
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(request_place(scheduler, 1000, 1010, 60.0))
        for _ in range(3):
            await refusal(scheduler, 1000, ttft_s=2.5, is_job=True)
        assert scheduler.arrived == 2000
    async with request_place(scheduler, 1000, 1010, 60.0, is_job=True):
        assert scheduler.arrived == 3000
    async with request_place(scheduler, 1000, 1010, 60.0, is_job=True) as placement:
        scheduler.rejected(placement, full=True)
    assert scheduler.arrived == 3000


async def test_control_without_an_objective_it_waits() -> None:
    """And so does one whose client has had tokens already, of it or of another completion, whatever the objective."""
    late = RoutingConfig("never", ttft=2.5)
    begun = ({"begun": True}, {"kv_holder": "gone"}, {"follows": True})
    for rules, about in ((RoutingConfig("never"), {}), *((late, about) for about in begun)):
        scheduler = RequestScheduler(slow(), 60.0, rules)
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(request_place(scheduler, 1000, 1010, 60.0))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), request_place(scheduler, 1000, 1010, 60.0, **about):
                    pass


async def test_an_estimate_that_fails_leaves_nobody_in_the_queue() -> None:
    """Whatever it raises: nobody would wait for that place, and it would be taken for ever."""

    def broken(_: Any) -> int:
        raise KeyError("a")

    scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never"))
    with pytest.raises(KeyError):
        async with request_place(scheduler, 1000, 1010, 60.0, cached=broken):
            pass
    assert scheduler.waiting() == 0


async def test_further_completions_wait_their_turn() -> None:
    """A tenant that asks for many does not come before one that asks for one. The control: one that has begun does."""
    for about, polite_waits in (({"kv_holder": "gone"}, False), ({"begun": True}, True)):
        scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never"))

        async def wait(tenant: str, tokens: int, about: Any, scheduler: RequestScheduler = scheduler) -> None:
            async with request_place(scheduler, tokens, tokens + 10, 60.0, tenant=tenant, **about):
                await asyncio.Event().wait()  # keeps its place

        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(request_place(scheduler, 1000, 1010, 60.0, tenant="greedy"))
            waiting = [asyncio.create_task(wait("greedy", 1000, about)) for _ in range(8)]
            waiting.append(asyncio.create_task(wait("polite", 400, {})))
            await asyncio.sleep(0)
            assert scheduler.waiting() == len(waiting)
        await asyncio.sleep(0.05)
        assert ("polite" in scheduler._queue._waiting) is polite_waits
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_nobody_is_refused_for_a_prompt_that_is_late_by_itself() -> None:
    """An idle cluster serves a prompt that takes longer than the cluster's objective; only its own one refuses it."""
    scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never", ttft=0.5))
    async with request_place(scheduler, 1000, 1010, 60.0):
        pass
    assert (await refusal(scheduler, 1000, ttft_s=0.5)).reason == "OVERLOADED"


@pytest.mark.parametrize("late", [{"ttft_s": 0.5}, {"remaining_s": 0.5}], ids=["objective", "deadline"])
async def test_an_idle_cluster_computes_what_would_be_late_now_and_then(
    late: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate may be too slow, and nothing else would correct it. One in some seconds, and none while the cluster
    computes other prompts, which correct it as well."""
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never"))

    async def placed(tokens: int = 1000, remaining_s: float = 60.0, **about: float) -> bool:
        try:
            async with request_place(scheduler, tokens, tokens + 10, remaining_s, **about):
                return True
        except (Busy, DeadlineExceeded):
            return False

    assert not await placed(**late)
    now[0] += PROBE_S
    assert [await placed(**late) for _ in range(3)] == [True, False, False]
    for _ in range(4):
        now[0] += PROBE_S / 2
        assert await placed(100)
        assert not await placed(**late)
    now[0] += PROBE_S
    assert await placed(**late)


@pytest.mark.parametrize(
    ("tokens", "more", "probed"),
    [(10, {}, True), (1000, {"cached": lambda record: 996}, True), (1000, {}, False)],
    ids=["short", "cached", "control"],
)
async def test_a_prompt_of_few_tokens_is_no_probe(
    tokens: int, more: dict[str, Any], probed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker learns next to nothing from it: with one every few seconds, long prompts would be refused for good. The
    control: one that corrects the estimate takes the turn of a probe."""
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never"))
    for _ in range(4):
        now[0] += PROBE_S / 2
        async with request_place(scheduler, tokens, tokens + 10, 60.0, **more) as placement:
            scheduler.prefilled(placement)
    if probed:
        async with request_place(scheduler, 1000, 1010, 60.0, ttft_s=0.5) as placement:
            assert placement.prefill
    assert (await refusal(scheduler, 1000, ttft_s=0.5)).reason == "OVERLOADED"


async def test_prompts_that_a_decode_worker_computes_in_time_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is the prefill worker's, and too slow. Prompts on the decode worker do not correct it. When there
    are too many for the decode worker, one goes to the prefill worker and counts as the probe."""
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    fast = replace(DECODE, prompt_rate=1000.0, step_s=0.01)
    scheduler = RequestScheduler(seen(fast, replace(PREFILL, prompt_rate=100.0)), 60.0, RoutingConfig())
    now[0] += PROBE_S
    about: dict[str, Any] = {"ttft_s": 5.0}
    async with AsyncExitStack() as stack:
        paths = [await stack.enter_async_context(request_place(scheduler, 1000, 1010, 60.0, **about)) for _ in range(5)]
        assert [one.prefill is None for one in paths] == [True, True, True, True, False]
        assert (await refusal(scheduler, 1000, **about)).reason == "OVERLOADED"


async def test_a_prompt_that_waits_for_others_is_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: seconds without a first token, in which a worker computes."""
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never"))
    async with request_place(scheduler, 1000, 1010, 60.0):
        now[0] += 10 * PROBE_S
        refused = await refusal(scheduler, 1000, ttft_s=1.5)
        assert (refused.reason, refused.retry_after) == ("OVERLOADED", pytest.approx(0.5))


async def test_who_cannot_be_in_time_on_an_idle_cluster_is_not_told_to_come_again() -> None:
    """1 s of computing within 0.5 s of its own objective. Behind others it is told: a worker that is busy may be taken
    for slower than it is."""
    scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never"))
    assert (await refusal(scheduler, 1000, ttft_s=0.5)).retry_after is None
    async with request_place(scheduler, 1000, 1010, 60.0):
        assert (await refusal(scheduler, 1000, ttft_s=0.5)).retry_after == pytest.approx(1.5)


async def test_a_deadline_that_no_cluster_could_keep_is_over_at_once() -> None:
    """1 s of computing within 0.5 s: to come again later would not help, so nobody is told to."""
    scheduler = RequestScheduler(slow(), 60.0, RoutingConfig("never"))
    with pytest.raises(DeadlineExceeded) as over:
        async with request_place(scheduler, 1000, 1010, 0.5):
            pass
    assert (over.value.retry_after, over.value.bound) == (None, "at least 1.00 s")
    with pytest.raises(DeadlineExceeded) as late:  # the control: a first attempt took the time
        async with request_place(scheduler, 1000, 1010, 0.5, spent_s=9.5):
            pass
    assert late.value.bound is None
    async with request_place(scheduler, 400, 410, 0.5):  # and it has left the queue
        pass


async def test_the_wait_ends_when_it_is_of_no_more_use() -> None:
    """Expected to be in time, and then it was not: no place is taken for an answer that nobody wants."""
    view = slow(prompt_rate=0.0)
    scheduler = RequestScheduler(view, 60.0, RoutingConfig("never"))
    view.workers = {**view.workers, "decode-0": replace(DECODE, running=DECODE.max_running, prompt_rate=0.0)}
    assert (await refusal(scheduler, 100, ttft_s=0.05)).reason == "QUEUE_TIMEOUT"


async def test_a_pair_between_which_kv_did_not_arrive_is_avoided_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair, and neither of the two workers: each goes on with others, and another incarnation is a new pair."""
    decodes, prefills = two("decode"), two("prefill")
    several = RequestScheduler(seen(*decodes, *prefills), 5.0, RoutingConfig(local="never"))
    bad = await once(several)
    assert bad.prefill
    several.avoid(bad.decode, bad.prefill)
    found = [await once(several) for _ in range(8)]
    pairs = {(one.decode.worker_id, one.prefill.worker_id) for one in found if one.prefill}
    assert pairs == {("decode-0", "prefill-1"), ("decode-1", "prefill-0"), ("decode-1", "prefill-1")}
    alone = RequestScheduler(seen(decodes[0], prefills[0]), 5.0, RoutingConfig(local="never"))
    first = await once(alone)
    assert first.prefill
    alone.avoid(first.decode, first.prefill)
    assert (await once(alone)).why_local == "handoffs from prefill-0 to decode-0 failed lately"
    alone._view.workers = {**alone._view.workers, "prefill-0": replace(prefills[0], incarnation="b")}
    assert (await once(alone)).prefill
    monkeypatch.setattr(module, "monotonic", lambda: monotonic() + module.SUSPECT_S)
    alone._view.workers = {**alone._view.workers, "prefill-0": prefills[0]}
    assert (await once(alone)).prefill


async def test_a_lost_prefill_worker_counts_once_and_is_no_handoff_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is suspected, so the others share what waits, and the receipt does not blame the pair. The control: one that
    is only avoided is still among the usable ones."""
    prefills = [replace(RECORD, worker_id=f"prefill-{number}", role="prefill") for number in range(3)]
    shares = list[float]()

    def chosen(*about: Any) -> Placement:
        shares.append(about[5])
        return choose_prefill(*about)

    monkeypatch.setattr(module, "choose_prefill", chosen)
    for lost in (True, False):
        scheduler = RequestScheduler(seen(RECORD, *prefills), 5.0, RoutingConfig(local="never"))
        bad = await once(scheduler)
        assert bad.prefill
        (scheduler.lost if lost else scheduler.avoid)(bad.decode, bad.prefill)
        scheduler._place(WaitingRequest(10, ahead=10), queued_behind=4)
        assert shares[-1] == 4 / 2
    alone = RequestScheduler(seen(RECORD, prefills[0]), 5.0, RoutingConfig(local="never"))
    bad = await once(alone)
    assert bad.prefill
    alone.lost(bad.decode, bad.prefill)
    assert (await once(alone)).why_local == "no prefill worker is ready"


@pytest.mark.parametrize("why", ["said no", "suspected", "avoided"])
async def test_who_waits_is_placed_when_a_worker_may_be_used_again(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens: the registry does not answer, and the record of a worker that gets no requests does not
    change."""
    monkeypatch.setattr(module, "REJECTED_S", 0.05)
    monkeypatch.setattr(module, "SUSPECT_S", 0.05)
    scheduler = RequestScheduler(
        seen(RECORD, replace(RECORD, worker_id="prefill-0", role="prefill")), 5.0, RoutingConfig(local="never")
    )
    found = await once(scheduler)
    assert found.prefill
    if why == "said no":
        scheduler.rejected(found, full=True)
    elif why == "suspected":
        scheduler.suspect(found.decode)
    else:
        scheduler.avoid(found.decode, found.prefill)
        scheduler.suspect(found.decode)
    async with asyncio.timeout(30.0):
        again = await once(scheduler)
    assert again.prefill


async def test_control_without_an_end_a_worker_that_said_no_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record never changes, since nobody sends it anything."""
    monkeypatch.setattr(module, "REJECTED_S", 60.0)
    scheduler = RequestScheduler(seen(RECORD), 0.1, RoutingConfig())
    scheduler.rejected(await once(scheduler), full=True)
    for _ in range(2):
        with pytest.raises(Busy):
            await once(scheduler)
