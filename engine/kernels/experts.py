"""The experts of a mixture, whose weights transformers stacks in two parameters [experts, out, in]: packed as one
product for each expert, and multiplied by `torch.ops.tandem.experts`.

A module is recognised by the common form of transformers' experts (integrations/moe.py), and by its results. Its two
parameters are dropped, since mixtures are mostly experts, and become NaN without memory: a second copy would double the
model. The self-check compares the rest of the model with torch's modules, for which torch multiplies by experts that
are unpacked for each call; that the packed ones are right, row by row and whatever else is in the step, is proved here,
before the originals are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from engine.core.weight_formats import weight_bytes
from engine.kernels import DTYPES, exact, fresh_memory, nothing
from engine.kernels.replacement import Compiled, compiled, own_class
from tandem.errors import CheckpointRefused

ROWS_TRIED, CHOSEN_TRIED = 13, 2  # rows, and experts of each
GAP = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative to the root mean square of the result
SERVED_BY = "_tandem_experts"  # the class that serves a module instead of Experts
_STACKS = "_tandem_stacks"  # both Stacks of a module, up and down


@dataclass(frozen=True)
class Stack:
    """The weights [experts, n, k] of one product of each expert, in panels [experts, size]."""

    panels: torch.Tensor
    n: int
    k: int
    name: str  # of the parameter

    @property
    def count(self) -> int:
        return len(self.panels)

    @property
    def nbytes(self) -> int:
        """Without the padding of panels."""
        return self.count * self.n * self.k * self.panels.element_size()

    def multiply(self, x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[chosen, n], from x [rows, k]; each row has as many of the experts `chosen` [chosen]."""
        if x.dtype != self.panels.dtype:
            return plainly(self, x, chosen, bias)
        out: torch.Tensor = torch.ops.tandem.experts.default(x, chosen, self.panels, bias, self.n, self.k)
        return out

    def weight(self, expert: int) -> torch.Tensor:
        """The weight [n, k] of one expert, bit for bit."""
        out: torch.Tensor = torch.ops.tandem.look_up.default(torch.arange(self.n), self.panels[expert], self.n, self.k)
        return out


