"""A broken connection to a process of Ray is not its death: calls are repeated until Ray knows that it has died."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import actors
from ray.exceptions import ActorDiedError, ActorUnavailableError

from cluster import ray_actors, ray_nodes, ray_worker
from cluster.placement import Placement
from cluster.ray_actors import RayHost, SupervisorActor, WorkerActor
from cluster.ray_runtime import Runtime
from cluster.ray_worker import RayWorkerProcess, as_tandem_error
from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.registry import Registry
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.worker_process import Kind, Started, WorkerProcess
from tandem.errors import Unavailable, WorkerLost
from tandem.settings import Settings
from tandem.tasks import end
from tandem.telemetry import logs
from tests.cluster.fake import LAUNCHER
from tests.cluster.test_supervisor import SOON_S, FakeHost, Watch

BROKEN = ActorUnavailableError("connection reset by peer", None)
DEAD = ActorDiedError()
STARTED = Started("127.0.0.1:1", 1, "a1", can_switch_role=True)


class Method:
    """A method of an actor: `answers` are its first ones, an error is raised; without one left it does not answer."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls = list(answers), list[tuple[Any, ...]]()
        self._called = asyncio.Event()

    async def called(self, times: int) -> None:
        async with asyncio.timeout(SOON_S):
            while len(self.calls) < times:
                self._called.clear()
                await self._called.wait()

    async def remote(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        self._called.set()
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Actor:
    """A living worker, as Ray shows it."""

    def __init__(self, **methods: Method) -> None:
        self.wait, self.stop, self.prepare, self.stages = Method(), Method(None), Method(None), Method([])
        self.start, self.switch_role = Method(STARTED), Method(STARTED)
        self.serves_as, self.node = Method("decode-0"), Method("n")
        vars(self).update(methods)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "UNREACHED_PAUSE_S", 0.0)


class Host(FakeHost):
    """Whose workers are processes of this actor."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.actor, self.killed, self.created = actor, 0, 0

    def create(self, worker_id: str) -> WorkerProcess:
        process = RayWorkerProcess(self.actor, worker_id)
        self.created += 1
        process.kill = self.kill  # type: ignore[method-assign]
        return process

    def kill(self) -> None:
        self.killed += 1
        self.actor.wait.answers.append(DEAD)


async def test_a_worker_whose_connection_breaks_lives_on(registry: Registry) -> None:
    """The supervisor asks again instead of killing a healthy worker, and hears of its death afterwards, the control."""
    for answers, kills in (((BROKEN, BROKEN), 0), ((BROKEN, DEAD), 1)):
        host = Host(Actor(wait=Method(*answers)))
        supervisor = Supervisor(host, registry, grace_s=1.0)
        await registry.set_wanted({"decode": 1})
        running = asyncio.create_task(supervisor.run())
        watch = Watch(supervisor)
        await watch.until(Kind.READY, "decode-0")
        if kills:
            assert isinstance((await watch.until(Kind.DIED, "decode-0")).error, WorkerLost)
        else:
            await host.actor.wait.called(3)
        assert (host.killed, host.created) == (kills, 1)
        await end(running)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("start", lambda process: process.start(lambda line: None)),
        ("switch_role", lambda process: process.switch_role("prefill-0", 1.0, lambda line: None)),
        ("stop", lambda process: process.stop(1.0)),
        ("serves_as", lambda process: process.serves_as()),
        ("node", lambda process: process.start(lambda line: None)),
        ("stages", lambda process: process.start(lambda line: None)),
    ],
)
async def test_a_call_is_made_again_with_the_same_arguments(name: str, call: Callable[[RayWorkerProcess], Any]) -> None:
    """For all calls, until the process answers or is dead."""
    actor = Actor()
    method: Method = getattr(actor, name)
    method.answers.insert(0, BROKEN)
    await call(RayWorkerProcess(actor, "decode-0"))
    first, second = method.calls
    assert first == second


async def test_a_worker_whose_connection_breaks_while_it_switches_has_ended() -> None:
    """The process serves as the next worker then, and asked again it would wait for that one's end. The former one has
    ended when the next one serves."""
    broken = asyncio.Event()

    class Wait(Method):
        async def remote(self, *arguments: Any) -> Any:
            self.calls.append(arguments)
            await broken.wait()
            raise BROKEN

    actor = Actor(wait=Wait(), switch_role=Method(STARTED, STARTED))
    process = RayWorkerProcess(actor, "decode-1")
    before = asyncio.create_task(process.wait())
    await asyncio.sleep(0)
    await process.switch_role("prefill-1", 1.0, lambda line: None)
    broken.set()
    async with asyncio.timeout(SOON_S):
        await before
    assert actor.wait.calls == [()]
    assert actor.switch_role.calls == [("prefill-1", 1.0)] * 2


def test_who_is_not_reached_is_not_called_dead() -> None:
    """Also where the call is not repeated."""
    assert not isinstance(as_tandem_error(BROKEN, "it"), WorkerLost)
    assert isinstance(as_tandem_error(BROKEN, "it"), Unavailable)
    assert isinstance(as_tandem_error(DEAD, "it"), WorkerLost)


class Survivors(RayHost):
    """Finds these actors, by name."""

    def __init__(self, patch: pytest.MonkeyPatch, **names: Actor) -> None:
        super().__init__(Settings(model="fake", cluster="c"), "fake", Placement("home"))
        found = {f"tandem-worker-c/{name.replace('_', '-')}/{at}": one for at, (name, one) in enumerate(names.items())}
        self.killed: list[Any] = []
        patch.setattr(ray_actors, "_our_actors", lambda prefix: list(found))
        patch.setattr(ray, "get_actor", lambda name, namespace: found[name])
        patch.setattr(ray, "kill", self.killed.append)
        patch.setattr(ray_worker, "SERVES_AS_TIMEOUT_S", 0.05)
        patch.setattr(ray_worker, "begun", self.begun)
        self.waits: list[Actor] = []

    async def begun(self, actor: Actor) -> bool:
        return actor not in self.waits

    async def found(self) -> dict[str, Any]:
        survivors = await self.survivors()
        self.keep_spares(0)
        return {worker_id: process._actor for worker_id, process in survivors.items()}  # type: ignore[attr-defined]


async def test_a_survivor_that_does_not_say_what_it_is_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names, the silent ones are a spare and decode-0. Both may serve as other workers by now, and another
    process may be decode-0, so none of the three may end for that. They are asked again before."""
    spare, former, worker = (Actor(serves_as=Method(*answers)) for answers in ((), (), ("decode-0",)))
    host = Survivors(monkeypatch, spare=spare, decode_0=former, decode_1=worker)
    assert await host.found() == {"decode-0": worker}
    assert host.killed == []
    assert len(spare.serves_as.calls) == ray_worker.SERVES_AS_ASKED > 1


