"""Greedy tokens through running processes equal transformers' own, for every family and the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loadtest.harness.random_checkpoints import SHAPES, make_checkpoint
from tests.support import oracle
from tests.support.harness import LocalCluster

ROOT = Path(__file__).parents[2]
FAMILIES = sorted(name for name in SHAPES if name.startswith("tiny-"))
NEW = 12
BLOCK = 8
# One token to several chunks of 64; block borders hit, missed by one, and crossed.
LENGTHS = [1, 2, 7, 8, 9, 16, 17, 31, 40, 63, 64, 65, 90, 128, 150, 200]


# To the transport a block is bytes, so few over the second one: plain KV, and latent KV.
OVER_GLOO = ["demo", "tiny-deepseek-v2"]
CASES = [("demo", "nixl"), *((name, "nixl") for name in FAMILIES), *((name, "nccl") for name in OVER_GLOO)]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, transport = request.param
    return name, transport


@pytest.fixture(scope="module")
def model(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, _ = case
    if name == "demo":
        return ROOT / "demo/model"
    folder = tmp_path_factory.mktemp(name)
    make_checkpoint(folder, name, seed=0, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def cluster(case: tuple[str, str], model: Path) -> Iterator[LocalCluster]:
    settings: dict[str, Any] = {"block_size": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 32}
    with LocalCluster(model, dtype="float32", transport=case[1], **settings) as running:
        yield running


def test_tokens_equal_transformers(cluster: LocalCluster, model: Path, case: tuple[str, str]) -> None:
    """One at a time and sixteen at once, cache cold and warm: token for token what `generate` gives, between processes
    over NIXL or Gloo."""
    client = cluster.client()
    prompts = oracle.prompts(model, LENGTHS)
    expected = [oracle.greedy(model, prompt, NEW) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > len(expected) // 2, "outputs must vary, or equality is weak"

    def ask(prompt: list[int]) -> list[int]:
        done = client.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True, timeout=60)
        assert done.receipt.path == "disaggregated"
        assert done.receipt.transfer is not None
        assert done.receipt.transfer.transport.startswith({"nixl": "nixl:", "nccl": "gloo:"}[case[1]])
        return done.token_ids

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, prompts)) == expected, "sixteen at once, cold"
        assert list(pool.map(ask, prompts)) == expected, "sixteen at once, warm"
    again = [0, 4, 8, 11, 15]
    assert [ask(prompts[i]) for i in again] == [expected[i] for i in again], "one at a time, warm"
    fresh = oracle.prompts(model, [1, 23, 130], seed=1)
    assert [ask(prompt) for prompt in fresh] == [oracle.greedy(model, prompt, NEW) for prompt in fresh], "alone, cold"
    assert client.generate(prompts[-1], max_tokens=2, ignore_eos=True).receipt.cached_tokens >= LENGTHS[-1] - BLOCK
    cluster.wait_balanced()
