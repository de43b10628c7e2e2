"""Products by tiles whose weights are codes or contiguous columns: the bits of the same weight in bfloat16 panels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine import kernels
from engine.core.weight_formats import BITS
from engine.kernels import weight_quantization

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
FORMATS = sorted(BITS)
IN_PLACE = [(130, 96), (50, 2080)]  # of many rows, x is read where it is
SHAPES = [(1, 1), (3, 2), (64, 32), (65, 33), (130, 577), (7, 1000), (50, 2100), *IN_PLACE]  # weights [n, k]
ROWS = [*range(1, 34), 100, 600]
GROUPS = [2, 30, 32, 34, 64, 96, 128, 512]

tiled = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE or "tile32" not in torch.ops.tandem.orders(),
    reason="tiles need the compiled operators and bfloat16 by AVX-512",
)


@pytest.fixture(autouse=True)
def by_tiles() -> Iterator[None]:
    torch.manual_seed(0)
    if kernels.serving(CPU) == kernels.REFERENCE or "tile32" not in torch.ops.tandem.orders():
        yield
        return
    before = torch.ops.tandem.order()
    torch.ops.tandem.use_order("tile32")
    yield
    torch.ops.tandem.use_order(before)


@contextmanager
def emulated() -> Iterator[None]:
    before = torch.ops.tandem.emulate(True)
    try:
        yield
    finally:
        torch.ops.tandem.emulate(before)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.tandem.linear(x, torch.ops.tandem.pack(weight), bias, *weight.shape)
    return out


def columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x times weight [n, k] transposed, by the operator that replaces torch's in a step."""
    with kernels.exact(CPU):
        return torch.mm(x, weight.T)


def wide(rows: int, k: int) -> torch.Tensor:
    """Numbers of many magnitudes: small ones of one magnitude have exact sums with integers, in any order."""
    return (torch.randn(rows, k) * torch.randn(rows, k).mul(3).exp()).bfloat16()


def random_codes(n: int, k: int, format: str) -> torch.Tensor:
    """Any codes, including int8's -128; of bfloat16 the numbers below one."""
    above = {"int8": 256, "fp8": 127, "int4": 16, "bf16": 0x3F80}[format]
    return torch.randint(0, above, (n, k)).to(torch.int16)


