"""Greedy tokens through a whole cluster equal transformers' own, for every kind of KV and of state, and the demo model.

Whether a worker computes a family correctly is tested, for all families, in tests/engine/test_models.py,
test_sparse_indexers.py and test_recurrent_layers.py; between workers a block is bytes.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from loadtest.harness.random_checkpoints import make_checkpoint
from tandem.async_client import AsyncClient
from tests.support import oracle
from tests.support.harness import LocalCluster

ROOT = Path(__file__).parents[2]
NEW = 12
SETTINGS: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 32, "dtype": "float32"}
# One token to several chunks of 64; lengths at, next to, and beyond block boundaries.
LENGTHS = [1, 8, 9, 17, 63, 64, 65, 150]
# In separate processes: the demo model, and windows next to full attention. What a worker does with the others is
# the same in the test's process, which needs no further imports: latents, windows alone, chunked attention, an
# indexer's keys; in addition to test_recurrent_state.py's, layers with neither KV nor state, convolutions, latents with
# states, Mamba 1.
IN_PROCESSES = ["demo", "tiny-gpt-oss"]
KINDS = [
    *("tiny-deepseek-v3", "tiny-mistral", "tiny-llama4-text", "tiny-glm-dsa"),
    *("tiny-nemotron-h", "tiny-lfm2", "tiny-kimi-linear", "tiny-jamba"),
]
Answers = list[tuple[list[int], list[int]]]  # a prompt and its answer


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "demo":
        return ROOT / "demo/model"
    return make_checkpoint(tmp_path / request.param, request.param, seed=0, dtype="float32")


async def answers(client: AsyncClient, model: Path, transport: str = "nixl:") -> Answers:
    """Answers to all prompts at once, cold and warm, then one at a time, warm and cold."""

    async def ask(prompt: list[int]) -> tuple[list[int], list[int]]:
        done = await client.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True, timeout=60)
        assert done.receipt.path == "disaggregated"
        assert done.receipt.transfer is not None
        assert done.receipt.transfer.transport.startswith(transport)
        assert len(done.token_ids) == NEW
        return prompt, done.token_ids

    prompts = oracle.prompts(model, LENGTHS)
    found = await asyncio.gather(*map(ask, prompts))
    assert await asyncio.gather(*map(ask, prompts)) == found, "all at once, warm"
    for index in (0, 2, 7):
        assert await ask(prompts[index]) == found[index], "one at a time, warm"
    found += [await ask(prompt) for prompt in oracle.prompts(model, [1, 130], seed=1)]
    warm = await client.generate(prompts[-1], max_tokens=2, ignore_eos=True)
    assert warm.receipt.cached_tokens >= LENGTHS[-1] - SETTINGS["block_size"]
    return found


def assert_transformers(model: Path, found: Answers) -> None:
    """Runs outside the cluster, whose event loop it would block."""
    for prompt, tokens in found:
        assert tokens == oracle.likeliest(model, prompt, tokens)
    assert len({tuple(tokens) for _, tokens in found}) > len(found) // 2, "outputs must vary, or equality is weak"


async def in_processes(model: Path, carrier: str, **settings: Any) -> None:
    with LocalCluster(model, **settings, **SETTINGS) as cluster:
        async with AsyncClient(cluster.target) as client:
            found = await answers(client, model, carrier)
        cluster.wait_balanced()
    assert_transformers(model, found)


@pytest.mark.parametrize("model", IN_PROCESSES, indirect=True)
async def test_tokens_equal_transformers(model: Path) -> None:
    """Through a router, a prefill and a decode worker in separate processes; afterwards nothing is held."""
    await in_processes(model, "nixl:")


@pytest.mark.parametrize("model", ["tiny-deepseek-v2"], indirect=True)
async def test_tokens_equal_transformers_over_gloo(model: Path) -> None:
    """Likewise with latent KV over the transport in which both sides act."""
    await in_processes(model, "gloo:", transport="nccl")


@pytest.mark.parametrize(("model", "transport"), [*itertools.product(KINDS, ["nixl", "nccl"])], indirect=["model"])
async def test_tokens_of_every_other_kind_equal_transformers(inside: Any, model: Path, transport: str) -> None:
    """Through the same router and workers in this process, also with KV and states over NIXL, and over Gloo;
    afterwards nothing is held."""
    room = 1024  # blocks; a quarter is for snapshots, which must hold those of all these prompts
    async with inside(model=str(model), kv_blocks=room, **SETTINGS) as cluster:
        found = await answers(cluster.client, model, {"nixl": "nixl:", "nccl": "gloo:"}[transport])
        await cluster.freed()
        assert await cluster.ledgers_balance()
    assert_transformers(model, found)
