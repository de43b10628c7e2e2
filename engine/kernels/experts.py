"""The experts of a mixture, whose weights transformers stacks in two parameters [experts, out, in]: packed as one
product for each expert, and multiplied by `torch.ops.tandem.experts`.

A module is recognised by the common form of transformers' experts (integrations/moe.py), and by its results. Its two
parameters are dropped, since mixtures are mostly experts, and become NaN without memory: a second copy would double the
model. The self-check compares the rest of the model with torch's modules, for which torch multiplies by experts that
are unpacked for each call; that the packed ones are right, row by row and whatever else is in the step, is proved here,
before the originals are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels import DTYPES, exact, fresh_memory, nothing
from tandem.errors import CheckpointRefused

ROWS_TRIED, CHOSEN_TRIED = 13, 2  # rows, and experts of each
GAP = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative to the root mean square of the result
_STACKS = "_tandem_stacks"  # both Stacks of a module, up and down


@dataclass(frozen=True)
class Stack:
    """The weights [experts, n, k] of one product of each expert, in panels [experts, size]."""

    panels: torch.Tensor
    n: int
    k: int
    name: str  # of the parameter

    @property
    def nbytes(self) -> int:
        """Without the padding of panels."""
        return len(self.panels) * self.n * self.k * self.panels.element_size()

    def multiply(self, x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[chosen, n], from x [rows, k]; each row has as many of the experts `chosen` [chosen]."""
        if x.dtype != self.panels.dtype:
            return self.multiply_plainly(x, chosen, bias)
        out: torch.Tensor = torch.ops.tandem.experts.default(x, chosen, self.panels, bias, self.n, self.k)
        return out

    def multiply_plainly(self, x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """By torch, in x's type, one expert after the other."""
        out = x.new_empty(len(chosen), self.n)
        each = len(chosen) // max(1, len(x))
        for expert in sorted(set(chosen.tolist())):
            (at,) = torch.nonzero(chosen == expert, as_tuple=True)
            weight = self.weight(expert).to(x.dtype)
            out[at] = F.linear(x[at // each], weight, None if bias is None else bias[expert].to(x.dtype))
        return out

    def weight(self, expert: int) -> torch.Tensor:
        """The weight [n, k] of one expert, bit for bit."""
        out: torch.Tensor = torch.ops.tandem.look_up.default(torch.arange(self.n), self.panels[expert], self.n, self.k)
        return out


def found(model: nn.Module) -> Iterator[nn.Module]:
    """The experts below `model` that the operators can serve, and do not yet."""
    for module in model.modules():
        if has_stacks(module):
            continue
        weights = [module._parameters.get(name) for name in _names(module)]
        if weights and all(each is not None and each.dim() == 3 and each.dtype in DTYPES for each in weights):
            yield module


def _names(module: Any) -> tuple[str, ...]:
    """The names of both parameters; none of a module without transformers' common form."""
    if not hasattr(module, "_apply_gate") or not hasattr(type(module).forward, "__wrapped__"):
        return ()
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def weights(module: Any) -> list[torch.Tensor]:
    """Both weights as [experts, out, in], up and down."""
    own = [module._parameters[name].detach() for name in _names(module)]
    return [each.transpose(1, 2) if module.is_transposed else each for each in own]


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [experts, n, k] in panels [experts, size]."""
    packed = map(torch.ops.tandem.pack.default, weight)
    first = next(packed)
    panels = fresh_memory(len(weight) * first.nbytes).view(first.dtype).view(len(weight), -1)
    panels[0] = first
    for expert, each in enumerate(packed, 1):
        panels[expert] = each
    return panels


class Adopter:
    """Gives experts their panels, proves one module of each kind and shape, and drops the original weights."""

    def __init__(self) -> None:
        self._proved: set[Any] = set()

    def adopt(self, module: nn.Module, panels: list[torch.Tensor]) -> None:
        """`panels` has those of both weights. Raises CheckpointRefused when a result is wrong."""
        own = weights(module)
        module.__dict__[_STACKS] = [
            Stack(each.view(len(weight), -1), weight.shape[1], weight.shape[2], name)
            for each, weight, name in zip(panels, own, _names(module), strict=True)
        ]
        kind = (type(module), own[0].dtype, *(each.shape for each in own))
        if kind not in self._proved:
            prove(module)
            self._proved.add(kind)
        for name in _names(module):
            parameter = module._parameters[name]
            assert parameter is not None
            parameter.data = nothing(parameter.shape, parameter.dtype, parameter.device)


@torch.inference_mode()
def prove(module: Any) -> None:
    """Compares the experts over panels with the module's own forward, a row alone with the same among others, and an
    unpacked weight with the original. Raises CheckpointRefused if they differ."""
    up, down = module.__dict__[_STACKS]
    dtype, experts = up.panels.dtype, len(up.panels)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS_TRIED, up.k, generator=generator).to(dtype)
    chosen = torch.rand(ROWS_TRIED, experts, generator=generator).topk(min(CHOSEN_TRIED, experts)).indices
    shares = torch.rand(chosen.shape, generator=generator).to(dtype)
    with exact(x.device):
        ours, theirs = forward(module, x, chosen, shares), module.forward(x, chosen, shares)
        alone = forward(module, x[-1:], chosen[-1:], shares[-1:])
    allowed = GAP[dtype] * theirs.float().square().mean().sqrt()
    same = bool((ours.float() - theirs.float()).abs().max() <= allowed)  # false for NaN
    same &= torch.equal(alone[0], ours[-1])
    for stack, weight in zip((up, down), weights(module), strict=True):
        same &= torch.equal(stack.weight(experts - 1), weight[experts - 1])
    if not same:
        raise CheckpointRefused(
            f"the compiled products of {type(module).__name__} with weights of {tuple(up.panels.shape)} in {dtype}"
            ' differ from torch\'s; load it with kernels="reference"'
        )


def forward(
    module: Any,
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    multiply: Callable[..., torch.Tensor] = Stack.multiply,
) -> torch.Tensor:
    """What the module computes, from x [rows, width], and each row's experts and their shares [rows, some]."""
    (up, down), each = module.__dict__[_STACKS], chosen.reshape(-1).long()

    def product(stack: Stack, rows: torch.Tensor) -> torch.Tensor:
        bias = module._parameters[f"{stack.name}_bias"] if module.has_bias else None
        return multiply(stack, rows, each, bias)

    y = product(up, x)
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = product(down, y)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    y = y * shares.reshape(-1, 1)
    return y.view(*chosen.shape, -1).sum(1).to(x.dtype)


def stacks(model: nn.Module) -> Iterator[Stack]:
    """Those below `model`."""
    for module in model.modules():
        yield from module.__dict__.get(_STACKS, ())


def has_stacks(module: nn.Module) -> bool:
    return _STACKS in module.__dict__
