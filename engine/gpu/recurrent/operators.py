"""The recurrences of engine/kernels (recurrences.cpp, state_space.cpp) in Triton, with the same names and signatures.

Tested by Triton's interpreter (tests/engine/test_gpu_recurrences.py).

    gated delta rule    S = decay S;  u = beta (v - k S);  S = S + k' u;  out = q S         S [dk, dv] of each head
    state space         S = decay S + (dt x) B;  y = S C + D x                              S [size] of each channel
    short convolution   y = act(bias + sum over w of taps[w] x[w])                          of each channel

(Yang et al. 2024, arXiv 2412.06464; Kimi Team 2025, arXiv 2510.26692; Gu and Dao 2023, arXiv 2312.00752; Dao and Gu
2024, arXiv 2405.21060.)

A program has a tile of a head's state in registers and processes the sequence's tokens one after another; programs
share nothing. The layer's sizes alone determine the tile, so each sum has one order: a token has the same bits as a
single token, in a chunk of any length, and next to any other sequences. The same kernel computes a single token, as a
chunk of one.

A row of `states` is read and a row is written for each sequence, which may be the same: `rows` int64 `[2, n]` on the
device, -1 for zeros. The row numbers are not checked, because the host would have to wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.gpu.operators import operator, power_of_two
from engine.gpu.recurrent import (
    kernels,
    norms,  # noqa: F401  (makes its operators known)
)

STATE = 512  # elements of a program's tile: 32 registers of each thread of a warp
LEAST = 8  # columns of a tile: a sector of memory in each row of the state
TOKENS, CHANNELS = 8, 128  # of a tile of the convolution


def tile(summed: int, others: int) -> tuple[int, int]:
    """The sizes of a program's tile for a state of `summed` x `others` elements: the whole summed dimension."""
    whole = power_of_two(summed)
    return whole, min(max(LEAST, STATE // whole), power_of_two(others))


def warps(summed: int, columns: int) -> int:
    return max(1, summed * columns // (2 * STATE))


@operator(
    "gated_delta(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor(a!) states, Tensor rows) -> Tensor"
)
def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """q, k `[n, tokens, k heads, dk]`, v `[n, tokens, v heads, dv]`, decay `[n, tokens, v heads]` or `[n, tokens, v
    heads, dk]`, beta `[n, tokens, v heads]`: float32 and contiguous; states `[all rows, v heads, dk, dv]` in float32,
    each row contiguous. Returns `[n, tokens, v heads, dv]`. AssertionError for anything else."""
    (n, tokens, k_heads, dk), (heads, dv) = q.shape, v.shape[2:]
    channels = decay.dim() == 4
    _check_inputs(q, k, v, decay, beta)
    assert k.shape == q.shape, "q and k of unlike shapes"
    assert v.shape[:2] == (n, tokens), "v of other tokens"
    assert heads % k_heads == 0, f"{k_heads} k heads for {heads} v heads"
    assert beta.shape == (n, tokens, heads), "beta of another shape"
    assert decay.shape == ((n, tokens, heads, dk) if channels else (n, tokens, heads)), "decay of another shape"
    _check_rows(states, (heads, dk, dv), torch.float32, rows, n)
    out = torch.empty_like(v)
    keys, columns = tile(dk, dv)
    if out.numel():
        kernels.gated_delta[(-(-dv // columns), heads, n)](
            q, k, v, decay, beta, states, rows, out, tokens, states.stride(0), heads // k_heads, dk, dv,
            KEYS=keys, COLS=columns, CHANNELS=channels, num_warps=warps(keys, columns),
        )  # fmt: skip
    return out


@operator(
    "state_space_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor(a!) states, Tensor rows)"
    " -> Tensor"
)
def state_space_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """x `[n, tokens, heads, dim]`; dt `[n, tokens, heads]` with A `[heads]`, or `[n, tokens, heads, dim]` with a decay
    of each element, A of heads * dim * size; B, C `[n, tokens, groups, size]`: float32 and contiguous. D is of any
    shape that expands to `[heads, dim]`, and of any type. states `[all rows, ...]` in float32 of heads * dim * size
    contiguous elements a row. Returns as x. AssertionError for anything else."""
    (n, tokens, heads, dim), (groups, size) = x.shape, B.shape[2:]
    own = dt.dim() == 4
    _check_inputs(x, dt, A, B, C)
    assert B.shape == C.shape == (n, tokens, groups, size), "B and C of other tokens"
    assert heads % groups == 0, f"{groups} groups of {heads} heads"
    assert dt.shape == (x.shape if own else x.shape[:3]), "dt of another shape"
    assert A.numel() == heads * (dim * size if own else 1), "A of another shape"
    assert math.prod(states.shape[1:]) == heads * dim * size, "states of another size"
    _check_rows(states, states.shape[1:], torch.float32, rows, n)
    skip = x if D is None else D.expand(heads, dim)  # a placeholder that is not read
    y = torch.empty_like(x)
    of_state, columns = tile(size, dim)
    if y.numel():
        kernels.state_space_scan[(-(-dim // columns), heads, n)](
            x, dt, A, B, C, skip, states, rows, y, tokens, *skip.stride()[:2], states.stride(0), heads // groups, dim,
            size, COLS=columns, SIZE=of_state, OWN=own, SKIP=D is not None, num_warps=warps(of_state, columns),
        )  # fmt: skip
    return y


@operator("short_convolution(Tensor x, Tensor weight, Tensor? bias, bool silu) -> Tensor")
def short_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """x `[n, tokens, channels]` with contiguous channels: all tokens of each sequence, with zeros before the first.
    weight `[channels, width]`, bias `[channels]`. Sums are in float32, and rounded to x's type before silu."""
    n, tokens, channels = x.shape
    assert x.stride(2) == 1, "channels lie side by side"
    _check_taps(weight, bias, channels)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        kernels.short_convolution[(-(-tokens // TOKENS), -(-channels // CHANNELS), n)](
            x, weight, x if bias is None else bias, y, tokens, channels, *x.stride()[:2], *weight.stride(),
            0 if bias is None else bias.stride(0), WIDTH=weight.shape[1], BIAS=bias is not None, SILU=silu,
            TOKENS=TOKENS, CHANNELS=CHANNELS, num_warps=4,
        )  # fmt: skip
    return y


@operator(
    "short_convolution_step(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor(a!) states, Tensor rows) -> Tensor"
)
def short_convolution_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """One token of each sequence, x `[n, channels]`, contiguous. A row of states has the `kept` tokens before it,
    `[channels, kept]` in x's type, of which the last width - 1 are used. The row that is written has the new one,
    too."""
    n, channels = x.shape
    assert x.is_contiguous(), "x is contiguous"
    _check_taps(weight, bias, channels)
    kept, width = states.shape[-1], weight.shape[1]
    assert kept >= width - 1, f"{kept} tokens are kept, for {width} taps"
    _check_rows(states, (channels, kept), x.dtype, rows, n)
    y = torch.empty_like(x)
    if y.numel():
        kernels.short_convolution_step[(-(-channels // CHANNELS), n)](
            x, weight, x if bias is None else bias, states, rows, y, channels, *weight.stride(),
            0 if bias is None else bias.stride(0), states.stride(0), WIDTH=width, KEPT=kept, BIAS=bias is not None,
            SILU=silu, CHANNELS=CHANNELS, num_warps=4,
        )  # fmt: skip
    return y


def _check_inputs(*given: torch.Tensor) -> None:
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in given), "inputs are contiguous float32"


def _check_taps(weight: torch.Tensor, bias: torch.Tensor | None, channels: int) -> None:
    assert weight.dim() == 2 and len(weight) == channels, "taps of another number of channels"  # noqa: PT018
    assert bias is None or bias.shape == (channels,), "a bias of another number of channels"


def _check_rows(states: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, rows: torch.Tensor, n: int) -> None:
    """Of `states [all rows, *shape]`."""
    assert states.dtype == dtype, "states of another type"
    assert states.shape[1:] == tuple(shape), "states of another shape"
    apart = 1
    for size, stride in zip(reversed(shape), reversed(states.stride()), strict=False):
        assert stride == apart or size == 1, "a row of states is contiguous"
        apart *= size
    assert rows.shape == (2, n) and rows.dtype == torch.int64 and rows.is_contiguous(), "one row each"  # noqa: PT018
    assert rows.device == states.device, "the rows' numbers are on another device"
