"""Greedy tokens through a whole cluster equal transformers' own, for every family and the demo model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loadtest.harness.random_checkpoints import SHAPES, make_checkpoint
from tandem.async_client import AsyncClient
from tests.support import oracle
from tests.support.harness import LocalCluster

ROOT = Path(__file__).parents[2]
NEW = 12
SETTINGS: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 32, "dtype": "float32"}
# One token to several chunks of 64; block borders hit, missed by one, and crossed.
LENGTHS = [1, 2, 7, 8, 9, 16, 17, 31, 40, 63, 64, 65, 90, 128, 150, 200]
# In processes of their own: the demo model, and one family for each kind of KV (latent; windows beside full attention).
# What a worker does with the others is the same in the test's process, which imports no library again.
IN_PROCESSES = ["demo", "tiny-deepseek-v3", "tiny-gpt-oss"]
FAMILIES = sorted(name for name in SHAPES if name.startswith("tiny-") and name not in IN_PROCESSES)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "demo":
        return ROOT / "demo/model"
    return make_checkpoint(tmp_path / request.param, request.param, seed=0, dtype="float32")


@dataclass(frozen=True)
class Expected:
    """Prompts, and what transformers appends to each. Made before the cluster starts: it would hold its event loop."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    fresh: list[list[int]]
    fresh_tokens: list[list[int]]


@pytest.fixture
def expected(model: Path) -> Expected:
    prompts, fresh = oracle.prompts(model, LENGTHS), oracle.prompts(model, [1, 23, 130], seed=1)
    tokens, fresh_tokens = ([oracle.greedy(model, one, NEW) for one in asked] for asked in (prompts, fresh))
    assert len({tuple(one) for one in tokens}) > len(tokens) // 2, "outputs must vary, or equality is weak"
    return Expected(prompts, tokens, fresh, fresh_tokens)


async def assert_equal(client: AsyncClient, expected: Expected, transport: str = "nixl:") -> None:
    """One at a time and sixteen at once, cache cold and warm: token for token what `generate` gives."""

    async def ask(prompt: list[int]) -> list[int]:
        done = await client.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True, timeout=60)
        assert done.receipt.path == "disaggregated"
        assert done.receipt.transfer is not None
        assert done.receipt.transfer.transport.startswith(transport)
        return done.token_ids

    assert await asyncio.gather(*map(ask, expected.prompts)) == expected.tokens, "sixteen at once, cold"
    assert await asyncio.gather(*map(ask, expected.prompts)) == expected.tokens, "sixteen at once, warm"
    for index in (0, 4, 8, 11, 15):
        assert await ask(expected.prompts[index]) == expected.tokens[index], "one at a time, warm"
    assert [await ask(prompt) for prompt in expected.fresh] == expected.fresh_tokens, "alone, cold"
    warm = await client.generate(expected.prompts[-1], max_tokens=2, ignore_eos=True)
    assert warm.receipt.cached_tokens >= LENGTHS[-1] - SETTINGS["block_size"]


@pytest.mark.parametrize("model", IN_PROCESSES, indirect=True)
async def test_tokens_equal_transformers(model: Path, expected: Expected) -> None:
    """Through a router, a prefill and a decode worker, each a process; then nothing stays held."""
    with LocalCluster(model, **SETTINGS) as cluster:
        async with AsyncClient(cluster.target) as client:
            await assert_equal(client, expected)
        cluster.wait_balanced()


# To the transport a block is bytes, so few over the second one: plain KV, and latent KV.
@pytest.mark.parametrize("model", ["demo", "tiny-deepseek-v2"], indirect=True)
async def test_tokens_equal_transformers_over_gloo(model: Path, expected: Expected) -> None:
    """As above, over the transport in which both sides act."""
    with LocalCluster(model, transport="nccl", **SETTINGS) as cluster:
        async with AsyncClient(cluster.target) as client:
            await assert_equal(client, expected, "gloo:")
        cluster.wait_balanced()


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
async def test_tokens_of_every_other_family_equal_transformers(inside: Any, model: Path, expected: Expected) -> None:
    """Through the same router and workers in this process, with KV over NIXL, too; then nothing stays held."""
    room = 1024  # blocks, of which a quarter is for snapshots of states: of all these prompts, and the first must stay
    async with inside(model=str(model), transport="nixl", kv_blocks=room, **SETTINGS) as cluster:
        await assert_equal(cluster.client, expected)
        await cluster.freed()
        assert await cluster.ledgers_balance()
