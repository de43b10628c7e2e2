"""Copies KV from blocks of one layout into blocks of another layout with the same meaning
(engine/core/kv_conversion.py).

A block of the source is in separate memory, the *staging*; its tokens are copied, not its bytes. Elements of the same
type keep their bits. Others are converted as attention does: quantised elements are multiplied by their scale, and
elements are quantised by the function that writes pages (engine/kv/kv_quantization.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.kv_layout import KvLayout
from engine.kv.kv_cache import KvCache, dtype_named
from engine.kv.kv_quantization import dequantise, quantise


class KvConverter:
    """From a staging with `count` blocks of `source` into `pages`, which may be those of several ranks."""

    def __init__(self, source: KvLayout, count: int, pages: KvCache) -> None:
        self.staging = KvCache(source, count, pages.buffer.device)
        self._pages = pages.all_heads()
        self._model_dtype = dtype_named(source.model_dtype)

    def convert(self, staged: Sequence[tuple[int, int]], table: Sequence[int], tokens: range) -> None:
        """Copies the tokens of blocks in the staging: `staged` has (place in the staging, index in the sequence) of
        each. `table` are the sequence's blocks; only `tokens` are written."""
        theirs, ours = self.staging.block_size, self._pages.block_size
        places: list[tuple[int, int, int, int]] = []
        for place, index in staged:
            span = range(max(tokens.start, index * theirs), min(tokens.stop, (index + 1) * theirs))
            places += [(place, at - index * theirs, table[at // ours], at % ours) for at in span]
        if not places:
            return
        source, target = self.staging, self._pages
        # To the device once: a view of it that is indexed by a tensor of the host copies that one each time, and waits.
        block, slot, to_block, to_slot = torch.tensor(places).to(source.buffer.device).unbind(1)
        for call in range(len(source.layout.calls)):
            for kind in ("k", "v"):
                elements, scales = getattr(source, kind)[call], getattr(source, f"{kind}_scales")[call]
                into, into_scales = getattr(target, kind)[call], getattr(target, f"{kind}_scales")[call]
                own = None if scales is None else scales[block, slot]
                values, factors = self._converted(_taken(elements, block, slot), own, into.dtype)
                _put(into, to_block, to_slot, values)
                if into_scales is not None:
                    assert factors is not None
                    into_scales[to_block, to_slot] = factors

    def _converted(
        self, elements: torch.Tensor, scales: torch.Tensor | None, wanted: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`elements [tokens, heads, d]`, with `scales [tokens, heads]` if they are quantised, as `wanted`."""
        if elements.dtype == wanted:
            return elements, scales
        exact = elements if scales is None else dequantise(elements, scales, self._model_dtype)
        return (exact, None) if wanted == self._model_dtype else quantise(exact, wanted)


def _taken(view: torch.Tensor, block: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """`[tokens, heads, d]` of `view [blocks, size, heads, d]`. By bytes: fp8 cannot be indexed everywhere."""
    return view.view(torch.uint8)[block, slot].view(view.dtype) if view.element_size() == 1 else view[block, slot]


def _put(view: torch.Tensor, block: torch.Tensor, slot: torch.Tensor, values: torch.Tensor) -> None:
    if view.element_size() == 1:
        view.view(torch.uint8)[block, slot] = values.view(torch.uint8)
    else:
        view[block, slot] = values
