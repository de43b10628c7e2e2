"""Latent pages for DeepSeek-style attention (MLA): pages store, and transfers move, the latent, not the expanded K and
V.

Such modules have a method `expand_kv(latent, k_rot)` that turns the latent `[1, 1, T, kv_lora_rank]` and the rotated
key `[1, 1, T, rope_dim]` into K `[1, heads, T, k_dim]` and V `[1, heads, T, v_dim]`. On the instance it is replaced by
one that passes both through while our attention functions are switched on, so that those receive the latent as their
key and value; they call `expander(module)` after reading the pages. Under any other attention implementation the method
does what it always did, which keeps eager the oracle. A module without `expand_kv` keeps expanded pages.

On CUDA the pages need not be expanded where one product does it: `find_products` proves that for a model, and attention
gets the weight (engine/gpu/attention/latent.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.kv.kv_cache_spec import CallFacts

OURS = frozenset({"paged_kv", "probe_kv", "isolation_kv"})  # the names under which our functions are registered

Expander = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_ORIGINAL = "_tandem_expand_kv"
_PRODUCT = "_tandem_expanding_product"


class Expanded(NamedTuple):
    """Elements of each head that a product makes of a latent: of its key, before the rotated part, and of its value."""

    plain: int
    values: int


def use_latent_pages(model: nn.Module) -> int:
    """Installs the pass-through on every module that has `expand_kv`; returns how many there are."""
    modules = [module for module in model.modules() if callable(getattr(module, "expand_kv", None))]
    for module in modules:
        _install(module)
    return len(modules)


def expander(module: nn.Module) -> Expander | None:
    """The module's own expansion, if its pages are latent."""
    original: Expander | None = module.__dict__.get(_ORIGINAL)
    return original


def find_products(model: nn.Module, facts: tuple[CallFacts, ...]) -> Expanded | None:
    """Finds the product that expands the latents of each module, for `expansion`. None if one has no such product, or
    they are of different sizes."""
    sizes = {(fact.k_dim, fact.v_dim) for fact in facts if fact.latent}
    modules = [module for module in model.modules() if expander(module) is not None]
    found = set()
    for module in modules if len(sizes) == 1 else []:
        layer, expanded = _product_of(module, *next(iter(sizes)))
        module.__dict__[_PRODUCT] = layer
        found.add(expanded)
    return found.pop() if len(found) == 1 else None


def expansion(module: nn.Module) -> torch.Tensor | None:
    """The weight `[heads * (plain + values), rank]` of the product that `find_products` has found."""
    layer = module.__dict__.get(_PRODUCT)
    return None if layer is None else layer.weight


def expander_of(weight: torch.Tensor, heads: int, plain: int) -> Expander:
    """What a module with this weight does."""
    own = weight.view(heads, -1, weight.shape[1])

    def expand(latent: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = latent @ own[:, :plain].transpose(1, 2), latent @ own[:, plain:].transpose(1, 2)
        return torch.cat((keys, k_rot.expand(-1, heads, -1, -1)), -1), values

    return expand


@torch.inference_mode()
def _product_of(module: nn.Module, rank: int, rope: int) -> tuple[nn.Linear | None, Expanded | None]:
    """The layer whose weight alone expands the module's latents, bit for bit."""
    expand = expander(module)
    assert expand is not None
    for layer in module.children():
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, nn.Linear) or layer.bias is not None or weight is None or weight.shape[1:] != (rank,):
            continue
        units = torch.ones(rank, dtype=weight.dtype, device=weight.device)
        units[::2] = 2.0  # so that a norm within the expansion shows
        k_rot = torch.randn(1, 1, rank, rope, device=weight.device).to(weight.dtype)
        keys, values = expand(units.diag()[None, None], k_rot)
        heads, plain, size = keys.shape[1], keys.shape[3] - rope, values.shape[3]
        if weight.shape[0] != heads * (plain + size) or plain < 1:
            continue
        own = (weight * units).view(heads, plain + size, rank)
        expected = own[:, :plain].transpose(1, 2), own[:, plain:].transpose(1, 2)
        turned = k_rot[0].expand(heads, -1, -1)
        if all(map(torch.equal, (keys[0, ..., :plain], values[0], keys[0, ..., plain:]), (*expected, turned))):
            return layer, Expanded(plain, size)
    return None, None


def _install(module: nn.Module) -> None:
    original: Expander = module.expand_kv  # type: ignore[assignment]  # bound method of the module's class

    def expand_kv(latent: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config: Any = module.config
        if config._attn_implementation in OURS:
            return latent, k_rot
        return original(latent, k_rot)

    module.__dict__[_ORIGINAL] = original
    module.__dict__["expand_kv"] = expand_kv
