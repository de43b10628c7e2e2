"""Prints the sections of a report as tables, and writes them to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.harness import machine
from loadtest.harness.machine import Machine
from loadtest.harness.stats import Section, Spread, console


def finish(
    about: Machine, sections: Mapping[str, Section], before: dict[str, Any], began: float, to: Path | None, **more: Any
) -> None:
    """Prints what was measured since `began`, under the conditions `before`, and writes it with `more` to a file."""
    out, seconds = console(), monotonic() - began
    machine.show(about, out)
    for section in sections.values():
        show(section, out)
    out.print(", ".join(f"{name} {value}" for name, value in before.items()), style="dim", highlight=False)
    out.print(f"measured in {seconds:.0f} s; ratios of one run, medians", style="dim", highlight=False)
    if to:
        report = {"conditions": before, "machine": about.to_dict(), "seconds": seconds, **more}
        report["sections"] = {name: section.to_dict() for name, section in sections.items()}
        to.write_text(json.dumps(report, indent=1) + "\n")


def show(section: Section, out: Console) -> None:
    table = Table(title=section.title, title_justify="left", title_style="bold", caption=section.read)
    table.caption_justify = "left"
    table.add_column("what", ratio=2)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("middle half", justify="right", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("for orientation", ratio=3)
    for row in section.rows:
        beside = ", ".join(f"{name} {_value(value, unit)}" for name, (value, unit) in row.beside.items())
        half = f"{_number(row.ratio.low)} to {_number(row.ratio.high)}"
        table.add_row(row.what, _number(row.ratio.median), half, str(row.ratio.count), beside)
    out.print(table)
    for note in section.notes:
        out.print(f"  {note}", style="dim", highlight=False)
    out.print()


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _value(spread: Spread, unit: str) -> str:
    value = spread.median
    if unit == "s":
        scale, name = (1.0, "s") if abs(value) >= 1 else (1e3, "ms") if abs(value) >= 1e-3 else (1e6, "µs")
        return f"{_number(value * scale) if value >= 0 else f'{value * scale:.3g}'} {name}"
    if unit in ("B/s", "FLOP/s"):
        return f"{_number(value / 1e9)} G{unit}"
    return _number(value)
