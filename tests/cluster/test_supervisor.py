"""The supervisor's loop with workers that are only objects: no Ray, a real registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from cluster.state.registry import Registry, State, WorkerRecord
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.worker_process import Event, Kind, Started, WorkerProcess
from tandem.errors import CheckpointRefused, Unavailable, WorkerLost
from tests.support.waiting import until

SOON_S = 10.0


class FakeWorkerProcess:
    def __init__(self, refuse: bool) -> None:
        self._refuse = refuse
        self.node = ""
        self.loaded = asyncio.Event()  # what start() waits for
        self.loaded.set()
        self.drained = asyncio.Event()  # what switch_role() waits for
        self.drained.set()
        self.killed = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.graces: list[float] = []
        self.report: Callable[[str], None]

    async def start(self, report: Callable[[str], None]) -> Started:
        self.report = report
        report("weights read")
        await self.loaded.wait()
        if self._refuse:
            raise CheckpointRefused("no such model")
        return Started("127.0.0.1:1", 1, f"{id(self):x}", can_switch_role=True)

    async def switch_role(self, worker_id: str, grace_s: float, report: Callable[[str], None]) -> Started:
        report("drains")
        drained = asyncio.ensure_future(self.drained.wait())
        await asyncio.wait({drained, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        before, self._ended = self._ended, asyncio.get_running_loop().create_future()
        if before.done():
            raise WorkerLost("killed")
        before.set_result(None)
        return Started("127.0.0.1:2", 1, f"{id(self):x}+", can_switch_role=True)

    async def wait(self) -> None:
        await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        self.graces.append(grace_s)
        self.end()

    async def stop_before_the_end(self, grace_s: float) -> None:
        """As over a network: the end of wait() arrives a little after the answer to stop()."""
        asyncio.get_running_loop().call_later(0.05, self.end)

    async def die_instead(self, grace_s: float) -> None:
        self.kill()

    def end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def kill(self) -> None:
        self.killed = True
        if not self._ended.done():
            self._ended.set_exception(WorkerLost("killed"))
            self._ended.exception()  # retrieved here: it may have no waiter left


class FakeHost:
    def __init__(self, *, refuse: bool = False, survivors: tuple[str, ...] = (), slow: tuple[str, ...] = ()) -> None:
        self._slow = slow  # ids that start only when the test permits it
        self.processes: dict[str, FakeWorkerProcess] = {}
        self.spares: list[int] = []  # the requested number, for each request
        self._asked = asyncio.Event()
        self._refuse = refuse
        self._survivors = survivors
        self.late: dict[str, WorkerProcess] = {}  # survivors that say only later what they are
        self.mute = False  # whether one says nothing yet
        self.nodes: dict[str, str] = {}  # where a worker will be
        self.ending: set[str] | None = set()  # None: unknown

    def create(self, worker_id: str) -> WorkerProcess:
        self.processes[worker_id] = FakeWorkerProcess(self._refuse)
        self.processes[worker_id].node = self.nodes.get(worker_id, "")
        if worker_id in self._slow:
            self.processes[worker_id].loaded.clear()
        return self.processes[worker_id]

    def keep_spares(self, count: int) -> None:
        self.spares.append(count)
        self._asked.set()

    async def asked(self, times: int) -> None:
        """Waits until spares were requested that often."""
        async with asyncio.timeout(SOON_S):
            while len(self.spares) < times:
                self._asked.clear()
                await self._asked.wait()

    async def leaving(self) -> set[str]:
        if self.ending is None:
            raise Unavailable("no head")
        return self.ending

    async def survivors(self) -> dict[str, WorkerProcess]:
        return {worker_id: self.create(worker_id) for worker_id in self._survivors}

    async def late_survivors(self) -> dict[str, WorkerProcess]:
        late, self.late = self.late, {}
        return late

    @property
    def silent(self) -> bool:
        return self.mute or bool(self.late)


class SlowHost(FakeHost):
    """Finds the surviving workers only when the test permits it."""

    def __init__(self, *, survivors: tuple[str, ...]) -> None:
        super().__init__(survivors=survivors)
        self.looks, self.may = asyncio.Event(), asyncio.Event()

    async def survivors(self) -> dict[str, WorkerProcess]:
        self.looks.set()
        await self.may.wait()
        return await super().survivors()


class Watch:
    """Reads a supervisor's events one after another."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._after = 0
        self._waiting: list[Event] = []

    async def until(self, kind: Kind, worker_id: str) -> Event:
        return (await self.until_all((kind, worker_id)))[0]

    async def until_all(self, *wanted: tuple[Kind, str]) -> list[Event]:
        """Waits for these events, in any order."""
        found: dict[tuple[Kind, str], Event] = {}
        async with asyncio.timeout(SOON_S):
            while True:
                while self._waiting:
                    event = self._waiting.pop(0)
                    self._after = event.seq
                    if (event.kind, event.worker_id) in wanted:
                        found[event.kind, event.worker_id] = event
                    if len(found) == len(wanted):
                        return [found[one] for one in wanted]
                self._waiting = await self._supervisor.events(self._after)


