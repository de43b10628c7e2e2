"""Plain checkpoints with the weights that a format of quantised weights represents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.core.weight_formats import of_head
from engine.kernels import weight_quantization


def rounded(base: Path, folder: Path, format: str) -> Path:
    """A plain checkpoint in float32 with the weights that one rank's codes represent."""
    auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
    model = auto.from_pretrained(base, dtype=torch.float32)
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear:
            codes = weight_quantization.quantise(module.weight.detach(), of_head(format) if module is head else format)
            module.weight = nn.Parameter(codes.weight())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    return folder
