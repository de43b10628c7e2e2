"""Receipts on a terminal: phases, transfers, calibration, slow requests."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.latency_attribution import LatencyAttribution
from cli.rendering import NARROW_COLUMNS, WIDE_COLUMNS, bar, count, of_ranks, printable, rate, seconds, share, size
from tandem.calibration import Calibrated
from tandem.results import Receipt, Transfer


def receipt(item: Receipt) -> RenderableType:
    """The workers, and the parts of the time to first token, drawn to scale."""
    parts: list[RenderableType] = [_facts(item), Text(""), phases(item)]
    parts += [Text(f"note: {printable(note)}", style="yellow") for note in item.notes]
    return Group(*parts)


def _facts(item: Receipt) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("request", Text(printable(item.request_id)))
    table.add_row("model", Text(printable(item.model)))
    if item.adapter:
        table.add_row("adapter", Text(printable(item.adapter)))
    table.add_row("path", Text(f"{item.path}: {workers_of(item)}"))
    table.add_row(
        "tokens",
        f"{item.prompt_tokens} prompt ({_cached(item)}), {item.completion_tokens} completion, seed {item.seed}",
    )
    if item.transfer is not None:
        table.add_row("transfer", Text(transfer(item.transfer)))
    client = "" if item.client_ttft is None else f" ({seconds(item.client_ttft)} at the client)"
    table.add_row(
        "time",
        f"first token {seconds(item.ttft)}{client}, then {seconds(item.tpot)} a token, total {seconds(item.total)}",
    )
    if item.drafted:
        table.add_row(
            "speculation", f"{item.accepted} of {item.drafted} drafts right ({share(item.accepted, item.drafted)})"
        )
    if item.attempts > 1 or item.preemptions:
        table.add_row("trouble", Text(f"{item.attempts} attempts, {item.preemptions} preemptions", style="yellow"))
    return table


def _cached(item: Receipt) -> str:
    found = f", {item.unresumed_tokens} more without a copy of the states" if item.unresumed_tokens else ""
    return f"{item.cached_tokens} cached{found}"


def workers_of(item: Receipt) -> str:
    decode = of_ranks(item.decode_worker, item.decode_tp)
    return f"{of_ranks(item.prefill_worker, item.prefill_tp)} → {decode}" if item.prefill_worker else decode


def transfer(item: Transfer) -> str:
    speed = f" at {rate(item.bytes / item.seconds)}" if item.seconds > 0 else ""
    return (
        f"{size(item.bytes)} in {count(item.blocks, 'block')} over {item.transport}, {seconds(item.seconds)}{speed}, "
        f"{seconds(item.exposed)} not hidden by compute"
        + (f" ({item.why})" if item.why else "")
        + (f", converted: {printable(item.converted)}" if item.converted else "")
    )


def phases(item: Receipt) -> Table:
    """One bar for each phase, beginning where the one before ended; the last line is their sum."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    table.add_column(style="cyan", no_wrap=True)
    start = 0.0
    for name, length in [*item.phases.items(), *unaccounted(item)]:
        table.add_row(
            Text(name.replace("_", " ")), seconds(length), share(length, item.ttft), bar(start, length, item.ttft)
        )
        start += max(0.0, length)
    table.add_row("[bold]time to first token", f"[bold]{seconds(item.ttft)}", "", bar(0, item.ttft, item.ttft))
    return table


def unaccounted(item: Receipt) -> list[tuple[str, float]]:
    """The part of the time to first token that the phases do not cover; empty when they add up."""
    missing = item.ttft - sum(item.phases.values())
    return [("not accounted for", missing)] if abs(missing) > max(1e-4, 0.01 * item.ttft) else []


def explained(item: Receipt) -> RenderableType:
    """The receipt, and the router's estimate when it placed the request."""
    parts: list[RenderableType] = [receipt(item), Text("")]
    guess = item.estimate
    if guess is None:
        return Group(*parts, Text("no estimate: a worker's rate was unknown", style="dim"))
    table = Table(box=None, padding=(0, 2), show_edge=False)
    table.add_column("at the worker that prefilled")
    table.add_column("expected", justify="right")
    table.add_column("was", justify="right")
    for name, expected, phase in (
        ("waiting", guess.wait, "prefill_queue"),
        ("computing", guess.compute, "prefill_compute"),
    ):
        table.add_row(name, seconds(expected), seconds(item.phases.get(phase, 0.0)))
    parts.append(table)
    if guess.there:
        where, other = ("decode", "prefill") if item.path == "local" else ("prefill", "decode")
        chosen, rejected = (guess.here, guess.there) if item.path == "local" else (guess.there, guess.here)
        parts.append(
            Text(
                f"prefilled on the {where} worker, estimated cost {seconds(chosen)} for all requests; on the {other}"
                f" worker {seconds(rejected)}"
            )
        )
    return Group(*parts)