async def test_a_silent_survivor_is_found_once_it_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again as long as it is silent, and found once. By its name it is decode-0; it has become another
    worker."""
    silent = Actor(serves_as=Method())
    host = Survivors(monkeypatch, decode_0=silent)
    assert await host.found() == {}
    assert await host.late_survivors() == {}
    assert host.silent
    asked = asyncio.create_task(host.late_survivors())
    await asyncio.sleep(0)
    assert host.silent  # also while it is asked
    assert await asked == {}
    silent.serves_as.answers.append("prefill-1")
    found = await host.late_survivors()
    assert not host.silent
    assert {worker_id: process._actor for worker_id, process in found.items()} == {"prefill-1": silent}  # type: ignore[attr-defined]
    assert await host.late_survivors() == {}
    assert host.killed == []


async def test_control_a_spare_that_says_so_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a spare too many ends, also one whose first answer is late or whose connection breaks, and the second
    process of one worker. A dead one is no survivor."""
    late = Actor(serves_as=Method(BROKEN, "spare"))
    first, second = (Actor(serves_as=Method("decode-0")) for _ in range(2))
    dead = Actor(serves_as=Method(DEAD))
    host = Survivors(monkeypatch, spare=late, decode_0=first, decode_1=second, decode_2=dead)
    assert await host.found() == {"decode-0": first}
    assert host.killed == [second, late]


async def test_a_survivor_without_a_process_is_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that waits for room answers nobody and has never served as anything: the supervisor waits for it instead
    of asking Ray for another one. Where a process serves as that worker, it is not needed."""
    waits, needless = Actor(serves_as=Method()), Actor(serves_as=Method())
    serves = Actor(serves_as=Method("decode-0"))
    host = Survivors(monkeypatch, decode_0=needless, decode_1=serves, decode_2=waits)
    host.waits = [waits, needless]
    assert await host.found() == {"decode-0": serves, "decode-2": waits}
    assert host.killed == [needless]
    assert len(waits.serves_as.calls) == 1


async def test_a_survivor_that_waits_for_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no needs that the line could name."""
    monkeypatch.setattr(ray_worker, "PLACED_SOON_S", 0.0)
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    process = RayWorkerProcess(Actor(node=Method(), start=Method()), "decode-0")
    starting = asyncio.create_task(process.start(said.set_result))
    line = await asyncio.wait_for(said, SOON_S)
    await end(starting)
    assert "not started its process" in line
    assert "None" not in line


class Supervising(SupervisorActor):
    """A supervisor that only ends with its owner."""

    def __init__(self) -> None:
        self._owner, self._grace_s, self.stopped = "owner", 1.0, asyncio.Event()

    async def stop(self, grace_s: float) -> int:
        self.stopped.set()
        return 0


