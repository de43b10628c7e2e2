"""Prints the sections of a report as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from loadtest.harness.stats import Section, Spread

FILE_WIDTH = 150  # columns, where the output is not a terminal


def show(section: Section, console: Console) -> None:
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
    console.print(table)
    for note in section.notes:
        console.print(f"  {note}", style="dim", highlight=False)
    console.print()


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
