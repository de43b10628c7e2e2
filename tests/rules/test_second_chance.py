"""What is tried once more when it fails, and what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
calls = []


class Done:
    token_ids = [1]


def test_late():
    calls.append(1)
    assert len(calls) > 1


def test_tokens():
    assert Done.token_ids == [2]


def test_ledger():
    faults = ("block 3 is held",)
    assert not faults, f"faults: {faults}"
"""


@pytest.mark.parametrize(("folder", "summary"), [("journey", "2 failed, 1 passed, 1 rerun"), ("engine", "3 failed")])
def test_a_busy_machine_gets_a_second_chance_and_a_wrong_answer_none(tmp_path: Path, folder: str, summary: str) -> None:
    """Only with processes and clocks, and never for tokens or books."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", os.devnull, str(tmp_path / folder)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert summary in done.stdout, done.stdout + done.stderr
