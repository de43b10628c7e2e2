"""What UCX says: which transport it chose for reads, and its warnings.

UCX tells the transport nowhere but in its log (UCX_PROTO_INFO), as a table per configuration of endpoints, printed when
that configuration is first used:

    | worker7@5f21 intra-node cfg#1                                   |
    | remote memory read by ucp_get*(multi) into host memory from host|
    +--------+-------------+------------------------------------------+
    | Range  | Description | Config                                   |
    +--------+-------------+------------------------------------------+
    | 0..inf | zero-copy   | cma/memory                               |

A peer whose endpoint is configured like an earlier one's brings no table. Which earlier one, its lanes tell, which UCX
prints for every new endpoint at the debug level; that is switched on only while one is made.

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
_EP = re.compile(r"created ep (0x\w+) to .* from api call")
_LANES = re.compile(r"ep (0x\w+): am_lane ")
_LANE = re.compile(r"ep (0x\w+): (lane\[\d+\]: .*)")
_TRANSPORT = re.compile(r"\b([a-z]\w*)/[\w:.-]+")
_TROUBLE = re.compile(r"UCX\s+(WARN|ERROR|FATAL)\s+(.*)")

# Read at most this much of the log at once; UCX in a loop of errors must not fill our memory.
_CHUNK = 1 << 20


# Rows of (first byte count, transports).
_Table = list[tuple[int, str]]


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
        # agent name -> every read table seen, oldest first.
        self._tables: dict[str, list[_Table]] = {}
        # The endpoint made last, and the lanes of every one made while the details were on.
        self._newest = ""
        self._lanes: dict[str, list[str]] = {}
        # (agent, lanes) -> the table that the first endpoint with these lanes brought.
        self._known: dict[tuple[str, tuple[str, ...]], _Table] = {}
        self._ucs: ctypes.CDLL | None = None

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

    def details(self, wanted: bool) -> None:
        """Makes UCX print the lanes of new endpoints, or stop it. Without effect where UCX's library is not found."""
        with self._lock:
            if self._fd is None:
                return
            self._ucs = self._ucs or _libucs()
            if self._ucs is not None:
                self._ucs.ucs_global_opts_set_value(b"LOG_LEVEL", b"debug" if wanted else b"warn")

    def new_endpoint(self) -> str:
        """The endpoint made since the last call, while the details were on; empty if there was none."""
        with self._lock:
            self._consume()
            newest, self._newest = self._newest, ""
            return newest

    def tables(self, agent: str) -> int:
        """How many read tables there are for this agent by now."""
        with self._lock:
            self._consume()
            return len(self._tables.get(agent, ()))

    def transport(self, agent: str, endpoint: str, seen_before: int | None, block_bytes: int) -> str | None:
        """What a read of block_bytes uses, for a peer whose first reads came after `seen_before` tables; else None.

        A table printed since then is the peer's; `seen_before` is None where others may have brought it. Without one,
        the peer has the table of the earlier one with the same lanes; failing that, it is still known if all earlier
        tables name the same transport.
        """
        with self._lock:
            self._consume()
            tables = self._tables.get(agent, [])
            lanes = (agent, tuple(self._lanes.get(endpoint, ())))
            if seen_before is not None and len(tables) > seen_before:
                self._known[lanes] = tables[-1]
                return _pick(tables[-1], block_bytes)
            if lanes[1] and lanes in self._known:
                return _pick(self._known[lanes], block_bytes)
            names = {_pick(table, block_bytes) for table in tables}
            return names.pop() if len(names) == 1 else None

    def drop(self, agent: str) -> None:
        """Forgets an agent that was closed."""
        with self._lock:
            self._consume()
            self._tables.pop(agent, None)
            self._known = {key: table for key, table in self._known.items() if key[0] != agent}

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
        if endpoint := _EP.search(line):
            self._newest = endpoint[1]
        if endpoint := _LANES.search(line) or _EP.search(line):
            self._lanes[endpoint[1]] = []
        elif lane := _LANE.search(line):
            self._lanes.setdefault(lane[1], []).append(lane[2])
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


def _libucs() -> ctypes.CDLL | None:
    """The library that UCX's log lives in, as it was loaded into this process by NIXL."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/libucs-" in line or "/libucs.so" in line}
    return ctypes.CDLL(paths.pop()) if len(paths) == 1 else None


def _pick(table: _Table, block_bytes: int) -> str | None:
    name = None
    for first, transports in table:
        if first <= block_bytes:
            name = transports
    return name or None


ucx_log = UcxLog()
