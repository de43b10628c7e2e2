"""Recurrences of mixers by Tandem's own operators, in the place of transformers' PyTorch code.

The forward of a mixer calls its recurrence as a function of the module that defines it, in one form for chunks and in
one for single tokens. `with_operators` gives the same forward with other functions under these names; the class and its
module stay as they are. Whether the functions do the same is not believed: engine.loading.state_probe compares each
mixer with its own forward, and keeps what transformers has where they differ.

Unlike theirs, the operators take the tokens one after another, in every form, so a token's result has the same bits
however its prompt is cut and whatever else is in the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

Forward = Callable[..., Any]


def with_operators(kind: type) -> Forward | None:
    """The forward of a class of mixers over Tandem's operators; None if it calls no recurrence that they have."""
    own = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    if not isinstance(own, FunctionType):
        return None
    called = {name: function for name, function in OPERATORS.items() if name in own.__code__.co_names}
    if not called:
        return None
    forward = FunctionType(own.__code__, {**own.__globals__, **called}, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As transformers' `torch_chunk_gated_delta_rule`: query and key `[n, tokens, key heads, dk]`, value `[n, tokens,
    value heads, dv]`, `g` (the logarithm of the decay) and `beta` `[n, tokens, value heads]`, states `[n, value heads,
    dk, dv]` in float32."""
    q, k = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    if initial_state is None:
        state = q.new_zeros(value.shape[0], value.shape[2], q.shape[-1], value.shape[-1])
    else:
        state = initial_state.float().clone(memory_format=torch.contiguous_format)
    inputs = (each.contiguous() for each in (q, k, value.float(), g.float().exp(), beta.float()))
    out: torch.Tensor = torch.ops.tandem.gated_delta.default(*inputs, state)
    return out.to(query.dtype), state if output_final_state else None


OPERATORS: dict[str, Forward] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
}
