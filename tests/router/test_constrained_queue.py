"""Requests that only some decode workers can take, and streams that only some can go on with."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from cluster.state.registry import State
from services.router.routing import constrained_queue
from services.router.routing import request_scheduler as module
from services.router.routing.constrained_queue import MAX_LINES, ConstrainedQueue, constraint
from services.router.routing.fair_queue import FairQueue
from services.router.routing.placement import Begun, RoutingConfig, WorkerSnapshot
from services.router.routing.request_scheduler import RequestScheduler
from services.router.routing.waiting_request import WaitingRequest
from services.router.routing.worker_pools import DecodePool
from tandem.errors import Busy, NoWorker, ResumeFailed
from tandem.tasks import end
from tests.router.scheduling import RECORD, once, request_place, seen, two


async def test_a_lost_stream_goes_on_where_sums_are_the_same_but_waits_for_nobody() -> None:
    """A worker with its bits is taken although another one is idle; when it has no room, the other one is."""
    records = [replace(RECORD, worker_id=f"decode-{number}", sum_order=order) for number, order in enumerate(
        ["pairs", "tile32"]
    )]  # fmt: skip
    scheduler = RequestScheduler(seen(*records), 5.0, RoutingConfig())
    async with AsyncExitStack() as stack:
        lost: Any = {"begun": True, "begun_with": Begun("L", "tile32")}
        places = [await stack.enter_async_context(request_place(scheduler, 10, 20, 5.0, **lost)) for _ in range(3)]
    assert [one.decode.worker_id for one in places] == ["decode-1", "decode-1", "decode-0"]


async def test_a_lost_stream_ends_where_all_workers_would_give_other_tokens() -> None:
    """At once, and it keeps no other request waiting; while no worker is known, it waits as all do."""
    scheduler = RequestScheduler(seen(replace(RECORD, computes_with="M")), 0.2, RoutingConfig())
    begun = Begun("L")
    with pytest.raises(ResumeFailed) as failed:
        await once(scheduler, begun=True, begun_with=begun)
    assert failed.value.reason == "OTHER_MODEL"
    assert (await once(scheduler)).decode.worker_id == RECORD.worker_id
    empty = RequestScheduler(seen(), 0.2, RoutingConfig())
    with pytest.raises(NoWorker):
        await once(empty, begun=True, begun_with=begun)


@pytest.mark.parametrize("apart", [True, False])
async def test_a_stream_that_waits_for_its_own_workers_keeps_nobody_else_waiting(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only worker is full: the next request is served by another one at once, and it itself when there is room
    again. In the control it stays at the head of the queue."""
    if not apart:
        monkeypatch.setattr(module, "constraint", lambda waiting, decodes: None)
    mine, other = replace(RECORD, worker_id="decode-1", max_running=1), replace(RECORD, computes_with="M")
    scheduler = RequestScheduler(seen(mine, other), 5.0, RoutingConfig())
    begun = {"begun": True, "begun_with": Begun("L")}
    async with request_place(scheduler, 10, 20, 5.0, **begun) as first:
        waiting = asyncio.create_task(once(scheduler, **begun))
        await asyncio.sleep(0)
        behind = asyncio.create_task(once(scheduler))
        done, _ = await asyncio.wait({waiting, behind}, timeout=0.3)
        assert done == ({behind} if apart else set())
        assert scheduler.waiting() == (1 if apart else 2)
    assert (await asyncio.wait_for(waiting, 30.0)).decode.worker_id == first.decode.worker_id == "decode-1"
    assert (await asyncio.wait_for(behind, 30.0)).decode.worker_id == RECORD.worker_id
    assert scheduler.waiting() == 0


async def test_a_stream_whose_last_worker_goes_while_it_waits_ends() -> None:
    """Aside or not."""
    mine, other = replace(RECORD, worker_id="decode-1", max_running=1), replace(RECORD, computes_with="M")
    view = seen(mine, other)
    scheduler = RequestScheduler(view, 5.0, RoutingConfig())
    begun = {"begun": True, "begun_with": Begun("L")}
    async with request_place(scheduler, 10, 20, 5.0, **begun):
        waiting = asyncio.create_task(once(scheduler, **begun))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        view.workers = {RECORD.worker_id: other}
        await scheduler.keep_up()
        with pytest.raises(ResumeFailed):
            await asyncio.wait_for(waiting, 30.0)


