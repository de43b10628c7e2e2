"""The list of adapters on a real Valkey: one adapter per name, and versions that only grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.state import adapter_list
from cluster.state.adapter_list import AdapterList, LoadedAdapter
from cluster.state.registry import Registry
from services.adapter_follower import AdapterFollower
from tandem.errors import InvalidRequest, NotFound, TandemError, TooLarge

RED, BLUE = LoadedAdapter("red", "01ff", 5.0), LoadedAdapter("folder/blue", "02", 6.0)
EMPTY = AdapterList()


@pytest.fixture
async def follower(registry: Registry) -> AsyncIterator[AdapterFollower]:
    following = AdapterFollower(registry, 5.0, lambda: None)
    await following.start()
    yield following
    await following.stop()


async def test_what_is_added_is_listed_until_it_is_removed(registry: Registry) -> None:
    """An added adapter is listed with every field until it is removed, and each change has the next version."""
    assert await adapter_list.read(registry) == EMPTY
    assert await adapter_list.add(registry, "red", RED, EMPTY) == 1
    assert await adapter_list.add(registry, "b/l:u.e-", BLUE, EMPTY) == 2
    assert await adapter_list.read(registry) == AdapterList(2, {"b/l:u.e-": BLUE, "red": RED})
    assert RED.digest == b"\x01\xff"
    assert await adapter_list.remove(registry, "red", EMPTY) == 3
    with pytest.raises(NotFound):
        await adapter_list.remove(registry, "red", EMPTY)
    assert await adapter_list.read(registry) == AdapterList(3, {"b/l:u.e-": BLUE})


async def test_of_two_loads_of_one_name_at_once_one_succeeds(registry: Registry) -> None:
    """Of two concurrent loads of one name the first one succeeds, at whichever router."""
    both = (adapter_list.add(registry, "one", adapter, EMPTY) for adapter in (RED, BLUE))
    found = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(type(one) for one in found if isinstance(one, TandemError)) == [InvalidRequest]
    assert (await adapter_list.read(registry)).version == 1


async def test_the_list_is_bounded(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name beyond the bound is refused, and accepted again after another one is unloaded."""
    monkeypatch.setattr(adapter_list, "MAX_ADAPTERS", 2)
    for name in ("one", "two"):
        await adapter_list.add(registry, name, RED, EMPTY)
    with pytest.raises(TooLarge):
        await adapter_list.add(registry, "three", RED, EMPTY)
    await adapter_list.remove(registry, "one", EMPTY)
    await adapter_list.add(registry, "three", RED, EMPTY)


async def test_a_change_at_a_registry_that_lost_the_list_keeps_the_rest(registry: Registry) -> None:
    """The caller's list is written back before its change. Without knowledge of the list, the version would start
    again."""
    known = AdapterList(7, {"red": RED})
    assert await adapter_list.add(registry, "blue", BLUE, known) == 8
    assert await adapter_list.read(registry) == AdapterList(8, {"blue": BLUE, "red": RED})
    await adapter_list.restore(registry, known)
    assert (await adapter_list.read(registry)).version == 8, "an older list changes nothing"


async def test_the_last_unloading_is_no_loss(registry: Registry, follower: AdapterFollower) -> None:
    """An empty list has a version, so no follower restores the former list."""
    await follower.add("red", RED)
    await follower.remove("red")
    stale = AdapterFollower(registry, 5.0, lambda: None)
    stale.list = AdapterList(1, {"red": RED})
    await stale.start()
    await stale.stop()
    assert stale.list == follower.list == AdapterList(2, {}) == await adapter_list.read(registry)


async def test_followers_see_a_change_at_once(registry: Registry, follower: AdapterFollower) -> None:
    """A follower sees a change when it is announced, and not only at the next refresh, seconds later."""
    seen = asyncio.Event()
    other = AdapterFollower(registry, 60.0, seen.set)
    await other.start()
    async with asyncio.timeout(30.0):
        while not seen.is_set():  # the subscription may begin after the first change
            await follower.add(f"red{follower.list.version}", RED)
            await asyncio.sleep(0)
    await other.stop()
    assert other.list.adapters["red0"] == RED


async def test_an_entry_that_cannot_be_read_hides_no_other(registry: Registry) -> None:
    """An entry of a newer version that cannot be read is skipped, and unknown fields are ignored."""
    await adapter_list.add(registry, "red", RED, EMPTY)
    broken = {"odd": '{"path": "x", "fingerprint": "no hex"}', "empty": '{"path": "x", "fingerprint": ""}', "no": "{"}
    later = '{"path": "red", "fingerprint": "01ff", "loaded_at": 5.0, "rank": 8}'
    for name, text in {**broken, "later": later}.items():
        await registry.run(adapter_list.KEY, "return redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])", [name, text])
    assert (await adapter_list.read(registry)).adapters == {"later": RED, "red": RED}
