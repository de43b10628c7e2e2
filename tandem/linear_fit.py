"""A straight line, learnt from successive points, and the largest x for which it stays below a limit. Pure."""

from __future__ import annotations

from math import floor

NEWEST_WEIGHT = 0.2  # of the newest point


class LinearFit:
    """`base + each * x`, neither negative: least mean squares, normalised (Widrow and Hoff, 1960).

    `scale` is the x at which a point updates both parts equally.
    """

    def __init__(self, base: float = 0.0, each: float = 0.0, *, scale: float) -> None:
        """Zeros: not known yet."""
        self.base = base
        self.each = each
        self._scale = scale

    def at(self, x: float) -> float:
        return self.base + self.each * x

    def learn(self, x: float, y: float) -> None:
        """`x` from 0."""
        part = x / self._scale
        if not self.base and not self.each:
            self.base = y / (1 + part)
            self.each = self.base / self._scale
            return
        error = NEWEST_WEIGHT * (y - self.at(x)) / (1 + part**2)
        self.base = max(self.base + error, self.base / 2)  # positive, also after an outlier
        self.each = max(self.each + error * part / self._scale, 0.0)


def places(max_running: int, step_s: float, stream_s: float, tpot_s: float | None) -> int:
    """Streams with which a worker's steps meet the objective; at least one, as in the router."""
    if tpot_s is None or step_s + stream_s * (max_running - 1) <= tpot_s:
        return max_running
    return max(1, 1 + floor(round((tpot_s - step_s) / stream_s, 6))) if stream_s > 0 else 1