async def test_a_stream_that_is_placed_as_its_wait_ends_is_placed_once() -> None:
    """It waited aside, and its last look finds the room that a record has shown meanwhile. Placed again by the next
    dispatch, it left its first placement in the account of the worker for good."""
    mine, other = replace(RECORD, max_running=1, running=1), replace(RECORD, worker_id="decode-1", computes_with="M")
    view = seen(mine, other)
    scheduler = RequestScheduler(view, 0.3, RoutingConfig())
    await scheduler.keep_up()

    async def stream() -> None:
        async with request_place(scheduler, 10, 20, 5.0, begun=True, begun_with=Begun("L")):
            assert scheduler.waiting() == 0
            await scheduler.keep_up()

    waiting = asyncio.create_task(stream())
    for _ in range(5):
        await asyncio.sleep(0)
    assert scheduler.waiting() == 1
    view.workers = {**view.workers, RECORD.worker_id: replace(RECORD, beat=2.0)}
    await waiting
    decode = (await once(scheduler, begun=True, begun_with=Begun("L"))).decode
    assert (decode.running, decode.prompts) == (0, ())


async def test_requests_behind_a_stream_that_waits_aside_do_not_take_the_room_that_it_waits_for() -> None:
    """They go to other workers, though its own has room for each of them: of the room that it takes for the stream,
    each would take a part as it comes."""
    mine, other = (
        replace(RECORD, worker_id="decode-1", blocks_held=50),
        replace(RECORD, computes_with="M", max_running=9),
    )
    scheduler = RequestScheduler(seen(mine, other), 5.0, RoutingConfig())
    begun: Any = {"begun": True, "begun_with": Begun("L")}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(request_place(scheduler, 300, 310, 5.0, **begun))
        places = list[str]()

        async def stream(tokens: int) -> None:
            async with request_place(scheduler, tokens, tokens + 10, 5.0, **begun) as placement:
                places.append(f"{placement.decode.worker_id} {tokens}")

        waiting = asyncio.create_task(stream(700))
        await asyncio.sleep(0.05)
        for _ in range(3):
            placement = await stack.enter_async_context(request_place(scheduler, 10, 20, 5.0))
            assert placement.decode.worker_id == RECORD.worker_id
        assert (places, scheduler.waiting()) == ([], 1)
        await stack.aclose()
        await waiting
    assert places == ["decode-1 700"]
    assert (await once(scheduler, **begun)).decode.worker_id == "decode-1"
    assert scheduler.waiting() == 0


async def test_an_unsuited_worker_is_used_only_where_no_other_is_there() -> None:
    """By this request alone: others take turns as before, and nothing waits for a worker that may not be used."""
    records = [*two("decode"), *two("prefill")]
    scheduler = RequestScheduler(seen(*records), 5.0, RoutingConfig())
    unsuited = {("decode-0", "a"), ("prefill-1", "a")}
    placements = [await once(scheduler, unsuited=unsuited) for _ in range(3)]
    assert {one.decode.worker_id for one in placements} == {"decode-1"}
    assert {one.prefill and one.prefill.worker_id for one in placements} == {"prefill-0"}
    assert {(await once(scheduler)).decode.worker_id for _ in range(4)} == {"decode-0", "decode-1"}
    assert {(await once(scheduler, unsuited={("decode-0", "z")})).decode.worker_id for _ in range(4)} > {"decode-0"}
    scheduler = RequestScheduler(seen(records[0], records[2]), 5.0, RoutingConfig())
    alone = await once(scheduler, unsuited={("decode-0", "a"), ("prefill-0", "a")})
    assert (alone.decode.worker_id, alone.prefill) == ("decode-0", None)


