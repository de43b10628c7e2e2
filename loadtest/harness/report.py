"""A report: the loads of each side, as one JSON file and one HTML page without external parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import jinja2

from loadtest.harness import plots
from loadtest.harness.goodput import Load, Objective, Outcome, Side, State, interval
from loadtest.harness.stats import Spread
from tandem.errors import SettingsError

FORMAT = 1
TEMPLATE = Path(__file__).with_name("report.html")
LATE_S = 0.05
NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end",
}


@dataclass
class Report:
    title: str
    objective: Objective
    sides: list[Side]
    notes: list[str] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=dict)
    bound: float = LATE_S
    """Seconds by which the 99th percentile of requests and ticks may be late."""
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def faults(self) -> list[str]:
        """Why the numbers mean nothing, a sentence each."""
        late = [
            f"{side.name}, {load.name}: the load generator was {load.late * 1e3:.0f} ms late (p99), over its bound of"
            f" {self.bound * 1e3:.0f} ms: it measured itself"
            for side in self.sides
            for load in side.loads
            if load.late > self.bound
        ]
        empty = [
            f"{side.name}, {load.name}: no request was counted"
            for side in self.sides
            for load in side.loads
            if not load.counted
        ]
        return late + empty

    def to_dict(self) -> dict[str, Any]:
        sides = [
            {
                "name": side.name,
                "target": side.target,
                "model": side.model,
                "bests": side.bests,
                "loads": [_load(load, self.objective) for load in side.loads],
            }
            for side in self.sides
        ]
        return {
            **{"format": FORMAT, "title": self.title, "made": self.made, "valid": not self.faults()},
            **{"faults": self.faults(), "objective": asdict(self.objective), "bound": self.bound, "notes": self.notes},
            **{"conditions": self.conditions, "ratios": [asdict(row) for row in ratios(self)], "sides": sides},
        }

    def html(self) -> str:
        environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
        environment.filters |= {"ms": ms, "number": number, "share": share}
        template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
        return template.render(
            report=self,
            faults=self.faults(),
            ratios=ratios(self),
            plots=plots.draw(self.sides, self.objective),
            names=NAMES,
            interval=interval,
            colours=plots.colours(len(self.sides)),
            failures=[(side.name, *failure) for side in self.sides for failure in failures(side.loads)],
        )

    def write(self, page: Path | None, data: Path | None) -> None:
        if data:
            data.write_text(json.dumps(self.to_dict(), separators=(",", ":")) + "\n", encoding="utf-8")
        if page:
            page.write_text(self.html(), encoding="utf-8")


def read(path: Path) -> Report:
    """Reads a report that `write` has written. Raises SettingsError for any other file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']}, and this reads {FORMAT}")
        sides = [
            Side(
                side["name"], side["target"], side["model"], [_read_load(load) for load in side["loads"]], side["bests"]
            )
            for side in fields["sides"]
        ]
        return Report(
            fields["title"],
            Objective(**fields["objective"]),
            sides,
            fields["notes"],
            fields["conditions"],
            fields["bound"],
            fields["made"],
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"{path} is no report of this load generator: {error!r}", field="report") from error


def beside(first: Report, other: Report, names: tuple[str, str]) -> Report:
    """Both in one report. Raises SettingsError where their objectives differ: goodputs could not be compared."""
    if first.objective != other.objective:
        raise SettingsError(f"the objectives differ: {first.objective} and {other.objective}", field="objective")
    sides = [
        Side(name if len(report.sides) == 1 else f"{name}: {side.name}", *list(vars(side).values())[1:])
        for name, report in zip(names, (first, other), strict=True)
        for side in report.sides
    ]
    notes = [f"{name}: {note}" for name, report in zip(names, (first, other), strict=True) for note in report.notes]
    notes.append("the two were not measured in turn: what the machine did meanwhile is in the ratios")
    title = f"{names[0]} and {names[1]}, side by side"
    return Report(title, first.objective, sides, notes, first.conditions, min(first.bound, other.bound))


@dataclass(frozen=True)
class Ratio:
    """`side` / the first side, of loads of the same name; `better`: whether more or less of it is better."""

    what: str
    side: str
    ratio: Spread
    better: str