@asynccontextmanager
async def supervised(
    host: FakeHost, registry: Registry, spares: int = 0, start_s: float = 60.0, **wanted: int
) -> AsyncIterator[tuple[Supervisor, Watch]]:
    await registry.set_wanted(wanted)
    supervisor = Supervisor(host, registry, grace_s=7.0, spares=spares, start_s=start_s)
    running = asyncio.create_task(supervisor.run())
    yield supervisor, Watch(supervisor)
    async with asyncio.timeout(SOON_S):
        await supervisor.stop(grace_s=1.0)
        await running


async def test_how_far_a_start_is_is_told(registry: Registry) -> None:
    """The progress of a start is reported to those who wait for a worker."""
    async with supervised(FakeHost(), registry, decode=1) as (_, watch):
        assert (await watch.until(Kind.LOADING, "decode-0")).text == "weights read"
        await watch.until(Kind.READY, "decode-0")


async def test_a_start_that_makes_no_progress_is_given_up_and_tried_again(registry: Registry) -> None:
    """The process is killed, and the next incarnation of the worker may become ready."""
    host = FakeHost(slow=("decode-0",))
    async with supervised(host, registry, start_s=0.1, decode=1) as (_, watch):
        await watch.until(Kind.LOADING, "decode-0")
        hung = host.processes["decode-0"]
        ended = await watch.until(Kind.DIED, "decode-0")
        assert "no stage completed for 0.1 s" in ended.error.message  # type: ignore[union-attr]
        assert hung.killed
        host._slow = ()
        await watch.until(Kind.READY, "decode-0")
        assert host.processes["decode-0"] is not hung


async def test_a_start_that_makes_progress_may_take_longer(registry: Registry) -> None:
    """Every stage has the same time limit again."""
    host = FakeHost(slow=("decode-0",))
    async with supervised(host, registry, start_s=4.0, decode=1) as (_, watch):
        await watch.until(Kind.LOADING, "decode-0")
        process = host.processes["decode-0"]
        for stage in range(11):
            await asyncio.sleep(0.4)
            process.report(f"stage {stage}")
        process.loaded.set()
        await watch.until(Kind.READY, "decode-0")
        assert host.processes["decode-0"] is process
        assert not process.killed


async def test_what_is_wanted_is_started(registry: Registry) -> None:
    """One worker is started for each missing one."""
    host = FakeHost()
    async with supervised(host, registry, router=1, decode=2) as (_, watch):
        for worker_id in ("router-0", "decode-0", "decode-1"):
            await watch.until(Kind.STARTING, worker_id)
    assert set(host.processes) == {"router-0", "decode-0", "decode-1"}


async def test_spares_come_when_nobody_starts_and_go_at_the_end(registry: Registry) -> None:
    """Preparing a spare does not take cores from a worker that starts."""
    host = FakeHost(slow=("decode-0", "decode-1"))
    async with supervised(host, registry, spares=2, decode=1) as (_, watch):
        await watch.until(Kind.LOADING, "decode-0")
        assert host.spares == []
        host.processes["decode-0"].loaded.set()
        await watch.until(Kind.READY, "decode-0")
        await host.asked(1)
        await registry.set_wanted({"decode": 2})
        await watch.until(Kind.LOADING, "decode-1")
        before = len(host.spares)
        host.processes["decode-0"].kill()  # which wakes the supervisor while decode-1 starts
        await watch.until(Kind.LOADING, "decode-0")
        assert len(host.spares) == before
        for process in host.processes.values():
            process.loaded.set()
        await watch.until(Kind.READY, "decode-0")
        await host.asked(before + 1)
    assert set(host.spares[:-1]) == {2}
    assert host.spares[-1] == 0


