"""What a chaos run counts, and how it says it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.chaos.book import Answer, difference, violation
from tandem.errors import Busy, DeadlineExceeded, InternalError, ResumeFailed, TandemError, Unavailable

COST = (Unavailable, ResumeFailed, Busy)  # with their subclasses: what a lost process may cost a stream
KILLS, UNKEPT, HUNG = "KILLS_WORKERS", "KEPT_BY_A_KILLED_REGISTRY", "HUNG"
VIOLATIONS = ("lost", "duplicated", "corrupt", "leaked", "hung")
LIMITS = {"exit": 1.0, "hang": 3.0}  # seconds until a failure is to be known
GAP_S = 0.3  # shorter ones are not noted
FAIR = 0.5  # a pool shares evenly when its least used worker has this share of what its most used one has
WINDOW_S = 10.0
FORGOTTEN_S = 60.0  # services/router/quarantine.py


@dataclass
class Happened:
    """One fault that was seen to strike. Times are monotonic seconds."""

    fault: str
    at: float
    lasts: float = 0.0


@dataclass
class Detection:
    """A worker that is out of order, until the supervisor or a router knows."""

    kind: str  # exit or hang
    fault: str
    worker_id: str
    incarnation: str
    at: float
    known_at: float | None = None
    by: str = ""

    @property
    def seconds(self) -> float | None:
        return None if self.known_at is None else self.known_at - self.at


@dataclass
class Tally:
    """What became of the requests, and what was done to the cluster."""

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    internal: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    happened: list[Happened] = field(default_factory=list)
    detections: list[Detection] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    resumed: int = 0
    registries: int = 0  # that were killed, with the jobs that they kept
    ends: list[float] = field(default_factory=list)  # when worker processes ended
    longest_s: float = 0.0
    ended: list[float] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    served: list[tuple[float, str]] = field(default_factory=list)  # when a request ended, a worker that served it
    calm_since: float | None = None  # all faults are over and all workers are ready

    # ---- requests

    def judge(
        self,
        how: str,
        request: dict[str, Any],
        said: Answer,
        whole: Answer,
        error: TandemError | None,
        now: float = 0.0,
    ) -> None:
        """One request is over: `error` is None for a status of OK."""
        name = f"{how}: as it should be" if error is None else f"{how}: {type(error).__name__} {error.reason}"
        self.outcomes[name] += 1
        self.resumed += error is None and said.attempts > 1
        if error is None:
            if not said.same(whole):
                self.violate(
                    violation(said, whole), f"{how} {request!s:.160}: status OK, but {difference(said, whole)}"
                )
        elif not said.begins(whole):
            text = f"{how} {request!s:.160}: what came before {error!r} differs: {difference(said, whole)}"
            self.violate(violation(said, whole), text)
        elif error.reason == HUNG or (how == "stream" and isinstance(error, DeadlineExceeded)):
            self.violate("hung", f"{how} {request!s:.160}: {error.message}")
        elif isinstance(error, InternalError):
            self._internal(how, request, error, now)
        elif error.reason != UNKEPT and (how == "job" or not isinstance(error, COST)):
            self.violate("lost", f"{how} {request!s:.160}: {type(error).__name__} {error.reason}: {error.message}")

    def violate(self, kind: str, text: str) -> None:
        self.violations[kind] += 1
        self.wrong.append(f"{kind}: {text}")

    def _internal(self, how: str, request: dict[str, Any], error: InternalError, now: float) -> None:
        """KILLS_WORKERS is right where two workers did end while the request was known."""
        ends = sum(now - 2 * FORGOTTEN_S < at <= now for at in self.ends)
        if error.reason == KILLS and ends >= 2:
            self.internal["beside two workers that ended"] += 1
            return
        self.internal[error.reason] += 1
        self.wrong.append(f"INTERNAL: {how} {request!s:.160}: {error.reason}: {error.message}")

    # ---- faults

    def gap(self, start: float, end: float) -> None:
        """Between two messages of one stream."""
        if end - start > GAP_S:
            self.gaps.append((start, end))

    def largest_gaps(self) -> dict[str, float]:
        """For each fault the longest silence of a stream while it struck; with several at once, the latest counts."""
        found: dict[str, float] = {}
        for start, end in self.gaps:
            during = [one for one in self.happened if one.at <= end and start <= one.at + one.lasts + 1.0]
            name = max(during, key=lambda one: one.at).fault if during else "no fault"
            found[name] = max(found.get(name, 0.0), end - start)
        return dict(sorted(found.items()))

    def even_after(self) -> tuple[float | None, str]:
        """Seconds from calm to the first window since which each pool shares evenly (None: it never did), and the
        shares of the least and the most used worker in that window, or in the last one."""
        if self.calm_since is None:
            return None, "no calm"
        return even_after(self.served, self.calm_since, max((at for at, _ in self.served), default=0.0))

    def lines(self) -> list[str]:
        """The report."""
        done = self.outcomes.total()
        counts = " ".join(f"{kind} {self.violations[kind]}" for kind in VIOLATIONS)
        bugs = sum(count for name, count in self.internal.items() if name not in EXPECTED)
        found = [
            f"{counts} INTERNAL {bugs} ({done} requests; {_counts(self.internal) or 'no INTERNAL at all'})",
            f"requests: {_counts(self.outcomes)}",
            f"faults: {len(self.happened)} struck of {self.tried.total()}: "
            + _counts(Counter(one.fault for one in self.happened)),
            f"{self.resumed} answers went on at another worker; the longest took {self.longest_s:.1f} s",
            *self._detection_lines(),
            "largest gap in a stream: "
            + (", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.largest_gaps().items()) or "none"),
        ]
        if self.calm_since is not None:
            seconds, shares = self.even_after()
            when = "never" if seconds is None else f"{seconds:.0f} s"
            found.append(f"load is shared evenly again after the last fault within: {when} ({shares})")
        return found

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        seconds, shares = self.even_after()
        return {
            "outcomes": self.outcomes,
            "violations": {kind: self.violations[kind] for kind in VIOLATIONS},
            "internal": self.internal,
            "tried": self.tried,
            "faults": Counter(one.fault for one in self.happened),
            "detections": [{**asdict(one), "seconds": one.seconds} for one in self.detections],
            "largest_gaps": self.largest_gaps(),
            "even_after_s": seconds,
            "shares": shares,
            "resumed": self.resumed,
            "wrong": self.wrong,
        }

    def _detection_lines(self) -> list[str]:
        found = []
        for kind, limit in LIMITS.items():
            of = [one for one in self.detections if one.kind == kind]
            took = sorted(one.seconds for one in of if one.seconds is not None)
            if not of:
                continue
            text = f"detection of {kind}: {len(took)} of {len(of)}"
            if took:
                late = sum(one > limit for one in took)
                text += (
                    f", median {statistics.median(took):.2f} s, most {took[-1]:.2f} s, {late} later than {limit:g} s"
                )
            found.append(text)
        return found


EXPECTED = ("poison", "beside two workers that ended")


def even_after(served: Iterable[tuple[float, str]], since: float, until: float) -> tuple[float | None, str]:
    after = [(at - since, worker) for at, worker in served if at >= since]
    names = sorted({worker for _, worker in after})
    found: float | None = None
    shares = "nothing was served"
    start = 0.0
    while start + WINDOW_S <= until - since:
        counts = Counter(worker for at, worker in after if start <= at < start + WINDOW_S)
        if all(_fair([counts[name] for name in names if name.startswith(role)]) for role in ("prefill", "decode")):
            if found is None:
                found, shares = start, _shares(counts, names)
        else:
            found, shares = None, _shares(counts, names)
        start += 1.0
    return found, shares


def _fair(counts: Sequence[int]) -> bool:
    return len(counts) > 1 and min(counts) >= FAIR * max(counts) > 0


def _shares(counts: Counter[str], names: Sequence[str]) -> str:
    parts = []
    for role in ("prefill", "decode"):
        of = [counts[name] for name in names if name.startswith(role)]
        if of and sum(of):
            parts.append(f"{role} {min(of) / sum(of):.0%} to {max(of) / sum(of):.0%} of {sum(of)}")
    return f"in {WINDOW_S:.0f} s: {', '.join(parts)}"


def _counts(of: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(of.items()))
