"""What a benchmark says of its machine: the peaks are those of what was run, and the floors follow from them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import kernels
from loadtest.commands import main
from loadtest.harness import machine
from loadtest.harness.machine import QUICK, Machine, Peaks, Sizes, reader
from loadtest.harness.random_checkpoints import REAL
from loadtest.microbench import prefill, products, step

CPU = torch.device("cpu")
built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


def test_floors_follow_from_the_peaks() -> None:
    """Products at the best rate of bfloat16, whoever's, and weights with the KV of each sequence at that of reading."""
    rates = {"bfloat16, ours": 1e12, "bfloat16, torch": 5e11, "float32, ours": 9e12}
    peaks = [Peaks(1, rates, 1e10), Peaks(2, rates, 2e10)]
    floors = Machine("CPU", [], "", 2, peaks).floors("SmolLM2-135M")
    layers, head = 106_168_320, 49152 * 576  # SmolLM2-135M: 30 layers of 576 x (1152 + 384 + 4608)
    assert floors["prefill 512"] == [pytest.approx(2 * layers * 512 / 1e12)] * 2
    one = 2 * (layers + head) + 256 * 23040  # K and V of 30 layers, 3 heads of 64, 2 bytes
    assert floors["decode 1 x 256"] == [pytest.approx(one / 1e10), pytest.approx(one / 2e10)]
    assert floors["decode 16 x 256"][0] == pytest.approx((one + 15 * 256 * 23040) / 1e10)


