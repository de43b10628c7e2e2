"""The log of UCX: the transport that it chose for reads, and its warnings.

UCX names the transport only in its log (UCX_PROTO_INFO), as a table per configuration of endpoints (cfg), printed when
that configuration is first used:

    | worker7@5f21 intra-node cfg#1                                   |
    | remote memory read by ucp_get*(multi) into host memory from host|
    +--------+-------------+------------------------------------------+
    | Range  | Description | Config                                   |
    +--------+-------------+------------------------------------------+
    | 0..inf | zero-copy   | cma/memory                               |

UCX's debug output shows the configuration of an endpoint; it is on only while peers connect. UCX prints an endpoint's
lanes each time it is configured, after the number of the configuration if that is new:

    created ep 0x7f61 to <no debug data> from api call
    worker7@5f21 intra-node cfg#1 rma_am(tcp/lo) am(tcp/lo cma/memory)
    ep 0x7f61: am_lane 0 wireup_msg_lane 0 ...
    ep 0x7f61: lane[0]: ...

Endpoints with equal lanes have the same configuration. This does not depend on the order in which peers connect, so
they may connect concurrently.

The log goes to an anonymous file in memory, so nothing reaches the terminal and nothing is left on disk after a
SIGKILL; its warnings and errors are passed to Python's logging. The owner thread of an agent reads it every LOG_READ_S.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

_PREFIX = re.compile(r"^\[[^\]]*\]\s*\[[^\]]*\]\s*")
_OWNER = re.compile(r"^\| (\S+) \S+ cfg#(\d+)")
_ROW = re.compile(r"^\|\s*(\d+)(?:\.\.(\S+))?\s*\|[^|]*\|\s*([^|]*?)\s*\|$")
_CFG = re.compile(r"UCX\s+INFO\s+(\S+) \S+ cfg#(\d+) ")
_EP = re.compile(r"created ep (0x\w+) to .* from api call")
_LANES = re.compile(r"ep (0x\w+): am_lane ")
_LANE = re.compile(r"ep (0x\w+): (lane\[\d+\]: .*)")
_PATH = re.compile(r"\b([a-z]\w*)/([\w:.-]+)")  # transport and device
_HOST = "memory"  # what UCX calls the device of transports within one host
_TROUBLE = re.compile(r"UCX\s+(WARN|ERROR|FATAL)\s+(.*)")

# Read at most this much of the log at once; UCX in a loop of errors must not fill our memory.
_CHUNK = 1 << 20


# Rows of (first byte count, transports, devices).
_Table = list[tuple[int, str, str]]
_Lanes = tuple[str, ...]


@dataclass
class _Agent:
    """What was printed about one agent's configurations, by number."""

    tables: dict[int, list[_Table]] = field(default_factory=dict)
    # Two configurations with equal lanes may differ otherwise.
    by_lanes: dict[_Lanes, set[int]] = field(default_factory=dict)


class UcxLog:
    """The log of all agents of this process; UCX has one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._offset = 0
        self._rest = ""
        self._agents: dict[str, _Agent] = {}
        # Parser state: the read table that rows belong to; the configuration that was announced last (agent, number)
        # and whether lanes are yet to follow it; the endpoint whose lanes are being printed.
        self._table: _Table | None = None
        self._owner = ("", -1)
        self._announced: tuple[str, int] | None = None
        self._endpoint = ""
        self._cfg: tuple[str, int] | None = None
        self._lanes: list[str] = []
        # The endpoint made last, and the lanes of every one that was made here.
        self._newest = ""
        self._lanes_of: dict[str, _Lanes] = {}
        self._ucs: ctypes.CDLL | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Use it around the loading of UCX, which reads its environment only then. A user's UCX_LOG_FILE is kept."""
        if self._fd is not None or "UCX_LOG_FILE" in os.environ:
            yield
            return
        self._fd = os.memfd_create("tandem-ucx-log")
        os.environ["UCX_LOG_FILE"] = f"/proc/self/fd/{self._fd}"
        try:
            yield
        finally:
            # Child processes must not inherit the path: it refers to this process's file descriptor.
            del os.environ["UCX_LOG_FILE"]

    def details(self, wanted: bool) -> None:
        """Whether UCX prints the lanes of new endpoints. Without effect if UCX's library is not found."""
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

    def transport(self, agent: str, endpoint: str, block_bytes: int) -> str | None:
        """The transport that reads of `block_bytes` take over an endpoint that has been read from; None if the log
        leaves more than one."""
        return self._agreed(agent, endpoint, block_bytes, 1)

    def devices(self, agent: str, endpoint: str, block_bytes: int) -> str:
        """The network devices of that transport, with + between them; empty if there are none, or if they are
        unknown."""
        return self._agreed(agent, endpoint, block_bytes, 2) or ""

    def _agreed(self, agent: str, endpoint: str, block_bytes: int, column: int) -> str | None:
        with self._lock:
            self._consume()
            self._end_lanes()
            known = self._agents.get(agent, _Agent())
            # Without lanes (if the debug level cannot be set) the answer is known if all tables agree.
            lanes = self._lanes_of.get(endpoint, ())
            cfgs = known.by_lanes.get(lanes, set()) if lanes else known.tables.keys()
            names = {_pick(table, block_bytes, column) for cfg in cfgs for table in known.tables.get(cfg, ())}
            return names.pop() if len(names) == 1 else None

    def read(self) -> None:
        """Passes on what UCX has written since the last call, and frees its memory."""
        with self._lock:
            self._consume()

    def drop_endpoint(self, endpoint: str) -> None:
        """Forgets an endpoint that was closed or is no longer needed."""
        with self._lock:
            self._consume()
            self._lanes_of.pop(endpoint, None)

    def drop(self, agent: str) -> None:
        """Forgets an agent that was closed."""
        with self._lock:
            self._consume()
            self._agents.pop(agent, None)

    def _consume(self) -> None:
        if self._fd is None:
            return
        # UCX writes through stdio; flushing is the only way to see its last lines now.
        ctypes.CDLL(None).fflush(None)
        while os.fstat(self._fd).st_size > self._offset:
            data = os.pread(self._fd, _CHUNK, self._offset)
            self._offset += len(data)
            *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
            for line in lines:
                self._parse(line)
        # Frees the pages. UCX continues to write at its own offset, which leaves a hole and costs nothing.
        os.ftruncate(self._fd, 0)

    def _parse(self, line: str) -> None:
        trouble = _TROUBLE.search(line)
        if trouble:
            log.log(logging.WARNING if trouble[1] == "WARN" else logging.ERROR, "UCX: %s", trouble[2].strip())
            return
        if made := _EP.search(line):
            self._newest = made[1]
            self._lanes_of[made[1]] = ()
        elif cfg := _CFG.search(line):
            self._announced = (cfg[1], int(cfg[2]))
        elif lanes := _LANES.search(line):
            self._end_lanes()
            self._endpoint, self._cfg, self._announced = lanes[1], self._announced, None
        elif (lane := _LANE.search(line)) and lane[1] == self._endpoint:
            self._lanes.append(lane[2])
        else:
            self._parse_table(_PREFIX.sub("", line.lstrip("\0").strip()))

    def _end_lanes(self) -> None:
        """All lanes of an endpoint have been printed."""
        lanes = tuple(self._lanes)
        if self._cfg is not None:
            agent, number = self._cfg
            self._agents.setdefault(agent, _Agent()).by_lanes.setdefault(lanes, set()).add(number)
        if self._endpoint in self._lanes_of:
            self._lanes_of[self._endpoint] = lanes
        self._endpoint, self._cfg, self._lanes = "", None, []

    def _parse_table(self, line: str) -> None:
        owner = _OWNER.match(line)
        if owner:
            self._owner, self._table = (owner[1], int(owner[2])), None
        elif line.startswith("| remote memory read by "):
            agent, number = self._owner
            self._table = []
            self._agents.setdefault(agent, _Agent()).tables.setdefault(number, []).append(self._table)
        elif self._table is not None and (row := _ROW.match(line)):
            paths = _PATH.findall(row[3])
            transports = dict.fromkeys(transport for transport, _ in paths)
            devices = dict.fromkeys(device for _, device in paths if device != _HOST)
            self._table.append((int(row[1]), "+".join(transports), "+".join(devices)))


def _libucs() -> ctypes.CDLL | None:
    """The library with UCX's log, which NIXL loaded into this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/libucs-" in line or "/libucs.so" in line}
    return ctypes.CDLL(paths.pop()) if len(paths) == 1 else None


def _pick(table: _Table, block_bytes: int, column: int) -> str | None:
    rows = [row for row in table if row[0] <= block_bytes]
    return str(rows[-1][column]) or None if rows else None


ucx_log = UcxLog()