async def test_a_killed_worker_comes_back_and_its_old_record_is_gone(registry: Registry) -> None:
    """Routers forget the dead incarnation at once, not when its record expires; the new process is another
    incarnation."""
    host = FakeHost()
    async with supervised(host, registry, decode=1) as (_, watch):
        first = await watch.until(Kind.READY, "decode-0")
        assert first.started
        incarnation = first.started.incarnation
        await registry.beat(WorkerRecord("decode-0", "decode", State.READY, 1, incarnation, "127.0.0.1:1"))
        host.processes["decode-0"].kill()
        died = await watch.until(Kind.DIED, "decode-0")
        assert isinstance(died.error, WorkerLost)
        assert await registry.workers() == []
        second = await watch.until(Kind.READY, "decode-0")
    assert second.started
    assert first.started.incarnation != second.started.incarnation


async def test_a_dead_worker_does_not_take_the_record_of_another_life_with_it(registry: Registry) -> None:
    """The id may be in use elsewhere: the record of another incarnation stays."""
    host = FakeHost()
    async with supervised(host, registry, decode=1) as (_, watch):
        await watch.until(Kind.READY, "decode-0")
        await registry.beat(WorkerRecord("decode-0", "decode", State.READY, 1, "other", "127.0.0.1:1"))
        host.processes["decode-0"].kill()
        await watch.until(Kind.DIED, "decode-0")
        assert [one.incarnation for one in await registry.workers()] == ["other"]


async def test_scaling_down_drains_the_highest_number_with_grace(registry: Registry) -> None:
    """A surplus worker drains and is not replaced."""
    host = FakeHost()
    async with supervised(host, registry, decode=2) as (_, watch):
        await watch.until(Kind.READY, "decode-1")
        await registry.set_wanted({"decode": 1})
        await watch.until(Kind.STOPPED, "decode-1")
        assert host.processes["decode-1"].graces == [7.0]
        assert host.processes["decode-0"].graces == []


async def test_a_worker_that_ended_by_itself_is_replaced(registry: Registry) -> None:
    """An operator's drain is followed by a new process."""
    host = FakeHost()
    async with supervised(host, registry, prefill=1) as (_, watch):
        await watch.until(Kind.READY, "prefill-0")
        host.processes["prefill-0"].end()
        await watch.until(Kind.STOPPED, "prefill-0")
        await watch.until(Kind.READY, "prefill-0")


async def test_a_worker_that_stopped_as_told_did_not_die(registry: Registry) -> None:
    """The result of stop() may arrive before that of wait(): no process is killed in between, and no death is
    reported."""
    host = FakeHost()
    async with supervised(host, registry, decode=2) as (_, watch):
        await watch.until(Kind.READY, "decode-1")
        process = host.processes["decode-1"]
        process.stop = process.stop_before_the_end  # type: ignore[method-assign]
        await registry.set_wanted({"decode": 1})
        assert (await watch.until(Kind.STOPPED, "decode-1")).error is None


async def test_a_death_during_a_drain_is_told(registry: Registry) -> None:
    """Control of the test above: a process that dies instead of stopping is reported."""
    host = FakeHost()
    async with supervised(host, registry, decode=2) as (_, watch):
        await watch.until(Kind.READY, "decode-1")
        process = host.processes["decode-1"]
        process.stop = process.die_instead  # type: ignore[method-assign]
        await registry.set_wanted({"decode": 1})
        assert isinstance((await watch.until(Kind.STOPPED, "decode-1")).error, WorkerLost)


async def test_while_stopping_nobody_is_promised_a_new_life(registry: Registry) -> None:
    """A worker that dies while the others drain is not started again, and the event does not announce a restart."""
    host = FakeHost()
    async with supervised(host, registry, router=1, decode=1) as (supervisor, watch):
        await watch.until(Kind.READY, "router-0")
        await watch.until(Kind.READY, "decode-0")
        host.processes["router-0"].stop = host.processes["decode-0"].die_instead  # type: ignore[method-assign]
        stopping = asyncio.create_task(supervisor.stop(grace_s=1.0))
        died = await watch.until(Kind.DIED, "decode-0")
        assert died.retry_in_s == 0.0
        host.processes["router-0"].end()
        await stopping


