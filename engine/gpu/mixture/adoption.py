"""The mixtures of experts of a model that Tandem's own operators serve on CUDA, chosen at load after a trial on the
device itself: experts, and routers with a weight of their own.

Experts are recognised by the common form of transformers' (engine/kernels/experts.py), a router by what it does: one
matrix, and a forward that multiplies by it. Their activations, gates and norms stay torch's, element by element or row
by row, except gpt-oss's gate, which is recognised by its results. The result must agree with torch's, and a row must
have the same bits alone, among few and among many others. Where a trial fails, torch's own code serves all experts, or
all routers, of the model, and the log says so; experts over codes are refused.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from engine.gpu import products, trial
from engine.gpu.mixture import operators as _registered  # noqa: F401
from engine.gpu.operators import ops
from engine.kernels import experts, modules, nothing
from engine.kernels.replacement import Compiled
from tandem.errors import CheckpointRefused

log = logging.getLogger(__name__)

ROWS_OF_GATE = 16  # of the trial of a gate
MOST_CHOSEN = 8  # experts of a row in the trial
SOME = (1, 5, 200)  # row counts of the trial; that of experts has those with the next kinds of tiles, too
MEANS = (16, products.FEW)  # rows of an expert, above which it has larger tiles
ERRORS = (*trial.ERRORS, IndexError, AttributeError)  # those of transformers' own code, too
_GATE = "_tandem_gate"  # (limit, alpha, interleaved) of experts that are gated as gpt-oss's
_SIZES = "_tandem_sizes"  # numbers of a module, which a recording takes for constants

Given = tuple[torch.Tensor, ...]


def adopt(model: nn.Module) -> str:
    """Marks experts and routers for `engine.kernels.modules.switch`; returns a line about them, empty if there are
    none."""
    found = list(found_experts(model))
    for module in found:
        if (gate := gate_of(module)) is not None:
            module.__dict__[_GATE] = gate
    parts = [_marked("mixtures", found, Experts, _differs_from_experts)] if found else []
    if over_codes := sum(map(experts.has_stacks, model.modules())):
        parts.append(f"{over_codes} mixtures over codes")
    if routers := list(found_routers(model)):
        parts.append(_marked("routers", routers, Router, _differs_from_router))
    return ", ".join(parts)


def _marked(what: str, found: list[nn.Module], replacement: type, differs: Callable[[Any], str | None]) -> str:
    kinds = {_kind(each): each for each in found}
    for module in kinds.values():
        if problem := trial.failing(partial(differs, module), ERRORS):
            why = f"Triton's {type(module).__name__} {problem}"
            log.warning("torch's %s serve, with bits that may follow from a token's batch: %s", what, why)
            for each in found:
                each.__dict__.pop(_SIZES, None)
            return f"{what} by torch, because {why}"
    for module in found:
        sizes = kinds[_kind(module)].__dict__[_SIZES]
        module.__dict__.update({_SIZES: sizes, modules.REPLACEMENT: replacement})
    return f"{len(found)} {what}"


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """The trial of one module holds for all of its kind."""
    parameters = (each for each in module._parameters.values() if each is not None)
    return type(module), *((each.dtype, each.shape) for each in parameters)


# ---- experts


def found_experts(model: nn.Module) -> Iterator[nn.Module]:
    return experts.found(model, trial.GAP)


class Experts(Compiled):
    """A mixture's experts, whose rows do not depend on each other."""

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        weight = self._parameters["down_proj"]  # type: ignore[attr-defined]  # the module's own
        if hidden_states.dtype != weight.dtype and not experts.has_stacks(self):  # type: ignore[arg-type]
            out: torch.Tensor = super().forward(hidden_states, chosen, shares)  # type: ignore[misc]
            return out
        return compute(self, hidden_states, chosen, shares)


