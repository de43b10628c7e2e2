"""The GPU kernels as machine code, compiled here without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.microbench.machine_code import Code, barriers, other_order

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")
ROOT = Path(__file__).parents[2]


ALL_AND_TIGHT = """
import torch
from loadtest.commands import main
assert main("machine-code --architectures 90 --dims 128 --no-variants".split()) == 0
print("TIGHT")
from loadtest.microbench.machine_code import attention, experts, latents, product
for code in (
    product(80, 4096, 4096, rows=65),
    product(100, 4096, 4096, rows=65, several=True),
    experts(80, rows=65, transposed=True, bias=True),
    attention(89, 512, single=False),
    attention(89, 512, single=False, dtype=torch.float32),
    attention(90, 256, single=True, dtype=torch.float32),
    attention(80, 128, single=False, kept="fp8"),
    latents(100, 512, 64, single=True, kept="fp8"),
    latents(80, 512, 64, single=False, kept="int8"),
    latents(89, 512, 64, single=False, dtype=torch.float32),
):
    print(code.kernel, code.architecture, code.problem)
"""


@pytest.fixture(scope="module")
def said() -> tuple[str, str]:
    """About all kernels for Hopper, and about the tightest tiles; from a process of its own, for where the interpreter
    is asked for it replaces the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", ALL_AND_TIGHT],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    everything, _, tight = done.stdout.partition("TIGHT\n")
    return everything, tight


def test_nothing_is_spilled_and_attention_uses_tensor_cores(said: tuple[str, str]) -> None:
    """Every kernel for Hopper, of the most common head size; the command checks other sizes and architectures."""
    told, _ = said
    assert told.count("attend 128") == told.count("attend latents 512 + 64") == 2
    assert told.count("each head") == 4
    assert told.count("product 4096 x 4096") == 6  # in three tiles, and of several layers
    assert told.count("experts 1536 x 2048") == 3
    assert told.count("plan of pairs") == told.count("clamped gate") == told.count("mix") == 1
    assert told.count("place_heads") == told.count("rotate") == 1
    assert told.count("merge parts") == told.count("write i8 pages") + told.count("write u8 pages") == 2
    assert told.count("gated") == 2  # gates, and the delta rule
    assert told.count("digest") == told.count("sampling") == 1
    assert {told.count(one) for one in ("delta 128 x 128", "scan", "short convolution")} == {2}


def test_the_tightest_tiles_fit(said: tuple[str, str]) -> None:
    """A product on Ampere, several layers' with a bias on Blackwell, experts as gpt-oss stores them, the largest heads
    with least shared memory, float32 without tensor cores, fp8 pages where the processor has no fp8, and quantised
    latents."""
    _, tight = said
    assert [line.split()[-1] for line in tight.splitlines()] == [
        *("80", "100", "80", "89", "89", "90", "80"),
        *("100", "80", "89"),
    ], tight


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (Code("k", 80, 255, 0, 20_000, 16), ""),
        (Code("k", 80, 255, 8, 20_000, 16), "spilled"),
        (Code("k", 89, 90, 0, 100 * 1024, 16), "shared memory"),
        (Code("k", 90, 90, 0, 20_000, 0), "tensor cores"),
        (Code("k", 90, 90, 0, 20_000, 16, sums=1), "order"),
        (Code("attend 64, prompts", 90, 90, 0, 20_000, 16, barriers=0), "barrier"),
        (Code("k", 90, 90, 0, 20_000, 16, rows=64, of_hopper=4, copies=4), ""),
        (Code("k", 90, 90, 0, 20_000, 16, rows=64, copies=4), "as Ampere has them"),
        (Code("k", 90, 90, 0, 20_000, 16, rows=16, copies=0), "no copies"),
    ],
)
def test_control_each_problem_is_one(code: Code, problem: str) -> None:
    """A stack, too much shared memory, no tensor cores, sums that no product makes, values that another thread may
    load too early, the instructions of an older GPU, and a loop that Triton does not pipeline."""
    assert problem in code.problem
    assert bool(code.problem) == bool(problem)


def test_control_products_of_permuted_operands_are_noticed() -> None:
    """Bytes that are widened in registers come four at a time there: a token alone would be summed in another order
    than in a chunk. What another architecture does, does not matter."""
    alone, chunk, elsewhere = (
        Code(f"attend 64, int8 KV, {what}", architecture, 90, 0, 20_000, 16, widths=frozenset(widths))
        for what, architecture, widths in (("one query", 90, {2, 4}), ("prompts", 90, {2}), ("prompts", 80, {2, 4}))
    )
    assert other_order([alone, chunk, elsewhere]) == [chunk]
    assert other_order([chunk, elsewhere]) == []


def test_barriers_are_counted_after_the_last_store_of_a_loop() -> None:
    """Those before it and those outside the loop do not keep another thread from loading too early."""
    ptx = "$L__BB0_1:\n{}\tst.global.b32 [%rd1], %r1;\n{}\t@%p1 bra \t$L__BB0_1;\n\tbar.sync 0;\n"
    assert barriers(ptx.format("\tbar.sync 0;\n", "")) == 0
    assert barriers(ptx.format("", "\tbar.sync \t0;\n")) == 1
    assert barriers("\tst.global.b32 [%rd1], %r1;\n") is None
