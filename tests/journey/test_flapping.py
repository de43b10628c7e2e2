"""A registry that loses its workers and gets them back costs no request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.state.registry import Registry, RegistryChanges
from kvtransfer.types import Peer
from services.decode.prefill_peers import PrefillPeers
from services.worker_liveness import WorkerLiveness
from tandem.errors import TandemError
from tests.support import oracle
from tests.support.faults import Harm

NEW = 24
REQUESTS = 12


class Flapping:
    """Every other answer of the registry has no worker, to each process, from `start` to `stop`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        self.empty = 0  # answers without a worker
        self._flap = asyncio.Event()
        self._asked: dict[Registry, int] = {}
        asked, changes_since = self._asked, Registry.changes_since

        async def flapping(registry: Registry, mark: tuple[str, int] = ("", 0)) -> RegistryChanges:
            found = await changes_since(registry)
            asked[registry] = asked.get(registry, 0) + 1
            if not self.on or asked[registry] % 2:
                return found
            self.empty += 1
            self._flap.set()
            self._flap = asyncio.Event()
            routers = {name: one for name, one in found.records.items() if one is None or one.role == "router"}
            return replace(found, records=routers)

        monkeypatch.setattr(Registry, "changes_since", flapping)

    async def during_a_read(self, harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
        """Makes every read last for several flaps."""
        async with asyncio.timeout(60):
            for _ in range(6):
                if self.on:
                    await self._flap.wait()

    def stop(self) -> None:
        """Reads that began last go on, such as that which verifies a source after a failure."""
        self.on = False
        self._flap.set()


async def flapped(inside: Any, tiny: Path, flapping: Flapping) -> list[Any]:
    """The results, errors included, of requests that arrived, ran and moved their KV meanwhile."""
    prompts = oracle.prompts(tiny, [40 + index for index in range(REQUESTS)])
    wrap = lambda inner, who: Harm(inner, before=flapping.during_a_read) if who.startswith("decode") else inner  # noqa: E731
    async with inside(prefill=2, decode=2, wrap=wrap, heartbeat_s=0.05) as cluster:
        flapping.on = True
        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.create_task(cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)))
            await asyncio.sleep(0.05)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        flapping.stop()
        assert flapping.empty > 10
        failures = [one for one in done if isinstance(one, BaseException)]
        assert all(isinstance(one, TandemError) for one in failures), failures
        for one, prompt in zip(done, prompts, strict=True):
            if not isinstance(one, BaseException):
                assert one.token_ids == oracle.greedy(tiny, prompt, NEW)
        await cluster.freed(10.0)
        return done


async def test_no_request_fails_while_the_registry_flaps(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is tried twice either: no connection is closed and no read ended because a record is missing."""
    done = await flapped(inside, tiny, Flapping(monkeypatch))
    assert [one for one in done if isinstance(one, BaseException)] == []
    assert [one.receipt.attempts for one in done] == [1] * REQUESTS


async def test_control_if_a_missing_record_were_a_death_requests_would_be_hurt(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: connections and reads are ended whenever a record is missing."""
    present = lambda view: {(one.worker_id, one.incarnation): one for one in view.workers.values()}  # noqa: E731
    monkeypatch.setattr(WorkerLiveness, "incarnations", property(present))

    @asynccontextmanager
    async def not_in_use(peers: PrefillPeers, worker_id: str, incarnation: str, address: str) -> Any:
        yield await peers._get(peers._link((worker_id, incarnation), address))

    monkeypatch.setattr(PrefillPeers, "using", not_in_use)
    done = await flapped(inside, tiny, Flapping(monkeypatch))
    assert any(isinstance(one, BaseException) or one.receipt.attempts > 1 for one in done)