async def test_a_cluster_does_not_end_because_the_connection_to_its_owner_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broken connection to the owner is not the end of `tandem up`, which would drain all workers; its death is."""
    owner, killed = Actor(wait=Method(BROKEN, BROKEN)), list[Any]()
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: owner)
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Context", (), {"current_actor": "me"}))
    supervisor = Supervising()
    ending = asyncio.create_task(supervisor._end_with_owner())
    await owner.wait.called(3)
    assert (supervisor.stopped.is_set(), killed) == (False, [])
    await end(ending)
    owner.wait.answers.append(DEAD)
    await supervisor._end_with_owner()
    assert (supervisor.stopped.is_set(), killed) == (True, ["me"])


class Loop(Supervisor):
    """A supervisor's loop that ends when the test permits it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.over = calls, asyncio.Event()

    def retire(self) -> None:
        self.calls.append("retire")

    async def run(self) -> None:
        await self.over.wait()
        self.calls.append("over")

    async def leave(self) -> None:
        self.calls.append("leave")


class Retiring(SupervisorActor):
    def __init__(self, loop: Supervisor) -> None:
        self._loop, self._run, self._scaling, self._owner = loop, None, None, ""
        self._settings = Settings(model="fake")


async def test_a_retired_supervisor_ends_its_process_after_its_last_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers only then, so that Ray makes the call again if it restarts the process before; and the call may be
    made twice."""
    calls: list[str] = []
    monkeypatch.setattr(ray, "kill", calls.append)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Context", (), {"current_actor": "killed"}))
    loop = Loop(calls)
    supervisor = Retiring(loop)
    retiring = [asyncio.create_task(supervisor.retire()) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert calls == ["retire", "retire"]
    loop.over.set()
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*retiring)
    assert calls[2:] == ["over", *2 * ["leave", "killed"]]


# ---- with Ray


class Waits:
    """An actor with the calls that count here."""

    def __init__(self) -> None:
        self._calls, self._called, self._ended = 0, asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self._calls += 1
        self._called.set()
        await self._ended.wait()

    async def called(self, times: int) -> None:
        while self._calls < times:
            self._called.clear()
            await self._called.wait()

    async def end(self) -> None:
        self._ended.set()

    async def die(self) -> None:
        os._exit(1)


@pytest.fixture
def started() -> Iterator[Runtime]:
    with tempfile.TemporaryDirectory(prefix="tdm-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        runtime = Runtime(None, Path(directory))
        try:
            runtime.start()
            yield runtime
        finally:
            runtime.stop()


def cut(port: int) -> int:
    """Breaks this process's connections to that port, as a network does; returns their number."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError, TypeError, IndexError), socket.socket(fileno=os.dup(int(number))) as connection:
            if connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
                found += 1
    return found


async def test_ray_knows_which_actors_have_begun(started: Runtime) -> None:
    """One that waits for a resource has not."""
    actor: Any = ray.remote(Waits)
    runs, waits = actor.options(num_cpus=0).remote(), actor.options(num_cpus=0, resources={"nowhere": 1}).remote()
    await runs.called.remote(0)
    assert await ray_nodes.begun(runs)
    assert not await ray_nodes.begun(waits)


async def test_rays_own_connections_may_break(started: Runtime) -> None:
    """An actor to which the connection breaks is asked again, while its first wait() still waits; then it ends orderly,
    or dies, which Ray says at once."""
    for ends in ("end", "die"):
        actor: Any = ray.remote(Waits).options(num_cpus=0).remote()
        waiting = asyncio.create_task(RayWorkerProcess(actor, "decode-0").wait())
        await actor.called.remote(1)
        assert cut(actors(actor._actor_id.hex())["Address"]["Port"]) > 0
        await ray_worker.answer(partial(actor.called.remote, 2))
        assert not waiting.done()
        getattr(actor, ends).remote()
        if ends == "end":
            await asyncio.wait_for(waiting, SOON_S)
        else:
            with pytest.raises(WorkerLost):
                await asyncio.wait_for(waiting, SOON_S)


async def test_a_worker_that_serves_does_not_wait_for_a_lost_head(
    started: Runtime, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next supervisor asks it to start again. The control asks the head, which does not answer. A worker that
    starts waits for the head, and its event loop goes on meanwhile: the watchdog ends a process whose loop stands."""
    monkeypatch.setattr(ray_actors, "exit_with_parent", lambda: None)
    monkeypatch.setattr(logs, "configure", lambda settings, process: None)
    settings = Settings(model="fake", redis=valkey.url)
    serves, starts = (WorkerActor("decode-0", settings, LAUNCHER, Placement("")) for _ in range(2))
    before = await serves.start("decode-0")
    (head,) = [process for process in started.processes() if process.name() == "gcs_server"]
    late = threading.Timer(SOON_S, head.resume)  # this loop may stand
    late.start()
    head.suspend()
    try:
        async with asyncio.timeout(SOON_S):
            assert await serves.start("decode-0") == before
            starting = asyncio.create_task(starts.start("decode-0"))
            asked = asyncio.create_task(asyncio.to_thread(ray_nodes.where))
            assert await asyncio.wait({starting, asked}, timeout=0.5) == (set(), {starting, asked})
    finally:
        late.cancel()
        head.resume()
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(asked, starting)
        await asyncio.gather(serves.stop(0), starts.stop(0))