@built
def test_the_sizes_of_a_shape_are_those_of_its_products() -> None:
    """What `loadtest.microbench.products` packs, and more for what fills up panels."""
    shape = {**REAL["Qwen3-0.6B"], "num_hidden_layers": 2, "vocab_size": 4800}
    parts, _ = products._packed([(4800, 1024), (3072, 1024)])
    assert [part.numel() for part in parts] == [4800 * 1024, 3072 * 1024]
    assert Sizes.of(shape).head == 4800 * 1024
    _, _, size = products.products(shape)
    assert size == Sizes.of(shape).weight_bytes == 2 * (2 * 15_728_640 + 4800 * 1024)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("fpu sse2 avx2 fma", ["AVX2"]),
        ("avx2 avx512f avx512bw", ["AVX2", "AVX-512"]),
        ("avx512f avx2 amx_tile avx512_bf16 amx_bf16", ["AVX2", "AVX-512", "AVX512-BF16", "AMX"]),
        ("amx_tile", []),
    ],
)
def test_it_says_what_the_processor_can_do(flags: str, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that people use, in one order; tiles without bfloat16 are no help here."""
    monkeypatch.setattr(machine, "processor", lambda: ("Some CPU", f"vendor_id: X; flags: {flags}"))
    about = machine.describe()
    assert (about["processor"], about["instructions"]) == ("Some CPU", told)
    wanted = "plain PyTorch" if kernels.serving(CPU) == kernels.REFERENCE else f"{kernels.serving(CPU)}, order "
    assert about["operators"].startswith(wanted)


def test_alone_it_prints_a_table_and_writes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each peak with each number of threads, and torch has as many threads as before."""
    before, file = torch.get_num_threads(), tmp_path / "machine.json"
    assert main(["machine", "--quick", "--threads", "1,2", "--json", str(file)]) == 0
    out, found = capsys.readouterr().out, json.loads(file.read_text())
    assert [peaks["threads"] for peaks in found["peaks"]] == [1, 2]
    for peaks in found["peaks"]:
        assert peaks["read"] > 0
        for name, rate in peaks["products"].items():
            assert rate > 0
            assert f"product in {name}" in out
    assert "streaming read" in out
    assert "Qwen3-0.6B, bfloat16: decode 16 x 256" in out
    assert len(found["floors"]["Qwen3-0.6B"]["prefill 512"]) == 2
    assert torch.get_num_threads() == before


@built
def test_products_that_wait_are_not_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best repeat counts, and of several shapes the best one; of ours and torch's each has its own."""
    seconds = iter([9.0, 4.0, 2.0, 8.0] * 4)

    def rigged(dtype: torch.dtype, shape: Any) -> dict[str, Any]:
        return {"torch": lambda: 1.0, "ours": lambda: next(seconds)} if dtype == torch.bfloat16 else {}

    monkeypatch.setattr(machine, "products", rigged)
    plan = machine.Plan(shapes=((1, 1, 10),), stream=4096, repeats=3)
    (peaks,) = machine.measure([1], plan).peaks
    assert peaks.products == {"bfloat16, torch": 20.0, "bfloat16, ours": 10.0}
    assert peaks.of("bfloat16") == 20.0


def test_all_of_the_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of that many ones is their number."""
    monkeypatch.setattr(machine, "taken", lambda work: work())
    assert reader(1 << 16)() == [(1 << 16) / 4]


def test_a_step_says_whether_it_keeps_its_share_of_the_floor() -> None:
    """Half of the floor's time is twice of it; without a promise nothing is said."""
    found = {"packed": [1.0, 1.0], "sdpa": [2.0, 2.0], "eager": [2.0, 2.0]}
    for floor, wanted, mark in (
        (0.9, 0.85, "(≥ 0.85: kept)"),
        (0.8, 0.85, "(≥ 0.85: NOT KEPT)"),
        (0.8, None, "packed"),
    ):
        row = step._rows("decode", found, [floor, floor], wanted)[-1]
        assert row.what.endswith(mark)
        assert row.ratio.median == floor


@built
def test_products_are_told_as_shares_of_the_bandwidth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of that of reading in the same run, with what is wanted of 1, 8 and 16 rows."""
    tiny = {**REAL["SmolLM2-135M"], "num_hidden_layers": 2, "hidden_size": 192, "vocab_size": 960}
    monkeypatch.setitem(REAL, "SmolLM2-135M", tiny | {"intermediate_size": 384})
    monkeypatch.setattr(products, "reader_of", lambda each: lambda: each[0].nbytes / 1e9)  # 1 GB/s
    before = torch.get_num_threads()
    try:
        assert main(["products", "--shape", "SmolLM2-135M", "--rows", "1,2,8", "--repeats", "2"]) == 0
    finally:
        torch.set_num_threads(before)
    out = capsys.readouterr().out
    assert "weights are read at 1.0 GB/s" in out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| ")][1:]
    assert [(row[0], row[7]) for row in rows] == [("1", "at least 90%"), ("2", ""), ("8", "at least 80%")]
    for row in rows:
        assert float(row[5].rstrip("%")) == pytest.approx(100 * float(row[4]), abs=6)
        assert float(row[6].rstrip("%")) >= float(row[5].rstrip("%")) - 1  # reading is one of the two floors


@built
def test_a_prefill_is_told_as_a_share_of_its_floor_at_the_same_rank_of_their_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Products run at 1e9 FLOP/s here, and in one turn of four at 4e9."""
    needed = 2 * 512 * Sizes.of(REAL["SmolLM2-135M"]).layers / 1e9
    seconds = {"checkpoint": itertools.repeat(2 * needed), "int8": itertools.repeat(4 * needed)}
    monkeypatch.setattr(prefill, "make_checkpoint", lambda folder, shape: folder)
    monkeypatch.setattr(prefill, "_engine", lambda _, weights: weights)
    monkeypatch.setattr(prefill, "new_prompt", lambda weights, _: lambda: next(seconds[weights]))
    turns = {
        size: itertools.cycle([2 * math.prod(size) / rate for rate in (4e9, 1e9, 1e9, 1e9)])
        for size in machine.Plan().shapes
    }
    monkeypatch.setattr(machine, "products", lambda _, size: {"ours": lambda: next(turns[size])})
    before = torch.get_num_threads()
    try:
        assert main(["prefill", "--repeats", "10"]) == 0
    finally:
        torch.set_num_threads(before)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    shares = {(row[0].lstrip("| "), row[1]): (row[3], row[4]) for row in rows}
    assert shares["least", "checkpoint"] == ("12%", "1.00")
    assert shares["median", "checkpoint"] == ("50%", "1.00")
    assert shares["median", "int8"] == ("25%", "2.00")


def test_a_quick_plan_is_a_small_one() -> None:
    """It takes milliseconds, so that the tests can run it."""
    assert sum(2 * m * k * n for m, k, n in QUICK.shapes) * QUICK.repeats < 1e7
    assert QUICK.stream * QUICK.repeats < 1e8
