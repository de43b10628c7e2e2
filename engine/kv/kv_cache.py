"""The KV memory of one engine: one allocation, one contiguous run of bytes for each block.

    buffer  [num_blocks, block_bytes] uint8
    block   | K of call 0 | V of call 0 | K of call 1 | ... | V of the last call |     each starts at a multiple of 64 B
    K       [kv_heads, block_size, k_dim] in the model's dtype: what one task of attention reads lies in one piece

A quantised element (engine/kv/kv_quantization.py) is one byte, and the scales follow V, those of one head contiguously:

    block   | K of call 0 | V of call 0 | scales of K, scales of V of call 0 | K of call 1 | ...
    scales  [kv_heads, block_size] bfloat16

The keys of sparse indexers (engine/runner/indexers.py) follow the last attention call, as calls of one head without V.

A large block may end with a page of padding (`engine.core.kv_layout.plan_calls`).

The ranks of one worker share the memory of its pages: a block has the KV heads of the whole model, and each rank has
views of its own heads. So a block is the same for any number of ranks. A block is contiguous across all attention
calls, so one block is one transfer descriptor. The attention function uses strided views of the same memory; nothing is
copied for a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.core.kv_layout import HOST_DIGEST, SCALE_DTYPE, VERSION, KvLayout, plan_calls, plan_parts, plan_states
from engine.kernels import fresh_memory
from engine.kv.kv_cache_spec import CallFacts, StateFacts
from engine.kv.state_memory import StateMemory


class KvCache:
    """Owns the buffer of `num_blocks` blocks, with ids from 0. `layout` describes its bytes. `slots` is the number of
    slots for states, if the model has recurrent layers."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device,
        slots: int = 0,
        facts: Sequence[CallFacts] = (),
        memory: torch.Tensor | None = None,
    ) -> None:
        """`facts` say which heads of `layout` the views have; without `facts` all. `memory` is zeroed uint8
        `[num_blocks * block_bytes]`; None: new memory."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        self.block_bytes = layout.block_bytes
        self.dtype = dtype_named(layout.dtype)
        flat = fresh_memory(num_blocks * layout.block_bytes, device) if memory is None else memory
        self.buffer = flat.view(num_blocks, layout.block_bytes)
        if memory is None:
            self.buffer.zero_()  # touches every page, so that missing memory fails here and not under load
        typed = self.buffer.view(self.dtype)  # [num_blocks, block_bytes / itemsize]
        # Keys and values of each attention call: views, `[num_blocks, block_size, kv_heads, dim]`.
        own = [heads_of(fact) for fact in facts]
        own += [range(call.k_heads) for call in layout.calls[len(own) :]]  # of sparse indexers, or of all calls
        self.k = [self._window(typed, c.k_offset, held, c.k_dim) for c, held in zip(layout.calls, own, strict=True)]
        self.v = [self._window(typed, c.v_offset, held, c.v_dim) for c, held in zip(layout.calls, own, strict=True)]
        # The keys of each sparse indexer, of which `k` ends with: `[num_blocks, block_size, 1, dim]`.
        self.index_keys = [keys for keys, call in zip(self.k, layout.calls, strict=True) if not call.v_dim]
        self.quantised = bool(layout.scale_dtype)
        # The scales of their elements, `[num_blocks, block_size, kv_heads]`; None if not quantised.
        self.k_scales = [self._scales(c.k_scale_offset, held) for c, held in zip(layout.calls, own, strict=True)]
        self.v_scales = [self._scales(c.v_scale_offset, held) for c, held in zip(layout.calls, own, strict=True)]
        self.states = StateMemory(layout, slots, device) if layout.states else None

    @property
    def base_address(self) -> int:
        """Address of block 0; block `i` starts at `base_address + i * block_bytes`."""
        return self.buffer.data_ptr()

    @property
    def device_id(self) -> int:
        """Index of the device that holds the buffer; 0 for host memory."""
        return self.buffer.device.index or 0

    def block_view(self, block: int) -> memoryview:
        """The bytes of one block, `block_bytes` long, writable and not copied. Host memory only."""
        assert self.buffer.device.type == "cpu", f"block_view reads host memory, the pages are on {self.buffer.device}"
        return self.buffer[block].numpy().data

    def all_heads(self) -> KvCache:
        """The same memory with views of the whole model's KV heads, if these views are those of one rank."""
        return KvCache(self.layout, self.num_blocks, self.buffer.device, memory=self.buffer.flatten())

    def save_state(self, slot: int, blocks: Sequence[int]) -> None:
        """Copies the states of a slot into `layout.state_blocks` blocks; the rest of the last one is zeroed."""
        for block, part in zip(blocks, self._state_parts(slot), strict=True):
            self.buffer[block, : len(part)] = part
            self.buffer[block, len(part) :] = 0

    def load_state(self, slot: int, blocks: Sequence[int]) -> None:
        """The inverse of `save_state`."""
        for block, part in zip(blocks, self._state_parts(slot), strict=True):
            part.copy_(self.buffer[block, : len(part)])

    def _state_parts(self, slot: int) -> tuple[torch.Tensor, ...]:
        assert self.states is not None, "this model keeps no states"
        return torch.split(self.states.row(slot), self.block_bytes)

    def _window(self, typed: torch.Tensor, offset: int, heads: range, dim: int) -> torch.Tensor:
        size = (self.num_blocks, self.block_size, len(heads), dim)
        stride = (typed.shape[1], dim, self.block_size * dim, 1)
        first = offset // typed.element_size() + heads.start * self.block_size * dim
        return torch.as_strided(typed, size, stride, storage_offset=first)

    def _scales(self, offset: int, heads: range) -> torch.Tensor | None:
        if not self.quantised:
            return None
        return self._window(self.buffer.view(dtype_named(self.layout.scale_dtype)), offset, heads, 1).squeeze(-1)


def heads_of(fact: CallFacts) -> range:
    """The KV heads of a block that this rank has."""
    first = fact.held.first if fact.held else 0
    return range(first, first + fact.kv_heads)


def layout_of(
    facts: Sequence[CallFacts],
    block_size: int,
    dtype: torch.dtype,
    fingerprint: str,
    kept: torch.dtype | None = None,
    digest: str = HOST_DIGEST,
    states: StateFacts | None = None,
    index_dims: Sequence[int] = (),
) -> KvLayout:
    """The layout that `KvCache` will have for these facts; `fingerprint` names the model whose KV it is.

    `dtype` is the model's; `kept` that of quantised elements, None without quantisation; `digest` the kind of digest;
    `states` the states of recurrent layers; `index_dims` has the elements of a key of each sparse indexer.
    """
    shapes = [(fact.model_heads, fact.k_dim, fact.v_dim) for fact in facts] + [(1, dim, 0) for dim in index_dims]
    element = dtype if kept is None else kept
    calls, total = plan_calls(shapes, block_size, element.itemsize, scaled=kept is not None)
    scale = SCALE_DTYPE if kept is not None else ""
    layout = KvLayout(
        VERSION, fingerprint, dtype_name(element), scale, dtype_name(dtype), block_size, total, calls, digest
    )
    if states is None:
        return layout
    each = [(state.key, state.shape, state.dtype or dtype) for state in states.states]
    placed, state_bytes = plan_states([(key, shape, dtype_name(own), own.itemsize) for key, shape, own in each])
    block_bytes = total or plan_parts(state_bytes)
    return replace(
        layout, block_bytes=block_bytes, states=placed, state_bytes=state_bytes, state_kernels=states.kernels
    )


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. Raises ValueError for an unknown name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype
