"""Workers with both transports, NIXL and Gloo: each pair uses one of them, and reports which and why."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.backends.nixl_transport import NixlTransport
from services.router.routing import request_scheduler
from tandem.errors import TransferFailed
from tests.support import oracle
from tests.support.stopwatch import Stopwatch

NEW = 16


async def never_arrives(self: NixlTransport, peer: Any, pairs: Any, *_: Any, **__: Any) -> Any:
    raise TransferFailed("injected: nothing arrives by NIXL")


async def test_receipt_and_doctor_say_which_transport_a_pair_uses_and_why(inside: Any, tiny: Path) -> None:
    """Both transports are measured, and the tokens are right over the one that was chosen."""
    prompts = oracle.prompts(tiny, [50, 51])
    async with inside(transport="auto") as cluster:
        (pair,) = (await cluster.client.diagnose()).pairs
        assert pair.compatible
        assert {part.partition(":")[0] for part in pair.why.split("; ")} == {"nixl", "nccl"}
        assert pair.why.count("GB/s") == 2
        for prompt in prompts:
            done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
            assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
            assert (done.receipt.transfer.transport, done.receipt.transfer.why) == (pair.transport, pair.why)
        assert await cluster.ledgers_balance()


@pytest.mark.parametrize("transport", ["auto", "nixl"])
async def test_a_pair_whose_nixl_fails_goes_on_over_the_other_transport(
    inside: Any, tiny: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request is computed by its decode worker, as after every transfer that fails. Later ones move KV over
    Gloo, with the right tokens and an empty ledger. In the control, with NIXL alone, none moves any KV."""
    monkeypatch.setattr(request_scheduler, "SUSPECT_S", 0.1)  # how long the pair is avoided
    prompts = oracle.prompts(tiny, [50, 51, 52, 53])
    async with inside(transport=transport) as cluster:
        monkeypatch.setattr(NixlTransport, "read", never_arrives)
        done = await cluster.client.generate(prompts[0], max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompts[0], NEW)
        assert done.receipt.path == "local"
        if transport == "auto":
            async with asyncio.timeout(20):
                while done.receipt.path == "local":  # until the source is verified, and the pair no longer avoided
                    done = await cluster.client.generate(prompts[1], max_tokens=NEW, ignore_eos=True)
            assert done.token_ids == oracle.greedy(tiny, prompts[1], NEW)
            assert done.receipt.transfer.transport == "gloo:tcp"
            assert "nixl failed" in done.receipt.transfer.why
        else:
            assert "injected" in (await cluster.client.diagnose()).pairs[0].error
            done = await cluster.client.generate(prompts[1], max_tokens=NEW, ignore_eos=True)
            assert done.receipt.path == "local"
        await cluster.freed()
        assert await cluster.ledgers_balance()


async def test_pairs_that_change_their_transport_under_load_lose_no_request(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL's reads from one of two sources fail: its pairs switch to Gloo while requests run, and each request has its
    own tokens."""
    monkeypatch.setattr(request_scheduler, "SUSPECT_S", 0.1)
    read = NixlTransport.read

    async def from_one_only(self: NixlTransport, peer: Any, *given: Any, **named: Any) -> Any:
        if peer.worker_id == "prefill-0":
            raise TransferFailed("injected: nothing arrives by NIXL")
        return await read(self, peer, *given, **named)

    used: set[tuple[str, str]] = set()
    async with inside(transport="auto", prefill=2, decode=2) as cluster:
        monkeypatch.setattr(NixlTransport, "read", from_one_only)
        async with asyncio.timeout(30):
            for seed in count():
                prompts = oracle.prompts(tiny, [40, 41, 42, 43, 44, 45], seed)  # not in any worker's cache
                done = await asyncio.gather(
                    *(cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True) for prompt in prompts)
                )
                assert [one.token_ids for one in done] == [oracle.greedy(tiny, prompt, NEW) for prompt in prompts]
                moved = [one.receipt for one in done if one.receipt.transfer.blocks]
                used |= {(one.prefill_worker, one.transfer.transport.partition(":")[0]) for one in moved}
                if {source for source, _ in used} == {"prefill-0", "prefill-1"}:
                    break
        assert ("prefill-0", "nixl") not in used
        await cluster.freed(5.0)
        watch = Stopwatch()
        while not await cluster.ledgers_balance():  # a source that failed is verified in the background
            assert watch.within(5.0)
            await asyncio.sleep(0.01)
