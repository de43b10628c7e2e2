"""The placer's account between two beats: what this router did since is added, and forgotten with the next beat."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from cluster.registry import State, WorkerRecord
from services.decode import servicer
from services.router import placer as module
from services.router import workers
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
    assert module.AHEAD_TOKENS == servicer.AHEAD_TOKENS


async def test_a_new_beat_replaces_the_account() -> None:
    """Else a request would be counted twice, by the worker and by the router."""
    view = seen(RECORD)
    placer = Placer(view, 0.05, Rules())
    async with placer.placed(10, 20, 5.0):
        view.workers = {**view.workers, "decode-0": replace(RECORD, beat=2.0, running=1)}
        assert (await once(placer)).decode.running == 1


async def test_a_beat_that_knows_nothing_of_a_request_makes_no_room_when_it_ends() -> None:
    """The record was written before the request came to the worker, and seen while it ran: no worker has more free
    blocks than it has, or it would be preferred to all others until its next beat."""
    view = seen(*two("decode"))
    placer = Placer(view, 0.05, Rules())
    async with placer.placed(10, 20, 5.0) as first:
        view.workers = {name: replace(one, beat=2.0) for name, one in view.workers.items()}
        await placer.keep_up()
    second = await once(placer)
    assert second.decode.worker_id != first.decode.worker_id
    assert (await once(placer)).decode.free_blocks == RECORD.blocks_total


async def test_who_said_no_or_failed_is_left_alone() -> None:
    """Until its next beat for the first, until its next life for the second; the other worker serves meanwhile."""
    view = seen(*two("decode"))
    placer = Placer(view, 0.05, Rules())
    first = await once(placer)
    placer.suspect(first.decode)
    assert {(await once(placer)).decode.worker_id for _ in range(3)} == {"decode-1"}
    placer.said_no(await once(placer))
    view.workers = {**view.workers, "decode-0": replace(view.workers["decode-0"], incarnation="b")}
    assert (await once(placer)).decode.incarnation == "b"


async def test_a_worker_that_is_full_is_usable_again_when_something_of_ours_ends_there() -> None:
    """Without a beat. The end of the very request that it refused is no such thing: it would be asked again at once."""
    placer = Placer(seen(RECORD), 0.02, Rules())
    async with placer.placed(10, 20, 5.0):
        async with placer.placed(10, 20, 5.0) as refused:
            placer.said_no(refused)
        with pytest.raises(Busy):
            await once(placer)
    assert (await once(placer)).decode.worker_id == "decode-0"


async def test_a_request_that_was_refused_counts_once() -> None:
    """For its tenant's turn, and for what has arrived: it comes again."""
    view = seen(replace(RECORD, max_running=1, running=1))
    placer, order = Placer(view, 5.0, Rules()), list[str]()

    async def ask(tenant: str, tokens: int, refusals: int = 0) -> None:
        async with placer.placed(tokens, tokens + 10, 5.0, tenant=tenant) as placement:
            order.append(tenant)
            if refusals:
                placer.said_no(placement)
        if refusals:
            await ask(tenant, tokens, refusals - 1)

    tasks = [asyncio.create_task(ask("unlucky", 100, refusals=1))]
    tasks += [asyncio.create_task(ask(*about)) for about in (("unlucky", 300), ("other", 150), ("other", 200))]
    async with asyncio.timeout(5):
        for beat in range(2, 4):
            await asyncio.sleep(0)
            view.workers = {"decode-0": replace(RECORD, max_running=1, beat=float(beat))}
            await placer.keep_up()
            for _ in range(20):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    assert order == ["unlucky", "unlucky", "other", "unlucky", "other"]
    assert placer.arrived == 100 + 300 + 150 + 200


