"""The owners of the slots that hold the states of recurrent layers. Pure Python.

A sequence owns a slot from its start, or from its reservation of blocks on this worker, until it ends or is preempted;
states are never shared. Always free + held = total.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class StateSlots:
    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))  # a heap
        self._slot_of: dict[str, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return len(self._slot_of)

    def take(self, owner: str) -> bool:
        """False: all are held. The new slot contains another sequence's state, so the sequence must begin with its
        first chunk or with a state that is copied in."""
        if owner in self._slot_of:
            raise ValueError(f"{owner} has a slot already")
        if not self._free:
            return False
        self._slot_of[owner] = heapq.heappop(self._free)
        return True

    def slot(self, owner: str) -> int:
        """Raises KeyError for an owner without one."""
        return self._slot_of[owner]

    def drop(self, owner: str) -> None:
        """Ignores an owner without one."""
        slot = self._slot_of.pop(owner, None)
        if slot is not None:
            heapq.heappush(self._free, slot)

    def owns(self, owner: str) -> bool:
        return owner in self._slot_of

    def owners(self) -> tuple[str, ...]:
        return tuple(self._slot_of)

    def check(self, running: Iterable[str], live: Iterable[str]) -> list[str]:
        """One sentence for each inconsistency. All of `running` must have a slot, and only `live` sequences may."""
        faults = []
        every = sorted([*self._free, *self._slot_of.values()])
        if every != list(range(self.total)):
            faults.append(f"state slots: free {self.free} + held {self.held} are not all {self.total}, each once")
        owners = self._slot_of.keys()
        faults += [f"{owner} has a state slot but no longer exists" for owner in sorted(owners - set(live))]
        faults += [f"{owner} runs without a state slot" for owner in sorted(set(running) - owners)]
        return faults
