"""`tandem demo`: a whole cluster on this machine, real prompts through gRPC, the streams as they come, the receipts.

Cluster (router, workers, registry) ◀── AsyncClient, all prompts at once ──▶ Board ──▶ receipts, summary
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli import receipt_rendering, rendering
from tandem.errors import SettingsError, TandemError
from tandem.settings import load
from tandem.telemetry import logs

if TYPE_CHECKING:
    from tandem.async_client import AsyncClient
    from tandem.results import Receipt
    from tandem.rpc.request_builder import Options

HOME = Path(__file__).resolve().parent.parent / "demo"
_KEYS = {"prompt", "messages", "max_tokens", "temperature", "seed"}
_STATES = {"waiting": "dim", "running": "cyan", "done": "green", "failed": "red"}


@dataclass
class Row:
    """One request of the demo and its state."""

    name: str
    question: str
    prompt: str | list[int] | None
    options: Options
    state: str = "waiting"  # waiting, running, done, failed
    tokens: int = 0
    text: str = ""
    error: str = ""
    receipt: Receipt | None = None

    def to_dict(self) -> dict[str, object]:
        """The row as plain values, ready for JSON."""
        about = {"name": self.name, "question": self.question, "state": self.state, "text": self.text}
        return {**about, "error": self.error, "receipt": self.receipt.to_dict() if self.receipt else None}


def read_prompts(path: Path, max_tokens: int) -> list[Row]:
    """The rows of a file of JSON lines. Raises SettingsError naming the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"cannot read the prompts in {path}: {why}", field="prompts") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_row(line, f"demo-{len(rows) + 1}", f"{path.name} line {number}", max_tokens))
    if not rows:
        raise SettingsError(f"{path} has no prompts", field="prompts")
    return rows


def _row(line: str, name: str, where: str, max_tokens: int) -> Row:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{where} is not JSON: {error}", field="prompts") from error
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise SettingsError(f"{where} needs either prompt or messages", field="prompts")
    if unknown := sorted(set(fields) - _KEYS):
        known = ", ".join(sorted(_KEYS))
        raise SettingsError(f"{where} has unknown {', '.join(unknown)}", field="prompts", bound=known)
    prompt, messages = fields.get("prompt"), fields.get("messages")
    try:
        question = str(prompt) if messages is None else str(messages[-1]["content"])
    except (TypeError, LookupError) as error:
        raise SettingsError(f"{where}: messages are objects with role and content", field="prompts") from error
    options: Options = {
        "messages": messages,
        "max_tokens": fields.get("max_tokens", max_tokens),
        "temperature": fields.get("temperature"),
        "seed": fields.get("seed"),
        "request_id": name,
    }
    return Row(name, question, prompt, options)


def run(
    model: str | None, prompts: Path | None, *, prefill: int, decode: int, max_tokens: int, as_json: bool = False
) -> int:
    """Runs the demo. Returns the exit code: 0 if every request finished. Raises TandemError if the cluster does not
    start."""
    home = HOME / "model"
    if model is None and not home.is_dir():
        raise SettingsError("the demo model is missing; name a checkpoint with --model", field="model")
    rows = read_prompts(prompts or HOME / "prompts.jsonl", max_tokens)
    settings = load(model=model or str(home), prefill=prefill, decode=decode, port=0)
    logs.configure(settings, "demo")
    screen = sys.stderr if as_json else sys.stdout
    console = Console(file=screen, highlight=False, width=None if screen.isatty() else 160)

    from cli.local_run import sigterm_interrupts
    from cluster.local_cluster import LocalCluster

    with sigterm_interrupts(), LocalCluster(settings, lambda line: print(line, file=sys.stderr)) as cluster:
        start = perf_counter()
        asyncio.run(send_all(cluster.target, rows, Board(rows, console)))
        elapsed = perf_counter() - start
    if as_json:
        print(json.dumps([row.to_dict() for row in rows], ensure_ascii=False))
    else:
        console.print(report(rows, elapsed, console.width if console.is_terminal else rendering.NARROW_COLUMNS))
    return 0 if all(row.state == "done" for row in rows) else 1


