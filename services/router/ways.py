"""What the ways through the cluster cost, learnt from the requests that took them. Pure.

Seconds to the first token that are neither waiting nor computing, and for a prompt that was computed elsewhere, those
by which moving its KV delayed the second token. The policy adds both to what a placement costs.
"""

from __future__ import annotations

from collections.abc import Set

from services.router.policy import Way
from tandem.line import WEIGHT, Line

MANY_BLOCKS = 32  # so many blocks of a move say as much of each block as of the move itself


class Ways:
    """By decode worker and prefill worker; "" for the latter where the decode worker computes the prompt."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Way] = {}
        self._moves: dict[tuple[str, str], Line] = {}

    def took(self, decode: str, prefill: str, first_s: float, blocks: int = 0, exposed_s: float = 0.0) -> None:
        """One request came this way: `first_s` to its first token beside waiting and computing, and `exposed_s` from
        there until `blocks` blocks were there."""
        way = decode, prefill
        before = self.known[way].first_s if way in self.known else first_s
        move = self._moves.setdefault(way, Line(scale=MANY_BLOCKS))
        if blocks:
            move.learn(blocks, exposed_s)
        self.known[way] = Way(before + WEIGHT * (first_s - before), move.base, move.each)

    def keep_only(self, workers: Set[str]) -> None:
        """Forgets the ways to and from all other workers."""
        for way in [way for way in self.known if set(filter(None, way)) - workers]:
            del self.known[way], self._moves[way]
