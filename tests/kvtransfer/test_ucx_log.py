"""The transport of a link is learned from UCX's log, without guessing."""

from __future__ import annotations

import logging
import os

import pytest

from kvtransfer.backends.ucx_log import UcxLog
from kvtransfer.types import agent_name

STAMP = "[1795231426.745072] [host:3604 :0]   "


def table(agent, operation, *rows, cfg=1):
    lines = [
        "+-----+",
        f"| {agent} intra-node cfg#{cfg}      |",
        f"| {operation} |",
        "+-----+",
        "| Range | Description | Config |",
    ]
    return "".join(f"{STAMP}{line}\n" for line in [*lines, "+---+", *rows, "+---+"])


READ = "remote memory read by ucp_get*(multi) into host memory from host"
CMA = table("w@1", READ, "| 0..inf | zero-copy   | cma/memory |")
TCP = table("w@1", READ, "| 0..inf | software emulation | tcp/lo |", cfg=2)


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


def test_without_lanes_it_is_known_only_while_all_tables_agree(log):
    """A single candidate is the answer; with two the answer is None, not a guess."""
    write(log, CMA)
    assert log.transport("w@1", "0x1", 4096) == "cma"
    write(log, TCP)
    assert log.transport("w@1", "0x1", 4096) is None


def configured(name, lane, cfg=None):
    """UCX's output when it configures an endpoint, with a number if the configuration is new."""
    new = f"{STAMP} ucp_worker.c:1997 UCX  INFO    w@1 intra-node cfg#{cfg} rma_am(tcp/lo)\n" if cfg else ""
    head = f"{STAMP} wireup.c:1464 UCX  DEBUG   ep {name}: "
    return f"{new}{head}am_lane 0 wireup_msg_lane 0\n{head}lane[0]:  5:{lane} md[4] -> addr[5] rma_bw#0\n"


def endpoint(name, lane, cfg=None):
    made = f"{STAMP} ucp_ep.c:452 UCX  DEBUG created ep {name} to <no debug data> from api call\n"
    return made + configured(name, lane, cfg)


def test_peers_that_connect_at_once_are_told_apart(log):
    """Each endpoint has the table of its configuration, whatever was printed in between, and by its lanes if an earlier
    one has the same; unknown lanes give None."""
    write(log, endpoint("0x1", "cma/memory", 1))
    assert log.new_endpoint() == "0x1"
    write(log, endpoint("0x2", "tcp/lo", 2))
    write(log, endpoint("0x3", "cma/memory"))
    assert (log.new_endpoint(), log.new_endpoint()) == ("0x3", "")
    write(log, endpoint("0x4", "posix/memory"))
    write(log, TCP + CMA)
    names = [log.transport("w@1", name, 4096) for name in ("0x1", "0x2", "0x3", "0x4")]
    assert names == ["cma", "tcp", "cma", None]


def test_lanes_of_no_configuration_that_was_seen_are_not_guessed(log):
    """An endpoint over TCP is not taken for the only configuration whose table was printed: reads that failed over TCP
    may still arrive."""
    write(log, endpoint("0x1", "cma/memory", 1) + CMA + endpoint("0x2", "tcp/lo"))
    assert log.transport("w@1", "0x1", 4096) == "cma"
    assert log.transport("w@1", "0x2", 4096) is None


def test_agents_of_one_worker_differ_in_what_ucx_prints():
    """The id of a pod is longer than what UCX prints of a name, and a worker has an agent for each layout of KV that
    arrives: with one name their tables would be mixed. A short name stays as it is."""
    pod = "tandem-decode-7d9f6c5b8-x2x4z"
    names = [agent_name(pod, life) for life in ("0123456789abcdef", "0123456789abcdef-aaaaaaaa", "fedcba9876543210")]
    assert len({name[:31] for name in names}) == 3
    assert agent_name("decode-0", "0123456789abcdef") == "decode-0@0123456789abcdef"


def test_wire_up_may_configure_an_endpoint_anew(log):
    """The lanes printed last count, also if another endpoint was made in between."""
    write(log, endpoint("0x1", "cma/memory", 1) + endpoint("0x2", "cma/memory") + configured("0x1", "tcp/lo", 2))
    write(log, CMA + TCP)
    assert log.transport("w@1", "0x1", 4096) == "tcp"
    assert log.transport("w@1", "0x2", 4096) == "cma"


