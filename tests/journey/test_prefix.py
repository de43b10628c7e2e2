"""Prompts go to the worker that has their prefix cached; wrong knowledge of that does no harm."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import services.kv_events
from services.router.routing.prefix_index import PrefixIndex, Prompt
from tests.support import oracle
from tests.support.waiting import until

NEW = 8


def known(cluster: Any, worker_id: str, tokens: list[int], salt: bytes = b"") -> int:
    """The number of tokens of it that the router believes a worker has cached."""
    record = cluster.router.models.first.pools.view.workers[worker_id]
    found: int = cluster.router.models.first.pools.prefixes.cached(Prompt(tokens, salt, ""), record)
    return found


async def ask(cluster: Any, prompt: list[int], **options: Any) -> Any:
    return (await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True, **options)).receipt


async def told(cluster: Any, worker_id: str, tokens: list[int]) -> None:
    await until(lambda: known(cluster, worker_id, tokens) > 0, 5, lambda: f"{worker_id} told nothing")


async def test_a_prompt_goes_to_the_prefill_worker_that_has_its_beginning(inside: Any, tiny: Path) -> None:
    """Three conversations over two workers, repeated: none is computed from its start twice."""
    prompts = oracle.prompts(tiny, [40, 48, 56])
    async with inside(prefill=2) as cluster:
        homes = []
        for prompt in prompts:
            receipt = await ask(cluster, prompt)
            homes.append(receipt.prefill_worker)
            await told(cluster, homes[-1], prompt)
        assert len(set(homes)) == 2
        for turn in range(4):
            for number in (turn % 3, (turn + 1) % 3, (turn + 2) % 3):
                longer = [*prompts[number], *range(5, 5 + turn)]
                done = await cluster.client.generate(longer, max_tokens=NEW, ignore_eos=True)
                assert done.receipt.prefill_worker == homes[number]
                assert done.receipt.cached_tokens >= 32
                assert done.token_ids == oracle.greedy(tiny, longer, NEW)


async def test_control_without_the_index_workers_take_turns(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: both workers compute the same prompt."""
    monkeypatch.setattr(PrefixIndex, "cached", lambda self, prompt, record: 0)
    prompt = oracle.prompts(tiny, [40])[0]
    async with inside(prefill=2) as cluster:
        receipts = [await ask(cluster, prompt) for _ in range(2)]
        assert {one.prefill_worker for one in receipts} == {"prefill-0", "prefill-1"}
        assert [one.cached_tokens for one in receipts] == [0, 0]


async def test_another_tenant_finds_nothing(inside: Any, tiny: Path) -> None:
    """Its salt gives other hashes, so its prompt is not routed to that worker, and nothing is found there."""
    prompt = oracle.prompts(tiny, [40])[0]
    async with inside(prefill=2) as cluster:
        home = (await ask(cluster, prompt)).prefill_worker
        await told(cluster, home, prompt)
        assert known(cluster, home, prompt, salt=b"other") == 0
        receipt = await ask(cluster, prompt, cache_salt=b"other")
        assert receipt.prefill_worker != home
        assert receipt.cached_tokens == 0


async def test_a_new_life_of_a_worker_has_nothing_until_it_says_so(inside: Any, tiny: Path) -> None:
    """The cached blocks of the former incarnation are forgotten with it."""
    prompt = oracle.prompts(tiny, [40])[0]
    async with inside(prefill=1) as cluster:
        await ask(cluster, prompt)
        await told(cluster, "prefill-0", prompt)
        await cluster.workers.pop("prefill-0").stop(0.0)
        await cluster.start_worker("prefill-0")
        await cluster.seen(2)
        assert known(cluster, "prefill-0", prompt) == 0
        assert (await ask(cluster, prompt)).cached_tokens == 0
        await told(cluster, "prefill-0", prompt)


async def test_a_message_that_is_lost_makes_the_router_ask_again(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gap in the numbers is noticed, and all blocks are sent again."""
    lost = asyncio.Event()
    watch = services.kv_events.KvEvents.watch

    async def gappy(self: Any) -> Any:
        async for message in watch(self):
            if message.sequence == 1 and not lost.is_set():
                lost.set()
                continue
            yield message

    monkeypatch.setattr(services.kv_events.KvEvents, "watch", gappy)
    first, second = oracle.prompts(tiny, [40, 48])
    async with inside() as cluster:
        await ask(cluster, first)
        await asyncio.wait_for(lost.wait(), 5)
        await ask(cluster, second)
        await told(cluster, "prefill-0", second)
        await told(cluster, "prefill-0", first)


async def test_wrong_knowledge_costs_no_token(inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that believes that every worker has every prefix gets the same answer."""
    monkeypatch.setattr(PrefixIndex, "cached", lambda self, prompt, record: len(prompt) - 1)
    prompt = oracle.prompts(tiny, [60])[0]
    async with inside(prefill=2, local_prefill="measured") as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
        assert done.receipt.cached_tokens == 0