@dataclass(frozen=True)
class CodedStack:
    """The same as codes [experts, bytes] times scales [experts, scales], in panels (engine/kernels/lowbit.cpp)."""

    codes: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    group: int
    format: str
    name: str

    @property
    def count(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        return self.count * weight_bytes(self.n, self.k, self.format, self.group)

    def multiply(self, x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.tandem.experts_codes.default(
            x, chosen, self.codes, self.scales, bias, self.n, self.k, self.group, self.format
        )
        return out

    def weight(self, expert: int) -> torch.Tensor:
        """In float32."""
        out: torch.Tensor = torch.ops.tandem.unpack_codes.default(
            self.codes[expert], self.scales[expert], self.n, self.k, self.group, self.format
        )
        return out


AnyStack = Stack | CodedStack


class ExpertCodes(NamedTuple):
    """Of the weight [n, k] of one expert, before they are packed. With zeros, int4 alone, they are integers."""

    codes: torch.Tensor  # int16 [n, k]
    scales: torch.Tensor  # [n, groups]
    group: int
    zeros: torch.Tensor | None = None  # [n, groups]


def plainly(stack: AnyStack, x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `multiply`, by torch, one expert after the other: in x's type, or, over codes, in float32."""
    out = x.new_empty(len(chosen), stack.n)
    each = len(chosen) // max(1, len(x))
    for expert in sorted(set(chosen.tolist())):
        (at,) = torch.nonzero(chosen == expert, as_tuple=True)
        weight = stack.weight(expert)
        wide = x.dtype if isinstance(stack, Stack) else weight.dtype
        added = None if bias is None else bias[expert].to(wide)
        out[at] = F.linear(x[at // each].to(wide), weight.to(wide), added).to(x.dtype)
    return out


def found(model: nn.Module, dtypes: Collection[torch.dtype] = DTYPES) -> Iterator[nn.Module]:
    """The experts below `model` that operators for these types can serve, and do not yet."""
    for module in model.modules():
        common = hasattr(module, "_apply_gate") and hasattr(type(module).forward, "__wrapped__")  # transformers' form
        if not common or has_stacks(module):
            continue
        weights = [module._parameters.get(name) for name in names(module)]
        if all(each is not None and each.dim() == 3 and each.dtype in dtypes for each in weights):
            yield module


def names(module: Any) -> tuple[str, str]:
    """The names of both parameters, also of a module that is replaced."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def weights(module: Any) -> list[torch.Tensor]:
    """Both weights as [experts, out, in], up and down."""
    own = [module._parameters[name].detach() for name in names(module)]
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


def stacked(module: nn.Module, panels: list[torch.Tensor]) -> list[AnyStack]:
    """The stacks of both weights, from their panels."""
    return [
        Stack(each.view(len(weight), -1), weight.shape[1], weight.shape[2], name)
        for each, weight, name in zip(panels, weights(module), names(module), strict=True)
    ]


class Adopter:
    """Gives experts their stacks, proves one module of each kind and shape, and drops the original weights."""

    def __init__(self) -> None:
        self._proved: set[Any] = set()

    def adopt(self, module: nn.Module, both: Sequence[AnyStack]) -> None:
        """Raises CheckpointRefused when a result is wrong."""
        module.__dict__[_STACKS] = both
        kind = (type(module), weights(module)[0].dtype, *(each.shape for each in weights(module)))
        if kind not in self._proved:
            self.prove(module)
            self._proved.add(kind)
        for name in names(module):
            parameter = module._parameters[name]
            assert parameter is not None
            parameter.data = nothing(parameter.shape, parameter.dtype, parameter.device)
        switch(module, False)

    def prove(self, module: nn.Module) -> None:
        """Raises CheckpointRefused when a result is wrong."""
        prove(module)


@torch.inference_mode()
def prove(module: Any) -> None:
    """Compares the experts over stacks with the module's own forward (by torch over the unpacked weights, if those are
    rounded), and a row alone with the same among others. Raises CheckpointRefused if they differ."""
    own, both = weights(module), module.__dict__[_STACKS]
    dtype, count = own[0].dtype, len(own[0])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS_TRIED, both[0].k, generator=generator).to(dtype)
    chosen = torch.rand(ROWS_TRIED, count, generator=generator).topk(min(CHOSEN_TRIED, count)).indices
    shares = torch.rand(chosen.shape, generator=generator).to(dtype)
    rounded = any(isinstance(stack, CodedStack) for stack in both)
    with exact(x.device):
        ours, alone = forward(module, x, chosen, shares), forward(module, x[-1:], chosen[-1:], shares[-1:])
        plain = forward(module, x, chosen, shares, plainly)
        theirs = plain if rounded else module.forward(x, chosen, shares)
    allowed = GAP[dtype] * theirs.float().square().mean().sqrt()
    same = all(bool((each.float() - theirs.float()).abs().max() <= allowed) for each in (ours, plain))  # false for NaN
    same &= torch.equal(alone[0], ours[-1])
    if not rounded:
        same &= all(torch.equal(s.weight(count - 1), w[count - 1]) for s, w in zip(both, own, strict=True))
    if not same:
        raise CheckpointRefused(
            f"the compiled products of {type(module).__name__} with weights of {tuple(own[0].shape)} in {dtype}"
            ' differ from torch\'s; load it with kernels="reference"'
        )


def forward(
    module: Any,
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    multiply: Callable[..., torch.Tensor] = lambda stack, *of: stack.multiply(*of),
) -> torch.Tensor:
    """What the module computes, from x [rows, width], and each row's experts and their shares [rows, some]."""
    (up, down), each = module.__dict__[_STACKS], chosen.reshape(-1).long()

    def product(stack: AnyStack, rows: torch.Tensor) -> torch.Tensor:
        bias = module._parameters[f"{stack.name}_bias"] if module.has_bias else None
        return multiply(stack, rows, each, bias)

    y = product(up, x)
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = product(down, y)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    y = y * shares.reshape(-1, 1)
    return y.view(*chosen.shape, -1).sum(1).to(x.dtype)


class Experts(Compiled):
    """A mixture's experts over stacks, with results that do not depend on the other rows."""

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return forward(self, hidden_states, chosen, shares)


class PlainExperts(Compiled):
    """The same by torch, for which each expert is unpacked: the self-check's reference."""

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return forward(self, hidden_states, chosen, shares, plainly)


def switch(module: nn.Module, on: bool) -> None:
    """Experts with stacks, to the operators or to torch; their own forward has no weights any more."""
    served_by = module.__dict__.get(SERVED_BY, Experts)
    module.__class__ = compiled(own_class(module), served_by if on else PlainExperts)


def stacks_of(module: nn.Module) -> Sequence[AnyStack]:
    """Both of a module, up and down; none of one that has its weights."""
    both: Sequence[AnyStack] = module.__dict__.get(_STACKS, ())
    return both


def stacks(model: nn.Module) -> Iterator[AnyStack]:
    """Those below `model`."""
    for module in model.modules():
        yield from stacks_of(module)


def has_stacks(module: nn.Module) -> bool:
    return _STACKS in module.__dict__