def test_configurations_that_the_lanes_cannot_tell_apart_are_not_guessed(log):
    """Equal lanes with two numbers and two paths leave None."""
    write(log, endpoint("0x1", "x/y", 1) + endpoint("0x2", "x/y", 2) + endpoint("0x3", "x/y") + CMA + TCP)
    assert log.transport("w@1", "0x3", 4096) is None


def test_endpoints_and_agents_that_are_gone_are_forgotten(log):
    """The state does not grow with peers that come and go or with connections from others; a new agent begins without
    state."""
    theirs = endpoint("0x9", "tcp/lo").replace("from api call", "remote connect")
    for _ in range(3):
        write(log, endpoint("0x1", "cma/memory", 1) + CMA + theirs)
        log.drop_endpoint("0x1")
    assert not log._lanes_of
    log.drop("w@1")
    write(log, endpoint("0x1", "cma/memory", 1) + TCP.replace("cfg#2", "cfg#1"))
    assert log.transport("w@1", "0x1", 4096) == "tcp"


def test_the_row_of_the_block_size_counts(log):
    """Small and large reads may take different paths; several network devices are all named."""
    rows = [
        "| 0..2047 | short | posix/memory |",
        "| 2048..65535 | zero-copy | rc_mlx5/mlx5_0:1 |",
        "| 64K..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on dc_mlx5/mlx5_1:1 |",
    ]
    rows[2] = rows[2].replace("64K", "65536")
    write(log, table("w@1", READ, *rows))
    assert log.transport("w@1", "0x1", 64) == "posix"
    assert log.transport("w@1", "0x1", 4096) == "rc_mlx5"
    assert log.transport("w@1", "0x1", 1 << 20) == "rc_mlx5+dc_mlx5"


def test_the_network_devices_of_the_chosen_transport_are_named(log):
    """Devices are taken from the row of the block size; host memory is no device, and unknown devices give an empty
    string."""
    rows = [
        "| 0..65535 | short | tcp/eth1 |",
        "| 65536..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |",
    ]
    write(log, endpoint("0x1", "a/b", 1) + endpoint("0x2", "cma/memory", 2))
    write(log, table("w@1", READ, *rows) + table("w@1", READ, "| 0..inf | zero-copy | cma/memory |", cfg=2))
    assert log.devices("w@1", "0x1", 4096) == "eth1"
    assert log.devices("w@1", "0x1", 1 << 20) == "mlx5_0:1+mlx5_1:1"
    assert log.devices("w@1", "0x2", 1 << 20) == log.devices("w@1", "0x3", 4096) == ""


def test_tables_of_other_operations_and_agents_do_not_count(log):
    """Writes, messages and other agents of this process say nothing about this agent's reads."""
    write(log, table("w@1", "remote memory write by ucp_put* from host memory to host", "| 0..inf | x | cma/memory |"))
    write(log, table("other@1", READ, "| 0..inf | x | posix/memory |"))
    assert log.transport("w@1", "0x1", 4096) is None
    assert log.transport("other@1", "0x1", 4096) == "posix"


def test_a_line_cut_in_two_is_put_together(log):
    """A line of which UCX has written only a part when the log is read is parsed when it is complete."""
    half = len(CMA) - 30
    write(log, CMA[:half])
    log.new_endpoint()
    write(log, CMA[half:])
    assert log.transport("w@1", "0x1", 4096) == "cma"


def test_trouble_is_passed_on_and_the_file_does_not_grow(log, caplog):
    """Warnings and errors are passed to Python's logging; the memory of what was read is freed. No peer needs to
    connect for that."""
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            write(log, f"{STAMP} tcp_ep.c:260  UCX  ERROR connect() failed\n{STAMP} x.c:1 UCX  WARN  careful\n")
            log.read()
    assert {(r.levelname, r.getMessage()) for r in caplog.records} == {
        ("ERROR", "UCX: connect() failed"),
        ("WARNING", "UCX: careful"),
    }
    assert os.fstat(log._fd).st_blocks * 512 <= 8192


def test_a_users_own_log_file_is_left_alone(log, monkeypatch):
    """With UCX_LOG_FILE set by the user nothing is captured, and the transport stays unknown."""
    monkeypatch.setenv("UCX_LOG_FILE", "theirs.log")
    fresh = UcxLog()
    with fresh.capture():
        assert os.environ["UCX_LOG_FILE"] == "theirs.log"
    assert fresh.transport("w@1", "0x1", 4096) is None