async def test_accounts_of_workers_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long absence, or with the worker's next life. Not after a short one: the registry may have forgotten, and
    what runs there still runs."""
    now = 100.0
    monkeypatch.setattr(workers, "monotonic", lambda: now)
    view = seen(*two("decode"))
    placer, both = Placer(view, 5.0, Rules()), view.workers
    async with placer.placed(10, 20, 5.0) as first:
        view.workers = {name: one for name, one in both.items() if name != first.decode.worker_id}
        await placer.keep_up()
        now += workers.ABSENT_S
        view.workers = dict(both)
        await placer.keep_up()
        assert placer._workers.decodes.workers[first.decode.worker_id].running == 1
        view.workers = {}
        await placer.keep_up()
        now += workers.ABSENT_S + 1
        view.workers = {}
        await placer.keep_up()
        assert len(placer._workers) == 0
    for life in range(3):
        view.workers = {"decode-0": replace(RECORD, incarnation=f"life-{life}")}
        await placer.keep_up()
        assert len(placer._workers) == 1


async def test_what_changed_in_the_view_is_taken_over_a_few_workers_at_a_time() -> None:
    """So that streams have their turn in between; and what comes in the middle of it is not lost."""
    records = [replace(RECORD, worker_id=f"decode-{number}") for number in range(10 * workers.SLICE)]
    view = seen(*records)
    placer, turns = Placer(view, 0.01, Rules()), 0
    keeping = asyncio.create_task(placer.keep_up())
    while not keeping.done():
        await asyncio.sleep(0)
        turns += 1
        if turns == 5:
            view.workers = {one.worker_id: replace(one, running=2, beat=2.0) for one in records}
    assert turns > 10
    with pytest.raises(Busy):
        await once(placer)
    view.workers = {one.worker_id: one for one in records[:3]}
    await placer.keep_up()
    assert set(placer._workers.decodes.workers) == set(view.workers)


async def test_whoever_waits_is_placed_when_the_view_shows_room() -> None:
    """Without looking for it."""
    view = seen(replace(RECORD, running=2))
    placer = Placer(view, 5.0, Rules())
    waits = asyncio.create_task(once(placer))
    await asyncio.sleep(0)
    view.workers = {"decode-0": replace(RECORD, beat=2.0)}
    await placer.keep_up()
    assert (await waits).decode.worker_id == "decode-0"


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


async def test_a_place_that_comes_free_is_tried_for_those_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for none of the 200 behind them, nor does each that comes have it tried for the first."""
    tried: list[int] = []
    place = Placer._place

    def counted(self: Placer, one: Any, behind: int) -> Placement | None:
        tried.append(one.tokens)
        return place(self, one, behind)

    monkeypatch.setattr(Placer, "_place", counted)
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
    placer, placed = Placer(view, 5.0, Rules()), list[int]()

    async def ask() -> None:
        async with placer.placed(10, 20, 5.0):
            placed.append(1)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(ask()) for _ in range(50)]
    await asyncio.sleep(0)
    view.workers = {"decode-0": replace(view.workers["decode-0"], running=0, beat=2.0)}
    await placer.keep_up()
    most = 0
    while len(placed) < 50:
        before = placer.waiting()
        await asyncio.sleep(0)
        most = max(most, before - placer.waiting())
    assert most == module.AT_ONCE
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
    """And so does one whose client has had tokens already, of it or of another completion, whatever the objective."""
    late = Rules("never", ttft=2.5)
    for rules, about in ((Rules("never"), {}), (late, {"begun": True}), (late, {"follows": True})):
        placer = Placer(slow(), 60.0, rules)
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(placer.placed(1000, 1010, 60.0))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), placer.placed(1000, 1010, 60.0, **about):
                    pass


