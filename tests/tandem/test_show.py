from __future__ import annotations

import pytest

from tandem import show


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 us"), (0.00084, "840 us"), (0.0123, "12.3 ms"), (0.5, "500 ms"), (1.236, "1.24 s"), (250, "250 s")],
)
def test_seconds(value: float, text: str) -> None:
    """A duration has three digits and the unit that suits."""
    assert show.seconds(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (4096, "4.00 KiB"), (3 << 29, "1.50 GiB"), (5 << 40, "5.00 TiB")]
)
def test_size(count: int, text: str) -> None:
    """Bytes have a binary unit."""
    assert show.size(count) == text


def test_rate() -> None:
    """Bandwidth is in decimal GB/s, or MB/s where that would read as nothing."""
    assert [show.rate(value) for value in (0, 2e6, 1e8, 2.5e9, 4e11)] == [
        "0.00 MB/s",
        "2.00 MB/s",
        "0.10 GB/s",
        "2.50 GB/s",
        "400 GB/s",
    ]


def test_runs() -> None:
    """Block ids are shown as ranges, in order."""
    assert show.runs([]) == ""
    assert show.runs([9, 4, 3, 5]) == "3-5, 9"


def test_bars_are_to_scale() -> None:
    """Bars begin where the one before ended, never leave the line, and a short phase is still seen."""
    assert show.bar(0, 1, 1, cells=8) == "█" * 8
    assert show.bar(0.5, 0.25, 1, cells=8) == "    ██"
    assert show.bar(0, 1e-9, 1, cells=8) == "▏"
    assert show.bar(1, 0.1, 1, cells=8) == "       █"
    assert show.bar(0, 0, 1) == ""
    assert show.bar(0, 1, 0) == ""


def test_control_characters_are_shown_not_obeyed() -> None:
    """A model's text cannot move the cursor or colour the terminal."""
    assert show.printable("a\x1b[31m\r\x9b\tb\n") == "a\N{REPLACEMENT CHARACTER}[31m\ufffd\ufffd\tb\n"
