"""What every worker and router does before it serves."""

from __future__ import annotations

import asyncio
import importlib
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.state import redis_store
from cluster.state.redis_store import RedisStore
from services import launch
from tandem.errors import InternalError, SettingsError, Unavailable
from tandem.settings import Settings


async def test_names_that_no_server_resolves_hold_up_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that is looked up in vain leaves a thread in each lookup, and none of those that digest KV and hash
    prompts."""
    monkeypatch.setattr(redis_store, "CALL_TIMEOUT_S", 0.05)
    looked_up, over = threading.Event(), threading.Event()

    def hangs(*_: object, **__: object) -> None:
        looked_up.set()
        over.wait(60)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    with pytest.raises(SettingsError, match="unknown role"):
        await launch.start("nobody", Settings(model="m"), "nobody-0")
    store = RedisStore("redis://registry.invalid:6379", most=1)
    try:
        async with asyncio.timeout(30):
            while not looked_up.is_set():  # a lookup that was cancelled before it began is none
                with pytest.raises(Unavailable):
                    await store.memory()
            assert not await asyncio.to_thread(over.is_set)
    finally:
        over.set()
        await store.close()


async def test_a_router_raises_its_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it may, before it divides them among its connections; a higher one stays. The control is a worker,
    which keeps its own."""

    def ends(name: str) -> None:
        raise InternalError(name)

    monkeypatch.setattr(importlib, "import_module", ends)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for role, most, expected in (("decode", 300, 256), ("router", 300, 300), ("router", 200, 256)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
            monkeypatch.setattr(launch, "MOST_FILES", most)
            with pytest.raises(InternalError):
                await launch.start(role, Settings(model="m"), f"{role}-0")
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
