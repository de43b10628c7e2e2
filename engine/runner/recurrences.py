"""Runs the recurrences of mixers by Tandem's operators instead of transformers' PyTorch code.

A mixer's forward calls its recurrence as a function of the Python module that defines it, one for chunks and one for
single tokens. `with_operators` returns the same forward with other functions under these names; the class and its
module are not changed. engine.loading.state_probe compares each mixer with its own forward, and keeps transformers'
functions where they differ.

Unlike transformers' functions, the operators always compute the tokens one after another, so a token's result has the
same bits in any chunk and batch. If they get `SlotRows` instead of a state, they read the slots' states in place and
write the new ones to the other rows. On CPU they are compiled (engine/kernels), on CUDA Triton's
(engine/gpu/recurrent), with the same names and signatures.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from engine.attention.forward_context import on_device
from engine.kernels import REFERENCE, serving
from engine.kv.state_memory import Key, StateMemory

Forward = Callable[..., Any]
SILU = ("silu", "swish")
NO_LIMIT = (0.0, float("inf"))
# transformers' line about each of its functions that runs without the package that would be faster, and who writes it.
SLOW_LINE, SLOW_LOGGER = (
    "is falling back to its reference PyTorch implementation",
    "transformers.integrations.hub_kernels",
)


class SlotRows:
    """One state of some sequences, for an operator. transformers' forwards pass it on, and may call `to`."""

    def __init__(
        self, memory: StateMemory, key: Key, slots: Sequence[int], captured: torch.Tensor | None = None
    ) -> None:
        """`captured`: the rows, in place of those of the slots."""
        self._memory, self._key, self._slots, self._captured = memory, key, slots, captured

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The state in all rows, and the rows that are read and written, int64 `[2, n]`. The operator writes all of the
        new state."""
        view, rows = self._memory.view(self._key), self._captured
        if rows is None:
            rows = on_device(self._memory.rows(self._key, self._slots), torch.int64, view.device)
        return view, rows

    def to(self, *_: Any, **__: Any) -> SlotRows:
        return self


State = torch.Tensor | SlotRows | None
# The recurrent state that the running mixer has requested.
asked_for: ContextVar[State] = ContextVar("asked_for", default=None)


def available(device: torch.device) -> bool:
    """Whether the operators exist on this device. Registers them with torch."""
    if device.type != "cuda":
        return serving(device) != REFERENCE
    if importlib.util.find_spec("triton") is None:  # torch for CUDA brings it
        return False
    import engine.gpu.recurrent.operators  # noqa: F401

    return True


@contextmanager
def slow_lines_held() -> Iterator[Callable[[], None]]:
    """Holds transformers' lines about slow functions back while these are only what operators are compared with. Gives
    the function that writes them, for a model whose layers keep them. (transformers writes each once in a process.)"""
    held: list[logging.LogRecord] = []
    logger = logging.getLogger(SLOW_LOGGER)

    def passes(record: logging.LogRecord) -> bool:
        slow = SLOW_LINE in record.getMessage()
        if slow:
            held.append(record)
        return not slow

    def write() -> None:
        for record in held:
            logger.handle(record)

    logger.addFilter(passes)
    try:
        yield write
    finally:
        logger.removeFilter(passes)


def _operators(like: torch.Tensor) -> Any:
    """The operators of the tensor's device."""
    return torch.ops.tandem_gpu if like.is_cuda else torch.ops.tandem


def with_operators(kind: type) -> tuple[Forward, frozenset[str]] | None:
    """The forward of a mixer class over Tandem's operators, and the kinds of states that it takes as `SlotRows`; None
    if it calls no recurrence that has an operator."""
    own = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    if not isinstance(own, FunctionType):
        return None
    called = {name: function for name, function in OPERATORS.items() if name in own.__code__.co_names}
    if not called:
        return None
    forward = FunctionType(own.__code__, {**own.__globals__, **called}, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward, frozenset(TAKES[name] for name in called if name in TAKES)


def one_function(module: nn.Module) -> bool:
    """False where transformers computes a chunk by another formula than single tokens: Mamba-2 clamps the time steps of
    chunks alone."""
    low, high = getattr(module, "time_step_limit", NO_LIMIT)
    return (float(low), float(high)) == NO_LIMIT


@contextmanager
def one_formula(module: nn.Module) -> Iterator[None]:
    """Inside, Mamba-2 clamps no time steps, so that chunks and single tokens are one function and differ by what
    computes them."""
    limits: Any = getattr(module, "time_step_limit", None)
    if limits is None:
        yield
        return
    owner: Any = module
    owner.time_step_limit = NO_LIMIT
    try:
        yield
    finally:
        owner.time_step_limit = limits


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: State = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, State]:
    """As transformers' `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: query and key `[n, tokens, key
    heads, dk]`, value `[n, tokens, value heads, dv]`, `g` (the logarithm of the decay) `[n, tokens, value heads]` or
    `[n, tokens, value heads, dk]`, `beta` `[n, tokens, value heads]`, states `[n, value heads, dk, dv]` in float32."""
    q, k = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        q, k = map(_unit, (q, k))
    q = q * q.shape[-1] ** -0.5
    states, rows = _rows(initial_state, (value.shape[0], value.shape[2], q.shape[-1], value.shape[-1]), q)
    inputs = (each.contiguous() for each in (q, k, value.float(), g.float().exp(), beta.float()))
    out: torch.Tensor = _operators(q).gated_delta.default(*inputs, states, rows)
    return out.to(query.dtype), _after(initial_state, states) if output_final_state else None


