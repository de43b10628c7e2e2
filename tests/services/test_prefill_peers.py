"""How a decode worker measures the links of its sources, without workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.decode import prefill_peers
from services.decode.prefill_peers import PrefillPeers
from tandem.errors import Busy, TandemError, TransferFailed, WorkerLost
from tandem.tasks import end

SOON_S = 10.0
BUSY = [Busy("another probe", reason="PROBING"), Busy("no blocks", reason="NO_ROOM")]


@pytest.mark.parametrize("answers", [[*BUSY, None], [*BUSY, TransferFailed("no KV arrives")]])
async def test_a_link_that_cannot_be_measured_now_is_measured_later(
    monkeypatch: pytest.MonkeyPatch, answers: list[TandemError | None]
) -> None:
    """While other links are measured, or no block is free, nothing is known about this one. The first result or other
    error is the last."""
    monkeypatch.setattr(prefill_peers, "VERIFY_MIN_S", 0.0)
    left = [*answers]

    async def compare(_: object) -> None:
        if (error := left.pop(0)) is not None:
            raise error

    async def connected(_: object) -> Any:
        return SimpleNamespace(peer="peer")

    unused: Any = None
    peers = PrefillPeers(unused, unused, unused, unused, compare)
    monkeypatch.setattr(peers, "_get", connected)
    async with asyncio.timeout(SOON_S):
        await peers._warm(peers._link(("prefill-0", "a1"), "h:1"))
    assert left == []


@pytest.mark.parametrize("before", ["a request", "nothing", "no answer", "no connection"])
async def test_every_link_is_measured(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """Also one that a request made before the worker was seen here, or whose first connection failed. The control has
    had nothing before."""
    monkeypatch.setattr(prefill_peers, "VERIFY_MIN_S", 0.0)
    measured, failures = asyncio.Event(), {"no answer": [WorkerLost("")], "no connection": [TransferFailed("")]}
    key, unused = ("prefill-0", "a1"), cast(Any, None)

    async def compare(_: object) -> None:
        measured.set()

    async def connect(_: object) -> Any:
        if left := failures.get(before):
            raise left.pop()
        return SimpleNamespace(peer="peer")

    async def verify(_: object) -> None: ...

    async def updates() -> AsyncIterator[None]:
        yield None
        await asyncio.Event().wait()

    channels: Any = SimpleNamespace(keep_only=lambda addresses: None)
    peers = PrefillPeers(unused, unused, channels, verify, compare)
    monkeypatch.setattr(peers, "_connect", connect)
    if before == "a request":
        async with peers.using(*key, "h:1"):
            pass
    record = SimpleNamespace(role="prefill", worker_id="prefill-0", address="h:1")
    view: Any = SimpleNamespace(updates=updates, incarnations={key: record})
    following = asyncio.create_task(peers.follow(view))
    try:
        async with asyncio.timeout(SOON_S):
            await measured.wait()
    finally:
        await end(following)
        await peers.close()
