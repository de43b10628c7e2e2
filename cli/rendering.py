"""Renders results for a terminal, as tables and bars. Functions take values and return rich renderables; none prints.

Text from a model or a request is untrusted, and a terminal executes escape sequences. So it is inserted with `Text`,
never as markup, and without control characters.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.cluster_results import Audit, Autoscaling, Diagnosis, Findings, Ledger, Pair, Pools, ServedAdapter


def share(part: float, total: float) -> str:
    return f"{100 * part / total:.0f}%" if total > 0 else ""


BAR_CELLS = 36
NARROW_COLUMNS, WIDE_COLUMNS = 80, 140  # columns of a pipe or a small terminal, and of one that shows everything
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
    """Decimal units per second, as for network links: 12.5 GB/s, 85.0 MB/s."""
    if bytes_per_second >= 1e8:
        return f"{_digits(bytes_per_second / 1e9)} GB/s"
    return f"{_digits(bytes_per_second / 1e6)} MB/s"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def count(number: int, noun: str) -> str:
    """1 block, 2 blocks."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def of_ranks(worker: str, ranks: int) -> str:
    """decode-0, or decode-0 (2 ranks)."""
    return f"{worker} ({count(ranks, 'rank')})" if ranks > 1 else worker


def runs(blocks: Sequence[int]) -> str:
    """Block ids as ranges: 3-5, 9."""
    parts: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if parts and block == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], block)
        else:
            parts.append((block, block))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def bar(start: float, length: float, total: float, cells: int = BAR_CELLS) -> str:
    """A bar from `start` of `length` in a line that stands for `total`, precise to an eighth of a cell at its end.

    A shorter part still shows an eighth, so that every phase is visible.
    """
    if total <= 0 or length <= 0:
        return ""
    first = min(round(start / total * cells), cells - 1)
    eighths = max(1, round((start + length) / total * cells * 8) - first * 8)
    full, rest = divmod(min(eighths, (cells - first) * 8), 8)
    return " " * first + "█" * full + _EIGHTHS[rest].strip()


# ---- the cluster


def pools(answer: Pools) -> RenderableType:
    table = Table(header_style="bold", box=None, padding=(0, 1))
    for name in ("id", "role", "state", "node", "device", "pid", "incarnation", "address"):
        table.add_column(name)
    for name in ("running", "waiting", "KV use", "KV dtype", "last beat"):
        table.add_column(name, justify="right")
    for worker in answer.workers:
        used = share(worker.blocks_held, worker.blocks_total) or "-"
        table.add_row(
            worker.worker_id,
            worker.role,
            Text(worker.state, style=_STATES.get(worker.state, "")),
            printable(worker.node) or "-",
            (printable(worker.device) or "-") + (f", {worker.tp} ranks" if worker.tp > 1 else ""),
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
    mode = "autoscale is on" if answer.mode == "on" else "dry-run: nothing is done"
    lines: list[RenderableType] = [Text(f"{mode}, decided {seconds(answer.age)} ago")]
    for pool in answer.pools:
        step = (
            f"{pool.role} stays {pool.size}"
            if pool.wanted == pool.size
            else f"{pool.role} {pool.size} -> {pool.wanted}"
        )
        lines.append(Text(f"{step}: {printable(pool.why)}"))
    return Group(*lines)


def adapters(answer: Sequence[ServedAdapter]) -> RenderableType:
    if not answer:
        return Text("no adapters")
    table = Table("name", "folder", "fingerprint", "given", box=None)
    for one in answer:
        given = "while the cluster runs" if one.loaded_at else "at the start"
        table.add_row(Text(printable(one.name)), Text(printable(one.path)), one.fingerprint[:16], given)
    return table


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
    if ledger.states:
        states, held = ledger.states, len(ledger.states.owners)
        sign = "=" if states.free + held == states.total else "≠"
        head.append(f"\n  state slots: free {states.free} + held {held} {sign} total {states.total}")
        head.append(f"; {count(states.snapshots, 'snapshot')} in cached blocks")
    faults = [Text(f"  fault: {printable(fault)}", style="red") for fault in ledger.faults]
    return Group(head, table, *faults) if ledger.entries else Group(head, *faults)


def diagnosis(answer: Diagnosis, findings: Findings) -> RenderableType:
    """The matrix of pairs (rows prefill, columns decode), the registry, the versions, and the problems."""
    columns = list(dict.fromkeys(pair.decode_worker for pair in answer.pairs))
    rows = list(dict.fromkeys(pair.prefill_worker for pair in answer.pairs))
    cells = {(pair.prefill_worker, pair.decode_worker): pair for pair in answer.pairs}
    table = Table(header_style="bold", box=None, padding=(0, 1))
    sizes = {pair.prefill_worker: pair.prefill_tp for pair in answer.pairs}
    sizes |= {pair.decode_worker: pair.decode_tp for pair in answer.pairs}
    table.add_column("prefill \\ decode", style="bold")
    for column in columns:
        table.add_column(of_ranks(column, sizes[column]))
    for row in rows:
        table.add_row(of_ranks(row, sizes[row]), *(_cell(cells.get((row, column)), findings) for column in columns))
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
    parts += [
        Text(f"{pair.prefill_worker} to {pair.decode_worker} uses {printable(pair.why)}")
        for pair in answer.pairs
        if pair.why
    ]
    parts += [
        Text(f"{pair.prefill_worker} to {pair.decode_worker} converts {printable(pair.converted)}")
        for pair in answer.pairs
        if pair.converted
    ]
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
    over = f" over {printable(pair.device)}" if pair.device else ""
    return Text(f"{pair.transport}{over} {rate(pair.bytes_per_second)}", style="yellow" if slow else "green")
