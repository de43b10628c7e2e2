"""How many prompts there are, and of how many tokens together, below any size. Pure."""

from __future__ import annotations

MAX_SIZE = 1 << 20  # sizes above count as this one


class SizeHistogram:
    """A binary indexed tree by size (Fenwick, 1994): every call takes as many steps as MAX_SIZE has bits."""

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0
        self._counts: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    def add(self, tokens: int, times: int = 1) -> None:
        """`times` -1 takes one back."""
        self.count += times
        self.tokens += times * tokens
        counts, sums, place = self._counts, self._tokens, min(max(tokens, 1), MAX_SIZE)
        while place <= MAX_SIZE:
            counts[place] = counts.get(place, 0) + times
            sums[place] = sums.get(place, 0) + times * tokens
            place += place & -place
        if not self.count:  # nothing is left but zeros
            counts.clear()
            sums.clear()

    def up_to(self, tokens: int) -> tuple[int, int]:
        """The number of prompts of at most this size, and their tokens."""
        count = total = 0
        place = min(tokens, MAX_SIZE)
        while place > 0:
            count += self._counts.get(place, 0)
            total += self._tokens.get(place, 0)
            place -= place & -place
        return count, total

    def each_at_most(self, tokens: int) -> int:
        """The sum of min(tokens, size) over all."""
        count, total = self.up_to(tokens)
        return total + (self.count - count) * tokens
