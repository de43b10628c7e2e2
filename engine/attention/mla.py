"""Latent pages for DeepSeek-style attention (MLA): pages store, and transfers move, the latent, not the expanded K and
V.

Such modules have a method `expand_kv(latent, k_rot)` that turns the latent `[1, 1, T, kv_lora_rank]` and the rotated
key `[1, 1, T, rope_dim]` into K `[1, heads, T, k_dim]` and V `[1, heads, T, v_dim]`. On the instance it is replaced by
one that passes both through while our attention functions are switched on, so that those receive the latent as their
key and value; they call `expander(module)` after reading the pages. Under any other attention implementation the method
does what it always did, which keeps eager the oracle. A module without `expand_kv` keeps expanded pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

OURS = frozenset({"paged_kv", "probe_kv", "isolation_kv"})  # the names under which our functions are registered

Expander = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

_ORIGINAL = "_tandem_expand_kv"


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


def _install(module: nn.Module) -> None:
    original: Expander = module.expand_kv  # type: ignore[assignment]  # bound method of the module's class

    def expand_kv(latent: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config: Any = module.config
        if config._attn_implementation in OURS:
            return latent, k_rot
        return original(latent, k_rot)

    module.__dict__[_ORIGINAL] = original
    module.__dict__["expand_kv"] = expand_kv
