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
