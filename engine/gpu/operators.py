"""`torch.ops.tandem_gpu.*`: Triton kernels as operators, so that a forward can be recorded with them.

Those that tandem:: has for CPU (engine/kernels) have its signatures. They run on any device: on CPU by Triton's
interpreter, in tests. A module registers its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

NAME = "tandem_gpu"
Function = TypeVar("Function", bound=Callable[..., Any])
ops: Any = torch.ops.tandem_gpu
_library: Any = torch.library.Library(NAME, "DEF")  # type: ignore[no-untyped-call]  # operators exist as long as it does


def operator(signature: str) -> Callable[[Function], Function]:
    """Registers a function under the name in `signature`. It is passed fake tensors, too."""
    _library.define(signature)

    def register(function: Function) -> Function:
        _library.impl(signature.partition("(")[0], function, "CompositeImplicitAutograd")
        return function

    return register
