"""The states of recurrent layers, one slot for each running sequence.

    buffer  [2 * slots, state_bytes] uint8      of a slot's two rows `row(slot)` has its state; a step writes the other
    row     | a state of one layer | the next one | ...        each starts at a multiple of 64 B

A step reads the states of its sequences and writes new ones to the other rows. When the step has succeeded, `commit`
makes these the slots' states. A failed step leaves every state unchanged, so it can be retried. Tandem's operators read
one row and write the other without a copy (`rows`); transformers' own code gets copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from engine.core.kv_layout import STATE_ROWS, KvLayout
from engine.kernels import fresh_memory

Key = tuple[int, str, int]  # layer, kind, index: of one state


class StateMemory:
    def __init__(self, layout: KvLayout, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.buffer = fresh_memory(STATE_ROWS * slots * layout.state_bytes, device).view(
            STATE_ROWS * slots, layout.state_bytes
        )
        self.forget()
        self._views = {state.key: self._window(state.shape, state.dtype, state.offset) for state in layout.states}
        self._row = list(range(slots))  # slot -> the row with its state
        self._spare = list(range(slots, STATE_ROWS * slots))
        self._new: dict[tuple[Key, int], torch.Tensor] = {}  # of the current step: (state, slot) -> its value
        self._written: dict[int, set[Key]] = defaultdict(set)  # slot -> its states of this step that are in `_spare`

    def begin(self) -> None:
        """Call it before each forward: forgets the states of a failed one."""
        self._new.clear()
        self._written.clear()

    def forget(self) -> None:
        """All states: NaN in every float type, so that one that is read before it is written shows."""
        self.buffer.fill_(0xFF)

    def row(self, slot: int) -> torch.Tensor:
        """The slot's state, `[state_bytes]` uint8."""
        return self.buffer[self._row[slot]]

    def values(self, slot: int) -> list[torch.Tensor]:
        """The slot's states, each in its type and where it is."""
        return [view[self._row[slot]] for view in self._views.values()]

    def width(self, key: Key) -> int:
        """Elements along the last dimension."""
        return self._views[key].shape[-1]

    def dtype(self, key: Key) -> torch.dtype:
        return self._views[key].dtype

    def __contains__(self, key: Key) -> bool:
        return key in self._views

    def get(self, key: Key, slots: Sequence[int]) -> torch.Tensor:
        """A copy `[len(slots), ...]` of this forward's latest states. Writing to it in place, as single steps of a
        convolution do, writes the new state."""
        own = torch.stack([self._latest(key, slot) for slot in slots])
        self._keep(key, slots, own)
        return own

    def put(self, key: Key, slots: Sequence[int], states: torch.Tensor) -> None:
        """Stores the new states `[len(slots), ...]`."""
        view = self._views[key]
        assert states.shape == (len(slots), *view.shape[1:]), f"state {key} has shape {tuple(states.shape)}"
        self._keep(key, slots, states.to(view.dtype))

    def view(self, key: Key) -> torch.Tensor:
        """One state in all rows, `[2 * slots, ...]`."""
        return self._views[key]

    def step_rows(self, slots: Sequence[int], padding: int) -> tuple[list[int], list[int]]:
        """Begins a forward that reads every state of these slots once and writes it once, where they are: the rows that
        it reads and those that it writes. Behind them come `padding` others, which begin with zeros (-1) and all end in
        the spare row of the last slot."""
        self.begin()
        for slot in slots:
            self._written[slot] |= self._views.keys()
        having, into = [self._row[slot] for slot in slots], [self._spare[slot] for slot in slots]
        return having + [-1] * padding, into + [self._spare[-1]] * padding

    def rows(self, key: Key, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """For an operator that reads and writes in place: the rows that have what this forward has made of these slots
        so far, and the rows to which it writes all of their new states."""
        view, having = self._views[key], []
        for slot in slots:
            if (made := self._new.pop((key, slot), None)) is not None:
                view[self._spare[slot]].copy_(made)
                self._written[slot].add(key)
            having.append((self._spare if key in self._written[slot] else self._row)[slot])
            self._written[slot].add(key)
        return having, [self._spare[slot] for slot in slots]

    def commit(self) -> None:
        """Called when the step has succeeded: makes its states those of the slots."""
        for (key, slot), state in self._new.items():
            self._views[key][self._spare[slot]].copy_(state)
            self._written[slot].add(key)
        for slot, written in self._written.items():
            for key in self._views.keys() - written:  # states of layers that this step did not compute
                self._views[key][self._spare[slot]].copy_(self._views[key][self._row[slot]])
            self._row[slot], self._spare[slot] = self._spare[slot], self._row[slot]
        self._new.clear()
        self._written.clear()

    def _latest(self, key: Key, slot: int) -> torch.Tensor:
        if (made := self._new.get((key, slot))) is not None:
            return made
        rows = self._spare if slot in self._written and key in self._written[slot] else self._row
        return self._views[key][rows[slot]]

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
