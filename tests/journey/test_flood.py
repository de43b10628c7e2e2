"""One client that does what it can to keep the others from being served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loadtest.scenarios import two_tenants
from services import grpc_server
from tests.support import flood

QUIET_S = 2.0  # silence after which a flood has had its last answer; a busy machine is silent for a second


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"greedy {two_tenants.GREEDY} requests=8\npolite {two_tenants.POLITE}\n")
    return file


@pytest.mark.parametrize("name", list(flood.FLOODS))
async def test_a_greedy_client_ends_where_its_limits_are(inside: Any, keys: Path, name: str) -> None:
    """Refused, or told to go away; nobody else is refused, and nothing is left of it."""
    async with inside(api_keys=keys) as cluster, two_tenants.served(cluster.router.address) as polite:
        found = await flood.FLOODS[name](cluster.router.address, 200, QUIET_S if name in ("unread", "pings") else 0.4)
    assert polite.kept
    assert polite.new
    assert not polite.failed
    match name:
        case "unread":
            assert found["RESOURCE_EXHAUSTED"] >= 192, found
        case "connections":
            assert found == {"answered": 200}
        case "pings":
            assert found["GOAWAY too_many_pings"] + found["closed"] >= 1, found


async def test_control_without_strikes_pings_go_on(inside: Any, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the option causes the GOAWAY above."""
    monkeypatch.setattr(grpc_server, "MAX_PING_STRIKES", 0)
    async with inside(api_keys=keys) as cluster:
        found = await flood.pings(cluster.router.address, 200, QUIET_S)
    assert found["sent"] == 2000
    assert "closed" not in found


async def test_control_where_few_calls_may_wait_a_flood_of_resets_cancels_others(
    inside: Any, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with the lower limit gRPC ends random calls of all clients, so the option protects them above."""
    monkeypatch.setattr(grpc_server, "MAX_PENDING_CALLS", 1)
    async with inside(api_keys=keys) as cluster, two_tenants.served(cluster.router.address) as polite:
        async with asyncio.timeout(30):
            while not polite.failed["CANCELLED"]:
                await flood.resets(cluster.router.address, 200, 0.4)
