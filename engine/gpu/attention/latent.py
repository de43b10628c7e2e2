"""Attention over pages of latents (MLA) on CUDA: the expansion of the latents moves to the queries and the result.

A module expands a latent c with one weight, of each head U (keys) and W (values), and appends the rotated key r:

    key = (U c, r)   value = W c        q . key = (q U) . c + turned q . r        sum of p value = W (sum of p c)

So attention reads each latent once, as a key and as a value, for all heads, and nothing of the context is expanded.
`absorbed` and `expanded` are the two products; engine/gpu/attention/kernels.py is what lies between them. As those of
engine/gpu/products.py, they add along the summed dimension in one float32 chain, whatever the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from engine.attention.mla import Expanded
from engine.gpu import layers, trial
from engine.gpu import product_kernels as kernels
from engine.gpu.operators import AMPERE, BLACKWELL, HOPPER, capability_of
from engine.gpu.products import Tiling, cdiv, exact
from engine.kv.kv_cache_spec import CallFacts


def absorbed(plain: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`plain [tokens, heads, d]`, the part of the queries that is not rotated, times the weights of the keys:
    `[tokens, heads, rank]`. `weight [heads * (d + values), rank]` has the rows of each head after another."""
    heads, d = plain.shape[1:]
    own = weight.view(heads, -1, weight.shape[1])  # [heads, d + values, rank]
    return each_head(plain, own[:, :d].transpose(1, 2))


def expanded(latents: torch.Tensor, weight: torch.Tensor, d: int) -> torch.Tensor:
    """Weighted sums of latents `[tokens, heads, rank]` as those of values, `[tokens, heads, values]`; `d` rows of each
    head of the weight are of its key."""
    own = weight.view(latents.shape[1], -1, weight.shape[1])
    return each_head(latents, own[:, d:])


def each_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x [tokens, heads, k]` times `weight [heads, n, k]` of any strides: `[tokens, heads, n]`."""
    tokens, heads, k = x.shape
    n = weight.shape[1]
    out = x.new_empty(tokens, heads, n)
    if tokens == 0:
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    tiling = tiling_of(tokens, n, x.dtype, capability_of(x.device))
    kernels.each_head[(cdiv(tokens, tiling.rows), cdiv(n, tiling.columns), heads)](
        x, weight, out, tokens, n, k, *x.stride()[:2], *weight.stride(), *out.stride()[:2],
        **tiling.launch, maxnreg=most_registers(x.dtype), WHOLE=k % tiling.depth == 0,
        EXACT=exact(x.dtype),
    )  # fmt: skip
    return out


def most_registers(dtype: torch.dtype) -> int | None:
    """Of a thread; None is ptxas's own choice, which in 16 bits stops early to fit more programs, and spills."""
    return None if dtype == torch.float32 else 255


def tiling_of(tokens: int, n: int, dtype: torch.dtype, capability: int) -> Tiling:
    """That of a layer's product, without what the copy engine of Hopper allows: it reads no weights of one head."""
    return Tiling.of(tokens, n, dtype, AMPERE if HOPPER <= capability < BLACKWELL else capability)


def random_weight(fact: CallFacts, sizes: Expanded, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """One that expands random latents to elements of the same size."""
    rows = fact.heads * sum(sizes)
    weight = torch.randn(rows, fact.k_dim, generator=generator, device=generator.device)
    return (weight / math.sqrt(fact.k_dim)).to(dtype)


@torch.inference_mode()
def differs(fact: CallFacts, sizes: Expanded, dtype: torch.dtype, generator: torch.Generator) -> str | None:
    """What is wrong with the two products of this attention call; None if nothing is."""
    weight = random_weight(fact, sizes, dtype, generator)
    own = weight.float().view(fact.heads, -1, fact.k_dim)
    for what, width, multiply, wide in (
        ("queries", sizes.plain, lambda x: absorbed(x, weight), own[:, : sizes.plain]),
        ("values", fact.k_dim, lambda x: expanded(x, weight, sizes.plain), own[:, sizes.plain :].transpose(1, 2)),
    ):
        shape = (layers.ROWS[-1], fact.heads, width)
        x = torch.randn(shape, generator=generator, device=generator.device).to(dtype)
        expected = (x.float().transpose(0, 1) @ wide).transpose(0, 1)
        if problem := trial.failing(partial(_wrong, multiply, x, expected)):
            return f"product of latents' {what} {problem}"
    return None


def _wrong(multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, expected: torch.Tensor) -> str | None:
    found = multiply(x)
    return trial.differs(found, expected) or trial.other_bits(
        lambda rows: (multiply(rows),), (x,), (found,), layers.ROWS
    )
