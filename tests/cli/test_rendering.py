from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from cli import output, receipt_rendering, rendering
from tandem.cluster_results import Audit, Held, Ledger
from tandem.results import Receipt, Transfer

RECEIPT = Receipt(
    request_id="demo-19",
    model="toy",
    path="disaggregated",
    prefill_worker="prefill-0",
    decode_worker="decode-0",
    prompt_tokens=1433,
    completion_tokens=1048,
    cached_tokens=1024,
    seed=1,
    ttft=0.62,
    phases={"tokenize": 0.001, "prefill_compute": 0.619},
    tpot=0.00747,
    total=0.972,
    transfer=Transfer("nixl:ucx:cma", 1_373_000, 28, 0.0026, 0.045),
    attempts=1,
    notes=[],
    preemptions=0,
    drafted=0,
    accepted=0,
    choice=0,
    choices=1,
    adapter="",
    client_ttft=0.67,
)


def printed(what: object, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(what)
    return out.getvalue().splitlines()


def test_receipts_fit_into_eighty_columns() -> None:
    """One line for each request, whole, where nobody has more room: the piped demo, a small terminal."""
    lines = printed(
        receipt_rendering.receipts([RECEIPT, replace(RECEIPT, prefill_worker="", path="local", transfer=None)]),
        rendering.NARROW_COLUMNS,
    )
    assert len(lines) == 4  # title, header, two requests
    assert max(map(len, lines)) <= rendering.NARROW_COLUMNS
    assert "prefill-0 → decode-0" in lines[2]
    assert lines[2].split()[-2:] == ["1.31", "MiB"]


def test_a_wide_terminal_gets_phases_and_transport() -> None:
    """The control: with room, nothing is left out."""
    text = "\n".join(printed(receipt_rendering.receipts([RECEIPT], rendering.WIDE_COLUMNS), rendering.WIDE_COLUMNS))
    assert "prefill compute 619 ms" in text
    assert "nixl:ucx:cma" in text


def test_one_block_is_no_plural() -> None:
    """Neither in a receipt nor in a ledger."""
    assert " in 1 block over" in receipt_rendering.transfer(Transfer("inprocess", 10, 1, 0.1, 0.0))
    assert " in 2 blocks over" in receipt_rendering.transfer(Transfer("inprocess", 10, 2, 0.1, 0.0))
    ledger = Ledger("decode-0", "i", "h:1", 8, 7, 0, 1, [Held("sequence:r", [3], 1.0)], [])
    assert any("  1 block  3" in line for line in printed(rendering.audit(Audit([ledger], {})), 120))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 us"), (0.00084, "840 us"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (1.236, "1.24 s"), (250, "250 s")],
)
def test_seconds(value: float, text: str) -> None:
    """A duration has three digits and the unit that suits."""
    assert rendering.seconds(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (4096, "4.00 KiB"), (3 << 29, "1.50 GiB"), (5 << 40, "5.00 TiB")]
)
def test_size(count: int, text: str) -> None:
    """Bytes have a binary unit."""
    assert rendering.size(count) == text


def test_rate() -> None:
    """Bandwidth is in decimal GB/s, or MB/s where that would read as nothing."""
    assert [rendering.rate(value) for value in (0, 2e6, 1e8, 2.5e9, 4e11)] == [
        "0.00 MB/s",
        "2.00 MB/s",
        "0.10 GB/s",
        "2.50 GB/s",
        "400 GB/s",
    ]


def test_runs() -> None:
    """Block ids are shown as ranges, in order."""
    assert rendering.runs([]) == ""
    assert rendering.runs([9, 4, 3, 5]) == "3-5, 9"


def test_bars_are_to_scale() -> None:
    """Bars begin where the one before ended, never leave the line, and a short phase is still seen."""
    assert rendering.bar(0, 1, 1, cells=8) == "█" * 8
    assert rendering.bar(0.5, 0.25, 1, cells=8) == "    ██"
    assert rendering.bar(0, 1e-9, 1, cells=8) == "▏"
    assert rendering.bar(1, 0.1, 1, cells=8) == "       █"
    assert rendering.bar(0, 0, 1) == ""
    assert rendering.bar(0, 1, 0) == ""


def test_control_characters_are_shown_not_obeyed() -> None:
    """A model's text cannot move the cursor or colour the terminal."""
    assert rendering.printable("a\x1b[31m\r\x9b\tb\n") == "a\N{REPLACEMENT CHARACTER}[31m\ufffd\ufffd\tb\n"


def test_what_is_told_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """A user's or a server's text may have brackets, which would end the chat or vanish, and control characters."""
    output.tell("there is no model [/x] or [red]\x1b[2J")
    assert capsys.readouterr().err == "there is no model [/x] or [red]\N{REPLACEMENT CHARACTER}[2J\n"
