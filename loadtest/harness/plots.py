"""The plots of a report, as SVG that takes its colours from the page's style. Only this file knows matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from loadtest.harness.goodput import Load, Metric, Objective, Side
from loadtest.harness.stats import percentile

# Colours that stand for the page's: each becomes a CSS variable, which is light or dark as the reader's system is.
INK, GRID, LIMIT, SPAN, BAD = "#010203", "#040506", "#070809", "#0a0b0c", "#0d0e0f"
SIDES = ("#101112", "#131415", "#161718", "#191a1b")
VARIABLES = {INK: "ink", GRID: "grid", LIMIT: "limit", SPAN: "span", BAD: "bad"} | {
    colour: f"side-{place}" for place, colour in enumerate(SIDES)
}
STYLE: Any = {
    **{
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "tandem",
        "font.family": "sans-serif",
        "font.size": 10.5,
    },
    **{"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK},
    **{"axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True},
    "axes.prop_cycle": cycler(color=SIDES, marker="osD^", linestyle=["-", "--", "-.", ":"]),
    **{"lines.linewidth": 1.8, "lines.markersize": 5.5},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 10},
    **{"xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0},
}
SECONDS = EngFormatter(unit="s")
WIDE = (10.4, 3.4)  # inches
HALF = (5.6, 3.5)


@dataclass(frozen=True)
class Plot:
    title: str
    read: str
    """How to read it, a sentence."""
    svg: str
    wide: bool = False


def colours(count: int) -> list[str]:
    return [f"var(--{VARIABLES[SIDES[place % len(SIDES)]]})" for place in range(count)]


def draw(sides: Sequence[Side], objective: Objective) -> list[Plot]:
    """Those that what was measured has something to show in."""
    with matplotlib.rc_context(STYLE):
        plots = (
            _over_rates(sides, objective) if any(len({load.rate for load in side.loads}) > 1 for side in sides) else []
        )
        shown = comparable(sides)
        if not any(load.counted for load in shown.values()):
            return plots
        return [*plots, *_shares(shown, objective), _in_time(shown, objective)]


def comparable(sides: Sequence[Side]) -> dict[str, Load]:
    """One load of each side: of the highest rate that all were offered and that all kept, or the last one that all
    have, or its own last one."""
    names = [{load.name for load in side.loads} for side in sides]
    common = set.intersection(*names) if names else set()
    lowest_rate = min((rate for side in sides for rate in side.bests), default=0.0)
    by_side = {}
    for side in sides:
        loads = [load for load in side.loads if load.name in common] or side.loads
        kept = [load for load in loads if load.rate <= lowest_rate]
        if loads:
            by_side[side.name] = max(kept, key=lambda load: load.rate) if kept else loads[-1]
    return by_side


def _metrics(objective: Objective) -> list[tuple[Metric, float | None, str]]:
    """With the limit of each that has one."""
    return [
        ("ttft", objective.ttft, "Time to first token"),
        ("tpot", objective.tpot, "Time per output token"),
        ("itl", None, "Inter-token latency"),
        ("e2e", None, "End to end"),
    ]


# ---- over the rates


def _over_rates(sides: Sequence[Side], objective: Objective) -> list[Plot]:
    def over(title: str, read: str, label: str, value: Callable[[Load], float | None], wide: bool = False) -> Axes:
        figure, axes = _figure(WIDE if wide else HALF)
        for side in sides:
            points = sorted((load.offered, at) for load in side.loads if (at := value(load)) is not None)
            axes.plot([rate for rate, _ in points], [at for _, at in points], label=side.name)
        axes.set(xlabel="offered rate (requests/s)", ylabel=label, xlim=(0, None))
        drawn.append((figure, Plot(title, read, "", wide)))
        return axes

    drawn: list[tuple[Figure, Plot]] = []
    limits = f"TTFT at most {objective.ttft:g} s and TPOT at most {objective.tpot * 1e3:g} ms"
    read = f"Requests a second that kept {limits}. Dotted: the highest rate at which {objective.attainment:.0%} did."
    axes = over("Goodput against rate", read, "goodput (requests/s)", lambda load: load.goodput(objective), wide=True)
    for place, side in enumerate(sides):
        for best in side.bests:
            axes.axvline(best, color=SIDES[place % 4], linewidth=1.2, linestyle=":", alpha=0.8)
    read = "Of all requests; rejected, failed and unfinished ones did not keep it."
    axes = over("Attainment against rate", read, "kept it (%)", lambda load: 100 * load.attainment(objective))
    _limit(axes, 100 * objective.attainment, f"wanted: {objective.attainment:.0%}")
    for metric, bound, title in _metrics(objective)[:3]:
        share = 0.99 if metric == "itl" else 0.9
        label, read = f"{metric.upper()} p{share * 100:.0f}", f"The {share * 100:.0f}th percentile, logarithmic."

        def value(load: Load, metric: Metric = metric, share: float = share) -> float | None:
            return percentile(values, share) if (values := load.values(metric)) else None

        axes = over(f"{title} against rate", read, label, value)
        if bound:
            _limit(axes, bound, f"objective: {SECONDS(bound)}")
        _logarithmic(axes)
    for figure, _ in drawn:
        _legend(figure.axes[0])
    return [replace(plot, svg=_svg(figure)) for figure, plot in drawn]


# ---- of one load


def _shares(shown: dict[str, Load], objective: Objective) -> list[Plot]:
    plots = []
    for metric, bound, title in _metrics(objective):
        values = {name: load.values(metric) for name, load in shown.items()}
        if not any(values.values()):
            continue
        figure, axes = _figure(HALF)
        for name, those in values.items():
            axes.ecdf(those or [float("nan")], label=name, marker="")
        # Messages that were read at once have next to no gap: a per cent of them must not stretch the axis.
        least = min(percentile(those, 0.02) for those in values.values() if those)
        most = max(max(those) for those in values.values() if those)
        axes.set(xlabel=f"{metric.upper()}, logarithmic", ylabel="share at most so long", xscale="log")
        axes.set_xlim(max(least, most / 1e4) / 1.3, max(most, bound or 0.0) * 1.3)
        _seconds(axes.xaxis)
        if bound:
            axes.axvline(bound, color=LIMIT, linewidth=1.3)
            look: Any = {"color": LIMIT, "va": "bottom", "ha": "right", "fontsize": 9.5, "in_layout": False}
            axes.text(bound, 0.03, f"objective: {SECONDS(bound)} ", **look)
        _legend(axes)
        what = "gaps between messages" if metric == "itl" else "requests"
        names = "; ".join(f"{name} at {load.offered:.2f} requests/s" for name, load in shown.items())
        plots.append(Plot(title, f"Share of {what} ({names}).", _svg(figure)))
    return plots


def _in_time(shown: dict[str, Load], objective: Objective) -> Plot:
    """Every request at its time: one panel for each side."""
    figure = _sheet((WIDE[0], 0.7 + 2.2 * len(shown)))
    panels: Any = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    waits = [outcome.waited for load in shown.values() for outcome in load.outcomes if outcome.waited]
    top = 1.3 * max([objective.ttft, *waits])
    for place, (axes, (name, load)) in enumerate(zip(panels, shown.items(), strict=True)):
        kept = {True: SIDES[place % 4], False: BAD}
        for good, label in ((True, "kept the objective"), (False, "missed it")):
            those = [outcome for outcome in load.outcomes if outcome.waited and outcome.kept(objective) is good]
            points = [outcome.at for outcome in those], [outcome.waited for outcome in those]
            if not those:
                continue
            axes.scatter(*points, s=16, color=kept[good], marker="o" if good else "x", linewidths=1.2, label=label)
        lost = [outcome.at for outcome in load.outcomes if not outcome.waited]
        if lost:
            axes.scatter(lost, [top] * len(lost), s=30, marker="v", color=BAD, label="rejected or failed")
        _limit(axes, objective.ttft, "")
        if load.warmup:
            axes.axvspan(0, load.warmup, color=SPAN, alpha=0.35, linewidth=0)
            axes.text(load.warmup / 2, 0.03, "warm-up", transform=axes.get_xaxis_transform(), ha="center", va="bottom")
        axes.set_title(f"{name}, {load.offered:.2f} requests/s", loc="left", fontsize=10.5)
        axes.set_ylabel("TTFT")
        _logarithmic(axes)
        _legend(axes, outside=True)
    panels[-1].set_xlabel("when it was sent (s)")
    read = "Each request's time to first token, where it was sent. The line is the objective."
    return Plot("Requests in time", read, _svg(figure), wide=True)


# ---- pieces


def _sheet(size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = _sheet(size)
    return figure, figure.subplots()


def _limit(axes: Axes, at: float, label: str) -> None:
    axes.axhline(at, color=LIMIT, linewidth=1.3)
    where: Any = {"transform": axes.get_yaxis_transform(), "ha": "left", "va": "bottom", "in_layout": False}
    axes.text(0.01, at, label, color=LIMIT, fontsize=9.5, **where)


def _logarithmic(axes: Axes) -> None:
    if axes.has_data():
        axes.set_yscale("log")
        _seconds(axes.yaxis)


def _seconds(axis: Any) -> None:
    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(SECONDS)


def _legend(axes: Axes, outside: bool = False) -> None:
    """None where there is only one thing to name."""
    if outside:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="best")


def _svg(figure: Figure) -> str:
    """Without a fixed size, so that the page decides, and with the page's colours."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    head, end, rest = svg.partition(">")
    svg = re.sub(r' (width|height)="[^"]*"', "", head) + end + rest
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, name in VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg
