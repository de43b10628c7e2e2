"""The latency of each path through the cluster, learnt from the requests that took it. Pure: callers pass the time.

A path is a decode worker and a prefill worker. Its latency is the time to the first token apart from queueing,
computing and preparing, and the time by which moving the KV delayed the second token. The policy adds both to a
placement's cost.

A slow path is used less, so old slowness must not count for ever:

- the estimate of an unused path approaches the usual one: half of the way in HALF_LIFE_S;
- within GROWTH_PERIOD_S an estimate at most doubles, whatever is measured and however often: a worker that hangs for
  seconds delays all its requests at once, and that is one event;
- a path that was not used for FORGET_AFTER_S is forgotten, and an unknown path has the usual latency;
- the usual estimate of a kind of path, local or remote, that nobody took for UNUSED_S approaches 0 likewise, and is
  forgotten there: the first request may have met something that no other one does, and would keep all others away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from services.router.routing.placement import PathLatency
from tandem.linear_fit import NEWEST_WEIGHT, LinearFit

BLOCKS_SCALE = 32  # a move of this many blocks weighs the same for the latency per block as per move
HALF_LIFE_S = 5.0
UNUSED_S = 30.0
FORGET_AFTER_S = 60.0
MAX_GROWTH, GROWTH_PERIOD_S = 2.0, 1.0  # the largest factor by which an estimate grows, and in how many seconds
MIN_ESTIMATE_S = 0.001  # a shorter estimate may grow as if it was this
MAX_PATHS = 20_000  # beyond that the least recently used are forgotten
FORGET_BATCH = 4  # paths that are forgotten when a request ends

Key = tuple[str, str]  # decode worker and prefill worker; "" where the decode worker computes the prompt


class _Estimate:
    """Of one path, or the usual one."""

    def __init__(self, now: float, like: _Estimate | None = None) -> None:
        """Begins as a copy of `like`."""
        self.first_s: float = like.first_s if like else 0.0
        base, each = (like.move.base, like.move.each) if like else (0.0, 0.0)
        self.move: LinearFit = LinearFit(base, each, scale=BLOCKS_SCALE)
        self.at = now
        self._known = like is not None
        self._before = self.latency()  # at the beginning of the growth period
        self._before_at = now

    def latency(self) -> PathLatency:
        return PathLatency(self.first_s, self.move.base, self.move.each)

    def aged(self, now: float, usual: PathLatency) -> PathLatency:
        """The estimate, after it has approached the usual one since its last update."""
        kept = 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)
        return PathLatency(
            usual.first_s + kept * (self.first_s - usual.first_s),
            usual.moving_s + kept * (self.move.base - usual.moving_s),
            usual.block_s + kept * (self.move.each - usual.block_s),
        )

    def faded(self, now: float) -> PathLatency:
        """The usual estimate, after no path of its kind was used since its last update."""
        kept = 0.5 ** (max(0.0, now - self.at - UNUSED_S) / HALF_LIFE_S)
        return PathLatency(kept * self.first_s, kept * self.move.base, kept * self.move.each)

    def set(self, latency: PathLatency) -> None:
        self.first_s, self.move.base, self.move.each = latency.first_s, latency.moving_s, latency.block_s

    def learn(self, first_s: float, blocks: int, exposed_s: float, now: float, usual: _Estimate) -> None:
        aged = self.aged(now, usual.latency())
        self.set(aged)
        self.at = now
        if now - self._before_at >= GROWTH_PERIOD_S:
            self._before, self._before_at = aged, now
        before = self._before, usual._before
        if self._known:
            limit_s = MAX_GROWTH * max(MIN_ESTIMATE_S, *(latency.first_s for latency in before))
            self.first_s += NEWEST_WEIGHT * (min(first_s, limit_s) - self.first_s)
        else:
            self.first_s, self._known = first_s, True
        if blocks and (self.move.base or self.move.each):
            exposed_s = min(
                exposed_s, MAX_GROWTH * max(MIN_ESTIMATE_S, *(_moving(latency, blocks) for latency in before))
            )
        if blocks:
            self.move.learn(blocks, exposed_s)


class PathLatencyTracker:
    """Learns the latencies. `at` returns them as a mapping by decode worker and prefill worker, for the policy."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, _Estimate] = OrderedDict()  # the least recently used first
        self._usual: dict[bool, _Estimate] = {}  # by whether a prefill worker computed the prompt

    def observe(
        self, decode: str, prefill: str, first_s: float, blocks: int = 0, exposed_s: float = 0.0, *, now: float
    ) -> None:
        """One request took this path: `first_s` seconds to its first token apart from queueing and computing, and
        `exposed_s` from there until `blocks` blocks had arrived."""
        key, remote = (decode, prefill), bool(prefill)
        usual = self._usual.get(remote)
        if usual and now - usual.at > UNUSED_S:
            usual.set(usual.faded(now))
            usual = usual if usual.latency().seconds(BLOCKS_SCALE) >= MIN_ESTIMATE_S else None
        if key not in self._known or self._known[key].at < now - FORGET_AFTER_S:
            self._known[key] = _Estimate(now, usual)
        if usual is None:
            usual = self._usual[remote] = _Estimate(now)
        self._known.move_to_end(key)
        self._known[key].learn(first_s, blocks, exposed_s, now, usual)
        usual.learn(first_s, blocks, exposed_s, now, usual)
        for _ in range(FORGET_BATCH):
            oldest = next(iter(self._known))
            if len(self._known) <= MAX_PATHS and self._known[oldest].at >= now - FORGET_AFTER_S:
                break
            del self._known[oldest]

    def at(self, now: float) -> PathLatencySnapshot:
        return PathLatencySnapshot(
            self._known, {remote: usual.faded(now) for remote, usual in self._usual.items()}, now
        )


class PathLatencySnapshot(Mapping[Key, PathLatency]):
    """All estimates at one time."""

    def __init__(self, known: Mapping[Key, _Estimate], usual: Mapping[bool, PathLatency], now: float) -> None:
        self._known = known
        self._usual = usual
        self._now = now

    def usual(self, *, remote: bool) -> PathLatency | None:
        """None: no request has taken such a path yet."""
        return self._usual.get(remote)

    def __getitem__(self, key: Key) -> PathLatency:
        usual = self._usual[bool(key[1])]
        estimate = self._known.get(key)
        return usual if estimate is None else estimate.aged(self._now, usual)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _moving(latency: PathLatency, blocks: int) -> float:
    return latency.moving_s + latency.block_s * blocks