def compute(module: Any, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """What the module computes, from x `[tokens, k]`, and each token's experts and their shares `[tokens, each]`."""
    sizes, names = module.__dict__[_SIZES], experts.names(module)
    stacks: Any = experts.stacks_of(module)  # of engine/gpu/codes.py
    plan = ops.experts_plan.default(x, chosen, sizes[0][0], stacks[0].depth if stacks else None)

    def multiplied(rows: torch.Tensor, at: int) -> torch.Tensor:
        bias = module._parameters[f"{names[at]}_bias"] if module.has_bias else None
        weight = module._parameters[names[at]]
        out: torch.Tensor = (
            stacks[at].multiply(rows, chosen, bias, plan)
            if stacks
            else ops.experts.default(rows, chosen, plan, weight, bias, module.is_transposed, *sizes[at])
        )
        return out

    y = multiplied(x, 0)
    if (gate := module.__dict__.get(_GATE)) is not None:
        y = ops.clamped_gate.default(y, *gate)
    else:
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = multiplied(y, 1)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    out: torch.Tensor = ops.experts_sum.default(y, shares, x)
    return out


@torch.inference_mode()
def gate_of(module: Any) -> tuple[float, float, bool] | None:
    """The numbers with which `clamped_gate` equals the module's gate; None if there are none. They are among the
    module's own. Rows of several sizes are tried: beyond a limit, and within it."""
    numbers = {value for value in vars(module).values() if type(value) is float}
    if not module.has_gate or not numbers:
        return None
    weight = module._parameters["down_proj"]
    generator = torch.Generator(weight.device).manual_seed(0)
    sizes = torch.logspace(-1, 1, ROWS_OF_GATE, device=weight.device).unsqueeze(1)
    both = (torch.randn(ROWS_OF_GATE, 128, generator=generator, device=weight.device) * sizes).to(weight.dtype)
    try:
        expected = module._apply_gate(both)
        for gate in product(sorted(numbers), sorted(numbers), (True, False)):
            if _equal(ops.clamped_gate.default(both, *gate), expected):
                return gate
    except ERRORS as error:
        log.warning("the gate of %s stays torch's: %s", type(module).__name__, error)
    return None


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Up to the last bit of a sigmoid, which may change how a product with it is rounded."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if ours.dtype == torch.float32:
        return torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    return (ours != theirs).float().mean().item() < 0.02 and torch.allclose(ours, theirs, rtol=2**-6, atol=1e-3)


class Adopter(experts.Adopter):
    """Of experts over codes. They were proven equal to their weights when they were packed; here, what the module makes
    of them is."""

    def adopt(self, module: nn.Module, both: Sequence[Any]) -> None:
        """Both are of engine/gpu/codes.py. Their device becomes the module's, whose weights never go there."""
        device = both[0].codes.device
        for name in experts.names(module):
            parameter: Any = module._parameters[name]
            parameter.data = nothing(parameter.shape, parameter.dtype, device)
        module.to(device)
        if (gate := gate_of(module)) is not None:
            module.__dict__[_GATE] = gate
        module.__dict__.update({_SIZES: _sizes(module), experts.SERVED_BY: Experts})
        super().adopt(module, both)

    def prove(self, module: nn.Module) -> None:
        if problem := trial.failing(partial(_differs_from_experts, module), ERRORS):
            raise CheckpointRefused(
                f"Triton's {type(module).__name__} over codes {problem}; serve the unquantised checkpoint with"
                " weights = checkpoint"
            )


def _sizes(module: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each.shape) for each in experts.weights(module))


@torch.inference_mode()
def _differs_from_experts(module: Any) -> str | None:
    both = experts.weights(module)
    module.__dict__[_SIZES] = _sizes(module)
    count, each = len(both[0]), min(MOST_CHOSEN, max(1, len(both[0]) // 2))
    larger = [count * mean // each + 1 for mean in MEANS]
    generator, device = torch.Generator(both[0].device).manual_seed(0), both[0].device
    x = torch.randn(max(*larger, *SOME), both[0].shape[2], generator=generator, device=device).to(both[0].dtype)
    liked = torch.rand(len(x), count, generator=generator, device=device)
    liked[:, 0] += 1  # an expert whom all choose
    chosen = liked.topk(each).indices
    shares = torch.rand(chosen.shape, generator=generator, device=device).to(x.dtype)
    given = (x, chosen, shares)
    found = compute(module, *given)
    expected = experts.forward(module, *given, experts.plainly) if experts.has_stacks(module) else module(*given)
    problem = trial.differs(found, expected, several=True)
    return problem or trial.other_bits(lambda *rows: (compute(module, *rows),), given, (found,), (*SOME, *larger))


# ---- routers


class Products(TorchFunctionMode):
    """Inside, `F.linear` is Tandem's product, of these sizes [n, k] in the order of the calls."""

    def __init__(self, sizes: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self._next = iter(sizes)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self.product(*args, **(kwargs or {}))

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = ops.linear.default(x, weight, bias, *next(self._next))
        return out


class Noted(Products):
    """Computes by torch, and notes the sizes; with `compared` the problem of Tandem's product, too."""

    def __init__(self, *, compared: bool) -> None:
        super().__init__(())
        self.sizes: list[tuple[int, int]] = []
        self.problem: str | None = None
        self._compared = compared

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        n, k = weight.shape
        self.sizes.append((n, k))
        expected = F.linear(x, weight, bias)
        if self._compared:
            self.problem = self.problem or trial.differs(ops.linear.default(x, weight, bias, n, k), expected)
        return expected


class Router(Compiled):
    """A module whose products of rows do not depend on each other; the rest is its own."""

    def forward(self, *given: Any, **named: Any) -> Any:
        with Products(self.__dict__[_SIZES]):
            return super().forward(*given, **named)  # type: ignore[misc]  # the module's own


def found_routers(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with a matrix of their own, which multiply rows by it."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Linear | Conv1D | nn.Embedding) or weight is None or module._modules:
            continue
        if weight.dim() != 2 or weight.dtype not in trial.GAP or not weight.numel() or not _takes_one(module):
            continue
        try:
            with torch.inference_mode(), Noted(compared=False) as noted:
                module(weight.detach()[:1])
        except ERRORS:
            continue
        if noted.sizes:
            yield module


def _takes_one(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return len(required) == 1


@torch.inference_mode()
def _differs_from_router(module: Any) -> str | None:
    weight: torch.Tensor = module.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(max(SOME), weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    with Noted(compared=True) as noted:
        module(x)
    problem: str | None = noted.problem
    if problem:
        return problem
    sizes = module.__dict__[_SIZES] = tuple(noted.sizes)

    def ours(rows: torch.Tensor) -> Given:
        with Products(sizes):
            out = module(rows)
        return out if isinstance(out, tuple) else (out,)

    return trial.other_bits(ours, (x,), ours(x), SOME)
