"""The counts of a chaos run, and how they are printed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.scenarios.chaos.answer_book import Answer, difference, violation
from tandem.errors import Busy, DeadlineExceeded, InternalError, ResumeFailed, TandemError, Unavailable

COST = (Unavailable, ResumeFailed, Busy)  # with their subclasses: what a lost process may cost a stream
UNKEPT, HUNG = "KEPT_BY_A_KILLED_REGISTRY", "HUNG"
VIOLATIONS = ("lost", "duplicated", "corrupt", "leaked", "hung")
LIMITS = {"exit": 1.0, "hang": 3.0, "silence": 5.0}  # seconds until a failure is to be known
GAP_S = 0.3  # shorter ones are not noted
FAIR = 0.5  # a pool shares evenly when its least used worker has this share of what its most used one has
WINDOW_S = 10.0
POISON = "poison"  # made to be


@dataclass
class Happened:
    """One fault that was seen to strike. Times are monotonic seconds."""

    fault: str
    at: float
    lasts: float = 0.0


@dataclass
class Detection:
    """A failed worker, until the supervisor or a router detects it."""

    kind: str  # exit, hang or silence
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
    longest_s: float = 0.0
    ended: list[float] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    bare: list[tuple[float, float]] = field(default_factory=list)  # when a pool had no worker in order
    served: list[tuple[float, str]] = field(default_factory=list)  # when a request ended, a worker that served it
    members: set[str] = field(default_factory=set)  # ids of the workers of both pools, then
    calm_since: float | None = None  # all faults are over and all workers are ready

    # ---- requests

    def judge(
        self, how: str, request: dict[str, Any], received: Answer, reference: Answer, error: TandemError | None
    ) -> None:
        """One request is over: `error` is None for a status of OK."""
        name = f"{how}: as it should be" if error is None else f"{how}: {type(error).__name__} {error.reason}"
        self.outcomes[name] += 1
        self.resumed += error is None and received.attempts > 1
        if error is None:
            if not received.same(reference):
                self.violate(
                    violation(received, reference),
                    f"{how} {request!s:.160}: status OK, but {difference(received, reference)}",
                )
        elif not received.begins(reference):
            text = f"{how} {request!s:.160}: what came before {error!r} differs: {difference(received, reference)}"
            self.violate(violation(received, reference), text)
        elif error.reason == HUNG or (how == "stream" and isinstance(error, DeadlineExceeded)):
            self.violate("hung", f"{how} {request!s:.160}: {error.message}")
        elif isinstance(error, InternalError):
            self.internal[error.reason] += 1
            self.wrong.append(f"INTERNAL: {how} {request!s:.160}: {error.reason}: {error.message}")
        elif error.reason != UNKEPT and (how == "job" or not isinstance(error, COST)):
            self.violate("lost", f"{how} {request!s:.160}: {type(error).__name__} {error.reason}: {error.message}")

    def violate(self, kind: str, text: str) -> None:
        self.violations[kind] += 1
        self.wrong.append(f"{kind}: {text}")

    # ---- faults

    def gap(self, start: float, end: float) -> None:
        """Between two messages of one stream."""
        if end - start > GAP_S:
            self.gaps.append((start, end))

    def look(self, start: float, end: float, in_order: bool) -> None:
        """From `start` to `end` each pool had a worker in order, or not."""
        if not in_order:
            self.bare.append((start, end))

    def largest_gaps(self) -> dict[str, float]:
        """For each fault the longest silence of a stream while it struck, less the time in which a pool had no worker
        in order; of several at once, the one that struck when the silence began."""
        gaps: dict[str, float] = {}
        for start, end in self.gaps:
            during = [
                strike for strike in self.happened if strike.at <= end and start <= strike.at + strike.lasts + 1.0
            ]
            name = min(during, key=lambda strike: abs(strike.at - start)).fault if during else "no fault"
            bare = sum(max(0.0, min(end, until) - max(start, since)) for since, until in self.bare)
            gaps[name] = max(gaps.get(name, 0.0), end - start - bare)
        return dict(sorted(gaps.items()))

    def even_after(self) -> tuple[float | None, str]:
        """Seconds from calm to the first window since which each pool shares evenly (None: it never did), and the
        shares of the least and the most used worker in that window, or in the last one."""
        if self.calm_since is None:
            return None, "no calm"
        served = [
            (at, worker) for at, worker in self.served if worker in self.members
        ]  # one that left ends what it had
        return even_after(served, self.calm_since, max((at for at, _ in self.served), default=0.0))

    def lines(self) -> list[str]:
        """The report."""
        done = self.outcomes.total()
        counts = " ".join(f"{kind} {self.violations[kind]}" for kind in VIOLATIONS)
        bugs = self.internal.total() - self.internal[POISON]
        lines = [
            f"{counts} INTERNAL {bugs} ({done} requests; {_counts(self.internal) or 'no INTERNAL at all'})",
            f"requests: {_counts(self.outcomes)}",
            f"faults: {len(self.happened)} struck of {self.tried.total()}: "
            + _counts(Counter(strike.fault for strike in self.happened)),
            f"{self.resumed} answers went on at another worker; the longest took {self.longest_s:.1f} s",
            *self._detection_lines(),
            "largest gap in a stream, but for time in which a pool had no worker in order: "
            + (", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.largest_gaps().items()) or "none"),
            f"largest gap in all {max((end - start for start, end in self.gaps), default=0.0):.1f} s; a pool had no "
            f"worker in order for {sum(end - start for start, end in self.bare):.0f} s",
        ]
        if self.calm_since is not None:
            seconds, shares = self.even_after()
            when = "never" if seconds is None else f"{seconds:.0f} s"
            lines.append(f"load is shared evenly again after the last fault within: {when} ({shares})")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        seconds, shares = self.even_after()
        return {
            "outcomes": self.outcomes,
            "violations": {kind: self.violations[kind] for kind in VIOLATIONS},
            "internal": self.internal,
            "tried": self.tried,
            "faults": Counter(strike.fault for strike in self.happened),
            "detections": [{**asdict(detection), "seconds": detection.seconds} for detection in self.detections],
            "largest_gaps": self.largest_gaps(),
            "largest_gap_s": max((end - start for start, end in self.gaps), default=0.0),
            "bare_s": sum(end - start for start, end in self.bare),
            "gaps": [[start, end] for start, end in self.gaps if end - start > 3.0],
            "happened": [asdict(strike) for strike in self.happened],
            "even_after_s": seconds,
            "shares": shares,
            "resumed": self.resumed,
            "wrong": self.wrong,
        }

    def _detection_lines(self) -> list[str]:
        lines = []
        for kind, limit in LIMITS.items():
            of = [detection for detection in self.detections if detection.kind == kind]
            took = sorted(detection.seconds for detection in of if detection.seconds is not None)
            if not of:
                continue
            text = f"detection of {kind}: {len(took)} of {len(of)}"
            if took:
                late = sum(seconds > limit for seconds in took)
                text += (
                    f", median {statistics.median(took):.2f} s, most {took[-1]:.2f} s, {late} later than {limit:g} s"
                )
            lines.append(text)
        return lines


def even_after(served: Iterable[tuple[float, str]], since: float, until: float) -> tuple[float | None, str]:
    after = [(at - since, worker) for at, worker in served if at >= since]
    names = sorted({worker for _, worker in after})
    even_since: float | None = None
    shares = "nothing was served"
    start = 0.0
    while start + WINDOW_S <= until - since:
        counts = Counter(worker for at, worker in after if start <= at < start + WINDOW_S)
        if all(_fair([counts[name] for name in names if name.startswith(role)]) for role in ("prefill", "decode")):
            if even_since is None:
                even_since, shares = start, _shares(counts, names)
        else:
            even_since, shares = None, _shares(counts, names)
        start += 1.0
    return even_since, shares


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
