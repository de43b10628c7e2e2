"""`torch.ops.tandem_gpu.*`: Triton kernels as operators, so that a forward can be recorded with them.

Those that tandem:: has for CPU (engine/kernels) have its signatures. They run on any device: on CPU by Triton's
interpreter, in tests. A module registers its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from triton.errors import TritonError

NAME = "tandem_gpu"
AMPERE, HOPPER, BLACKWELL = 80, 90, 100  # the first compute capability of these generations, times 10
Function = TypeVar("Function", bound=Callable[..., Any])
ops: Any = torch.ops.tandem_gpu
_library: Any = torch.library.Library(NAME, "DEF")  # type: ignore[no-untyped-call]  # operators exist as long as it does


def operator(signature: str) -> Callable[[Function], Function]:
    """Registers a function under the name in `signature`. It is passed fake tensors, too. What Triton raises when it
    cannot compile or launch a kernel is a RuntimeError, like what torch raises: a trial at load then finds it."""
    _library.define(signature)

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def run(*given: Any, **options: Any) -> Any:
            try:
                return function(*given, **options)
            except TritonError as error:
                raise RuntimeError(f"{NAME}::{function.__name__}: {error}") from error

        _library.impl(signature.partition("(")[0], run, "CompositeImplicitAutograd")
        return function

    return register


def power_of_two(size: int) -> int:
    """The least one that is not smaller."""
    return 1 << max(size - 1, 0).bit_length()


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """`x [..., n]` as `[rows, n]`, the elements of a row side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@functools.cache
def capability_of(device: torch.device) -> int:
    """Compute capability times 10; that of Hopper for Triton's interpreter."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
