"""A worker of several ranks computes what one rank computes, and ends when a rank does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.builder import build_engine
from engine.engine import Engine
from engine.loading.self_check import pack
from loadtest.harness.random_checkpoints import make_checkpoint
from tandem.settings import Settings
from tests.support.rank_copies import rank_copies

NEW, BLOCK = 12, 4
PROMPTS = [[(7 * place + 11 * number) % 384 for place in range(length)] for number, length in enumerate((5, 21, 1, 34))]
# Name -> shape, changes, ranks. KV heads that are fewer than ranks, three ranks, gathered projections, experts, latents,
# biases of products that are summed.
CUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("tiny-llama", {}, 2),
    "llama of four ranks with two KV heads": ("tiny-llama", {}, 4),
    "llama of three ranks": (
        "tiny-llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 385},
        3,
    ),
    "llama with biases": ("tiny-llama", {"attention_bias": True, "mlp_bias": True}, 2),
    "tied": ("tiny-qwen3", {"tie_word_embeddings": True}, 2),
    "gemma2": ("tiny-gemma2", {}, 2),
    "qwen3-moe": ("tiny-qwen3-moe", {}, 2),
    "phi3": ("tiny-phi3", {}, 2),
    "deepseek-v3": ("tiny-deepseek-v3", {}, 2),
}


@contextmanager
def engine_of(folder: Path, ranks: int, **settings: Any) -> Iterator[Engine]:
    given: dict[str, Any] = {"kv_blocks": 64, "block_size": BLOCK, "threads": 1, "weight_cache": "off", **settings}
    with rank_copies():
        engine = build_engine(Settings(model=str(folder), device="cpu", **given), lambda line: None, ranks=ranks)
        try:
            yield engine
        finally:
            engine.model.close()


def greedy(engine: Engine) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of the prompts, all in the same steps, and the logits of all steps."""
    tokens = [list(prompt) for prompt in PROMPTS]
    tables = [list(range(15 * number, 15 * number + 15)) for number in range(len(PROMPTS))]
    done, rows = [0] * len(PROMPTS), []
    for _ in range(NEW):
        step = [(own, at, table) for own, at, table in zip(tokens, done, tables, strict=True)]
        logits = engine.model.forward(engine.pages, pack(step))
        rows.append(logits)
        for number, row in enumerate(logits):
            done[number] = len(tokens[number])
            tokens[number].append(int(row.argmax()))
    return [own[len(prompt) :] for own, prompt in zip(tokens, PROMPTS, strict=True)], torch.cat(rows)


def by_transformers(folder: Path) -> list[list[int]]:
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return [
        reference.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("cut", list(CUTS))
def test_several_ranks_give_the_tokens_of_transformers(cut: str, tmp_path: Path) -> None:
    """In float32, whatever is cut and whatever stays whole; and a rank's weights are fewer than the model's."""
    shape, changes, ranks = CUTS[cut]
    make_checkpoint(tmp_path, shape, dtype="float32", **changes)
    expected = by_transformers(tmp_path)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    with engine_of(tmp_path, ranks) as engine:
        assert greedy(engine)[0] == expected
        assert engine.model.recorded is not None or engine.model.latent
        assert engine.model.sum_order.endswith(f"x{ranks}")
        assert engine.decode is None
