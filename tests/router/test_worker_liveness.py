"""What a process knows of the others: a record that is missing is not a death, and a death is known as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.state.registry import RegistryChanges, State, WorkerRecord
from services import worker_liveness as view_module
from services.worker_liveness import FORGET_S, FULL_READ_S, WorkerLiveness
from tandem.errors import Unavailable
from tandem.tasks import end

ONE = WorkerRecord("prefill-0", "prefill", State.READY, pid=1, incarnation="a", address="h:1", beat=1.0)
TWO = replace(ONE, worker_id="prefill-1", address="h:2")
LIFE = ("prefill-0", "a")


class Registry:
    """Answers with `records`, or not at all; in full, or as changes."""

    records: list[WorkerRecord] | None = None
    full = True
    ttl_s = 3.0

    async def changes_since(self, mark: tuple[str, int]) -> RegistryChanges:
        if self.records is None:
            raise Unavailable("it does not answer")
        return RegistryChanges(("epoch", 1), self.full, {record.worker_id: record for record in self.records})


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(view_module, "monotonic", lambda: clock.now)
    monkeypatch.setattr(view_module, "time", lambda: clock.now)
    return clock


class World:
    def __init__(self, clock: Clock, refresh_s: float = 1.0) -> None:
        self.clock, self.registry = clock, Registry()
        anything: Any = self.registry
        self.view = WorkerLiveness(anything, refresh_s)

    async def read(self, *records: WorkerRecord, after_s: float = 1.0) -> None:
        self.clock.now += after_s
        self.registry.records = list(records)
        await self.view.refresh()


@pytest.fixture
def world(clock: Clock) -> World:
    return World(clock)


class SlowRegistry(Registry):
    """Answers when it may; counts its answers."""

    def __init__(self) -> None:
        self.records, self.answers, self.may = [ONE], 0, asyncio.Event()

    async def changes_since(self, mark: tuple[str, int]) -> RegistryChanges:
        self.answers += 1
        await self.may.wait()
        return await super().changes_since(mark)


@pytest.mark.parametrize("answered", [True, False])
async def test_many_who_read_all_records_at_once_share_reads(answered: bool) -> None:
    """300 requests whose attempts fail together, as when a pool dies, cost the registry two reads and not 300: the one
    under way, which began too early for those who came after it, and one for all of those. So also if it is away."""
    registry: Any = SlowRegistry()
    view = WorkerLiveness(registry, refresh_s=1.0)
    first = asyncio.create_task(view.refresh())
    await asyncio.sleep(0)
    later = [asyncio.create_task(view.refresh()) for _ in range(300)]
    await asyncio.sleep(0)
    if answered:
        registry.records = [ONE, TWO]
    else:
        registry.records = None
    registry.may.set()
    await asyncio.gather(first, *later)
    assert registry.answers == 2
    assert len(view.workers) == (2 if answered else 0)


async def test_one_who_reads_all_records_and_goes_away_leaves_the_others_their_read() -> None:
    """A cancelled request does not take the read with it."""
    registry: Any = SlowRegistry()
    view = WorkerLiveness(registry, refresh_s=1.0)
    first, second = (asyncio.create_task(view.refresh()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    registry.may.set()
    await asyncio.wait_for(second, 5)
    assert set(view.workers) == {"prefill-0"}


async def test_one_who_goes_away_in_its_read_has_not_read_for_those_who_asked_before() -> None:
    """They were still waiting for their turn when it began."""
    registry: Any = SlowRegistry()
    view, readers = WorkerLiveness(registry, refresh_s=1.0), list[asyncio.Task[None]]()
    for _ in range(3):
        readers.append(asyncio.create_task(view.refresh()))
        await asyncio.sleep(0.001)
    for reader in readers[:2]:
        await end(reader)
        await asyncio.sleep(0.001)  # the next one reads
    registry.may.set()
    await asyncio.wait_for(readers[2], 30)
    assert set(view.workers) == {"prefill-0"}


async def test_a_worker_without_a_record_gets_nothing_new_and_keeps_what_it_has(world: World) -> None:
    """Its life is kept until another one appears."""
    await world.read(ONE, TWO)
    await world.read(TWO)
    assert set(world.view.workers) == {"prefill-1"}
    assert set(world.view.incarnations) == {LIFE, ("prefill-1", "a")}
    await world.read(ONE, TWO)
    assert set(world.view.workers) == {"prefill-0", "prefill-1"}
    await world.read(replace(ONE, incarnation="b"), TWO)
    assert set(world.view.incarnations) == {("prefill-0", "b"), ("prefill-1", "a")}


async def test_another_worker_at_its_address_ends_a_life(world: World) -> None:
    """Two processes cannot listen there."""
    await world.read(ONE)
    await world.read(replace(TWO, address=ONE.address))
    assert set(world.view.incarnations) == {("prefill-1", "a")}


async def test_a_long_absence_ends_a_life(world: World) -> None:
    """Counted from the first answer without it; a registry that does not answer says nothing about anybody."""
    await world.read(ONE)
    world.registry.records = None
    world.clock.now += 10 * FORGET_S
    await world.view.refresh()
    assert set(world.view.incarnations) == {LIFE}
    await world.read()
    await world.read(after_s=FORGET_S - 1)
    assert set(world.view.incarnations) == {LIFE}
    await world.read()
    assert not world.view.incarnations


async def test_an_answer_that_comes_late_does_not_undo_a_newer_one(world: World) -> None:
    """Reads may overtake each other."""
    await world.read(ONE)
    await world.read(after_s=-0.5)
    assert set(world.view.workers) == {"prefill-0"}


async def test_another_life_or_an_absence_shows_that_a_worker_ended(world: World) -> None:
    """An absence of two refreshes; until then it is not known."""
    await world.read(ONE)
    lost = world.clock.now + 0.1
    await world.read(ONE)
    assert world.view.ended(*LIFE, lost) is None
    await world.read()
    await world.read()
    assert world.view.ended(*LIFE, lost) is None
    await world.read()
    assert world.view.ended(*LIFE, lost) is True
    await world.read(replace(ONE, incarnation="b"))
    assert world.view.ended(*LIFE, lost) is True
    assert world.view.ended("prefill-0", "b", world.clock.now) is None


@pytest.mark.parametrize("refresh_s", [0.5, 2.0])
async def test_the_absence_that_shows_an_end_is_two_refreshes(clock: Clock, refresh_s: float) -> None:
    """Which a live worker needs at most to come back, however long they are."""
    world = World(clock, refresh_s)
    await world.read(ONE)
    lost = world.clock.now + 0.1
    await world.read(after_s=0.2)
    await world.read(after_s=1.9 * refresh_s)
    assert world.view.ended(*LIFE, lost) is None
    await world.read(after_s=0.2 * refresh_s)
    assert world.view.ended(*LIFE, lost) is True


async def test_a_view_says_whether_its_registry_answers(world: World) -> None:
    """Operators are told so, and its workers stay what they were."""
    assert not world.view.registry_ok
    await world.read(ONE)
    assert world.view.registry_ok
    world.registry.records = None
    await world.view.refresh()
    assert not world.view.registry_ok
    assert set(world.view.workers) == {"prefill-0"}
    await world.read(ONE)
    assert world.view.registry_ok


async def test_who_waits_for_a_newer_view_waits(world: World) -> None:
    """Until something has changed, or a reason to look again is given. The control: an older version is no wait."""
    await world.read(ONE)
    version = world.view.version
    waiting = asyncio.create_task(world.view.newer_than(version))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert await world.view.newer_than(version - 1) == version
    await world.view.nudge()
    assert await waiting == version + 1


async def test_a_beat_after_the_loss_shows_that_it_lives(world: World) -> None:
    """One that is read after the loss may be from before it: its age tells."""
    await world.read(replace(ONE, beat=101.0))
    lost = world.clock.now + 0.1
    await world.read(replace(ONE, beat=101.05))
    assert world.view.ended(*LIFE, lost) is None
    await world.read(replace(ONE, beat=102.5))
    assert world.view.ended(*LIFE, lost) is False


async def test_a_change_of_its_record_or_one_that_does_not_expire_shows_that_it_lives(world: World) -> None:
    """A change that is read after the loss may be from before it, the next one is not; beats without a change keep the
    record."""
    await world.read(ONE, TWO)
    lost = world.clock.now + 0.1
    world.registry.full = False
    await world.read(ONE)
    assert world.view.ended(*LIFE, lost) is None
    await world.read(ONE)
    assert world.view.ended(*LIFE, lost) is False
    assert world.view.ended("prefill-1", "a", lost) is None
    await world.read(after_s=world.registry.ttl_s)
    assert world.view.ended("prefill-1", "a", lost) is False


async def test_a_worker_that_comes_back_into_an_empty_registry_lives(world: World) -> None:
    """With the incarnation that it had."""
    await world.read(ONE)
    lost = world.clock.now + 0.1
    await world.read()
    assert world.view.ended(*LIFE, lost) is None
    await world.read(replace(ONE, beat=102.9))
    assert world.view.ended(*LIFE, lost) is False


async def test_a_read_of_all_records_is_no_news_of_workers_that_say_nothing_new(world: World) -> None:
    """A router adds to a record what it did since; the same record again must not take that away. The age is told
    apart from it."""
    await world.read(replace(ONE, beat=world.clock.now), TWO)
    before = world.view.workers["prefill-0"]
    await world.read(replace(ONE, beat=world.clock.now + 0.7), TWO)
    assert world.view.workers["prefill-0"] is before
    assert world.view.age(before) == pytest.approx(0.3)
    await world.read(replace(ONE, beat=world.clock.now, running=1), TWO)
    assert world.view.workers["prefill-0"].running == 1


async def test_a_worker_that_is_present_is_not_silent_though_it_says_nothing_new(world: World) -> None:
    """Answers with changes alone leave it out."""
    await world.read(replace(ONE, beat=world.clock.now))
    world.registry.full = False
    for _ in range(5):
        await world.read()
    assert world.view.age(world.view.workers["prefill-0"]) == 0.0
    world.clock.now += 2.0
    assert world.view.age(world.view.workers["prefill-0"]) == 2.0


class MarkedRegistry(Registry):
    """Answers in full only without a mark. Notes the mark of each read, and has a change when `reads` says so."""

    def __init__(self) -> None:
        self.records, self.marks = [ONE], list[tuple[str, int]]()
        self.reads: asyncio.Queue[None] = asyncio.Queue()

    async def changes_since(self, mark: tuple[str, int]) -> RegistryChanges:
        self.marks.append(mark)
        self.full = mark == ("", 0)
        return await super().changes_since(mark)

    async def changes(self, every_s: float) -> AsyncIterator[None]:
        while True:
            yield await self.reads.get()


async def test_after_a_failed_read_all_records_are_read() -> None:
    """A server that took over may lack the last changes and has given their numbers to others. The control: otherwise
    changes are read."""
    registry: Any = MarkedRegistry()
    view = WorkerLiveness(registry, 1.0)
    for records in ([ONE], [ONE], None, [ONE], [ONE]):
        registry.records = records
        await view.refresh(changes_only=True)
    assert registry.marks == [("", 0), ("epoch", 1), ("epoch", 1), ("", 0), ("epoch", 1)]


async def test_all_records_are_read_now_and_then(clock: Clock) -> None:
    """A failover between two reads makes none fail. The control: until FULL_READ_S has passed, changes are read."""
    registry: Any = MarkedRegistry()
    view = WorkerLiveness(registry, 1.0)
    await view.start()
    for after_s in (FULL_READ_S - 1, 1.0, 1.0):
        clock.now += after_s
        read, version = len(registry.marks), view.version
        registry.reads.put_nowait(None)
        async with asyncio.timeout(5):
            await view.newer_than(version)
        assert len(registry.marks) == read + 1
    await view.stop()
    assert registry.marks == [("", 0), ("epoch", 1), ("", 0), ("epoch", 1)]


@pytest.mark.parametrize("full", [True, False])
async def test_a_worker_of_another_vocabulary_gets_no_requests(full: bool) -> None:
    """The reader's token ids would be other words there; it is still listed, with that as its state. A worker that does
    not say, as one of an older version, is ready, and so are all for a reader without a vocabulary."""
    registry: Any = Registry()
    registry.full = full
    registry.records = [
        replace(ONE, worker_id=worker_id, address=worker_id, vocabulary=vocabulary)
        for worker_id, vocabulary in (("same", "A"), ("other", "B"), ("silent", ""))
    ]
    view, unread = WorkerLiveness(registry, 1.0, "A"), WorkerLiveness(registry, 1.0)
    for _ in range(2):  # also where only the heartbeat is new
        await view.refresh()
        await unread.refresh()
        assert [one.worker_id for one in view.of_role("prefill")] == ["same", "silent"]
        assert {name: one.state for name, one in view.workers.items()} == {
            "same": State.READY,
            "other": State.OTHER_VOCABULARY,
            "silent": State.READY,
        }
        assert view.of_other_vocabulary == ["other"]
        assert "vocabulary" in view.needed
        assert len(unread.of_role("prefill")) == 3
        assert unread.needed == ""
