"""What UCX says: which transport it chose for reads, and its warnings.

UCX tells the transport nowhere but in its log (UCX_PROTO_INFO), as a table per configuration of endpoints, printed when
that configuration is first used:

    | worker7@5f21 intra-node cfg#1                                   |
    | remote memory read by ucp_get*(multi) into host memory from host|
    +--------+-------------+------------------------------------------+
    | Range  | Description | Config                                   |
    +--------+-------------+------------------------------------------+
    | 0..inf | zero-copy   | cma/memory                               |

The log goes to an anonymous file in memory, so nothing reaches the terminal and nothing is left on disk after a
SIGKILL; warnings and errors in it go on to Python's logging.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_PREFIX = re.compile(r"^\[[^\]]*\]\s*\[[^\]]*\]\s*")
_OWNER = re.compile(r"^\| (\S+) \S+ cfg#\d+")
_ROW = re.compile(r"^\|\s*(\d+)(?:\.\.(\S+))?\s*\|[^|]*\|\s*([^|]*?)\s*\|$")
_TRANSPORT = re.compile(r"\b([a-z]\w*)/[\w:.-]+")
_TROUBLE = re.compile(r"UCX\s+(WARN|ERROR|FATAL)\s+(.*)")

# Read at most this much of the log at once; UCX in a loop of errors must not fill our memory.
_CHUNK = 1 << 20


class UcxLog:
    """The log of all agents of this process; UCX has one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._offset = 0
        self._rest = ""
        # Parser state: whose table this is, and whether it is one about reads.
        self._owner = ""
        self._read_table = False
        # agent name -> every read table seen, oldest first; a table is rows of (first byte count, transports).
        self._tables: dict[str, list[list[tuple[int, str]]]] = {}

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around the loading of UCX, which reads its environment only then. A user's own UCX_LOG_FILE is left alone."""
        if self._fd is not None or "UCX_LOG_FILE" in os.environ:
            yield
            return
        self._fd = os.memfd_create("tandem-ucx-log")
        os.environ["UCX_LOG_FILE"] = f"/proc/self/fd/{self._fd}"
        try:
            yield
        finally:
            # Children must not inherit a path that means something else to them.
            del os.environ["UCX_LOG_FILE"]

    def tables(self, agent: str) -> int:
        """How many read tables there are for this agent by now."""
        with self._lock:
            self._consume()
            return len(self._tables.get(agent, ()))

    def transport(self, agent: str, seen_before: int, block_bytes: int) -> str | None:
        """What a read of block_bytes uses, for a peer whose first reads came after `seen_before` tables; else None.

        A table printed since then is the peer's. Where there is none, the peer shares a configuration with an earlier
        one, which is known as long as all earlier ones name the same transport.
        """
        with self._lock:
            self._consume()
            tables = self._tables.get(agent, [])
            if len(tables) > seen_before:
                return _pick(tables[-1], block_bytes)
            names = {_pick(table, block_bytes) for table in tables}
            return names.pop() if len(names) == 1 else None

    def drop(self, agent: str) -> None:
        """Forgets an agent that was closed."""
        with self._lock:
            self._consume()
            self._tables.pop(agent, None)

    def _consume(self) -> None:
        if self._fd is None:
            return
        # UCX writes through stdio; there is no other way to see its last lines now.
        ctypes.CDLL(None).fflush(None)
        while os.fstat(self._fd).st_size > self._offset:
            data = os.pread(self._fd, _CHUNK, self._offset)
            self._offset += len(data)
            *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
            for line in lines:
                self._parse(line)
        # Gives the pages back. UCX goes on writing at its own offset, which leaves a hole and costs nothing.
        os.ftruncate(self._fd, 0)

    def _parse(self, line: str) -> None:
        trouble = _TROUBLE.search(line)
        if trouble:
            log.log(logging.WARNING if trouble[1] == "WARN" else logging.ERROR, "UCX: %s", trouble[2].strip())
            return
        line = _PREFIX.sub("", line.lstrip("\0").strip())
        owner = _OWNER.match(line)
        if owner:
            self._owner, self._read_table = owner[1], False
        elif line.startswith("| remote memory read by "):
            self._read_table = True
            self._tables.setdefault(self._owner, []).append([])
        elif self._read_table and (row := _ROW.match(line)):
            names = dict.fromkeys(_TRANSPORT.findall(row[3]))
            self._tables[self._owner][-1].append((int(row[1]), "+".join(names)))


def _pick(table: list[tuple[int, str]], block_bytes: int) -> str | None:
    name = None
    for first, transports in table:
        if first <= block_bytes:
            name = transports
    return name or None


ucx_log = UcxLog()