async def test_a_refusal_to_start_is_told_as_it_was_raised(registry: Registry) -> None:
    """The error arrives unchanged, so that `tandem up` can end with it."""
    async with supervised(FakeHost(refuse=True), registry, decode=1) as (_, watch):
        failed = await watch.until(Kind.FAILED, "decode-0")
    assert isinstance(failed.error, CheckpointRefused)
    assert failed.error.message == "no such model"
    assert failed.retry_in_s > 0


async def test_a_restarted_supervisor_finds_its_workers(registry: Registry) -> None:
    """Surviving workers are adopted and not started a second time."""
    host = FakeHost(survivors=("decode-0",))
    async with supervised(host, registry, decode=2) as (_, watch):
        await watch.until(Kind.READY, "decode-0")
        await watch.until(Kind.READY, "decode-1")
        assert len(host.processes) == 2
        assert host.processes["decode-0"].graces == []


async def test_a_restarted_supervisor_that_is_stopped_at_once_ends_its_workers(registry: Registry) -> None:
    """`tandem up` was lost with its host and the registry, so the supervisor has not found its workers yet. In the
    control, a supervisor that does not wait for that leaves them running."""
    for waits in (True, False):
        host = SlowHost(survivors=("decode-0",))
        supervisor = Supervisor(host, registry, grace_s=5.0)
        running = asyncio.create_task(supervisor.run())
        async with asyncio.timeout(SOON_S):
            await host.looks.wait()
            if not waits:
                supervisor._found_survivors.set()
            stopping = asyncio.create_task(supervisor.stop(5.0))
            for _ in range(10):
                await asyncio.sleep(0)
            assert stopping.done() is not waits
            host.may.set()
            await stopping
            await running
        assert len(host.processes["decode-0"].graces) == int(waits)


