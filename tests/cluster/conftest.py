"""A real embedded Valkey for the tests that use it, and waits for conditions without fixed sleeps."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cluster.state import redis_store
from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.registry import Registry


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is there may be late, where others have the cores."""
    monkeypatch.setattr(redis_store, "CALL_TIMEOUT_S", 10.0)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private, short directory: a unix socket's path may have 107 bytes, and pytest's own directories are deep."""
    with tempfile.TemporaryDirectory(prefix="tdm-") as path:
        yield Path(path)


@pytest.fixture
def valkey(directory: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(directory)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def registry(valkey: EmbeddedValkey) -> AsyncIterator[Registry]:
    connection = Registry(valkey.url, "test", ttl_s=60.0)
    yield connection
    await connection.close()