def ratios(report: Report) -> list[Ratio]:
    """Of every other side to the first, where both have the value: of the highest rates, and of the loads that are
    drawn, or of all where no rate was searched. Rounds in which the first side kept nothing have no ratio."""
    rows = []
    first, *others = report.sides
    drawn = plots.comparable(report.sides)
    for side in others:
        rates = [(a, b) for a, b in zip(side.bests, first.bests, strict=False) if b]
        if rates:
            rows.append(Ratio("highest rate kept", side.name, Spread.of([a / b for a, b in rates]), "more"))
        for name in dict.fromkeys(load.name for load in first.loads):
            if first.bests and name != drawn[first.name].name:
                continue
            ours, theirs = ([load for load in report.loads if load.name == name] for report in (side, first))
            pairs = [
                (_values(a, report.objective), _values(b, report.objective)) for a, b in zip(ours, theirs, strict=False)
            ]
            for what, better in RATIOS.items():
                if values := [a[what] / b[what] for a, b in pairs if what in a and b.get(what)]:
                    rows.append(Ratio(f"{name}: {what}", side.name, Spread.of(values), better))
    return rows


RATIOS = {
    **{"goodput": "more", "tokens/s": "more", "ttft p50": "less", "ttft p99": "less", "tpot p50": "less"},
    "itl p99": "less",
}


def _values(load: Load, objective: Objective) -> dict[str, float]:
    percentiles = {f"{name} {share}": at for name, shares in load.latencies().items() for share, at in shares.items()}
    return percentiles | {"goodput": load.goodput(objective), "tokens/s": load.throughput}


def failures(loads: Sequence[Load]) -> list[tuple[int, str]]:
    """The most frequent error messages of failed and rejected requests, with their counts."""
    reasons: dict[str, int] = {}
    for why in (outcome.why for load in loads for outcome in load.counted if outcome.why):
        reasons[why] = reasons.get(why, 0) + 1
    return sorted(((count, why) for why, count in reasons.items()), reverse=True)[:5]


def _load(load: Load, objective: Objective) -> dict[str, Any]:
    kept, of = load.kept(objective), len(load.counted)
    summary = {
        **{"offered": load.offered, "requests": of, "kept": kept, "attainment": load.attainment(objective)},
        **{"attainment_interval": interval(kept, of), "goodput": load.goodput(objective)},
        **{state: load.count(state) for state in get_args(State)},
        **{"tokens_per_s": load.throughput, "late_p99": load.late, "latencies": load.latencies()},
    }
    plain = {name: value for name, value in vars(load).items() if name != "outcomes"}
    return plain | {"summary": summary, "outcomes": [_outcome(outcome) for outcome in load.outcomes]}


def _outcome(outcome: Outcome) -> dict[str, Any]:
    times = {"at": outcome.at, "sent": outcome.sent, "ended": outcome.ended}
    rounded = {name: round(value, 5) for name, value in times.items()} | {
        "times": [round(at, 5) for at in outcome.times]
    }
    return vars(outcome) | rounded


def _read_load(content: dict[str, Any]) -> Load:
    fields = {name: value for name, value in content.items() if name not in ("summary", "outcomes")}
    return Load(**fields, outcomes=[Outcome(**outcome) for outcome in content["outcomes"]])


def ms(seconds: float | None) -> str:
    """With its unit, three digits."""
    if seconds is None:
        return "–"
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1e3)} ms"


def number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def share(value: float) -> str:
    return f"{value:.0%}"


def lines(loads: Sequence[Load], objective: Objective) -> list[str]:
    """The same for a terminal, a line for each load."""
    failed = []
    for load in loads:
        kept = f"{load.attainment(objective):.0%} kept the objective (goodput {load.goodput(objective):.2f}/s)"
        parts = [
            *(f"{load.offered:.2f} requests/s offered", kept),
            f"{load.throughput:.0f} tokens/s",
            *(f"{name.upper()} {ms(at['p50'])}, p99 {ms(at['p99'])}" for name, at in load.latencies().items()),
            *(f"{state} {load.count(state)}" for state in get_args(State) if load.count(state)),
            f"late by {ms(load.late)} (p99)",
        ]
        failed.append(f"  {load.name}: {'; '.join(parts)}")
    return failed
