"""`torch.ops.tandem_gpu.*`: the Triton kernels of products and rows as operators, so that a forward can be recorded.

Those that tandem:: has for CPU (engine/kernels) have its signatures. They run on any device: on CPU by Triton's
interpreter, in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.gpu import products

NAME = "tandem_gpu"
_library = torch.library.Library(NAME, "DEF")  # operators exist as long as it does


def operator(signature: str) -> Callable[[Any], Any]:
    """Registers a function under the name in `signature`; it is passed fake tensors, too."""
    _library.define(signature)

    def register(function: Any) -> Any:
        _library.impl(signature.partition("(")[0], function, "CompositeImplicitAutograd")
        return function

    return register


@operator("linear(Tensor x, Tensor weight, Tensor? bias, int n, int k) -> Tensor")
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, n: int, k: int) -> torch.Tensor:
    assert weight.shape == (n, k), f"a weight of {tuple(weight.shape)} for {n} x {k}"
    return products.linear(x, weight, bias)


@operator("rms_norm(Tensor x, Tensor weight, float eps, float offset, bool round_first) -> Tensor")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, round_first: bool) -> torch.Tensor:
    return products.rms_norm(x, weight, eps, offset, round_first)