@pytest.mark.parametrize("stops", [True, False])
async def test_a_survivor_drains_although_it_has_not_answered_yet(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """It may have served for hours, and says so some milliseconds later. It is not killed in a stop, nor as a
    surplus worker whose pool was made smaller while no supervisor ran."""
    start = FakeWorkerProcess.start

    async def start_over_ray(process: FakeWorkerProcess, report: Callable[[str], None]) -> Started:
        await asyncio.sleep(0.5)
        return await start(process, report)

    monkeypatch.setattr(FakeWorkerProcess, "start", start_over_ray)
    host = FakeHost(survivors=("decode-0", "decode-1"))
    async with supervised(host, registry, decode=2 if stops else 1) as (supervisor, watch):
        await watch.until(Kind.STARTING, "decode-1")
        if stops:
            await supervisor.stop(grace_s=1.0)
        else:
            assert (await watch.until(Kind.STOPPED, "decode-1")).error is None
        assert len(host.processes["decode-1"].graces) == 1


async def test_a_survivor_that_says_late_what_it_is_is_followed(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its place is free it is a worker like the others. If another worker has its place by then, it drains and ends,
    and the other one stays."""
    monkeypatch.setattr("cluster.supervision.supervisor.LATE_ASKED_S", 0.01)
    host = FakeHost()
    async with supervised(host, registry, decode=1) as (_, watch):  # the size of the other pool is unknown
        await watch.until(Kind.READY, "decode-0")
        second, late = FakeWorkerProcess(refuse=False), FakeWorkerProcess(refuse=False)
        host.late = {"prefill-0": late, "decode-0": second}
        await watch.until(Kind.READY, "prefill-0")
        await until(lambda: second.killed)
        assert second.graces == [7.0]
        assert not late.killed
        assert not host.processes["decode-0"].killed


async def test_a_retired_supervisor_starts_no_worker_and_ends_with_the_last(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cluster has replaced its own in an upgrade. The workers that it has still drain when their nodes end. In
    the control, before that, a worker that has ended is started again."""
    monkeypatch.setattr("cluster.supervision.supervisor.NODES_LOOKED_AT_S", 0.01)
    await registry.set_wanted({"decode": 1})
    host = FakeHost()
    host.nodes = {"decode-0": "pod"}
    supervisor = Supervisor(host, registry, grace_s=7.0)
    running, watch = asyncio.create_task(supervisor.run()), Watch(supervisor)
    await watch.until(Kind.READY, "decode-0")
    host.processes["decode-0"].end()
    await watch.until(Kind.READY, "decode-0")
    last = host.processes["decode-0"]
    supervisor.retire()
    await asyncio.sleep(0.1)
    assert not running.done()
    host.ending = {"pod"}
    async with asyncio.timeout(SOON_S):
        await running
    assert last.graces == [7.0]
    assert host.processes == {"decode-0": last}


async def test_a_retired_supervisor_waits_for_survivors_that_do_not_say_what_they_are(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent workers may serve, and only this supervisor drains them. It ends when the last one has been found and has
    ended, or is dead."""
    monkeypatch.setattr("cluster.supervision.supervisor.NODES_LOOKED_AT_S", 0.01)
    monkeypatch.setattr("cluster.supervision.supervisor.LATE_ASKED_S", 0.01)
    host, silent = FakeHost(), FakeWorkerProcess(refuse=False)
    host.mute, silent.node, host.ending = True, "pod", {"pod"}
    supervisor = Supervisor(host, registry, grace_s=7.0)
    supervisor.retire()
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0.1)
    assert not running.done()
    host.late, host.mute = {"decode-0": silent}, False
    async with asyncio.timeout(SOON_S):
        await running
    assert silent.graces == [7.0]
    host.mute, host.ending = True, set()
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0.1)
    host.mute = False
    async with asyncio.timeout(SOON_S):
        await running


async def test_a_registry_that_forgot_is_told_again(registry: Registry) -> None:
    """Losing the registry's content changes no pool: the last known sizes are written back."""
    host = FakeHost()
    async with supervised(host, registry, decode=1) as (_, watch):
        await watch.until(Kind.READY, "decode-0")
        await registry._store.client.flushall()
        async with asyncio.timeout(SOON_S):
            changes = registry.changes(every_s=0.1)
            while await registry.wanted() != {"decode": 1}:
                await registry.set_wanted({})  # announces a change, as any caller's would
                await anext(changes)
            await changes.aclose()
        assert host.processes["decode-0"].graces == []


async def test_a_size_that_is_set_while_lost_ones_are_written_back_stays(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tandem scale` may come between a supervisor's read of an empty registry and its write."""
    async with supervised(FakeHost(), registry, decode=1) as (_, watch):
        await watch.until(Kind.READY, "decode-0")
        wanted = registry.wanted

        async def overtaken() -> dict[str, int]:
            monkeypatch.setattr(registry, "wanted", wanted)
            await registry.set_wanted({"decode": 2})
            return {}

        monkeypatch.setattr(registry, "wanted", overtaken)
        await registry.set_wanted({})  # announces a change, as any caller's would
        await watch.until(Kind.READY, "decode-1")
        assert await registry.wanted() == {"decode": 2}


async def test_what_a_restarted_supervisor_finds_stays_wanted_by_a_registry_that_forgot(registry: Registry) -> None:
    """If both are lost at once the wanted sizes are unknown, so the workers that were found define them: one that dies
    afterwards is replaced."""
    host = FakeHost(survivors=("router-0", "decode-0", "decode-1"))
    async with supervised(host, registry) as (_, watch):
        await watch.until(Kind.READY, "decode-1")
        before = host.processes["decode-1"]
        before.kill()
        await watch.until(Kind.DIED, "decode-1")
        await watch.until(Kind.READY, "decode-1")
        assert host.processes["decode-1"] is not before
        assert await registry.wanted() == {"router": 1, "decode": 2}


async def test_workers_of_a_node_that_ends_drain_while_others_start(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement does not wait for the drain, and no worker on another node is drained. In the control, while the
    ending nodes are unknown, all workers stay."""
    monkeypatch.setattr("cluster.supervision.supervisor.NODES_LOOKED_AT_S", 0.02)
    host = FakeHost()
    host.nodes, host.ending = {"decode-0": "a", "decode-1": "b"}, None
    async with supervised(host, registry, decode=2) as (_, watch):
        await watch.until_all((Kind.READY, "decode-0"), (Kind.READY, "decode-1"))
        leaves, stays = host.processes["decode-0"], host.processes["decode-1"]
        drains = asyncio.Event()

        async def stop(grace_s: float) -> None:
            leaves.graces.append(grace_s)
            await drains.wait()
            leaves.end()

        leaves.stop = stop  # type: ignore[method-assign]
        await asyncio.sleep(0.1)
        assert leaves.graces == []
        host.ending = {"a"}
        await watch.until(Kind.READY, "decode-2")
        assert leaves.graces == [7.0]
        drains.set()
        assert (await watch.until(Kind.STOPPED, "decode-0")).error is None
        assert stays.graces == []
        assert set(host.processes) == {"decode-0", "decode-1", "decode-2"}


async def test_a_worker_that_still_loads_on_a_node_that_ends_starts_elsewhere(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts elsewhere at once, because the node would end during the load."""
    monkeypatch.setattr("cluster.supervision.supervisor.NODES_LOOKED_AT_S", 0.02)
    host = FakeHost(slow=("decode-0",))
    host.nodes, host.ending = {"decode-0": "a"}, {"a"}
    async with supervised(host, registry, decode=1) as (_, watch):
        await watch.until(Kind.READY, "decode-1")
        assert host.processes["decode-0"].killed
        host.processes["decode-0"].loaded.set()  # its start() ends


async def test_a_worker_too_many_here_becomes_the_one_too_few_there(registry: Registry) -> None:
    """The same process gets another id and another incarnation; no process is started or killed."""
    host = FakeHost()
    async with supervised(host, registry, decode=2, prefill=0) as (_, watch):
        first = await watch.until(Kind.READY, "decode-1")
        process = host.processes["decode-1"]
        process.drained.clear()
        await registry.set_wanted({"decode": 1, "prefill": 1})
        await watch.until(Kind.LOADING, "prefill-0")
        process.drained.set()
        # Its old id is free only when the incarnation with it has ended.
        turned, _ = await watch.until_all((Kind.READY, "prefill-0"), (Kind.STOPPED, "decode-1"))
        assert set(host.processes) == {"decode-0", "decode-1"}
        assert not process.killed
        assert first.started
        assert turned.started
        assert turned.started.incarnation != first.started.incarnation
        await registry.set_wanted({"decode": 2, "prefill": 0})
        await watch.until(Kind.READY, "decode-1")
        assert not process.killed
    assert process.killed


async def test_a_process_that_dies_while_it_turns_is_replaced_in_its_new_pool(registry: Registry) -> None:
    """Both of its ids end, and a new worker is started; nothing waits for the drain of a dead process."""
    host = FakeHost()
    async with supervised(host, registry, decode=2, prefill=0) as (_, watch):
        await watch.until(Kind.READY, "decode-1")
        process = host.processes["decode-1"]
        process.drained.clear()
        await registry.set_wanted({"decode": 1, "prefill": 1})
        await watch.until(Kind.LOADING, "prefill-0")
        process.kill()
        died = await watch.until(Kind.DIED, "prefill-0")
        assert isinstance(died.error, WorkerLost)
        await watch.until(Kind.READY, "prefill-0")
        assert set(host.processes) == {"decode-0", "decode-1", "prefill-0"}


async def test_a_stop_lets_a_worker_that_turns_finish_what_it_has(registry: Registry) -> None:
    """A worker that switches its role is drained like every other one, and not killed like one that is starting."""
    host = FakeHost()
    async with supervised(host, registry, decode=2, prefill=0) as (supervisor, watch):
        await watch.until(Kind.READY, "decode-1")
        process = host.processes["decode-1"]
        process.drained.clear()
        await registry.set_wanted({"decode": 1, "prefill": 1})
        await watch.until(Kind.LOADING, "prefill-0")
        stopping = asyncio.create_task(supervisor.stop(grace_s=5.0))
        await watch.until(Kind.STOPPED, "decode-0")
        assert not process.killed
        process.drained.set()
        await stopping
    assert process.killed


async def test_stop_drains_routers_first(registry: Registry) -> None:
    """No new request arrives while the workers finish theirs."""
    host, order = FakeHost(), []
    async with supervised(host, registry, router=1, decode=1) as (supervisor, watch):
        await watch.until(Kind.READY, "router-0")
        await watch.until(Kind.READY, "decode-0")
        await supervisor.stop(grace_s=1.0)
        for event in await supervisor.events(after=0):
            if event.kind is Kind.STOPPED:
                order.append(event.worker_id)
    assert order == ["router-0", "decode-0"]