@pytest.mark.parametrize("why", ["said no", "suspected", "drains"])
async def test_a_worker_that_rests_is_waited_for_where_the_other_is_unsuited(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It will serve in a moment, and the unsuited one would fail the request for good. The control: one that drains
    will not."""
    monkeypatch.setattr(module, "REJECTED_S", 0.05)
    monkeypatch.setattr(module, "SUSPECT_S", 0.05)
    decodes = two("decode")
    if why == "drains":
        decodes[1] = replace(decodes[1], state=State.DRAINING)
    scheduler = RequestScheduler(seen(*decodes), 5.0, RoutingConfig())
    other = await once(scheduler, unsuited={("decode-0", "a")})
    assert other.decode.worker_id == ("decode-0" if why == "drains" else "decode-1")
    if why == "said no":
        scheduler.rejected(other, full=True)
    elif why == "suspected":
        scheduler.suspect(other.decode)
    assert (await once(scheduler, unsuited={("decode-0", "a")})).decode.identity == other.decode.identity


async def test_a_prefill_worker_is_unsuited_only_until_it_starts_again() -> None:
    """Its new incarnation may have what the request needs, and a worker that became a prefill worker is another one."""
    scheduler = RequestScheduler(seen(RECORD, *two("prefill")), 5.0, RoutingConfig())
    unsuited = {("prefill-0", "before"), ("prefill-1", "a")}
    placements = [await once(scheduler, unsuited=unsuited) for _ in range(2)]
    assert {one.prefill and one.prefill.worker_id for one in placements} == {"prefill-0"}


async def test_a_stream_whose_wait_ends_takes_the_room_that_there_is() -> None:
    """Its worker has room for it, and a longer stream, which comes first, waits for more: refused, it would be lost."""
    mine, other = (
        replace(RECORD, worker_id="decode-1", blocks_held=80),
        replace(RECORD, computes_with="M", max_running=9),
    )
    scheduler = RequestScheduler(seen(mine, other), 60.0, RoutingConfig())
    begun: Any = {"begun": True, "begun_with": Begun("L")}

    async def long() -> None:
        async with request_place(scheduler, 700, 710, 60.0, **begun):
            pytest.fail("it has no room")

    waiting = asyncio.create_task(long())
    for _ in range(5):
        await asyncio.sleep(0)
    assert scheduler.waiting() == 1
    scheduler.generated("greedy", 100)
    began = monotonic()
    async with request_place(scheduler, 20, 30, 0.1, tenant="greedy", **begun) as placement:
        assert placement.decode.worker_id == "decode-1"
        assert monotonic() - began >= 0.1
        assert scheduler.waiting() == 1
    await end(waiting)
    with pytest.raises(Busy, match="no place became free"):
        async with request_place(scheduler, 700, 710, 0.1, **begun):
            pytest.fail("it has no room")
    assert scheduler.waiting() == 0


LONG = replace(RECORD, worker_id="decode-1", max_model_len=4096, blocks_total=250)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("why", ["full", "suspected", "too long"])
async def test_a_request_that_only_some_workers_can_take_keeps_nobody_from_the_others(
    why: str, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' worker is idle, and can never take the first. In the control everybody waits behind it."""
    monkeypatch.setattr(module, "SUSPECT_S", 1.0)
    if not apart:
        monkeypatch.setattr(module, "constraint", lambda waiting, decodes: None)
    scheduler = RequestScheduler(seen(RECORD, replace(LONG, max_running=1)), 5.0, RoutingConfig())
    tokens = 2000 if why == "too long" else 10
    only: Any = {} if why == "too long" else {"unsuited": {("decode-0", "a")}}

    async def constrained() -> str:
        async with request_place(scheduler, tokens, tokens + 10, 5.0, **only) as placement:
            return placement.decode.worker_id

    async with request_place(scheduler, tokens, tokens + 10, 5.0, **only) as first:
        if why == "suspected":
            scheduler.suspect(first.decode)
        waiting = asyncio.create_task(constrained())
        await asyncio.sleep(0)
        behind = asyncio.create_task(once(scheduler, priority=1))
        done, _ = await asyncio.wait({waiting, behind}, timeout=0.3)
        assert done == ({behind} if apart else set())
        assert scheduler.waiting_tokens() == tokens + (0 if apart else 10)
    assert await asyncio.wait_for(waiting, 30.0) == "decode-1"
    assert (await asyncio.wait_for(behind, 30.0)).decode.worker_id in ("decode-0", "decode-1")
    assert scheduler.waiting() == 0


@pytest.mark.parametrize("reserves", [True, False])
async def test_short_prompts_do_not_take_the_room_that_a_long_one_waits_for(
    reserves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the worker that alone can take it. They wait, when the other worker is full. In the control, they take a part
    of the room."""
    if not reserves:
        monkeypatch.setattr(ConstrainedQueue, "reserved", lambda self, waiting: None)
    scheduler = RequestScheduler(seen(RECORD, replace(LONG, max_running=9)), 60.0, RoutingConfig())

    async def long() -> str:
        async with request_place(scheduler, 3000, 3010, 60.0) as placement:
            return placement.decode.worker_id

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(request_place(scheduler, 2000, 2010, 60.0))
        waiting = asyncio.create_task(long())
        await asyncio.sleep(0.05)
        short = [
            asyncio.create_task(stack.enter_async_context(request_place(scheduler, 10, 20, 60.0))) for _ in range(3)
        ]
        done, pending = await asyncio.wait(short, timeout=0.3)
        names = [placement.result().decode.worker_id for placement in done]
        assert (names.count("decode-0"), len(pending)) == (2, 1) if reserves else names.count("decode-1") > 0
        await asyncio.gather(*map(end, pending))
    assert await asyncio.wait_for(waiting, 30.0) == "decode-1"
    assert scheduler.waiting() == 0


def a_request(**about: Any) -> WaitingRequest:
    return WaitingRequest(about.pop("tokens", 10), **about)


class Lines:
    """A fair queue, and lines beside it, over decode workers with contexts of 1,000, 2,000 and 4,000 tokens."""

    def __init__(self) -> None:
        self.decodes = DecodePool(RoutingConfig())
        self.workers = {}
        for worker_id, length in (("short", 1000), ("long", 2000), ("longest", 4000)):
            self.workers[worker_id] = WorkerSnapshot(worker_id, "a", "h:1", "", 0, 9, 999, 16, length)
            self.decodes.put(self.workers[worker_id])
        self.queue: FairQueue[WaitingRequest] = FairQueue()
        self.constrained = ConstrainedQueue(self.queue)

    def add(self, tokens: int, **about: Any) -> WaitingRequest:
        """Adds a request to its line, by way of the queue."""
        request = self.arrived(tokens=tokens, **about)
        self.move(request)
        return request

    def move(self, request: WaitingRequest) -> None:
        line = constraint(request, self.decodes)
        assert line
        assert self.constrained.add(request, line)

    def arrived(self, **about: Any) -> WaitingRequest:
        request = a_request(**about)
        self.queue.add(request)
        return request

    def kept_from(self, request: WaitingRequest) -> set[str]:
        reserved = self.constrained.reserved(request)
        return {name for name, worker in self.workers.items() if reserved and reserved(worker)}


def test_lines_that_share_a_worker_have_it_in_turn() -> None:
    """The first of a line that came later, too, is kept from the workers that an earlier one waits for, and only from
    those; the next of an earlier line may be behind it. Who comes before either is kept from none."""
    lines = Lines()
    before = lines.arrived(priority=-1)
    longest, long, second = lines.add(3000), lines.add(1500), lines.add(3500)
    after = lines.arrived()
    assert (lines.constrained.firsts(), len(lines.constrained), lines.constrained.tokens) == ([longest, long], 3, 8000)
    assert [lines.kept_from(one) for one in (before, longest, long)] == [set(), set(), {"longest"}]
    assert lines.kept_from(after) == {"long", "longest"}
    assert lines.constrained.firsts(before) == []
    assert lines.constrained.firsts(after) == [longest, long]
    assert lines.constrained.tokens_before(a_request(tokens=3200), lines.decodes) == 3000
    assert lines.constrained.tokens_before(a_request(), lines.decodes) == 0
    lines.constrained.remove(longest)
    assert lines.constrained.firsts() == [long, second]
    assert (lines.kept_from(long), lines.kept_from(second)) == (set(), {"long", "longest"})
    for one in (long, second, second):
        lines.constrained.remove(one)
    assert (lines.constrained.reserved(after), len(lines.constrained)) == (None, 0)


def test_a_line_is_in_the_order_of_the_fair_queue() -> None:
    """A tenant is charged for what is placed from a line, so that its long prompts do not wait behind all of another
    tenant's. Requests whose answer has begun come first, then urgent ones."""
    lines = Lines()
    greedy = [lines.add(3000, tenant="greedy") for _ in range(3)]
    polite = [lines.add(3000, tenant="polite") for _ in range(2)]
    urgent, begun = lines.add(3000, tenant="greedy", priority=-1), lines.add(3000, tenant="greedy", begun=True)
    served = []
    while firsts := lines.constrained.firsts():
        assert lines.constrained.place(firsts[0])
        served.append(firsts[0])
    assert served[:2] == [begun, urgent]
    assert served[2:] == [*polite, *greedy]  # the tenant `greedy` has had two
    assert not lines.constrained.place(begun)


def test_who_comes_before_the_first_of_a_line_is_kept_from_no_worker() -> None:
    """Or a tenant that has received less would be kept from the workers for as long as others fill a line."""
    lines = Lines()
    lines.queue.charge("greedy", 5000)
    lines.add(3000, tenant="greedy")
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"tenant": "greedy"}, {"longest"}),
        ({"tenant": "polite"}, set()),
        ({"tenant": "greedy", "priority": -1}, set()),
        ({"tenant": "greedy", "begun": True}, set()),
        ({"tenant": "polite", "priority": 1}, {"longest"}),
    ]
    for about, kept in cases:
        request = lines.arrived(**about)
        if about["tenant"] == "polite":
            lines.queue._charged["polite"] = 100
        assert lines.kept_from(request) == kept, about


