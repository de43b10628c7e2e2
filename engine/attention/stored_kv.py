"""transformers' eager attention over the K and V in the pages: the reference for quantised pages.

Rounding is discontinuous: two paths that differ in the last bit of a key may keep two different elements. So the
self-check does not round a second time. The paged path runs first. Then an eager forward, with the library's own masks,
softmax and windows, uses in each attention call the K and V that the pages hold, and measures their distance from its
own: more than one rounding is an error. Its logits then differ from the paged ones only by the order of sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from engine.attention.mla import expander
from engine.kv.kv_cache import KvCache
from engine.kv.kv_quantization import dequantise, step_of
from tandem.errors import CheckpointRefused

NAME = "stored_kv"
EAGER = "eager_attention_forward"  # the name of this function in transformers' model files


class Stored:
    """The K and V of one prompt as pages keep them, taken call by call."""

    def __init__(self, pages: KvCache, calls: int, table: Sequence[int], length: int) -> None:
        self._pages = pages
        self._blocks = torch.tensor(table, device=pages.buffer.device)
        self._length = length
        self._calls = calls
        self.begin()

    def begin(self) -> None:
        """Before each forward."""
        self._next = 0
        self.beyond: list[torch.Tensor] = []  # of each K and V: [tokens], shares of the head's largest element

    def take(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next call's K and V for its own ones, `[1, kv_heads, T, d]` each."""
        call, self._next = self._next, self._next + 1
        assert call < self._calls, f"more than {self._calls} attention calls"
        k = self._compare(key, self._pages.k[call], self._pages.k_scales[call])
        v = self._compare(value, self._pages.v[call], self._pages.v_scales[call])
        return k, v

    def _compare(self, own: torch.Tensor, pages: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        assert scales is not None, "only quantised pages need this"
        elements = (
            pages.view(torch.uint8)[self._blocks].view(pages.dtype).flatten(0, 1)[: self._length]
        )  # [T, heads, d]
        factors = scales[self._blocks].flatten(0, 1)[: self._length]  # [T, heads]
        stored = dequantise(elements, factors, torch.float32)
        exact = own[0].transpose(0, 1).float()
        excess = ((exact - stored).abs() - step_of(elements, factors)).clamp(min=0).amax(dim=-1)
        largest = exact.abs().amax(dim=-1)
        share = torch.where(largest + excess == 0, 0.0, excess / largest)  # [T, heads]; NaN and infinity stay
        self.beyond.append(share.amax(dim=-1))
        return stored.to(own.dtype).transpose(0, 1).unsqueeze(0)


_running: list[Stored] = []  # of the forward that runs now; one thread of a process loads at a time


@contextmanager
def running(module: nn.Module, stored: Stored) -> Iterator[None]:
    """Inside, a forward of `module` under `NAME` reads `stored`; latents are taken before they are expanded."""
    latent = [each for each in module.modules() if expander(each) is not None]
    own = [each.__dict__["expand_kv"] for each in latent]
    for each, expand in zip(latent, own, strict=True):
        each.__dict__["expand_kv"] = lambda c, k_rot, expand=expand: expand(*stored.take(c, k_rot))
    stored.begin()
    _running.append(stored)
    try:
        yield
    finally:
        _running.pop()
        for each, expand in zip(latent, own, strict=True):
            each.__dict__["expand_kv"] = expand


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **known: Any
) -> Any:
    if expander(module) is None:
        key, value = _running[-1].take(key, value)
    eager = getattr(sys.modules[type(module).__module__], EAGER, None)
    if eager is None:
        raise CheckpointRefused(
            f"{type(module).__name__} has no eager attention of its own to check quantised KV against; "
            "serve it with kv_dtype auto"
        )
    return eager(module, query, key, value, mask, **known)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)