def causal_conv1d_fn(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """As transformers': `[n, channels, tokens]`, each channel over its own taps `weight [channels, width]`."""
    rows = hidden_states.transpose(1, 2)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out = _operators(rows).short_convolution.default(rows, weight, bias, activation in SILU)
    return _activated(out.transpose(1, 2), activation)


def causal_conv1d_update(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor | SlotRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """As transformers', for one token of each sequence `[n, channels, 1]` after those of the state."""
    now = hidden_states.flatten(1).contiguous()
    states, rows = _rows(conv_state, (), now)
    out = _operators(now).short_convolution_step.default(now, weight, bias, activation in SILU, states, rows)
    if isinstance(conv_state, torch.Tensor):
        conv_state.copy_(states)
    return _activated(out.unsqueeze(-1), activation)


def mamba_selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """As transformers': `hidden_states`, `dt` and `z` `[n, channels, tokens]`, A `[channels, state size]`, B and C `[n,
    state size, tokens]`. transformers' function always starts with zeros, because it gets no state; this one continues
    from the state that the mixer has requested."""
    dt = _time_steps(dt.transpose(1, 2), delta_bias, delta_softplus)
    x, b, c = (each.transpose(1, 2) for each in (hidden_states, B, C))
    x, dt, b, c = (each.float().unsqueeze(2) for each in (x, dt, b, c))
    before = asked_for.get()
    states, rows = _rows(before, (x.shape[0], x.shape[-1], A.shape[-1]), x)
    out = _scan(x, dt, A, b, c, D, states, rows)[:, :, 0].to(hidden_states.dtype)
    out = _gated(out, None if z is None else z.transpose(1, 2)).transpose(1, 2)
    return (out, _after(before, states)) if return_last_state else out


def mamba_selective_state_update(
    state: torch.Tensor | SlotRows,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """As transformers', for one token of each sequence, after whose state: of Mamba `[n, channels]`, B and C `[n, state
    size]`; of Mamba-2 `[n, heads, head size]`, where A and dt are expanded from one number of each head, B and C `[n,
    groups, state size]`. A state that is a tensor is changed in place."""
    if A.dim() == 3 and A.stride()[1:] == (0, 0) and dt.stride(2) == 0 and (dt_bias is None or dt_bias.stride(1) == 0):
        A, dt, dt_bias = A[:, 0, 0], dt[..., 0], None if dt_bias is None else dt_bias[:, 0]
    dt = _time_steps(dt, dt_bias, dt_softplus)
    one = (slice(None), None, None) if hidden_states.dim() == 2 else (slice(None), None)  # token, and of Mamba head
    x, steps, b, c = (each.float()[one] for each in (hidden_states, dt, B, C))
    states, rows = _rows(state, (), x)
    out = _scan(x, steps, A, b, c, D, states, rows).view_as(hidden_states)
    if isinstance(state, torch.Tensor):
        state.copy_(states)
    if hidden_states.dim() == 2:  # for Mamba-2 it is not rounded, as in the form for chunks
        out = out.to(hidden_states.dtype)
    return _gated(out, z)


def mamba2_chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: State = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """As transformers': `hidden_states [n, tokens, heads, head size]`, `dt [n, tokens, heads]`, A and D `[heads]`, B
    and C `[n, tokens, groups, state size]`, states `[n, heads, head size, state size]`."""
    dt = _time_steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    x = hidden_states.float()
    shape = (x.shape[0], *x.shape[2:], B.shape[-1])
    states, rows = _rows(initial_states, shape, x)
    out = _scan(x, dt.float(), A, B.float(), C.float(), None if D is None else D[:, None], states, rows)
    return (out, _after(initial_states, states)) if return_final_states else out


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    x, dt, A, B, C = (each.contiguous() for each in (x, dt, A.float(), B, C))
    out: torch.Tensor = _operators(x).state_space_scan.default(x, dt, A, B, C, D, states, rows)
    return out


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return nn.functional.softplus(dt) if softplus else dt


def _unit(rows: torch.Tensor) -> torch.Tensor:
    """Each row over its length. torch's sums on CUDA may depend on the number of rows."""
    if (operators := _operators(rows)) is torch.ops.tandem_gpu:
        out: torch.Tensor = operators.unit.default(rows, 1e-6)
        return out
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)


def _gated(out: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
    return out if z is None else out * nn.functional.silu(z)


def _activated(out: torch.Tensor, activation: str | None) -> torch.Tensor:
    return out if activation is None or activation in SILU else ACT2FN[activation](out)


def _rows(state: State, shape: Sequence[int], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States for an operator, and the rows that it reads, -1 for zeros, and those that it writes, int64 `[2, n]`. A
    tensor stays as it is; without a state there are new rows of this shape in float32."""
    if isinstance(state, SlotRows):
        return state.rows()
    if state is None:
        own, having = like.new_empty(shape, dtype=torch.float32), [-1] * shape[0]
    else:
        own = state.to(like.dtype).clone(memory_format=torch.contiguous_format)
        having = list(range(len(own)))
    return own, on_device([having, list(range(len(own)))], torch.int64, own.device)


def _after(before: State, states: torch.Tensor) -> State:
    return before if isinstance(before, SlotRows) else states


OPERATORS: dict[str, Forward] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "recurrent_kimi_delta_attention": gated_delta_rule,
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "mamba_selective_scan": mamba_selective_scan,
    "mamba_selective_state_update": mamba_selective_state_update,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba2_selective_state_update": mamba_selective_state_update,
}
# The kind of state of each function for single tokens.
TAKES = {
    "torch_recurrent_gated_delta_rule": "recurrent",
    "recurrent_kimi_delta_attention": "recurrent",
    "causal_conv1d_update": "conv",
    "mamba_selective_state_update": "recurrent",
    "mamba2_selective_state_update": "recurrent",
}
