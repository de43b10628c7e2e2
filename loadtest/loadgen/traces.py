"""Reads traces of requests: Azure's, Mooncake's and ServeGen's, each recognised by its columns, plain or gzipped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from loadtest.loadgen.workload import Request
from tandem.errors import SettingsError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SERVEGEN = ("arrival_s", "input_tokens", "output_tokens")


def read(path: Path) -> list[Request]:
    """The requests in the order of their times, the first at 0. Raises SettingsError, with the line, for an invalid
    trace."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            requests = sorted(_requests(path, lines), key=lambda request: request.at)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}", field="trace") from error
    if not requests:
        raise SettingsError(f"{path} has no requests", field="trace")
    return [replace(request, at=request.at - requests[0].at) for request in requests]


def _requests(path: Path, lines: Iterable[str]) -> Iterator[Request]:
    parse: Callable[[str], Request] | None = None
    for number, line in enumerate(lines, start=1):
        try:
            if parse:
                yield parse(line)
            elif line.startswith("{"):
                parse = _mooncake
                yield parse(line)
            else:
                parse = _columns(line.strip().split(","))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SettingsError(
                f"{path}, line {number}: {line[:80].strip()!r} is no request ({error!r})", field="trace"
            ) from error


def _mooncake(line: str) -> Request:
    row = json.loads(line)
    lengths = _lengths(row["input_length"], row["output_length"])
    return Request(row["timestamp"] / 1000, *lengths, tuple(row["hash_ids"]))


def _columns(names: list[str]) -> Callable[[str], Request]:
    """Reads the lines of a table. Raises ValueError for unknown columns."""
    for known, seconds in ((AZURE, _stamp), (SERVEGEN, float)):
        if set(known) <= set(names):
            at, prompt, new = map(names.index, known)
            return lambda line: _row(line.strip().split(","), seconds, at, prompt, new)
    raise ValueError("the columns are none of Azure's, ServeGen's or Mooncake's")


def _row(cells: list[str], seconds: Callable[[str], float], at: int, prompt: int, new: int) -> Request:
    return Request(seconds(cells[at]), *_lengths(cells[prompt], cells[new]))


def _lengths(prompt: str | int, new: str | int) -> tuple[int, int]:
    return max(1, int(prompt)), max(1, int(new))


def _stamp(text: str) -> float:
    """Azure writes seven digits after the point, one more than datetime takes."""
    return datetime.fromisoformat(text[:26]).timestamp()