def coded(codes: torch.Tensor, format: str, group: int | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with these codes, scaled by one or, with a group, by random scales of each group."""
    n, k = codes.shape
    scales = torch.ones(n, 1) if group is None else torch.rand(n, -(-k // group)) + 0.5
    packed, scaled = torch.ops.tandem.pack_codes(codes, format), torch.ops.tandem.pack_scales(scales)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.tandem.linear_codes(x, packed, scaled, None, n, k, group or k + k % 2, format)
        return out

    return multiply


@tiled
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_scale_has_the_bits_of_a_bfloat16_weight(format: str, shape: tuple[int, int]) -> None:
    """Codes give the same bits as the bfloat16 weight with their values, for any number of rows."""
    codes = random_codes(*shape, format)
    weight, multiply = weight_quantization.values_of(codes, format).bfloat16(), coded(codes, format)
    for rows in ROWS:
        x = wide(rows, shape[1])
        assert torch.equal(multiply(x), linear(x, weight))


@tiled
def test_another_order_has_other_bits() -> None:
    """The bits above are those of tile32: in the order `pairs` the same product has others."""
    codes, x = random_codes(130, 577, "int8"), wide(100, 577)
    multiply = coded(codes, "int8")
    in_tiles = multiply(x)
    torch.ops.tandem.use_order("pairs")
    assert not torch.equal(multiply(x), in_tiles)


@tiled
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("format", ["int4", "int8"])
def test_groups(format: str, group: int) -> None:
    """Groups that fill steps of tiles or do not: right, each row with the same bits alone and by FMA."""
    for n, k in ((65, 33), (70, 577), (7, 1000)):
        codes = random_codes(n, k, format)
        multiply, ones = coded(codes, format, group), weight_quantization.values_of(codes, format)
        weight = torch.stack([multiply(row) for row in torch.eye(k).bfloat16().unsqueeze(1)]).squeeze(1).T  # rounded
        assert ((weight / ones)[ones != 0] >= 0.49).all()
        for rows in (1, 2, 16, 17, 33, 100):
            x = wide(rows, k)
            got, exact = multiply(x), x.double() @ weight.double().T
            size = x.double().abs() @ weight.double().abs().T
            assert ((got - exact).abs() <= 2**-8 * (exact.abs() + size)).all()
            assert torch.equal(got, torch.cat([multiply(row) for row in x.split(1)]))
            with emulated():
                assert torch.equal(multiply(x), got)


@tiled
@pytest.mark.parametrize("groups", [1, 4])
def test_a_group_is_summed_and_scaled_once(groups: int) -> None:
    """The sum of each group is that of `linear` over its part of k, in float32; here parts whose sums are exact."""
    n, k = 70, 128 * groups
    codes, x = random_codes(n, k, "int4"), torch.randint(-4, 5, (40, k)).bfloat16()
    scales = torch.rand(n, groups) + 0.5
    packed, scaled = torch.ops.tandem.pack_codes(codes, "int4"), torch.ops.tandem.pack_scales(scales)
    got = torch.ops.tandem.linear_codes(x, packed, scaled, None, n, k, 128, "int4")
    total = torch.zeros(40, n, dtype=torch.float64)
    for group in range(groups):
        part = slice(128 * group, 128 * (group + 1))
        sums = x[:, part].double() @ weight_quantization.values_of(codes[:, part], "int4").double().T
        total = (sums * scales[:, group].double() + total).float().double()  # one rounding: an FMA
    assert torch.equal(got, total.bfloat16())


@tiled
@pytest.mark.parametrize("shape", SHAPES)
def test_columns_have_the_bits_of_a_packed_weight(shape: tuple[int, int]) -> None:
    """With any number of rows, alone and by FMA; memory past a column, here NaN, is not read."""
    n, k = shape
    weight = torch.full((n, k + 5), float("nan")).bfloat16()
    weight[:, :k] = torch.randn(n, k)
    weight = weight[:, :k]
    for rows in ROWS:
        x = wide(rows, k + 3)[:, :k]
        got = columns(x, weight)
        assert torch.equal(got, linear(x, weight))
        if rows > 33:
            continue
        assert torch.equal(got, torch.cat([columns(row, weight) for row in x.split(1)]))
        with emulated():
            assert torch.equal(columns(x, weight), got)


@tiled
def test_a_row_that_is_not_finite_stays_alone() -> None:
    """NaN and infinity in one row of x change no bit of the others."""
    weight, x = torch.randn(70, 100).bfloat16(), torch.randn(20, 100).bfloat16()
    multiply = coded(random_codes(70, 100, "int8"), "int8")
    for product in (multiply, lambda rows: columns(rows, weight)):
        expected, poisoned = product(x), x.clone()
        poisoned[5, 7], poisoned[6] = float("inf"), float("nan")
        got = product(poisoned)
        others = [row for row in range(20) if row not in (5, 6)]
        assert torch.equal(got[others], expected[others])
        assert got[6].isnan().all()


@tiled
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_denormals_are_zero_whatever_computes(format: str) -> None:
    """One row is summed by other instructions than several; a scale can make visible what was too small for float32.
    The control: it is, where sums keep denormals."""
    n, k, scale = 70, 200, 2.0**120
    codes = random_codes(n, k, format)
    packed, scaled = torch.ops.tandem.pack_codes(codes, format), torch.ops.tandem.pack_scales(torch.full((n, 1), scale))
    x = (torch.randn(17, k) * 2.0 ** torch.randint(-134, -118, (17, k))).bfloat16()
    x[3] = torch.full((k,), 2.0**-130)

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.tandem.linear_codes(rows, packed, scaled, None, n, k, k, format)
        return out

    kept = x.double() @ weight_quantization.values_of(codes, format).double().T * scale
    assert (kept[3] != 0).all()
    got = multiply(x)
    assert not got[3].any()
    assert got.any(1).sum() == 16
    assert torch.equal(got, torch.cat([multiply(row) for row in x.split(1)]))
    with emulated():
        assert torch.equal(got, multiply(x))


@tiled
def test_products_do_not_depend_on_the_threads() -> None:
    """One thread and three give the same bits, for few panels and for many."""
    for n, rows in ((131, 300), (4099, 5), (300, 1100)):
        weight, x = torch.randn(n, 203).bfloat16(), wide(rows, 203)
        multiply = coded(random_codes(n, 203, "int4"), "int4", 32)
        alone, before = (multiply(x), columns(x, weight)), torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            parallel = multiply(x), columns(x, weight)
        finally:
            torch.set_num_threads(before)
        assert all(map(torch.equal, parallel, alone))


# ---- processes

PRODUCTS = """
import ctypes, sys
refused, rounds, core = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if refused:  # a stack for signals that cannot hold the tiles' registers: Linux then gives no permission for these
    memory = ctypes.create_string_buffer(8192)
    class Stack(ctypes.Structure):
        _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
    own = Stack(ctypes.addressof(memory), 0, 8192)
    assert ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(own), None) == 0
