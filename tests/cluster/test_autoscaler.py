"""The autoscaler next to a supervisor: on a real registry with workers that are only objects, and on a real Ray."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from cluster.autoscale_policy import Look
from cluster.autoscaler import Autoscaler, Observer
from cluster.local_cluster import LocalCluster
from cluster.state.registry import Registry, State, WorkerRecord
from cluster.supervision.supervisor import Supervisor
from services.__main__ import run
from tandem.errors import SettingsError
from tandem.settings import Settings
from tandem.tasks import end
from tests.cluster.test_local_cluster import LAUNCHER, START_S, settings, until, workers_find_the_fake  # noqa: F401
from tests.cluster.test_supervisor import SOON_S, FakeHost

ROUTER = WorkerRecord("router-0", "router", State.READY, 1, "r1", "127.0.0.1:1")
DECODE = replace(
    ROUTER, worker_id="decode-0", role="decode", max_running=10, blocks_total=100, prompt_rate=1000.0, block_size=16
)


def of(mode: str) -> Settings:
    return Settings(model="m", autoscale=mode, decode_max=3, autoscale_hold_s=5.0)  # type: ignore[arg-type]


async def verdict(registry: Registry, true: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    """Waits for a decision about the decode pool that fulfils a condition."""
    async with asyncio.timeout(SOON_S):
        async for _ in registry.changes(every_s=0.02):
            found = json.loads(await registry.scaling() or '{"pools": []}')["pools"]
            mine = [one for one in found if one["role"] == "decode"]
            if mine and true(mine[0]):
                return dict(mine[0])
    raise AssertionError("changes() ended")


@asynccontextmanager
async def scaled(registry: Registry, mode: str, host: FakeHost) -> AsyncIterator[list[float]]:
    """A supervisor and its autoscaler, whose clock is the number in the list."""
    now = [0.0]
    await registry.set_wanted({"decode": 1})
    supervisor = Supervisor(host, registry, grace_s=1.0)
    running = asyncio.create_task(supervisor.run())
    scaling = asyncio.create_task(Autoscaler(of(mode), registry, clock=lambda: now[0], every_s=0.05).run())
    yield now
    await end(scaling)
    async with asyncio.timeout(SOON_S):
        await supervisor.stop(grace_s=1.0)
        await running


async def lives(registry: Registry, host: FakeHost, count: int) -> None:
    """Waits until that many workers have been started and not stopped."""
    async with asyncio.timeout(SOON_S):
        async for _ in registry.changes(every_s=0.02):
            if sum(not process.graces for process in host.processes.values()) == count:
                return


async def test_load_starts_a_worker_and_its_end_drains_it(registry: Registry) -> None:
    """16 requests on 10 places need 2 workers. When the requests have ended, the second one stays for the hold time and
    then drains."""
    host = FakeHost()
    async with scaled(registry, "on", host) as now:
        await registry.beat(ROUTER)
        await registry.beat(replace(DECODE, running=16), announce=True)
        await lives(registry, host, 2)
        now[0] = 4.0  # before the load ends: an observation at 0 that saw its end would cover the hold time's beginning
        await registry.beat(DECODE, announce=True)
        await verdict(registry, lambda one: "fewer after 5 s" in str(one["why"]))
        assert await registry.wanted() == {"decode": 2}
        now[0] = 8.9
        await verdict(registry, lambda one: any(ago in str(one["why"]) for ago in ("9 s ago", "5 s ago")))  # 0 or 4
        now[0] = 9.5
        await lives(registry, host, 1)
        assert host.processes["decode-1"].graces == [1.0]
        assert await registry.wanted() == {"decode": 1}


async def test_a_dry_run_only_says_it(registry: Registry) -> None:
    """A dry run writes the wanted sizes and the reason to the registry, and changes no wanted size."""
    host = FakeHost()
    async with scaled(registry, "dry-run", host):
        await registry.beat(ROUTER)
        await registry.beat(replace(DECODE, running=16), announce=True)
        found = await verdict(registry, lambda one: one["wanted"] == 2)
        assert str(found["why"]).startswith("16 requests with 0 KV blocks, a worker has 10 places")
    assert await registry.wanted() == {"decode": 1}
    assert set(host.processes) == {"decode-0"}


def test_arrivals_are_counted_once_whatever_becomes_of_routers() -> None:
    """Arrivals that a router counted before it was first seen have an unknown time and do not count; a router that
    leaves takes nothing back."""
    observer = Observer(None)

    def arrived(**counts: int) -> float:
        records = [replace(ROUTER, incarnation=life, arrived=count) for life, count in counts.items()]
        look: Look = observer.look(records, 0.0)
        return look.arrived

    assert [arrived(a=500), arrived(a=700), arrived(a=700, b=50), arrived(b=80), arrived(a=900, b=80)] == [
        *(0, 200, 0, 30, 0),
    ]


def test_a_draining_workers_requests_need_a_place_elsewhere() -> None:
    """The requests of a draining worker count as load, and its places do not count as capacity."""
    other = replace(DECODE, worker_id="decode-1", state=State.DRAINING, running=4, blocks_held=30)
    pool = Observer(None).look([ROUTER, DECODE, other], 0.0).pool("decode")
    assert (pool.workers, pool.running, pool.held, pool.places, pool.blocks) == (1, 4, 30, 10, 100)


async def test_processes_that_nobody_supervises_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a supervisor the autoscaler is refused, because in a pod an HPA may size the pool."""
    for name, value in {"MODEL": "m", "AUTOSCALE": "dry-run", "DECODE_MAX": "2"}.items():
        monkeypatch.setenv(f"TANDEM_{name}", value)
    with pytest.raises(SettingsError, match="HPA"):
        await run("decode", "decode-0")


@pytest.mark.usefixtures("workers_find_the_fake")
def test_a_real_cluster_grows_under_load_and_shrinks_after_it() -> None:
    """Requests that hold both places of a decode worker start a second one; all are answered, also those that began
    before the pool grew and end after it has shrunk."""
    given = settings(prefill=0, autoscale="on", decode_max=2, autoscale_hold_s=1.0, max_num_seqs=2)
    with LocalCluster(given, launcher=LAUNCHER, start_timeout_s=START_S) as cluster, ExitStack() as stack:
        assert set(cluster.workers) == {"router-0", "decode-0"}
        first = cluster.workers["decode-0"].started
        assert first
        host, _, port = first.address.rpartition(":")
        requests = [stack.enter_context(socket.create_connection((host, int(port)), SOON_S)) for _ in range(2)]
        until(cluster, lambda seen: "decode-1" in seen)
        requests[1].sendall(b"answer\n")
        assert requests[1].recv(100) == b"answered\n"
        until(cluster, lambda seen: "decode-1" not in seen)
        requests[0].sendall(b"answer\n")
        assert requests[0].recv(100) == b"answered\n"
        assert cluster.workers["decode-0"].started == first