async def test_further_completions_wait_their_turn() -> None:
    """A tenant that asks for many does not come before one that asks for one. The control: one that has begun does."""
    for about, polite_waits in (({"follows": True}, False), ({"begun": True}, True)):
        placer = Placer(slow(), 60.0, Rules("never"))

        async def wait(tenant: str, tokens: int, about: dict[str, bool], placer: Placer = placer) -> None:
            async with placer.placed(tokens, tokens + 10, 60.0, tenant=tenant, **about):
                await asyncio.Event().wait()  # keeps its place

        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(placer.placed(1000, 1010, 60.0, tenant="greedy"))
            waiting = [asyncio.create_task(wait("greedy", 1000, about)) for _ in range(8)]
            waiting.append(asyncio.create_task(wait("polite", 400, {})))
            await asyncio.sleep(0)
            assert placer.waiting() == len(waiting)
        await asyncio.sleep(0.05)
        assert ("polite" in [one.tenant for one in placer._queue]) is polite_waits
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


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
    view.workers = {**view.workers, "decode-0": replace(DECODE, running=DECODE.max_running, prompt_rate=0.0)}
    assert (await refusal(placer, 100, ttft_s=0.05)).reason == "QUEUE_TIMEOUT"


async def test_a_pair_between_which_kv_did_not_arrive_is_avoided_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair, and neither of the two workers: each goes on with others, and another life of either is a new pair."""
    decodes, prefills = two("decode"), two("prefill")
    several = Placer(seen(*decodes, *prefills), 5.0, Rules(local="never"))
    bad = await once(several)
    assert bad.prefill
    several.avoid(bad.decode, bad.prefill)
    found = [await once(several) for _ in range(8)]
    pairs = {(one.decode.worker_id, one.prefill.worker_id) for one in found if one.prefill}
    assert pairs == {("decode-0", "prefill-1"), ("decode-1", "prefill-0"), ("decode-1", "prefill-1")}
    alone = Placer(seen(decodes[0], prefills[0]), 5.0, Rules(local="never"))
    first = await once(alone)
    assert first.prefill
    alone.avoid(first.decode, first.prefill)
    assert (await once(alone)).why_local == "KV from prefill-0 did not arrive there lately"
    alone._view.workers = {**alone._view.workers, "prefill-0": replace(prefills[0], incarnation="b")}
    assert (await once(alone)).prefill
    monkeypatch.setattr(module, "monotonic", lambda: monotonic() + module.SUSPECT_S)
    alone._view.workers = {**alone._view.workers, "prefill-0": prefills[0]}
    assert (await once(alone)).prefill


@pytest.mark.parametrize("why", ["said no", "suspected", "avoided"])
async def test_who_waits_is_placed_when_a_worker_may_be_used_again(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens: the registry does not answer, and the record of a worker that gets no requests does not
    change."""
    monkeypatch.setattr(module, "FULL_S", 0.05)
    monkeypatch.setattr(module, "SUSPECT_S", 0.05)
    placer = Placer(seen(RECORD, replace(RECORD, worker_id="prefill-0", role="prefill")), 5.0, Rules(local="never"))
    found = await once(placer)
    assert found.prefill
    if why == "said no":
        placer.said_no(found)
    elif why == "suspected":
        placer.suspect(found.decode)
    else:
        placer.avoid(found.decode, found.prefill)
        placer.suspect(found.decode)
    async with asyncio.timeout(2.0):
        again = await once(placer)
    assert again.prefill


async def test_control_without_an_end_a_worker_that_said_no_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record never changes, since nobody sends it anything."""
    monkeypatch.setattr(module, "FULL_S", 60.0)
    placer = Placer(seen(RECORD), 0.1, Rules())
    placer.said_no(await once(placer))
    for _ in range(2):
        with pytest.raises(Busy):
            await once(placer)


async def test_a_lost_stream_goes_on_where_sums_are_the_same_but_waits_for_nobody() -> None:
    """A worker with its bits is taken although another one is idle; when it has no room, the other one is."""
    records = [replace(RECORD, worker_id=f"decode-{number}", sum_order=order) for number, order in enumerate(
        ["pairs", "tile32"]
    )]  # fmt: skip
    placer = Placer(seen(*records), 5.0, Rules())
    async with AsyncExitStack() as stack:
        places = [
            await stack.enter_async_context(placer.placed(10, 20, 5.0, begun=True, sum_order="tile32"))
            for _ in range(3)
        ]
    assert [one.decode.worker_id for one in places] == ["decode-1", "decode-1", "decode-0"]
