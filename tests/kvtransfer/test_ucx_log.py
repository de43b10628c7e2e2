"""Learning the transport from UCX's log, without guessing."""

from __future__ import annotations

import logging
import os

import pytest

from kvtransfer.ucx_log import UcxLog

STAMP = "[1795231426.745072] [host:3604 :0]   "


def table(agent, operation, *rows):
    lines = [
        "+-----+",
        f"| {agent} intra-node cfg#1      |",
        f"| {operation} |",
        "+-----+",
        "| Range | Description | Config |",
    ]
    return "".join(f"{STAMP}{line}\n" for line in [*lines, "+---+", *rows, "+---+"])


READ = "remote memory read by ucp_get*(multi) into host memory from host"
CMA = table("w@1", READ, "| 0..inf | zero-copy   | cma/memory |")
TCP = table("w@1", READ, "| 0..inf | software emulation | tcp/lo |")


@pytest.fixture
def log():
    """A log with a file that the test writes instead of UCX."""
    made = UcxLog()
    made._fd = os.memfd_create("test")
    yield made
    os.close(made._fd)


def write(log, text):
    log.__dict__.setdefault("written", 0)
    log.written += os.pwrite(log._fd, text.encode(), log.written)


def test_a_new_table_belongs_to_the_new_peer(log):
    """The table printed during a peer's first reads names its transport, whatever came before."""
    write(log, CMA)
    assert log.transport("w@1", "0x1", 0, 4096) == "cma"
    seen = log.tables("w@1")
    write(log, TCP)
    assert log.transport("w@1", "0x1", seen, 4096) == "tcp"


def test_no_new_table_is_known_only_while_all_agree(log):
    """A peer on a known configuration is known by elimination; with two candidates the answer is None, not a guess."""
    write(log, CMA)
    assert log.transport("w@1", "0x1", log.tables("w@1"), 4096) == "cma"
    write(log, TCP)
    assert log.transport("w@1", "0x1", log.tables("w@1"), 4096) is None


def endpoint(name, lane):
    head = f"{STAMP} wireup.c:1464 UCX  DEBUG   ep {name}: "
    made = f"{STAMP} ucp_ep.c:452 UCX  DEBUG created ep {name} to <no debug data> from api call\n"
    return f"{made}{head}am_lane 0 wireup_msg_lane 0\n{head}lane[0]:  5:{lane} md[4] -> addr[5] rma_bw#0\n"


def test_the_lanes_tell_which_configuration_is_shared(log):
    """With two candidates, a peer with the lanes of an earlier one has that one's; with other lanes it is None."""
    write(log, endpoint("0x1", "cma/memory") + CMA)
    assert log.transport("w@1", log.new_endpoint(), 0, 4096) == "cma"
    write(log, endpoint("0x2", "tcp/lo") + TCP)
    assert log.transport("w@1", log.new_endpoint(), 1, 4096) == "tcp"
    write(log, endpoint("0x3", "cma/memory"))
    assert (log.new_endpoint(), log.new_endpoint()) == ("0x3", "")
    assert log.transport("w@1", "0x3", 2, 4096) == "cma"
    write(log, endpoint("0x4", "posix/memory"))
    assert log.transport("w@1", "0x4", 2, 4096) is None
    write(log, TCP)
    assert log.transport("w@1", "0x3", None, 4096) == "cma"


def test_the_row_of_the_block_size_counts(log):
    """Small and large reads may take different paths; several rails are all named."""
    rows = [
        "| 0..2047 | short | posix/memory |",
        "| 2048..65535 | zero-copy | rc_mlx5/mlx5_0:1 |",
        "| 64K..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on dc_mlx5/mlx5_1:1 |",
    ]
    rows[2] = rows[2].replace("64K", "65536")
    write(log, table("w@1", READ, *rows))
    assert log.transport("w@1", "0x1", 0, 64) == "posix"
    assert log.transport("w@1", "0x1", 0, 4096) == "rc_mlx5"
    assert log.transport("w@1", "0x1", 0, 1 << 20) == "rc_mlx5+dc_mlx5"


def test_tables_of_other_operations_and_agents_do_not_count(log):
    """Writes, messages and other agents of this process say nothing about this agent's reads."""
    write(log, table("w@1", "remote memory write by ucp_put* from host memory to host", "| 0..inf | x | cma/memory |"))
    write(log, table("other@1", READ, "| 0..inf | x | posix/memory |"))
    assert log.transport("w@1", "0x1", 0, 4096) is None
    assert log.transport("other@1", "0x1", 0, 4096) == "posix"


def test_a_line_cut_in_two_is_put_together(log):
    """UCX may have written half a line when the log is read."""
    half = len(CMA) - 30
    write(log, CMA[:half])
    log.tables("w@1")
    write(log, CMA[half:])
    assert log.transport("w@1", "0x1", 0, 4096) == "cma"


def test_trouble_is_passed_on_and_the_file_does_not_grow(log, caplog):
    """Warnings and errors reach Python's logging; what was read takes no memory any more."""
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            write(log, f"{STAMP} tcp_ep.c:260  UCX  ERROR connect() failed\n{STAMP} x.c:1 UCX  WARN  careful\n")
            log.tables("w@1")
    assert {(r.levelname, r.getMessage()) for r in caplog.records} == {
        ("ERROR", "UCX: connect() failed"),
        ("WARNING", "UCX: careful"),
    }
    assert os.fstat(log._fd).st_blocks * 512 <= 8192


def test_a_users_own_log_file_is_left_alone(log, monkeypatch):
    """With UCX_LOG_FILE set by the user nothing is captured, and nothing is known."""
    monkeypatch.setenv("UCX_LOG_FILE", "theirs.log")
    fresh = UcxLog()
    with fresh.capture():
        assert os.environ["UCX_LOG_FILE"] == "theirs.log"
    assert fresh.transport("w@1", "0x1", 0, 4096) is None
