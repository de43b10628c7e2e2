"""Compiled operators for CPU: `torch.ops.tandem.*`, loaded when `engine.kernels.build` has built them.

`serving(device)` says what serves: "cpu-avx512_bf16" and the like, or "reference", plain PyTorch. They cover
float32 and bfloat16; other types go to plain PyTorch call by call.

A token's result has the same bits whatever else is in the step, alone or in a chunk, and with any number of threads.
Linear layers, RMS norms and attention are operators of ours. Whatever else a model computes goes through torch's own
operators, and `exact()` replaces those whose results would depend on their surroundings (`invariant.cpp`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

REFERENCE = "reference"
DTYPES = frozenset({torch.float32, torch.bfloat16})

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


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Inside, torch's products and elementwise functions on this thread give a row the same bits in any company."""
    if serving(device) == REFERENCE:
        yield
        return
    before = torch.ops.tandem.stepping.default(True)
    try:
        yield
    finally:
        torch.ops.tandem.stepping.default(before)


def huge_pages(fresh: torch.Tensor) -> torch.Tensor:
    """Asks for large memory pages behind a new CPU tensor that nothing has been written to; returns it."""
    if serving(fresh.device) != REFERENCE:
        torch.ops.tandem.huge_pages.default(fresh)
    return fresh
