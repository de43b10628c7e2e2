"""Compiled operators for CPU: `torch.ops.tandem.*`, loaded when `engine.kernels.build` has built them.

`serving(device)` returns the level of instruction sets for which the loaded operators are compiled, such as
"avx512_bf16", or "reference" for plain PyTorch. They cover float32 and bfloat16; calls with other types use PyTorch.

A token's result has the same bits whatever else is in the step, alone or in a chunk, and with any number of threads.
Linear layers, RMS norms and attention are compiled operators. Everything else uses torch's own operators, and `exact()`
replaces those whose results would depend on neighbouring elements (`invariant.cpp`).

Two processes give equal bits where their `sum_order` is equal: the id of the order in which products, and the lanes of
norms and softmax, are summed.

    level        of a bfloat16 model     of a float32 model
    avx512_bf16  tile32 or pairs         chain16
    avx512       chain16                 chain16
    avx2         chain8                  chain8
    portable     portable                portable
    reference    torch                   torch

A library is loaded once in a process, and only if the processor has its level, because it would end with SIGILL.
The environment variable TANDEM_OPERATORS names the one level that may be loaded, for tests and measurements.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.errors import SettingsError

REFERENCE = "reference"
CPU = torch.device("cpu")
DTYPES = frozenset({torch.float32, torch.bfloat16})
FASTEST = "fastest"
PLAIN = "torch"  # the order of plain PyTorch, which follows from the shapes of a step
ORDERS = {"avx512_bf16": ("tile32", "pairs"), "avx512": ("chain16",), "avx2": ("chain8",)}  # in bfloat16
CHAINS = {"avx512_bf16": "chain16", "avx512": "chain16", "avx2": "chain8"}  # in float32
ONLY = "TANDEM_OPERATORS"

log = logging.getLogger(__name__)

_loaded: tuple[str, str] | None = None  # level, or REFERENCE, and name of the library; torch cannot unload one


def serving(device: torch.device) -> str:
    """Which operators a model on this device has; loads them."""
    return _load()[0] if device.type == "cpu" else REFERENCE


def sum_order(device: torch.device, dtype: torch.dtype, ranks: int = 1) -> str:
    """The order of the sums of a model of this type that `serving` serves. tile32x2 is that of two ranks, each of which
    adds up its part of a sum."""
    if ranks > 1:
        return f"{sum_order(device, dtype)}x{ranks}"
    level = serving(device)
    if level == REFERENCE or dtype not in DTYPES:
        return PLAIN
    if level not in ORDERS:  # of another processor, of whose lanes and roundings nothing is promised
        return level
    chosen: str = torch.ops.tandem.order()
    return CHAINS[level] if dtype == torch.float32 else chosen


def described(level: str, order: str) -> str:
    """For the log: what serves, and what computes the order where that may differ."""
    if level == REFERENCE:
        return "plain PyTorch"
    by_tiles = order.startswith("tile32")
    return f"{level}, order {order}{f' by {torch.ops.tandem.tiles().upper()}' if by_tiles else ''}"


def use(wanted: str, device: torch.device, dtype: torch.dtype) -> None:
    """Takes sums in the order `wanted`, or the fastest, from here on: of the whole process, before weights are packed.

    Raises SettingsError (`sum_order`) that names the orders which can be served here.
    """
    here: dict[str, str] = {}  # order -> the best level that has it
    for level in _built() if device.type == "cpu" else []:
        for order in _orders(level, dtype):
            here.setdefault(order, level)
    if wanted != FASTEST and wanted not in here:
        raise SettingsError(
            f"sum_order is {wanted}, and this worker can serve {', '.join(here) or 'plain PyTorch alone'}"
            f"{_how_to_build(wanted) if device.type == 'cpu' else ''}",
            field="sum_order",
            bound=", ".join((FASTEST, *here)),
        )
    if device.type != "cpu":
        return
    level = _load(here.get(wanted))[0]
    if wanted != FASTEST and wanted not in _orders(level, dtype):
        raise SettingsError(
            f"sum_order is {wanted}, and this process has the operators of level {level} already", field="sum_order"
        )
    if level != REFERENCE:
        offered = torch.ops.tandem.orders()
        torch.ops.tandem.use_order(wanted if wanted in offered else offered[0])


def panels_of() -> str:
    """What packed weights depend on apart from the weights: the library and its order."""
    level, library = _load()
    return REFERENCE if level == REFERENCE else f"{library} {torch.ops.tandem.order()}"


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


def fresh_memory(nbytes: int, device: torch.device = CPU) -> torch.Tensor:
    """New memory, uint8 `[nbytes]`, in large pages where the compiled operators serve."""
    if serving(device) == REFERENCE:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    memory: torch.Tensor = torch.ops.tandem.fresh_memory.default(nbytes)
    return memory


def nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN without memory, in the place of a weight that is packed: any other reader is detected."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)


def is_nothing(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and not any(tensor.stride())


def _orders(level: str, dtype: torch.dtype) -> tuple[str, ...]:
    """That models of this type can have there. In float32 the orders of bfloat16 are one and the same chain."""
    chain = (CHAINS[level],) if dtype == torch.float32 and level in CHAINS else ()
    return tuple(dict.fromkeys((*ORDERS.get(level, ()), *chain)))


def _load(level: str | None = None) -> tuple[str, str]:
    """The library of this level, or the best one, unless this process has one already."""
    global _loaded
    if _loaded is None:
        from engine.kernels import build  # not above: `python -m engine.kernels.build` imports this package

        if build.INSTALLED and not _built():
            build.at_first_use()
        built = _built()
        if not built:
            log.warning(
                "the compiled operators are not built, plain PyTorch serves: run `python -m engine.kernels.build`"
            )
            _loaded = REFERENCE, ""
            return _loaded
        if level is None:
            level = built[0]
            _warn_of_better(level)
        path = build.library(level)
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        _loaded = torch.ops.tandem.isa(), path.name
    return _loaded


def _built() -> list[str]:
    """The levels that may be loaded here, the best first."""
    from engine.kernels.build import library

    return [level for level in _allowed() if library(level).exists()]


def _allowed() -> list[str]:
    """The levels that this processor has; of them the one that the environment names, which must be built then."""
    from engine.kernels.build import library, runnable

    here, only = runnable(), os.environ.get(ONLY)
    if only is None:
        return here
    if only not in here or not library(only).exists():
        raise SettingsError(
            f"{ONLY} is {only}, which {'is not built' if only in here else 'this processor does not have'}",
            field=ONLY,
            bound=", ".join(level for level in here if library(level).exists()),
        )
    return [only]


def _warn_of_better(level: str) -> None:
    best = _allowed()[0]
    if best != level and level in ORDERS:
        log.warning(
            "the compiled operators are built for %s, and this processor has %s:"
            " `python -m engine.kernels.build` builds for it",
            level,
            best,
        )


def _how_to_build(order: str) -> str:
    level = next((level for level in _allowed() if order in ORDERS.get(level, ())), None)
    return f"; `python -m engine.kernels.build --level {level}` builds what it needs" if level else ""
