"""Chooses the transport of a pair of workers among those that both have. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FASTER = 1.2  # another transport must be this much faster than the default; measurements vary by less


@dataclass(frozen=True)
class Choice:
    kind: str
    why: str


def choose(kinds: Sequence[str], measured: Mapping[str, float]) -> Choice:
    """`kinds` are the transports of both workers, the default first, at least one. `measured` is in bytes per second, 0
    for a transport that failed; a missing one has not been tried."""
    default = kinds[0]
    if len(kinds) == 1:
        return Choice(default, f"{default}: the only transport that both workers have")
    failed = [kind for kind in kinds if measured.get(kind) == 0]
    working = [kind for kind in kinds if kind not in failed]
    if not working:
        return Choice(default, f"{default}: the default; {' and '.join(failed)} failed")
    # Transports without a measurement compare by order.
    best = max(working, key=lambda kind: (measured.get(kind, 0.0), -kinds.index(kind)))
    if working[0] == default and measured.get(best, 0.0) < FASTER * measured.get(default, float("inf")):
        best = default
    others = [kind for kind in kinds if kind != best]
    told = [f"{kind} failed" if kind in failed else f"{kind}: {_speed(measured.get(kind))}" for kind in others]
    if best == default and not measured:
        return Choice(best, f"{best}: the default; nothing is measured yet")
    return Choice(best, f"{best}: {_speed(measured.get(best))}; {', '.join(told)}")


def _speed(bytes_per_second: float | None) -> str:
    return "not measured" if bytes_per_second is None else f"{bytes_per_second / 1e9:.2f} GB/s"
