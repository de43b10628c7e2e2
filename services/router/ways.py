"""What the ways through the cluster cost, learnt from the requests that took them. Pure: the caller tells the time.

Seconds to the first token that are neither waiting nor computing, and for a prompt that was computed elsewhere, those
by which moving its KV delayed the second token. The policy adds both to what a placement costs.

A way that costs more is used less, so what made it slow once must not count for ever. Three things see to that:

- what is known of a way comes near to what is usual by half in HALF_LIFE_S while nobody takes it;
- within a second an estimate at most doubles, whatever is measured and however often: a worker that stood still for
  seconds lets down all its requests at once, and that is one event;
- a way that nobody took for FORGOTTEN_S is forgotten, and an unknown way is a usual one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from services.router.policy import Way
from tandem.line import WEIGHT, Line

MANY_BLOCKS = 32  # so many blocks of a move say as much of each block as of the move itself
HALF_LIFE_S = 5.0
FORGOTTEN_S = 60.0
GROWTH, GROWS_S = 2.0, 1.0  # how many times as long as before an estimate may become within so many seconds
LEAST_S = 0.001  # an estimate below this may become twice this
MOST = 20_000  # ways that are known; of more, those that were taken longest ago are forgotten
AT_ONCE = 4  # ways that are forgotten when a request ends

Key = tuple[str, str]  # decode worker and prefill worker; "" where the decode worker computes the prompt


class _Learnt:
    """One way, or the usual one."""

    def __init__(self, now: float, like: _Learnt | None = None) -> None:
        """Nothing is known of it but what it is like."""
        self.first_s: float = like.first_s if like else 0.0
        base, each = (like.move.base, like.move.each) if like else (0.0, 0.0)
        self.move: Line = Line(base, each, scale=MANY_BLOCKS)
        self.at = now
        self._known = like is not None
        self._before = self.way()  # a moment ago: what it may become is a multiple of that
        self._before_at = now

    def way(self) -> Way:
        return Way(self.first_s, self.move.base, self.move.each)

    def aged(self, now: float, usual: Way) -> Way:
        kept = 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)
        return Way(
            usual.first_s + kept * (self.first_s - usual.first_s),
            usual.moving_s + kept * (self.move.base - usual.moving_s),
            usual.block_s + kept * (self.move.each - usual.block_s),
        )

    def learn(self, first_s: float, blocks: int, exposed_s: float, now: float, usual: _Learnt) -> None:
        aged = self.aged(now, usual.way())
        self.first_s, self.move.base, self.move.each, self.at = aged.first_s, aged.moving_s, aged.block_s, now
        if now - self._before_at >= GROWS_S:
            self._before, self._before_at = aged, now
        before = self._before, usual._before
        if self._known:
            most_s = GROWTH * max(LEAST_S, *(way.first_s for way in before))
            self.first_s += WEIGHT * (min(first_s, most_s) - self.first_s)
        else:
            self.first_s, self._known = first_s, True
        if blocks and (self.move.base or self.move.each):
            exposed_s = min(exposed_s, GROWTH * max(LEAST_S, *(_moving(way, blocks) for way in before)))
        if blocks:
            self.move.learn(blocks, exposed_s)


class Ways:
    """What is known at a time: `at`. A Mapping by decode worker and prefill worker, for the policy."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, _Learnt] = OrderedDict()  # the one that was taken longest ago first
        self._usual: dict[bool, _Learnt] = {}  # of prompts that were computed elsewhere, and of all others

    def __len__(self) -> int:
        return len(self._known)

    def took(
        self, decode: str, prefill: str, first_s: float, blocks: int = 0, exposed_s: float = 0.0, *, now: float
    ) -> None:
        """One request came this way: `first_s` to its first token beside waiting and computing, and `exposed_s` from
        there until `blocks` blocks were there."""
        key, elsewhere = (decode, prefill), bool(prefill)
        usual = self._usual.get(elsewhere)
        if key not in self._known:
            self._known[key] = _Learnt(now, usual)
        if usual is None:
            usual = self._usual[elsewhere] = _Learnt(now)
        self._known.move_to_end(key)
        self._known[key].learn(first_s, blocks, exposed_s, now, usual)
        usual.learn(first_s, blocks, exposed_s, now, usual)
        for _ in range(AT_ONCE):
            oldest = next(iter(self._known))
            if len(self._known) <= MOST and self._known[oldest].at >= now - FORGOTTEN_S:
                break
            del self._known[oldest]

    def at(self, now: float) -> WaysAt:
        return WaysAt(self._known, {kind: one.way() for kind, one in self._usual.items()}, now)


class WaysAt(Mapping[Key, Way]):
    """What is known of all ways at one time."""

    def __init__(self, known: Mapping[Key, _Learnt], usual: Mapping[bool, Way], now: float) -> None:
        self._known = known
        self._usual = usual
        self._now = now

    def usual(self, *, elsewhere: bool) -> Way | None:
        """None: nobody has come such a way."""
        return self._usual.get(elsewhere)

    def __getitem__(self, key: Key) -> Way:
        usual = self._usual[bool(key[1])]
        learnt = self._known.get(key)
        return usual if learnt is None else learnt.aged(self._now, usual)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _moving(way: Way, blocks: int) -> float:
    return way.moving_s + way.block_s * blocks
