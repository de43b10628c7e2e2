"""The reference of the other tests is what transformers' `generate` gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import oracle


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "llama4-text", "qwen3-moe"])
@torch.inference_mode()
def test_a_loop_over_forwards_gives_the_tokens_of_generate(family: str, checkpoint: Callable[[str], Path]) -> None:
    """With whole, sliding and chunked attention, with learned positions, and with experts."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint(f"tiny-{family}"), dtype=torch.float32, attn_implementation="eager"
    )
    rng = random.Random(5)
    ids = torch.tensor([[rng.randrange(3, model.config.get_text_config().vocab_size) for _ in range(30)]])
    assert oracle.in_a_loop(model, ids, 24) == oracle.by_generate(model, ids, 24)


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_a_list_equals_the_tokens_only_if_it_has_them_all(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared by one forward: a change of any token is found, also after a right answer is known, as are missing and
    further tokens."""
    folder, prompt = checkpoint(f"tiny-{family}"), list(range(40, 60))
    tokens = oracle.generated(folder, prompt, 12)
    vocab = oracle.vocab_size(folder)
    for known in (False, True):
        monkeypatch.setattr(oracle, "_longest", {})
        assert not known or tokens == oracle.greedy(folder, prompt, 12)
        for place in range(12):
            wrong = [(token + (at == place)) % vocab for at, token in enumerate(tokens)]
            assert wrong != oracle.greedy(folder, prompt, 12)
            assert wrong != oracle.greedy(folder, prompt, 20)[:12]
        assert tokens[:11] != oracle.greedy(folder, prompt, 12)
        assert [*tokens, tokens[0]] != oracle.greedy(folder, prompt, 12)
        assert tokens[:5] == oracle.greedy(folder, prompt, 12)[:5]
        assert tokens == oracle.greedy(folder, prompt, 12)
    assert list(oracle.greedy(folder, prompt, 12)) == tokens
    assert prompt + oracle.greedy(folder, prompt, 2) == prompt + tokens[:2]
