"""Compiled operators for CPU: `torch.ops.tandem.*`, loaded when `engine.kernels.build` has built them.

`serving(device)` says what serves: the level of instruction sets that they are compiled for, such as "avx512_bf16", or
"reference", plain PyTorch. They cover float32 and bfloat16; other types go to plain PyTorch call by call.

A token's result has the same bits whatever else is in the step, alone or in a chunk, and with any number of threads.
Linear layers, RMS norms and attention are operators of ours. Whatever else a model computes goes through torch's own
operators, and `exact()` replaces those whose results would depend on their surroundings (`invariant.cpp`).

Between two processes bits are equal where `sum_order` is: the id of the order in which products and the lanes of norms
and softmax are summed.

    level        of a bfloat16 model     of a float32 model
    avx512_bf16  tile32 or pairs         chain16
    avx512       chain16                 chain16
    avx2         chain8                  chain8
    reference    torch                   torch

The environment variable TANDEM_OPERATORS names the one level that may be loaded, for tests and measurements.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.errors import SettingsError

REFERENCE = "reference"
DTYPES = frozenset({torch.float32, torch.bfloat16})
FASTEST = "fastest"
TORCH = "torch"  # the order of plain PyTorch, which depends on the shapes of a step
ORDERS = {"avx512_bf16": ("tile32", "pairs"), "avx512": ("chain16",), "avx2": ("chain8",)}  # in bfloat16
CHAINS = {"avx512_bf16": "chain16", "avx512": "chain16", "avx2": "chain8"}  # in float32
ONLY = "TANDEM_OPERATORS"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Loaded:
    level: str  # or REFERENCE
    library: Path | None


_loaded: _Loaded | None = None  # by this process, for good: torch cannot unload a library


def serving(device: torch.device) -> str:
    """Which operators a model on this device has; loads them."""
    return _load().level if device.type == "cpu" else REFERENCE


def sum_order(device: torch.device, dtype: torch.dtype) -> str:
    """The order of the sums of a model that `serving` serves."""
    level = serving(device)
    if level == REFERENCE or dtype not in DTYPES:
        return TORCH
    return torch.ops.tandem.order() if dtype == torch.bfloat16 else CHAINS.get(level, level)


def described(device: torch.device, dtype: torch.dtype) -> str:
    """A line for the log: the level, the order, and how it is computed where that may differ."""
    level = serving(device)
    if level == REFERENCE:
        return "plain PyTorch"
    order, by = sum_order(device, dtype), torch.ops.tandem.tiles().upper()
    return f"{level}, order {order}{f' by {by}' if order == 'tile32' and by else ''}"


def use(wanted: str, device: torch.device, dtype: torch.dtype) -> None:
    """Has the sums of models taken in the order `wanted`, or "fastest". Before weights are packed, because it is of the
    whole process. Raises SettingsError (`sum_order`) that names what can be served here."""
    here: dict[str, str] = {}  # orders, and the best level that has them
    for level in _built() if device.type == "cpu" else []:
        for order in (*ORDERS.get(level, ()), *([CHAINS[level]] if dtype == torch.float32 and level in CHAINS else [])):
            here.setdefault(order, level)
    if wanted != FASTEST and wanted not in here:
        raise SettingsError(
            f"sum_order is {wanted}, and what is built here can serve {', '.join(here) or 'none but plain PyTorch'}"
            f"{_how_to_build(wanted)}",
            field="sum_order",
            bound=", ".join((FASTEST, *here)),
        )
    loaded = _load(here.get(wanted))
    if loaded.level == REFERENCE or device.type != "cpu":
        return
    offered = torch.ops.tandem.orders()
    torch.ops.tandem.use_order(wanted if wanted in offered else offered[0])


def library_name() -> str:
    """Of the library that this process has loaded, with the order that it is to sum in: what panels depend on."""
    library = _load().library
    return f"{library.name} {torch.ops.tandem.order()}" if library else REFERENCE