def test_a_tenant_that_gets_tokens_back_may_come_first_in_a_line() -> None:
    """Its request was refused for lack of room and is queued again."""
    lines = Lines()
    lines.queue.charge("a", 10)
    first, second = lines.add(3000, tenant="a"), lines.add(3000, tenant="b")
    lines.queue.charge("b", 10)
    assert lines.constrained.firsts() == [first]
    lines.constrained.give_back("b", 15)
    assert lines.constrained.firsts() == [second]


@pytest.mark.parametrize(
    ("about", "before", "overtaken_by", "suits"),
    [
        ({"tokens": 3000}, [], [3000], {"longest"}),
        ({"unsuited": {("longest", "a")}}, [900], [], {"short", "long"}),
    ],
)
def test_a_request_that_moves_to_a_line_keeps_its_place(
    about: dict[str, Any], before: list[int], overtaken_by: list[int], suits: set[str]
) -> None:
    """It was the first of its tenant's in the queue: the others, which came later or are longer, are kept from its
    workers, as is who comes after it has moved."""
    lines = Lines()
    others = [lines.arrived(tokens=tokens) for tokens in before]
    first = lines.arrived(**about)
    for tokens in overtaken_by:
        lines.queue.place(lines.arrived(tokens=tokens))
    others.append(lines.arrived(tokens=20))
    assert lines.queue.first() is first
    lines.move(first)
    others.append(lines.arrived())
    assert [lines.kept_from(one) for one in others] == [suits] * len(others)
    assert lines.kept_from(first) == set()