# ---- sending


async def send_all(target: str, rows: Sequence[Row], board: Board) -> None:
    """All rows at once over one connection."""
    from tandem.async_client import AsyncClient

    async with AsyncClient(target) as client:
        with board:
            await asyncio.gather(*(_send(client, row, board) for row in rows))


async def _send(client: AsyncClient, row: Row, board: Board) -> None:
    try:
        async for piece in client.stream(row.prompt, **row.options):
            row.state = "running"
            row.text += piece.text
            row.tokens += len(piece.token_ids)
            row.receipt = piece.receipt
            board.changed(row)
        row.state = "done"
    except TandemError as error:
        row.state, row.error = "failed", error.message
    board.changed(row)


class Board:
    """Shows the rows while they run: a live table on a terminal, else a line when a row starts and when it ends."""

    def __init__(self, rows: Sequence[Row], console: Console) -> None:
        self._rows = rows
        self._console = console
        self._live: Live | None = None
        self._printed: Mapping[str, str] = {}

    def __enter__(self) -> Board:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=12)
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live is not None:
            self._live.stop()

    def changed(self, row: Row) -> None:
        if self._live is None and self._printed.get(row.name) != row.state:
            self._printed = {**self._printed, row.name: row.state}
            self._console.print(_line(row), soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1), show_header=False, expand=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, width=8)
        table.add_column(no_wrap=True, justify="right", width=10)
        table.add_column(no_wrap=True, ratio=1)
        room = max(20, self._console.width - 32)
        for row in self._rows:
            question = f"{_tail(row.question, room // 3)} → "
            answer = _tail(row.error or row.text, room - len(question))
            text = Text.assemble((question, "dim"), (answer, "red" if row.error else ""))
            table.add_row(row.name, Text(row.state, style=_STATES[row.state]), f"{row.tokens} tokens", text)
        return table


def _line(row: Row) -> Text:
    text = row.error or (
        f"{row.tokens} tokens: {_tail(row.text, 100)}" if row.state == "done" else "first token is here"
    )
    return Text.assemble(f"{row.name} ", (row.state, _STATES[row.state]), f" {text}")


def _tail(text: str, room: int) -> str:
    """The end of a text in one line."""
    line = " ".join(rendering.printable(text).splitlines())
    return line if len(line) <= room else "…" + line[len(line) - room + 1 :]


# ---- the account


def report(rows: Sequence[Row], elapsed: float, width: int = rendering.NARROW_COLUMNS) -> RenderableType:
    """Every answer, the table of receipts, the slowest first token in detail, and a summary."""
    parts: list[RenderableType] = [Text()]
    for row in rows:
        answer = (row.error, "red") if row.error else (rendering.printable(row.text), "")
        parts.append(
            Text.assemble((f"{row.name}: ", "bold"), (f"{rendering.printable(row.question)} → ", "dim"), answer)
        )
    finished = [row.receipt for row in rows if row.receipt is not None]
    if finished:
        slowest = max(finished, key=lambda item: item.ttft)
        parts += [
            Text(),
            receipt_rendering.receipts(finished, width),
            Text(),
            Text("The slowest first token:", style="bold"),
        ]
        parts += [receipt_rendering.receipt(slowest)]
    return Group(*parts, Text(), summary(rows, finished, elapsed))


def summary(rows: Sequence[Row], finished: Sequence[Receipt], elapsed: float) -> Text:
    failed = [row for row in rows if row.state != "done"]
    tokens = sum(row.tokens for row in rows)
    apart = sum(item.path == "disaggregated" for item in finished)
    moved = [item.transfer for item in finished if item.transfer is not None]
    transports = ", ".join(sorted({transfer.transport for transfer in moved})) or "nothing"
    return Text(
        f"{len(rows) - len(failed)} of {len(rows)} requests finished: {tokens} tokens in {rendering.seconds(elapsed)}; "
        f"{apart} disaggregated, {len(finished) - apart} local; "
        f"{rendering.size(sum(transfer.bytes for transfer in moved))} of KV moved over {transports}",
        style="bold red" if failed else "bold green",
    )