def slowest(items: Sequence[LatencyAttribution]) -> RenderableType:
    """A line for each request: what delayed it, and what to do."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for name in ("request", "lost to"):
        table.add_column(name)
    for name in ("lost", "of it", "first token", "a token"):
        table.add_column(name, justify="right")
    table.add_column("what to do")
    for item in items:
        receipt = item.receipt
        table.add_row(
            Text(printable(receipt.request_id)),
            item.cause,
            seconds(item.lost),
            share(item.parts[item.cause], item.lost),
            seconds(receipt.ttft),
            seconds(receipt.tpot),
            Text(printable(item.advice)),
        )
    return table


def calibration(items: Sequence[Calibrated]) -> RenderableType:
    """The router's estimates compared with what requests took."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    table.add_column("path")
    table.add_column("requests", justify="right")
    table.add_column("computing: was / expected", justify="right")
    table.add_column("waiting: was - expected", justify="right")
    for item in items:
        low, middle, high = item.compute
        waits = " to ".join(f"{value:+.3f}" for value in (item.wait[0], item.wait[2]))
        table.add_row(
            item.path, str(item.requests), f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{item.wait[1]:+.3f} s ({waits})"
        )
    return table


def receipts(items: Sequence[Receipt], width: int = NARROW_COLUMNS) -> Table:
    """The finished requests: one line each in `width` columns or, if it is wide enough, with phases and transports."""
    return _narrow_receipts(items) if width < WIDE_COLUMNS else _wide_receipts(items)


def _narrow_receipts(items: Sequence[Receipt]) -> Table:
    table = Table(title="Receipts", title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in ("request", "workers"):
        table.add_column(name)
    for name in ("tokens", "cached", "TTFT", "TPOT", "KV moved"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in items:
        table.add_row(
            Text(printable(item.request_id)),
            workers_of(item),
            f"{item.prompt_tokens}+{item.completion_tokens}",
            str(item.cached_tokens),
            seconds(item.ttft),
            seconds(item.tpot),
            size(item.transfer.bytes) if item.transfer else "-",
        )
    return table


def _wide_receipts(items: Sequence[Receipt]) -> Table:
    table = Table(title="Receipts", title_justify="left", header_style="bold", box=None, padding=(0, 1))
    for name in ("request", "path", "tokens", "cached"):
        table.add_column(name, overflow="fold")
    for name in ("TTFT", "phases (to scale)", "TPOT", "KV moved", "transport"):
        table.add_column(name, justify="left" if name in ("phases (to scale)", "transport") else "right")
    for item in items:
        moved = item.transfer
        table.add_row(
            Text(printable(item.request_id)),
            f"{item.path}\n[dim]{workers_of(item)}",
            f"{item.prompt_tokens}+{item.completion_tokens}",
            str(item.cached_tokens),
            seconds(item.ttft),
            _strip(item),
            seconds(item.tpot),
            size(moved.bytes) if moved else "-",
            moved.transport if moved else "-",
        )
    return table


_PHASE_COLOURS = ("blue", "cyan", "green", "magenta", "yellow", "red", "white")


def _strip(item: Receipt, cells: int = 24) -> Text:
    """All phases in one line, a colour each, and their names with times in the next line."""
    line, names = Text(), Text()
    start = 0.0
    for place, (name, length) in enumerate([*item.phases.items(), *unaccounted(item)]):
        colour = _PHASE_COLOURS[place % len(_PHASE_COLOURS)]
        if item.ttft > 0:
            first, last = (round(edge / item.ttft * cells) for edge in (start, start + length))
            line.append("█" * max(0, min(last, cells) - first), style=colour)
        start += length
        names.append(f"{name.replace('_', ' ')} {seconds(length)}  ", style=colour)
    return Text.assemble(line, "\n", names)