def test_requests_that_move_to_a_line_overtake_a_longer_one_by_no_more_tokens_than_it_has() -> None:
    """It is the first of the queue then, however many more come that are shorter."""
    lines = Lines()
    waits, moved = lines.arrived(tokens=100), 0
    for _ in range(30):
        lines.arrived(unsuited={("longest", "a")})
        first = lines.queue.first()
        assert first
        if first is not waits:
            lines.move(first)
            moved += 1
    assert moved == 9
    assert lines.queue.first() is waits


def test_a_request_that_moves_to_a_line_costs_its_tenant_nothing() -> None:
    """Neither its others in the queue, nor its next one, because the tenant was not away. One that was is level with
    the latest that was placed, also where a line placed it."""
    lines = Lines()
    lines.queue.charge("heavy", 5000)
    lines.add(3000, tenant="heavy")
    light = lines.arrived(tenant="light")
    lines.add(3000, tenant="light")
    assert lines.queue.order(light)[2] == 0
    lines.queue.remove(light)
    lines.queue.charge("other", 7000)
    lines.arrived(tenant="other")
    assert lines.queue.order(lines.arrived(tenant="light"))[2] == 0
    lines = Lines()
    lines.queue.charge("heavy", 5000)
    heavy = lines.add(3000, tenant="heavy")
    assert lines.constrained.place(heavy)
    assert lines.queue.order(lines.arrived(tenant="away"))[2] == 8000


def test_requests_of_many_kinds_make_few_lines() -> None:
    """Each dispatch looks at all of them. What would begin another line stays in the queue; what has one moves."""
    lines = Lines()
    for name in range(MAX_LINES):
        assert lines.constrained.add(lines.arrived(), name)
    more = lines.arrived()
    assert not lines.constrained.add(more, "another")
    assert lines.queue.first() is more
    assert lines.constrained.add(more, 0)
    lines.constrained.remove(more)
    lines.constrained.remove(lines.constrained.firsts()[0])
    assert lines.constrained.add(lines.arrived(), "another")
    assert len(lines.constrained.firsts()) == MAX_LINES


