"""How answers look in a terminal: tables and bars. Values come in, rich renderables go out; nothing here prints.

Text of a model or of a request is put in with `Text`, never as markup, and without control characters: it may hold
anything, and a terminal obeys escape sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.answers import Audit, Autoscaling, Calibrated, Diagnosis, Findings, Ledger, Pair, Pools, Receipt, Transfer
from tandem.blame import Blame

BAR_CELLS = 36
NARROW, WIDE = 80, 140  # columns of a pipe or a small terminal; of one that holds everything
_EIGHTHS = " ▏▎▍▌▋▊▉"
_STATES = {"ready": "green", "draining": "yellow"}
# Characters that move the cursor or start an escape sequence; newline and tab stay.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


# ---- words


def printable(text: str) -> str:
    """The text with control characters made visible."""
    return text.translate(_CONTROLS)


def seconds(value: float) -> str:
    """Three digits and the unit that suits: 840 us, 12.3 ms, 1.24 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{_digits(value / size)} {unit}"
    return f"{value * 1e6:.0f} us"


def size(count: int) -> str:
    """Bytes with a binary unit: 512 B, 1.25 MiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{_digits(value)} {unit}"
        value /= 1024
    return f"{_digits(value)} TiB"


def rate(bytes_per_second: float) -> str:
    """Decimal units a second, as links are sold: 12.5 GB/s, 85.0 MB/s."""
    if bytes_per_second >= 1e8:
        return f"{_digits(bytes_per_second / 1e9)} GB/s"
    return f"{_digits(bytes_per_second / 1e6)} MB/s"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def count(number: int, noun: str) -> str:
    """1 block, 2 blocks."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def runs(blocks: Sequence[int]) -> str:
    """Block ids as ranges: 3-5, 9."""
    parts: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if parts and block == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], block)
        else:
            parts.append((block, block))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def bar(start: float, length: float, whole: float, cells: int = BAR_CELLS) -> str:
    """A bar from `start` of `length` in a line that stands for `whole`, to an eighth of a cell at its end.

    What is too short for an eighth still shows one: a phase that happened is never invisible.
    """
    if whole <= 0 or length <= 0:
        return ""
    first = min(round(start / whole * cells), cells - 1)
    eighths = max(1, round((start + length) / whole * cells * 8) - first * 8)
    full, rest = divmod(min(eighths, (cells - first) * 8), 8)
    return " " * first + "█" * full + _EIGHTHS[rest].strip()


# ---- a receipt


def receipt(item: Receipt) -> RenderableType:
    """Who did it and how long each part of the time to first token took, drawn to scale."""
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
        f"{item.prompt_tokens} prompt ({item.cached_tokens} cached), {item.completion_tokens} completion, "
        f"seed {item.seed}",
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


def workers_of(item: Receipt) -> str:
    return f"{item.prefill_worker} → {item.decode_worker}" if item.prefill_worker else item.decode_worker


