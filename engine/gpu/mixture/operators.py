"""The experts of a mixture on CUDA, with bits that do not depend on the other rows
(tests/engine/test_gpu_experts.py).

    experts_plan    which pairs of a token and one of its experts are computed together
    experts         the product of each pair with the weight of its expert
    experts_codes   likewise, over quantised weights (engine/gpu/codes.py)
    clamped_gate    the gate of gpt-oss's experts; others stay transformers', and most are fused in a recording
    experts_sum     the sum of a token's experts, times their shares, in the order in which they were chosen

A pair is the number token * chosen + place. A tile has pairs of one expert, and there are as many tiles as there can be
for this number of pairs; those without a pair end at once. So the host never waits to hear who was chosen, and a step
can be captured. Each product is the chain of engine/gpu/products.py, in such tiles.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.gpu.mixture import kernels
from engine.gpu.operators import capability_of, operator
from engine.gpu.products import FORMATS, Scaled, Tiling, cdiv, exact, of_codes

CHUNK = 1024  # pairs that a program of the plan looks at at a time
TALL = 128  # pairs of a tile, at most
TILE = 1024  # columns of a program of the sum


def tiling(pairs: int, count: int, n: int, dtype: torch.dtype, capability: int, depth: int | None = None) -> Tiling:
    """That of a layer with as many rows as each of `count` experts has on average, up to the largest tile whose rows,
    which are gathered, take no register too many. `depth`: that of weights of codes."""
    own = Tiling.of(cdiv(pairs, count), n, dtype, capability, depth)
    return replace(own, rows=min(own.rows, TALL))


def tiles(pairs: int, count: int, rows: int) -> int:
    """How many tiles of so many rows there may be: `kernels.plan` has why."""
    return pairs // rows + min(pairs, count)


@operator("experts_plan(Tensor x, Tensor chosen, int count, int? depth=None) -> Tensor")
def plan(x: torch.Tensor, chosen: torch.Tensor, count: int, depth: int | None = None) -> torch.Tensor:
    """For products of rows of x's type with `count` experts; `chosen [tokens, each]`. `depth` as in `tiling`."""
    pairs = chosen.numel()
    rows = tiling(pairs, count, 1, x.dtype, capability_of(x.device), depth).rows
    many = tiles(pairs, count, rows)
    out = torch.empty(pairs + 3 * many, dtype=torch.int32, device=x.device)
    if pairs:
        kernels.plan[(count,)](chosen.contiguous(), out, pairs, many, ROWS=rows, CHUNK=CHUNK, num_warps=4)
    return out


@operator(
    "experts(Tensor x, Tensor chosen, Tensor plan, Tensor weight, Tensor? bias, bool transposed, int count, int n,"
    " int k) -> Tensor"
)
def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    plan: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
    count: int,
    n: int,
    k: int,
) -> torch.Tensor:
    """`[pairs, n]`, from x `[tokens, k]` or `[pairs, k]`, and weight `[count, n, k]`, or `[count, k, n]` if
    transposed."""
    weight = weight.transpose(1, 2) if transposed else weight
    assert weight.shape == (count, n, k), f"weights of {tuple(weight.shape)} for {count} of {n} x {k}"
    if x.dtype != weight.dtype:
        raise TypeError(f"rows in {x.dtype} and weights in {weight.dtype}")
    return _multiplied(x, chosen, plan, weight, bias)


@operator(
    "experts_codes(Tensor x, Tensor chosen, Tensor plan, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias,"
    " int count, int n, int k, int group, int depth, str format) -> Tensor"
)
def experts_codes(
    x: torch.Tensor,
    chosen: torch.Tensor,
    plan: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: int,
    n: int,
    k: int,
    group: int,
    depth: int,
    format: str,
) -> torch.Tensor:
    """`[pairs, n]`, from x `[tokens, k]` or `[pairs, k]`, codes `[count, n, bytes]` and scales and zeros
    `[count, n, groups]`; the plan is of this `depth`."""
    assert codes.shape[:2] == scales.shape[:2] == (count, n), f"codes of {tuple(codes.shape)} for {count} of {n}"
    assert x.shape[-1] == k, f"{x.shape[-1]} inputs for {k}"
    kept = codes.view(torch.int8) if format == "int8" else codes
    return _multiplied(x, chosen, plan, kept, bias, Scaled(scales, zeros, group, FORMATS[format], depth))


def _multiplied(
    x: torch.Tensor,
    chosen: torch.Tensor,
    plan: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scaled: Scaled | None = None,
) -> torch.Tensor:
    count, n, k = *weight.shape[:2], x.shape[-1]
    pairs, flat = chosen.numel(), x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(pairs, n)
    if pairs == 0:
        return out
    own = tiling(pairs, count, n, x.dtype, capability_of(x.device), scaled.depth if scaled else None)
    many = tiles(pairs, count, own.rows)
    (scales, zeros, group, groups), of_format = of_codes(scaled, flat)
    kernels.experts[(many * cdiv(n, own.columns),)](
        flat, weight, scales, zeros, flat if bias is None else bias, plan, out, pairs, many, n, k, group,
        pairs // len(flat), flat.stride(0), *weight.stride(), groups, 0 if bias is None else bias.stride(0),
        **own.launch, **of_format, WHOLE=k % own.depth == 0, BIAS=bias is not None,
        EXACT=exact(x.dtype),
    )  # fmt: skip
    return out


@operator("clamped_gate(Tensor both, float limit, float alpha, bool interleaved) -> Tensor")
def clamped_gate(both: torch.Tensor, limit: float, alpha: float, interleaved: bool) -> torch.Tensor:
    """`[pairs, n]` from gate and up `[pairs, 2 n]`, side by side or in turn, as gpt-oss gates its experts."""
    pairs, width = both.shape
    both, n = both.contiguous(), width // 2
    out = both.new_empty(pairs, n)
    if pairs:
        kernels.clamped_gate[(pairs * cdiv(n, TILE),)](
            both, out, n, width, limit, alpha, INTERLEAVED=interleaved, TILE=TILE, num_warps=4, enable_fp_fusion=False
        )
    return out


@operator("experts_sum(Tensor y, Tensor shares, Tensor x) -> Tensor")
def total(y: torch.Tensor, shares: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`[tokens, n]` in x's type, from y `[pairs, n]` and `shares [tokens, each]`."""
    tokens, each = shares.shape
    y, shares = y.contiguous(), shares if shares.stride(1) == 1 else shares.contiguous()
    out = x.new_empty(tokens, y.shape[1])
    if out.numel():
        kernels.mix[(tokens * cdiv(y.shape[1], TILE),)](
            y, shares, out, each, y.shape[1], shares.stride(0), TILE=TILE, ROUNDED=shares.dtype == y.dtype,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