async def test_what_would_begin_one_line_too_many_waits_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is served when there is room."""
    monkeypatch.setattr(constrained_queue, "MAX_LINES", 0)
    scheduler = RequestScheduler(seen(RECORD, replace(LONG, max_running=1)), 60.0, RoutingConfig())

    async def long() -> None:
        async with request_place(scheduler, 2000, 2010, 60.0):
            pass

    async with request_place(scheduler, 2000, 2010, 60.0):
        waiting = asyncio.create_task(long())
        await asyncio.sleep(0.05)
        assert (len(scheduler._queue), len(scheduler._constrained)) == (1, 0)
    await asyncio.wait_for(waiting, 30.0)


@pytest.mark.parametrize("how", [{"priority": 0}, {"priority": 1, "begun": True, "begun_with": Begun("L")}])
async def test_who_comes_before_the_first_of_a_line_has_its_worker_before_it(how: Any) -> None:
    """An urgent request, or a lost stream, beside a line for the only worker with a long context: it has the next
    place there."""
    scheduler, order = RequestScheduler(seen(RECORD, replace(LONG, max_running=1)), 60.0, RoutingConfig()), list[str]()

    async def ask(name: str, tokens: int, **about: Any) -> None:
        async with request_place(scheduler, tokens, tokens + 10, 60.0, **about):
            order.append(name)

    async with AsyncExitStack() as stack:
        async with request_place(scheduler, 2000, 2010, 60.0):
            for _ in range(2):  # decode-0 is full from here on
                await stack.enter_async_context(request_place(scheduler, 10, 20, 60.0))
            line = asyncio.create_task(ask("line", 2000, priority=1))
            await asyncio.sleep(0.05)
            first = asyncio.create_task(ask("first", 10, **how))
            await asyncio.sleep(0.05)
            assert scheduler.waiting() == 2
        await asyncio.wait_for(asyncio.gather(line, first), 30.0)
    assert order == ["first", "line"]


FAST: Any = {"max_running": 16, "blocks_total": 10_000, "prompt_rate": 1000.0}


async def test_a_prompt_of_a_line_waits_for_a_prefill_worker_that_would_begin_soon() -> None:
    """As one of the queue: it holds no blocks until then."""
    long = replace(LONG, **FAST)
    view = seen(
        replace(RECORD, **FAST), replace(long, running=16), replace(long, worker_id="prefill-0", role="prefill")
    )
    scheduler, placed = RequestScheduler(view, 60.0, RoutingConfig("never")), asyncio.Event()
    await scheduler.keep_up()

    async def ask() -> None:
        async with request_place(scheduler, 2000, 2010, 60.0):
            placed.set()

    async with AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(request_place(scheduler, 900, 910, 60.0)) for _ in range(2)]
        waiting = asyncio.create_task(ask())
        await asyncio.sleep(0.05)
        view.workers = {**view.workers, "decode-1": replace(long, beat=2.0)}
        await scheduler.keep_up()
        await asyncio.sleep(0.05)
        assert scheduler.waiting() == 1
        scheduler.prefilled(busy[0])
        await asyncio.wait_for(placed.wait(), 30.0)
        await waiting


async def test_a_prompt_of_a_line_does_not_take_the_prefill_worker_before_one_that_comes_first() -> None:
    """It may go only to the worker that is too short for the other one, but the same prefill worker would compute it:
    the other one would wait for as long as more come to the line."""
    long = replace(LONG, **FAST)
    view = seen(replace(RECORD, **FAST, running=16), long, replace(long, worker_id="prefill-0", role="prefill"))
    scheduler, order = RequestScheduler(view, 60.0, RoutingConfig("never")), list[str]()
    await scheduler.keep_up()

    async def ask(name: str, tokens: int, **about: Any) -> None:
        async with request_place(scheduler, tokens, tokens + 10, 60.0, **about):
            order.append(name)
            await asyncio.Event().wait()

    async with AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(request_place(scheduler, 1500, 1510, 60.0)) for _ in range(2)]
        tasks = [asyncio.create_task(ask("line", 500, priority=1, unsuited={("decode-1", "a")}))]
        await asyncio.sleep(0.05)
        assert len(scheduler._constrained) == 1
        tasks.append(asyncio.create_task(ask("first", 2000)))
        view.workers = {**view.workers, "decode-0": replace(RECORD, **FAST, beat=2.0)}
        await scheduler.keep_up()
        await asyncio.sleep(0.05)
        assert scheduler.waiting() == 2
        scheduler.prefilled(busy[0])
        await asyncio.sleep(0.05)
        assert order == ["first"]
        await asyncio.gather(*map(end, tasks))


async def test_those_of_a_line_are_placed_some_in_each_turn_of_the_loop() -> None:
    """Their worker came free: tokens of streams do not wait until everybody has a place. Another line waits on."""
    full = replace(LONG, max_running=100, running=100, blocks_total=10_000)
    view = seen(replace(RECORD, running=2), full)
    scheduler = RequestScheduler(view, 60.0, RoutingConfig())

    async def ask(tokens: int, **about: Any) -> None:
        async with request_place(scheduler, tokens, tokens + 10, 60.0, **about):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(ask(10, unsuited={("decode-1", "a")}))]
    tasks += [asyncio.create_task(ask(2000)) for _ in range(50)]
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(scheduler._constrained) == 51
    view.workers = {**view.workers, "decode-1": replace(full, running=0, beat=2.0)}
    await scheduler.keep_up()
    assert scheduler.waiting() == 51 - module.PLACEMENTS_PER_SLICE
    for _ in range(30):
        await asyncio.sleep(0)
    assert scheduler.waiting() == 1
    await asyncio.gather(*map(end, tasks))


async def test_what_is_placed_at_once_says_nothing_about_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waited for those places, so their pace is no reason to refuse the next one of the line."""
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    scheduler = RequestScheduler(seen(RECORD, replace(LONG, max_running=1, running=1)), 60.0, RoutingConfig())

    async def long(**about: Any) -> None:
        async with request_place(scheduler, 3000, 3010, 60.0, **about):
            pytest.fail("the worker is full")

    waiting = asyncio.create_task(long())
    await asyncio.sleep(0.05)
    assert scheduler.waiting() == 1
    for _ in range(4):
        now[0] += 2.0
        await once(scheduler)
    with pytest.raises(Busy) as refused:
        await long(ttft_s=0.2)
    assert refused.value.reason == "QUEUE_TIMEOUT"  # it waited, instead of OVERLOADED at once
    await end(waiting)