def transfer(item: Transfer) -> str:
    speed = f" at {rate(item.bytes / item.seconds)}" if item.seconds > 0 else ""
    return (
        f"{size(item.bytes)} in {count(item.blocks, 'block')} over {item.transport}, {seconds(item.seconds)}{speed}, "
        f"{seconds(item.exposed)} not hidden by compute"
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
    """What the phases leave out of the time to first token; empty when they add up to it."""
    missing = item.ttft - sum(item.phases.values())
    return [("not accounted for", missing)] if abs(missing) > max(1e-4, 0.01 * item.ttft) else []


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole > 0 else ""


def explained(item: Receipt) -> RenderableType:
    """The receipt, and what the router expected when it placed the request."""
    parts: list[RenderableType] = [receipt(item), Text("")]
    guess = item.estimate
    if guess is None:
        return Group(*parts, Text("nothing was expected: a worker had not said how fast it is", style="dim"))
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
        chosen, left = (guess.here, guess.there) if item.path == "local" else (guess.there, guess.here)
        parts.append(
            Text(
                f"prefilled on the {where} worker, which was to cost everybody {seconds(chosen)}; on the {other} worker"
                f" {seconds(left)}"
            )
        )
    return Group(*parts)


def slowest(items: Sequence[Blame]) -> RenderableType:
    """A line for each request, and what to do about it below."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for name in ("request", "lost to"):
        table.add_column(name)
    for name in ("lost", "of it", "first token", "a token"):
        table.add_column(name, justify="right")
    table.add_column("what to do")
    for item in items:
        told = item.receipt
        table.add_row(
            Text(printable(told.request_id)),
            item.cause,
            seconds(item.lost),
            share(item.parts[item.cause], item.lost),
            seconds(told.ttft),
            seconds(told.tpot),
            Text(printable(item.advice)),
        )
    return table


def calibration(items: Sequence[Calibrated]) -> RenderableType:
    """How good the router's estimates were."""
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


def receipts(items: Sequence[Receipt], width: int = NARROW) -> Table:
    """The finished requests: one line each in `width` columns, or, where there is room, with phases and transports."""
    return _narrow_receipts(items) if width < WIDE else _wide_receipts(items)


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
    """All phases in one line, a colour each, and their names with times below."""
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


# ---- the cluster


def pools(answer: Pools) -> RenderableType:
    table = Table(header_style="bold", box=None, padding=(0, 1))
    for name in ("id", "role", "state", "pid", "incarnation", "address"):
        table.add_column(name)
    for name in ("running", "waiting", "KV use", "KV dtype", "last beat"):
        table.add_column(name, justify="right")
    for worker in answer.workers:
        used = share(worker.blocks_held, worker.blocks_total) or "-"
        table.add_row(
            worker.worker_id,
            worker.role,
            Text(worker.state, style=_STATES.get(worker.state, "")),
            str(worker.pid),
            worker.incarnation,
            worker.address,
            str(worker.running),
            str(worker.waiting),
            f"{used} ({worker.blocks_held}/{worker.blocks_total})",
            worker.kv_dtype or "-",
            seconds(worker.heartbeat_age),
        )
    return Group(table, Text(f"wanted: {wanted(answer.wanted)}"))


def wanted(sizes: dict[str, int]) -> str:
    return " ".join(f"{role}={sizes[role]}" for role in sorted(sizes, reverse=True)) or "nothing"


def autoscaling(answer: Autoscaling) -> RenderableType:
    said = "autoscale is on" if answer.mode == "on" else "dry-run: nothing is done"
    lines: list[RenderableType] = [Text(f"{said}, looked {seconds(answer.age)} ago")]
    for pool in answer.pools:
        step = (
            f"{pool.role} stays {pool.size}"
            if pool.wanted == pool.size
            else f"{pool.role} {pool.size} -> {pool.wanted}"
        )
        lines.append(Text(f"{step}: {printable(pool.why)}"))
    return Group(*lines)


def audit(answer: Audit) -> RenderableType:
    parts: list[RenderableType] = [_ledger(ledger) for ledger in answer.ledgers]
    parts += [
        Text(f"{worker} did not answer: {printable(why)}", style="red") for worker, why in answer.unreachable.items()
    ]
    if answer.balanced:
        blocks = sum(ledger.total for ledger in answer.ledgers)
        parts.append(Text(f"balanced: {blocks} blocks of {len(answer.ledgers)} workers", style="green"))
    else:
        parts.append(Text("not balanced", style="bold red"))
    return Group(*parts)


def _ledger(ledger: Ledger) -> RenderableType:
    sign = "=" if ledger.free + ledger.held + ledger.cached == ledger.total else "≠"
    head = Text.assemble(
        (ledger.worker_id, "bold"),
        f"  free {ledger.free} + held {ledger.held} + cached {ledger.cached} {sign} total {ledger.total}",
    )
    table = Table.grid(padding=(0, 2))
    for entry in sorted(ledger.entries, key=lambda entry: -entry.age):
        table.add_row(
            " ", Text(printable(entry.owner)), count(len(entry.blocks), "block"), runs(entry.blocks), seconds(entry.age)
        )
    faults = [Text(f"  fault: {printable(fault)}", style="red") for fault in ledger.faults]
    return Group(head, table, *faults) if ledger.entries else Group(head, *faults)


def diagnosis(answer: Diagnosis, findings: Findings) -> RenderableType:
    """The matrix of pairs (rows prefill, columns decode), the registry, the versions, and what is wrong."""
    columns = list(dict.fromkeys(pair.decode_worker for pair in answer.pairs))
    rows = list(dict.fromkeys(pair.prefill_worker for pair in answer.pairs))
    cells = {(pair.prefill_worker, pair.decode_worker): pair for pair in answer.pairs}
    table = Table(header_style="bold", box=None, padding=(0, 1))
    table.add_column("prefill \\ decode", style="bold")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(row, *(_cell(cells.get((row, column)), findings) for column in columns))
    registry = (
        Text(f"registry: reachable, {seconds(answer.registry_round_trip)}", style="green")
        if answer.registry_reachable
        else Text("registry: does not answer", style="red")
    )
    versions = Text("versions: " + ", ".join(f"{name} {version}" for name, version in answer.versions.items()))
    parts: list[RenderableType] = [
        table if rows else Text("no prefill-decode pairs", style="yellow"),
        registry,
        versions,
    ]
    parts += [Text(f"degraded: {printable(text)}", style="yellow") for text in findings.degraded]
    parts += [Text(f"advice: {printable(text)}") for text in findings.advice]
    parts += [Text(f"problem: {printable(text)}", style="red") for text in findings.problems]
    if not findings.problems:
        parts.append(Text("no problems", style="green"))
    return Group(*parts)


def _cell(pair: Pair | None, findings: Findings) -> Text:
    if pair is None:
        return Text("not probed", style="dim")
    if pair.error:
        return Text("probe failed", style="red")
    if not pair.compatible:
        return Text("incompatible", style="red")
    slow = (pair.prefill_worker, pair.decode_worker) in findings.slow_pairs
    return Text(f"{pair.transport} {rate(pair.bytes_per_second)}", style="yellow" if slow else "green")
