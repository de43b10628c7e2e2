"""What is summed between the operators of recurrent layers: the length of q and k, and norms with a gate. Not yet run
on a GPU. The order of torch's sums may depend on the number of rows; here a row's size alone decides.

Norms with a gate are found by what a module computes, as RMS norms are (engine/kernels/modules.py), in the types that
it gets: its weight's, and float32 from operators that do not round.
"""

from __future__ import annotations

import inspect
import logging
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.gpu.operators import in_rows, operator, power_of_two
from engine.gpu.recurrent import norm_kernels as kernels
from engine.kernels.replacement import Compiled

log = logging.getLogger(__name__)

ELEMENTS = 1024  # of a program, at least
ROWS = 24  # of the trial
NORM = "_tandem_gated_norm"  # the Gated of a module
# Of a module's result: float32 in another order and with another exponential, and 16 bits, of which a few per thousand
# may be rounded otherwise.
GAP, ROUNDED, FEW = 1e-5, 2**-7, 5e-3


class Gated(NamedTuple):
    """A kind of norm with a gate."""

    eps: float
    groups: int  # that are normed separately
    gate_first: bool
    silu: bool  # else the logistic function
    round_first: bool  # before the product with the weight


@operator("unit(Tensor x, float eps) -> Tensor")
def unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x [..., n]` in float32 times 1 / sqrt(sum of its squares + eps)."""
    assert x.dtype == torch.float32, "of float32"
    flat, out = in_rows(x), torch.empty(x.shape, device=x.device)
    rows, size = flat.shape[0], power_of_two(x.shape[-1])
    tile = max(1, ELEMENTS // size)
    if out.numel():
        kernels.unit[(-(-rows // tile),)](
            flat, out, rows, x.shape[-1], flat.stride(0), eps, ROWS=tile, SIZE=size, num_warps=4
        )
    return out


@operator(
    "gated_norm(Tensor x, Tensor gate, Tensor weight, float eps, int groups, bool gate_first, bool silu,"
    " bool round_first) -> Tensor"
)
def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    groups: int,
    gate_first: bool,
    silu: bool,
    round_first: bool,
) -> torch.Tensor:
    """`x` and `gate [..., n]`, `weight [n]`. The result has x's type, with `round_first` the wider one of both."""
    n = weight.numel()
    assert x.shape == gate.shape and x.shape[-1] == n, "x and its gate are of unlike shapes"  # noqa: PT018
    assert n % groups == 0, f"{groups} groups of {n}"
    dtype = torch.promote_types(x.dtype, weight.dtype) if round_first else x.dtype
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    flat, gates = in_rows(x), in_rows(gate)
    rows, size = flat.shape[0] * groups, power_of_two(n // groups)
    tile = max(1, ELEMENTS // size)
    if out.numel():
        kernels.gated[(-(-rows // tile),)](
            flat, gates, weight, out, rows, groups, n // groups, flat.stride(0), gates.stride(0), eps,
            ROWS=tile, SIZE=size, GATE_FIRST=gate_first, SILU=silu, ROUND_FIRST=round_first,
            num_warps=8 if size > 4096 else 4,
        )  # fmt: skip
    return out


def gated_of(module: nn.Module) -> Gated | None:
    """The norm with a gate that the module computes; None if it is none, or a row's bits depend on other rows."""
    weight = next(iter(module._parameters.values()), None)
    if weight is None or weight.dim() != 1 or not weight.is_floating_point() or not weight.any():
        return None  # with a weight of zeros all norms are alike
    if len(module._parameters) != 1 or module._modules or module._buffers or module._forward_hooks:
        return None
    if len(inspect.signature(module.forward).parameters) != 2:
        return None
    numbers = vars(module).values()
    n, epsilons = weight.numel(), sorted({value for value in numbers if type(value) is float})
    sizes = {value for value in numbers if type(value) is int and 0 < value <= n and n % value == 0}
    groups = sorted({1, *sizes, *(n // size for size in sizes)})
    cases = [_case(module, weight.detach(), dtype) for dtype in {weight.dtype, torch.float32}]
    if any(case is None for case in cases):
        return None
    flags = (True, False)
    try:
        for kind in map(Gated._make, product(epsilons, groups, flags, flags, flags)):
            if all(_equals(weight.detach(), kind, case) for case in cases):
                return kind
    except RuntimeError as error:  # it does not compile on this device
        log.warning("torch's norms with a gate serve: %s", str(error).strip().partition("\n")[0])
    return None


@torch.inference_mode()
def _case(module: nn.Module, weight: torch.Tensor, dtype: torch.dtype) -> Any:
    """Rows, some so small that eps matters, with gates, and what the module makes of them; None if it refuses them."""
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 1, ROWS, weight.numel(), generator=generator).unbind()
    x = (x * torch.logspace(-4, 2, ROWS).unsqueeze(1)).to(weight.device, dtype)
    gate = gate.to(weight)
    try:
        expected = module(x, gate)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None
    return (x, gate, expected) if isinstance(expected, torch.Tensor) and expected.shape == x.shape else None


@torch.inference_mode()
def _equals(weight: torch.Tensor, kind: Gated, case: Any) -> bool:
    x, gate, expected = case
    found = gated_norm(x, gate, weight, *kind)
    if found.dtype != expected.dtype:
        return False
    if found.dtype == torch.float32:
        close = torch.allclose(found, expected, rtol=GAP, atol=0)
    else:
        close = (found != expected).float().mean().item() < FEW and torch.allclose(found, expected, rtol=ROUNDED)
    if not close:
        return False
    alone = torch.cat([gated_norm(x[:, row : row + 1], gate[:, row : row + 1], weight, *kind) for row in (0, 7)], 1)
    return torch.equal(alone, found[:, [0, 7]])


class GatedNorm(Compiled):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        (weight,) = self._parameters.values()  # type: ignore[attr-defined]
        if gate is None or gate.dtype != weight.dtype or hidden_states.dtype not in (weight.dtype, torch.float32):
            out: torch.Tensor = super().forward(hidden_states, gate)  # type: ignore[misc]
        else:
            out = torch.ops.tandem_gpu.gated_norm.default(hidden_states, gate, weight, *self.__dict__[NORM])
        return out