async def test_the_expected_wait_counts_the_line_that_a_request_would_join() -> None:
    """3,000 tokens at 1,000 a second are before it. The control: alone, its first token would come in time, so it
    waits."""
    records = [RECORD, replace(LONG, max_running=1, running=1, prompt_rate=1000.0)]
    scheduler = RequestScheduler(seen(*records), 60.0, RoutingConfig())

    async def long(**about: Any) -> None:
        async with request_place(scheduler, 3000, 3010, 60.0, **about):
            pytest.fail("the worker is full")

    for about in ({}, {"ttft_s": 5.0}):
        waiting = asyncio.create_task(long(**about))
        for _ in range(5):
            await asyncio.sleep(0)
        assert scheduler.waiting() == 1
        if not about:
            with pytest.raises(Busy) as refused:
                await long(ttft_s=5.0)
            assert refused.value.reason == "OVERLOADED"  # at once, not after a wait
        await end(waiting)


def test_a_request_that_every_worker_in_use_can_take_is_not_constrained() -> None:
    """Also where another one rests, drains or has left, and where it takes an unsuited one because no other is
    ready."""
    decodes = DecodePool(RoutingConfig())
    one = WorkerSnapshot("one", "a", "h:1", "", 0, 9, 999, 16, 1000, computes_with="L")
    decodes.put(one)
    unsuited = {one.identity}
    assert constraint(a_request(), decodes) is None
    assert constraint(a_request(unsuited=unsuited), decodes) is None
    decodes.put(replace(one, worker_id="two", max_model_len=20, usable=False, ready=False))
    assert constraint(a_request(tokens=30), decodes) is None
    assert constraint(a_request(unsuited=unsuited), decodes) is None
    decodes.put(replace(one, worker_id="two", max_model_len=20, computes_with="M"))
    assert constraint(a_request(), decodes) is None
    about: list[dict[str, Any]] = [{"tokens": 30}, {"unsuited": unsuited}, {"begun_with": Begun("L")}]
    lines = [constraint(a_request(**some), decodes) for some in about]
    assert len({None, *lines}) == 4
    assert constraint(a_request(tokens=40), decodes) == lines[0]
    decodes.drop("two")
    assert [constraint(a_request(**some), decodes) for some in about] == [None] * 3
