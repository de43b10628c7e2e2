"""How a decode worker measures the links of its sources, without workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.contextvars import bind_contextvars, get_contextvars

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


async def test_a_bug_of_a_connection_is_a_failed_transfer_until_a_block_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker whose memory for a landing cannot be allocated, or whose transport fails in an unknown way, computes
    prompts itself meanwhile. The lines about the link, which is of all requests, name none."""
    monkeypatch.setattr(prefill_peers, "VERIFY_MIN_S", 0.0)
    again, verified, unused = asyncio.Event(), asyncio.Event(), cast(Any, None)

    async def connect(_: object, timeout: float) -> None:
        if not again.is_set():
            raise RuntimeError("out of memory")

    async def verify(_: object) -> None:
        verified.set()

    async def answer(*_: object) -> Any:
        return SimpleNamespace(peer=SimpleNamespace(worker_id="prefill-0", incarnation="a1"), layout_json="")

    async def no_landing(*_: object) -> None: ...

    transport: Any = SimpleNamespace(connect=connect, link=lambda _: "nixl", forget=lambda _: None, dial=None)
    channels: Any = SimpleNamespace(to=lambda _: None)
    for name, given in (("_get_peer", answer), ("peer_from", lambda one: one)):
        monkeypatch.setattr(prefill_peers, name, given)
    monkeypatch.setattr(prefill_peers.prefill_pb2_grpc, "PrefillServiceStub", lambda _: None)
    peers = PrefillPeers(transport, unused, channels, verify, unused)
    monkeypatch.setattr(peers, "_landing", no_landing)
    said: list[tuple[str, dict[str, Any]]] = []

    def say(event: str, **_: object) -> None:
        said.append((event, get_contextvars()))

    monkeypatch.setattr(prefill_peers, "log", SimpleNamespace(info=say, warning=say))
    bind_contextvars(request="the first")
    try:
        for _ in range(2):
            with pytest.raises(TransferFailed, match="incident"):
                async with peers.using("prefill-0", "a1", "h:1"):
                    pass
        again.set()
        async with asyncio.timeout(SOON_S):
            await verified.wait()
            await asyncio.sleep(0)
        async with peers.using("prefill-0", "a1", "h:1") as found:
            assert found.peer.worker_id == "prefill-0"
    finally:
        await peers.close()
    assert {event for event, _ in said} == {"source.refused", "source.connected", "source.verified"}
    assert not [event for event, bound in said if bound]


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
