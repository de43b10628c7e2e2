"""Compiled operators for CPU: `torch.ops.tandem.*`, loaded when `engine.kernels.build` has built them.

`serving(device)` says what serves: "cpu-avx512_bf16" and the like, or "reference", plain PyTorch. What the operators do
not cover goes to plain PyTorch call by call: products of more than `LIMIT` rows, types other than float32 and bfloat16,
layers that are no plain `nn.Linear` (GPT-2's Conv1D, the stacked experts of a mixture), attention of prompt chunks and
of latent pages.

Each operator's result for a row has the same bits whatever else is in the batch. A whole decode step keeps that where
everything in it does: with at most `LIMIT` new tokens in the step, no mixture of experts and no latent pages.
"""

from __future__ import annotations

import functools
import logging

import torch

REFERENCE = "reference"
DTYPES = frozenset({torch.float32, torch.bfloat16})
LIMIT = 64  # rows of a product; beyond, torch's own is faster

log = logging.getLogger(__name__)


def serving(device: torch.device) -> str:
    """Which operators a model on this device has; loads them."""
    return _load() if device.type == "cpu" else REFERENCE


@functools.cache
def _load() -> str:
    from engine.kernels.build import library  # not above: `python -m engine.kernels.build` imports this package first

    path = library()
    if not path.exists():
        log.warning("the compiled operators are not built, plain PyTorch serves: run `python -m engine.kernels.build`")
        return REFERENCE
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    return f"cpu-{torch.ops.tandem.isa()}"


def huge_pages(fresh: torch.Tensor) -> torch.Tensor:
    """Asks for large memory pages behind a new CPU tensor that nothing has been written to; returns it."""
    if serving(fresh.device) != REFERENCE:
        torch.ops.tandem.huge_pages.default(fresh)
    return fresh