import os
if core >= 0:
    os.sched_setaffinity(0, {core})
import torch, xxhash
from engine import kernels
torch.set_num_threads(1)
assert kernels.serving(torch.device("cpu")) != kernels.REFERENCE
default = torch.ops.tandem.order()
torch.ops.tandem.use_order("tile32")
torch.manual_seed(0)
x, weight = (torch.randn(100, 577) * torch.randn(100, 577).mul(3).exp()).bfloat16(), torch.randn(130, 577).bfloat16()
codes = torch.ops.tandem.pack_codes(torch.randint(0, 256, (130, 577)).short(), "int8")
scales = torch.ops.tandem.pack_scales(torch.rand(130, 1))
panels = torch.ops.tandem.pack(weight)
print("ready", torch.ops.tandem.tiles(), default, flush=True)
sys.stdin.readline()
digests = set()
for _ in range(rounds):
    with kernels.exact(torch.device("cpu")):
        made = [torch.mm(x, weight.T)]
    made.append(torch.ops.tandem.linear(x, panels, None, 130, 577))
    made.append(torch.ops.tandem.linear_codes(x, codes, scales, None, 130, 577, 578, "int8"))
    digests.add(xxhash.xxh3_128(b"".join(each.view(torch.int16).numpy().tobytes() for each in made)).hexdigest())
print(*digests, flush=True)
"""


def process(refused: bool, rounds: int, core: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PRODUCTS, str(int(refused)), str(rounds), str(core)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def bits(processes: list[subprocess.Popen[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Each one's output when it is ready, and the digests of its results; all compute at the same time."""
    ready = []
    for each in processes:
        assert each.stdout is not None
        ready.append(each.stdout.readline().split()[1:])
    for each in processes:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return ready, [each.communicate(timeout=600)[0].split() for each in processes]


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """The digests of a process that nothing disturbs, and by what it computed."""
    ready, digests = bits([process(False, 1, -1)])
    assert len(digests[0]) == 1
    return [*ready[0], *digests[0]]


@tiled
@pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE or torch.ops.tandem.orders()[0] != "tile32", reason="no AMX"
)
def test_without_permission_fma_has_the_same_bits(alone: list[str]) -> None:
    """Where Linux refuses the tile registers nothing ends by SIGILL: FMA computes the tiles, with the bits of AMX."""
    ready, digests = bits([process(True, 1, -1)])
    assert (alone[:2], ready) == (["amx", "tile32"], [["fma", "pairs"]])
    assert digests == [alone[2:]]


@tiled
def test_two_processes_on_one_core_keep_their_tiles(alone: list[str]) -> None:
    """While the system switches between them, saving and restoring registers, every result has the same bits."""
    core = min(os.sched_getaffinity(0))
    _, digests = bits([process(False, 300, core), process(False, 300, core)])
    assert digests == [alone[2:], alone[2:]]
