"""A short run of `python -m loadtest abuse`: the tenant greedy has what the command reports, and the tenant polite is
served meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from loadtest.scenarios import abuse, two_tenants

DEMO = Path(__file__).parents[2] / "demo/model"


async def test_each_abuse_is_what_it_says_and_polite_is_served(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies are refused, streams run to their end, idle connections are held, and watchers are served."""
    monkeypatch.setattr(abuse, "CONNECTIONS", 100)
    monkeypatch.setattr(abuse, "TOKENS", 20)
    monkeypatch.setattr(abuse, "REQUESTS", 4)
    monkeypatch.setattr(abuse, "WATCHERS", 10)
    keys = tmp_path / "keys"
    keys.write_text(f"greedy {two_tenants.GREEDY} requests=64\npolite {two_tenants.POLITE}\n")
    async with inside(model=str(DEMO), http_port=0, kv_blocks=1024, api_keys=keys) as cluster:
        target = abuse.Target(cluster.router.address, f"http://{cluster.router.http.address}")
        expected = {"body": {"400"}, "undecodable": {"200"}, "text": {"200"}, "idle": {"opened"}}
        expected |= {"watchers": {"pieces", "jobs"}, "job": {"pieces", "jobs"}}
        for name in expected:
            found: Counter[str] = Counter()
            abusing = asyncio.ensure_future((abuse.ABUSES | abuse.FAIR)[name](target, found))
            async with two_tenants.served(target.grpc) as polite, asyncio.timeout(30):
                while not found and not abusing.done():  # noqa: ASYNC110 (a counter offers no event)
                    await asyncio.sleep(0.05)
            abusing.cancel()
            await asyncio.wait([abusing])
            assert abusing.cancelled(), abusing.exception()
            assert found, name
            assert set(found) <= expected[name], (name, found)
            assert polite.kept
            assert not polite.failed
