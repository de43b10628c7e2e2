"""The states of recurrent layers, one slot for each sequence that runs.

    buffer  [slots, state_bytes] uint8
    slot    | a state of one layer | the next one | ...        each starts at a multiple of 64 B

A step reads the states of its sequences and puts new ones aside. They reach the slots by `commit`, when the step has
succeeded: a step that fails leaves every state as it was, so that it can be tried again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.kv_layout import KvLayout
from engine.kernels import fresh_memory

Key = tuple[int, str, int]  # layer, kind, index: of one state


class StateMemory:
    def __init__(self, layout: KvLayout, slots: int, device: torch.device) -> None:
        self.buffer = fresh_memory(slots * layout.state_bytes, device).view(slots, layout.state_bytes)
        self.buffer.fill_(0xFF)  # NaN in every float type: a state that is read before it is written shows
        self._views = {state.key: self._window(state.shape, state.dtype, state.offset) for state in layout.states}
        self._new: dict[tuple[Key, int], torch.Tensor] = {}  # of the step that runs: (state, slot) -> its value

    def begin(self) -> None:
        """Before each forward: forgets what a failed one has left."""
        self._new.clear()

    def width(self, key: Key) -> int:
        """Elements along the last dimension."""
        return self._views[key].shape[-1]

    def __contains__(self, key: Key) -> bool:
        return key in self._views

    def get(self, key: Key, slots: Sequence[int]) -> torch.Tensor:
        """A copy `[len(slots), ...]` of what this forward has made of them so far. Whoever writes to it in place, as
        single steps of a convolution do, writes the new state."""
        view = self._views[key]
        own = torch.stack([self._new.get((key, slot), view[slot]) for slot in slots])
        self._keep(key, slots, own)
        return own

    def put(self, key: Key, slots: Sequence[int], states: torch.Tensor) -> None:
        """`states [len(slots), ...]` are the new ones."""
        view = self._views[key]
        assert states.shape == (len(slots), *view.shape[1:]), f"state {key} has shape {tuple(states.shape)}"
        self._keep(key, slots, states.to(view.dtype))

    def commit(self) -> None:
        """The step has succeeded: its states are those of the slots now."""
        for (key, slot), state in self._new.items():
            self._views[key][slot].copy_(state)
        self._new.clear()

    def _keep(self, key: Key, slots: Sequence[int], states: torch.Tensor) -> None:
        for slot, state in zip(slots, states.unbind(0), strict=True):
            self._new[key, slot] = state

    def _window(self, shape: Sequence[int], dtype: str, offset: int) -> torch.Tensor:
        typed = self.buffer.view(getattr(torch, dtype))
        strides: list[int] = []
        size = 1
        for length in reversed(shape):
            strides.insert(0, size)
            size *= length
        start = offset // typed.element_size()
        return torch.as_strided(typed, (len(typed), *shape), (typed.shape[1], *strides), storage_offset=start)
