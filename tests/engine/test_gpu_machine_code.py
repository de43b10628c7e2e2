"""The GPU kernels as machine code, compiled here without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.microbench.machine_code import Code

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")
ROOT = Path(__file__).parents[2]


def test_nothing_is_spilled_and_attention_uses_tensor_cores() -> None:
    """For Ampere and Hopper, of the most common head size; the command checks the others. In a process of its own: the
    interpreter replaces the compiler where it is asked for."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "loadtest", "machine-code", "--architectures", "80,90", "--dims", "128"]
    done = subprocess.run(
        [*command, "--no-variants"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("attend 128") == 4
    assert done.stdout.count("product 4096 x 4096") == 4
    assert done.stdout.count("place_heads") == done.stdout.count("rotate") == 2
    assert done.stdout.count("gated") == 4  # gates, and the delta rule
    assert done.stdout.count("digest") == done.stdout.count("sampling") == 2
    assert {done.stdout.count(one) for one in ("delta 128 x 128", "scan", "short convolution")} == {4}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (Code("k", 80, 255, 0, 20_000, 16), ""),
        (Code("k", 80, 255, 8, 20_000, 16), "spilled"),
        (Code("k", 89, 90, 0, 100 * 1024, 16), "shared memory"),
        (Code("k", 90, 90, 0, 20_000, 0), "tensor cores"),
    ],
)
def test_control_each_problem_is_one(code: Code, problem: str) -> None:
    """A stack, too much shared memory, no tensor cores."""
    assert problem in code.problem
    assert bool(code.problem) == bool(problem)
