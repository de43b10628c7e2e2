"""One supervisor for each cluster name, on a real Valkey."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from cluster.model_clusters import want
from cluster.state import lease
from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.lease import Lease
from cluster.state.registry import Registry
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.worker_process import Kind
from tandem.errors import PreconditionFailed
from tandem.settings import Settings
from tandem.tasks import end
from tests.cluster.test_supervisor import FakeHost, Watch

SHORT_S = 2.0
KEPT_S = 4.0  # of a lease that has to be renewed in time, on a machine that others use


async def test_a_second_supervisor_is_refused_by_name(registry: Registry) -> None:
    """A second supervisor is refused while the first one renews its lease; the error names the setting."""
    first, second = Lease(registry, "one", KEPT_S), Lease(registry, "two", KEPT_S)
    await first.take()
    keeping = asyncio.create_task(first.keep())
    with pytest.raises(PreconditionFailed, match="'test' has a supervisor") as refused:
        await second.take()
    assert (refused.value.reason, refused.value.field) == ("ALREADY_UP", "cluster")
    assert not keeping.done()
    await end(keeping)


async def test_a_lease_that_nobody_renews_is_taken_when_it_ends(registry: Registry) -> None:
    """After SIGKILL of a whole cluster its name is free within the lease, and not before."""
    start = monotonic()
    await Lease(registry, "one", SHORT_S).take()
    async with asyncio.timeout(5 * SHORT_S):
        await Lease(registry, "two", SHORT_S).take()
    assert monotonic() - start > 0.8 * SHORT_S


async def test_the_next_life_of_a_supervisor_takes_over_at_once(registry: Registry) -> None:
    """A supervisor that Ray restarts with the same run id takes the lease at once; the former one, if it was only slow,
    does not take it back."""
    first, second = Lease(registry, "one"), Lease(registry, "one")
    await first.take()
    async with asyncio.timeout(lease.SUPERVISOR_LEASE_S / 2):
        await second.take()
    first._every_s = 0.0
    with pytest.raises(PreconditionFailed):
        await first.keep()
    await first.release()
    assert (await registry.acquire_lease("three/x/y", "three"))[0] == second._token


async def test_a_lease_outlives_a_registry_that_forgets(valkey: EmbeddedValkey, registry: Registry) -> None:
    """While the registry does not answer, and when it comes back empty, the holder continues and gets the lease
    again."""
    lease = Lease(registry, "one", SHORT_S)
    await lease.take()
    keeping = asyncio.create_task(lease.keep())
    valkey.stop()
    await asyncio.wait({keeping}, timeout=2 * SHORT_S)
    assert not keeping.done()
    valkey.start()
    async with asyncio.timeout(60):
        async for _ in registry.changes(every_s=0.05):
            if await registry._store.client.exists(f"{registry._prefix}:supervisor"):
                break
    with pytest.raises(PreconditionFailed):
        await Lease(registry, "two", SHORT_S).take()
    await end(keeping)


async def test_two_supervisors_of_one_name_do_not_both_start_workers(registry: Registry) -> None:
    """The second supervisor starts no worker, and does not touch the first one's workers and records."""
    await registry.set_wanted({"decode": 1})
    hosts = [FakeHost(), FakeHost()]
    first, second = (
        Supervisor(host, registry, grace_s=1.0, lease=Lease(registry, run, KEPT_S))
        for host, run in zip(hosts, ("one", "two"), strict=True)
    )
    running = asyncio.create_task(first.run())
    await Watch(first).until(Kind.READY, "decode-0")
    with pytest.raises(PreconditionFailed):
        await second.run()
    assert not hosts[1].processes
    await second.stop(0.0)
    assert not running.done()
    await first.stop(1.0)
    await running
    assert not await registry._store.client.exists(f"{registry._prefix}:supervisor")  # its lease is released
    await Lease(registry, "two").take()


async def test_control_without_a_lease_both_start_the_same_worker(registry: Registry) -> None:
    """Control: the lease causes the refusal above."""
    await registry.set_wanted({"decode": 1})
    hosts = [FakeHost(), FakeHost()]
    both = [Supervisor(host, registry, grace_s=1.0) for host in hosts]
    running = [asyncio.create_task(one.run()) for one in both]
    for one in both:
        await Watch(one).until(Kind.READY, "decode-0")
        await one.stop(1.0)
    await asyncio.gather(*running)


async def test_a_supervisor_that_leaves_gives_its_lease_and_its_workers_to_the_next(registry: Registry) -> None:
    """When settings change, for example, the successor does not wait until the lease expires, and no worker is
    affected."""
    await registry.set_wanted({"decode": 1})
    host = FakeHost()
    supervisor = Supervisor(host, registry, grace_s=1.0, lease=Lease(registry, "one"))
    running = asyncio.create_task(supervisor.run())
    await Watch(supervisor).until(Kind.READY, "decode-0")
    await supervisor.leave()
    await running
    assert host.processes["decode-0"].graces == []
    assert not host.processes["decode-0"].killed
    async with asyncio.timeout(lease.SUPERVISOR_LEASE_S / 2):
        await Lease(registry, "two").take()


async def test_a_second_cluster_of_one_name_changes_no_size_of_the_first(
    valkey: EmbeddedValkey, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second cluster is refused before it writes wanted sizes, which the first one would follow."""
    monkeypatch.setattr(lease, "SUPERVISOR_LEASE_S", KEPT_S)
    first = Lease(registry, "one", KEPT_S)
    await first.take()
    keeping = asyncio.create_task(first.keep())
    await registry.set_wanted({"decode": 3})
    with pytest.raises(PreconditionFailed) as refused:
        await want(Settings(model="m", redis=valkey.url, cluster="test"), "two", {"decode": 1})
    assert refused.value.field == "cluster"
    assert await registry.wanted() == {"decode": 3}
    await end(keeping)


async def test_a_supervisor_that_sees_another_holder_ends(registry: Registry) -> None:
    """Its run ends with the reason, instead of running workers under ids that another one uses."""
    supervisor = Supervisor(FakeHost(), registry, grace_s=1.0, lease=Lease(registry, "one", SHORT_S))
    running = asyncio.create_task(supervisor.run())
    client, key = registry._store.client, f"{registry._prefix}:supervisor"
    async with asyncio.timeout(60):
        async for _ in registry.changes(every_s=0.05):
            if await client.exists(key):
                break
        await client.set(key, "two/host:1/x")
        with pytest.raises(PreconditionFailed, match="host:1"):
            await running
    await supervisor.stop(0.0)


async def test_a_lease_from_a_clock_that_was_ahead_lasts_no_longer(registry: Registry) -> None:
    """The server's clock was set back, or a server whose clock is behind took over: the name of a dead supervisor's
    cluster is free within one lease. What is left of a shorter one does not change."""
    await registry.acquire_lease("one/h:1/x", "one")
    await registry._store.client.pexpire(f"{registry._prefix}:supervisor", 600_000)
    holder, left_s = await registry.acquire_lease("two/h:2/y", "two")
    assert holder == "one/h:1/x"
    assert left_s <= lease.SUPERVISOR_LEASE_S
    await registry._store.client.pexpire(f"{registry._prefix}:supervisor", 4_000)
    assert (await registry.acquire_lease("two/h:2/y", "two"))[1] <= 4.0
