"""The benchmark runs, has every part, and leaves nothing behind. What the numbers are, it does not say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.microbench import hop
from tests.support.processes import below
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


PRODUCT = ("-m", "loadtest")
COPIED = ("-c", "from tests.support import copied_services; copied_services.main()")


def start(
    folder: Path, *arguments: str, name: str = "bench", program: tuple[str, str] = PRODUCT
) -> subprocess.Popen[str]:
    """A benchmark, with a temporary folder of its own and a mark that its children inherit."""
    env = {**os.environ, "TMPDIR": str(folder), "LOADTEST_MARK": str(folder)}
    command = [sys.executable, *program, name, "--quick", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_behind(folder: Path) -> list[str]:
    """Processes with the mark, and files in the temporary folder. torch keeps a cache there, for other runs."""
    found = [str(path) for path in folder.iterdir() if not path.name.startswith("torchinductor")]
    for process in psutil.process_iter(["cmdline"]):
        try:
            if process.environ().get("LOADTEST_MARK") == str(folder):
                found.append(" ".join(process.info["cmdline"]))
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return found


@pytest.fixture
def folder() -> Any:
    """Short, because a socket's path must be."""
    with tempfile.TemporaryDirectory(prefix="tdm-", dir="/tmp") as path:
        yield Path(path)


@pytest.mark.timeout(620)
def test_a_quick_run_measures_all_parts(folder: Path, tmp_path: Path) -> None:
    """Each part has rows, each row a ratio above zero within its middle half, and the conditions are told. Those of
    telemetry are one plus a difference of processor times, which two rounds beside other work can make anything."""
    report_file = tmp_path / "report.json"
    process = start(folder, "--json", str(report_file), program=COPIED)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    report = json.loads(report_file.read_text())
    assert list(report["sections"]) == ["step", "link", "hop", "ttft", "spec", "telemetry"]
    assert {"cpu", "instructions", "operators", "cores", "torch", "threads"} <= report["conditions"].keys()
    assert report["machine"]["peaks"][0]["read"] > 0
    assert report["conditions"]["cpu"] in output
    assert "streaming read" in output
    for name, section in report["sections"].items():
        assert section["title"] in output
        assert section["rows"], name
        for row in section["rows"]:
            ratio = row["ratio"]
            assert ratio["low"] <= ratio["median"] <= ratio["high"] < float("inf"), row
            assert ratio["low"] > (-float("inf") if name == "telemetry" else 0), row
            assert ratio["count"] > 1, row
    wait_until(lambda: not left_behind(folder), 30, lambda: left_behind(folder))  # what is copied ends when it notices


def test_a_stream_that_came_in_one_message_has_a_time_per_token() -> None:
    """As on a busy machine, where an interval of 0 made a ratio of 0. The control: two messages have an interval."""
    assert hop._Stream(sent=1.0, at=[3.0], tokens=4).per_token == 0.5
    assert hop._Stream(sent=1.0, at=[3.0, 6.0], tokens=4).per_token == 1.0


@pytest.mark.timeout(320)
def test_nothing_is_left_behind_when_it_is_stopped(folder: Path) -> None:
    """SIGTERM in the middle of a part unwinds everything that was started."""
    process = start(folder, "--only", "hop")
    while not any("services" in words for words in below(psutil.Process.cmdline, process.pid).values()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)  # each look is at all processes of the machine
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    wait_until(lambda: not left_behind(folder), 30, lambda: left_behind(folder))  # Linux ends one that just began


@pytest.mark.timeout(320)
def test_a_short_soak_balances_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """A whole `tandem up` was loaded, watched process by process, audited and ended."""
    report_file = tmp_path / "report.json"
    process = start(folder, "soak", "--requests", "30", "--json", str(report_file), name="peers")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "balanced" in output
    report = json.loads(report_file.read_text())
    (section,) = report["sections"].values()
    assert report["machine"]["peaks"][0]["read"] > 0
    assert "streaming read" in output
    assert {"router-0", "prefill-0", "decode-0"} <= section["details"]["rss_mib"].keys()
    assert section["details"]["requests"][-1] == 30
    assert left_behind(folder) == []
