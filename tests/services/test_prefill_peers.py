"""How a decode worker measures the links of its sources, without workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.decode import prefill_peers
from services.decode.prefill_peers import PrefillPeers
from tandem.errors import Busy, TandemError, TransferFailed

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
