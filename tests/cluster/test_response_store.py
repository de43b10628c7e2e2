"""The store of responses on a real Valkey: who owns them, how long they are kept, and which are removed when the store
is full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.response_store import MAX_CONNECTIONS, OWN_BYTES, ResponseStore, StoredResponse
from tandem.errors import Busy, NotFound, TooLarge, Unavailable
from tests.support.stopwatch import Stopwatch

MIB = 1024 * 1024


@pytest.fixture
async def store(valkey: EmbeddedValkey) -> AsyncIterator[ResponseStore]:
    one = ResponseStore(valkey.url, "test", ttl_s=60.0, most_bytes=MIB)
    yield one
    await one.close()


async def uncounted(_: int) -> None: ...


def id_of(number: int) -> str:
    return f"resp_{number:048x}"


async def keys(store: ResponseStore) -> set[str]:
    async with store._store.connection() as client:
        return {key.decode() for key in await client.keys("*")}


async def known(store: ResponseStore, tenant: str, numbers: range) -> list[int]:
    """The ids that can be read."""
    found = []
    for number in numbers:
        try:
            await store.get(tenant, id_of(number), uncounted)
            found.append(number)
        except NotFound:
            pass
    return found


async def total(store: ResponseStore, tenant: str) -> int:
    """The bytes that are counted for the tenant's responses."""
    async with store._store.connection() as client:
        return int(await client.hget(f"tandem:{{test}}:response-bytes:{tenant}", "") or 0)


async def test_a_response_can_be_read_by_every_router(store: ResponseStore, valkey: EmbeddedValkey) -> None:
    """A response is stored as bytes of any content, and is read alone or with its earlier items."""
    await store.put("ann", id_of(1), b'["\xc3\xbc\\u0000"]', b'{"output":[]}')
    other = ResponseStore(valkey.url, "test", ttl_s=60.0, most_bytes=MIB)
    assert await other.get("ann", id_of(1), uncounted) == StoredResponse(b'["\xc3\xbc\\u0000"]', b'{"output":[]}')
    assert await other.response("ann", id_of(1), uncounted) == b'{"output":[]}'
    await other.close()


async def test_a_response_counts_before_it_is_read(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the parts that are asked for. When its bytes are refused, or are not known, nothing is read."""
    await store.put("ann", id_of(1), b"[" + b" " * 1000 + b"]", b"{}")
    counts: list[int] = []

    async def count(size: int) -> None:
        counts.append(size)

    async def refuse(size: int) -> None:
        raise Busy(f"{size} bytes")

    for read in (store.get, store.input, store.response):
        await read("ann", id_of(1), count)
    assert counts == [1004, 1002, 2]
    monkeypatch.setattr(store._store.client, "hmget", None)
    for read in (store.get, store.input, store.response):
        with pytest.raises(Busy):
            await read("ann", id_of(1), refuse)
        with pytest.raises(NotFound):
            await read("ann", id_of(2), count)


async def test_another_tenant_does_not_know_it(store: ResponseStore) -> None:
    """Another tenant can neither read nor delete it, also one whose name has the same prefix."""
    await store.put("ann", id_of(1), b"[]", b"{}")
    for tenant in ("", "an", "anna", "bob"):
        for call in (
            store.get(tenant, id_of(1), uncounted),
            store.response(tenant, id_of(1), uncounted),
            store.delete(tenant, id_of(1)),
        ):
            with pytest.raises(NotFound) as unknown:
                await call
            assert unknown.value.reason == "NO_SUCH_RESPONSE"
    assert await store.response("ann", id_of(1), uncounted) == b"{}"


async def test_a_deleted_response_leaves_nothing(store: ResponseStore) -> None:
    """Its bytes do not count any more, and deleting it twice is an error."""
    await store.put("ann", id_of(1), b"[]", b"{}")
    await store.put("ann", id_of(2), b"[]", b"{}")
    await store.delete("ann", id_of(1))
    with pytest.raises(NotFound):
        await store.delete("ann", id_of(1))
    assert await known(store, "ann", range(1, 3)) == [2]
    assert await total(store, "ann") == OWN_BYTES + 4
    assert not any(id_of(1) in key for key in await keys(store))


async def test_a_response_expires_with_all_that_is_known_of_it(valkey: EmbeddedValkey) -> None:
    """Also if its tenant sends nothing more."""
    store = ResponseStore(valkey.url, "test", ttl_s=0.05, most_bytes=MIB)
    await store.put("ann", id_of(1), b"[]", b"{}")
    watch = Stopwatch()
    while await keys(store):
        assert watch.within(60.0)
        await asyncio.sleep(0.01)
    await store.close()


async def test_an_expired_response_takes_no_room(valkey: EmbeddedValkey) -> None:
    """The next response of the tenant removes the expired one's entries, though the lists are kept."""
    short = ResponseStore(valkey.url, "test", ttl_s=0.05, most_bytes=MIB)
    long = ResponseStore(valkey.url, "test", ttl_s=60.0, most_bytes=MIB)
    await short.put("ann", id_of(1), b"[]", b"{}")
    await long.put("ann", id_of(2), b"[]", b"{}")
    watch = Stopwatch()
    while await known(long, "ann", range(1, 2)):
        assert watch.within(60.0)
        await asyncio.sleep(0.01)
    await long.put("ann", id_of(3), b"[]", b"{}")
    assert await total(long, "ann") == 2 * (OWN_BYTES + 4)
    await short.close()
    await long.close()


async def test_the_oldest_responses_of_a_tenant_make_room_for_its_newest(
    store: ResponseStore, valkey: EmbeddedValkey
) -> None:
    """Only the tenant's own responses are removed. In the control, without the bound, all of them stay."""
    body = b"x" * 200_000
    await store.put("bob", id_of(0), body, b"{}")
    for number in range(8):
        await store.put("ann", id_of(number), body, b"{}")
    assert await known(store, "ann", range(8)) == [3, 4, 5, 6, 7]
    assert await total(store, "ann") <= MIB
    assert await known(store, "bob", range(1)) == [0]
    roomy = ResponseStore(valkey.url, "test", ttl_s=60.0, most_bytes=100 * MIB)
    for number in range(8):
        await roomy.put("carl", id_of(number), body, b"{}")
    assert await known(roomy, "carl", range(8)) == list(range(8))
    await roomy.close()


async def test_a_response_larger_than_all_room_is_refused(store: ResponseStore) -> None:
    """A response larger than the bound is refused and removes nothing."""
    await store.put("ann", id_of(1), b"[]", b"{}")
    with pytest.raises(TooLarge) as refused:
        await store.put("ann", id_of(2), b"x" * MIB, b"{}")
    assert refused.value.field == "store"
    assert await known(store, "ann", range(1, 3)) == [1]


async def test_a_burst_of_responses_needs_few_connections(store: ResponseStore) -> None:
    """All are stored and counted once."""
    await asyncio.gather(*(store.put("ann", id_of(number), b"[]", b"{}") for number in range(200)))
    assert await total(store, "ann") == 200 * (OWN_BYTES + 4)
    async with store._store.connection() as client:
        assert len(await client.client_list()) <= MAX_CONNECTIONS + 2


async def test_without_the_registry_nothing_seems_to_be_stored(store: ResponseStore, valkey: EmbeddedValkey) -> None:
    """Every call raises an error that says that the registry cannot be reached."""
    await store.check("t")
    valkey.stop()
    for call in (
        store.check("t"),
        store.put("ann", id_of(1), b"[]", b"{}"),
        store.response("ann", id_of(1), uncounted),
        store.delete("ann", id_of(1)),
    ):
        with pytest.raises(Unavailable):
            await call
