"""What rank 0 tells the other ranks, over a socket pair that only these processes have.

message   kind, length, each 4 bytes   then `length` bytes of content; new pages and adapters come with their file
LOAD      JSON: what to load                                            rank 0 -> others, first
PAGES     JSON: number, num_blocks, block_size                          rank 0 -> others
CAPTURE   JSON: number of pages, spare, max_running                     rank 0 -> others
FREE      JSON: numbers of pages that nobody has any more               rank 0 -> others
ADAPTER   JSON: slot, bytes, adapter; its matrices come in a file       rank 0 -> others
STEP      int64: the number of the pages, captured or not, and a Batch  rank 0 -> others
READY     JSON: loaded and checked, a RankMemory                        others -> rank 0
FAILED    JSON: why                                                     others -> rank 0, last
"""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

from engine.attention.forward_context import Batch

LOAD, PAGES, CAPTURE, FREE, ADAPTER, STEP, READY, FAILED = range(8)
HEADER = struct.Struct("<II")
LONGEST = 1 << 28  # bytes; far beyond any step


def send(connection: socket.socket, kind: int, content: bytes = b"", files: Sequence[int] = ()) -> None:
    """Raises OSError when the other side has ended."""
    header = HEADER.pack(kind, len(content))
    if files:
        socket.send_fds(connection, [header], files)
        connection.sendall(content)
    else:
        connection.sendall(header + content)


def receive(connection: socket.socket) -> tuple[int, bytes, list[int]]:
    """The next message: kind, content, open files. Raises EOFError when the other side has ended."""
    header, files, _, _ = socket.recv_fds(connection, HEADER.size, 1)
    if len(header) < HEADER.size:
        header += _exactly(connection, HEADER.size - len(header))
    kind, length = HEADER.unpack(header)
    if length > LONGEST:
        raise EOFError(f"a message of {length} bytes")
    return kind, _exactly(connection, length), list(files)


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    rest = memoryview(content)
    while rest:
        taken = connection.recv_into(rest)
        if taken == 0:
            raise EOFError("the other side has ended")
        rest = rest[taken:]
    return bytes(content)


def of_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def from_json(content: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(content)
    return value


def of_step(pages: int, batch: Batch, captured: bool, marks: Sequence[int] = ()) -> bytes:
    """A step over these pages, by a captured one or not. Positions follow from the lengths. `marks`: of the adapters in
    the slots that the batch names (engine.runner.lora)."""
    counts = (pages, int(captured), len(batch.token_ids), len(batch.query_lens), len(batch.logits_at), len(marks))
    widths = [len(table) for table in batch.block_tables]
    assert len(marks) == len(batch.adapters)
    lists = (batch.token_ids, batch.query_lens, batch.context_lens, batch.logits_at, batch.adapters, marks, widths)
    return array("q", chain(counts, *lists, *batch.block_tables)).tobytes()


def from_step(content: bytes) -> tuple[int, Batch, bool, list[int]]:
    """The inverse of `of_step`."""
    numbers = array("q", content).tolist()
    pages, captured, tokens, sequences, wanted, marked = numbers[:6]
    at = 6

    def take(count: int) -> list[int]:
        nonlocal at
        at += count
        return numbers[at - count : at]

    token_ids, query_lens, context_lens, logits_at, adapters, marks, widths = map(
        take, (tokens, sequences, sequences, wanted, marked, marked, sequences)
    )
    positions = [
        position
        for query, context in zip(query_lens, context_lens, strict=True)
        for position in range(context - query, context)
    ]
    tables = [take(width) for width in widths]
    batch = Batch(token_ids, positions, query_lens, context_lens, tables, logits_at, adapters)
    return pages, batch, bool(captured), marks
