"""One build serves any host: a library for each level of instruction sets, and a common order of sums."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import kernels
from engine.builder import build_engine
from engine.kernels import build
from engine.loading.model_loader import load_model
from tandem.errors import SettingsError
from tandem.settings import Settings

CPU = torch.device("cpu")
NAMED = [level for level in build.LEVELS if level != build.NATIVE]
V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "sse4_2"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
PROCESSORS = {
    "Zen 4": V4 | {"avx512_bf16", "avx512vbmi"},
    "Cooper Lake": V4 | {"avx512_bf16"},
    "Ice Lake": V4 | {"avx512vbmi"},
    "Haswell": V3,
    "Nehalem": {"sse4_2"},
}
RUNS = {
    "Zen 4": ["avx512_bf16", "avx512", "avx2", "native"],
    "Cooper Lake": ["avx512", "avx2", "native"],
    "Ice Lake": ["avx512", "avx2", "native"],
    "Haswell": ["avx2", "native"],
    "Nehalem": ["native"],
}


class Operators:
    """Stand-in for `torch.ops.tandem` of a loaded library."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.used: list[str] = []

    def load_library(self, path: str) -> None:
        self.loaded.append(Path(path).name.split("-")[1])

    def isa(self) -> str:
        return self.loaded[-1]

    def orders(self) -> list[str]:
        return list(kernels.ORDERS.get(self.isa(), ("chain4",)))

    def use_order(self, order: str) -> None:
        assert order in self.orders()
        self.used.append(order)

    def order(self) -> str:
        return self.used[-1] if self.used else self.orders()[0]

    def tiles(self) -> str:
        return "amx" if self.order() == "tile32" else ""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Operators]:
    """`host(processor, *built)`: a machine on which these levels are built and nothing is loaded yet."""

    def made(processor: str, *levels: str) -> Operators:
        operators = Operators()
        monkeypatch.setattr(build, "processor", lambda: frozenset(PROCESSORS[processor]))
        monkeypatch.setattr(build, "FOLDER", tmp_path)
        monkeypatch.setattr(kernels, "_loaded", None)
        monkeypatch.setattr(torch.ops, "load_library", operators.load_library)
        monkeypatch.setattr(torch.ops, "tandem", operators)
        monkeypatch.delenv(kernels.ONLY, raising=False)
        for level in levels:
            build.library(level).touch()
        return operators

    return made


# ---- what is built


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_has_the_levels_whose_every_instruction_it_has(
    host: Callable[..., Operators], processor: str
) -> None:
    """The best first; a processor with none of them gets operators that are compiled for it alone."""
    host(processor)
    assert build.runnable() == RUNS[processor]


def test_the_name_of_a_library_says_nothing_of_the_machine_that_built_it(
    host: Callable[..., Operators], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each level has its own name, the same on any machine; the control is the library compiled for its machine.
    Another torch or another option gives another name."""
    names: dict[str, set[str]] = {level: set() for level in build.LEVELS}
    for processor in ("Zen 4", "Haswell"):
        host(processor)
        for level, found in names.items():
            found.add(build.library(level).name)
    assert {level: len(found) for level, found in names.items()} == {**dict.fromkeys(NAMED, 1), build.NATIVE: 2}
    assert len(set().union(*names.values())) == len(NAMED) + 2
    monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "-g"))
    assert build.library("avx2").name not in names["avx2"]
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert build.library("avx2").name not in names["avx2"]


def test_no_level_depends_on_the_processor_that_builds_it() -> None:
    """-march=native and -mtune=native depend on the builder: two builders would compile two programs."""
    for level in NAMED:
        assert not any("native" in option for option in (*build.OPTIONS, *build.LEVELS[level].options))
    assert any("native" in option for option in build.LEVELS[build.NATIVE].options)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler without -mavx512bf16 whose output cannot be loaded; returns the log of its arguments."""
    asked = tmp_path / "asked"
    script = tmp_path / "c++"
    script.write_text(
        f"""#!/bin/bash
case "$*" in *avx512bf16*) exit 1;; esac
echo "$*" >> {asked}
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo no library > "$2"; shift; done
exit 0
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return asked


@pytest.mark.parametrize(
    ("processor", "wanted", "made"),
    [
        ("Haswell", [], ["avx2"]),
        ("Zen 4", [], ["avx512"]),
        ("Haswell", ["--all"], ["avx512", "avx2"]),
        ("Haswell", ["--level", "avx512"], ["avx512"]),
        ("Nehalem", [], ["native"]),
    ],
)
def test_the_best_level_is_built_or_every_one_that_the_compiler_knows(
    host: Callable[..., Operators],
    compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processor: str,
    wanted: list[str],
    made: list[str],
) -> None:
    """By a compiler that lacks the newest level."""
    host(processor)
    monkeypatch.setattr(build, "_try", lambda path, level: None)
    assert build.main(wanted) == 0
    assert sorted(path.name.split("-")[1] for path in build.FOLDER.glob("*.so")) == sorted(made)
    assert capsys.readouterr().out.count("compiled operators: ") == len(made)


def test_a_level_is_tried_where_it_runs_and_nowhere_else(host: Callable[..., Operators], compiler: Path) -> None:
    """A library that fails to load is not kept; where its first instruction may raise SIGILL, it is not loaded."""
    host("Haswell")
    assert build.build("avx512").read_text() == "no library\n"
    assert build.main(["--level", "avx2"]) == 1
    assert not build.library("avx2").exists()


# ---- what is loaded


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("levels", [NAMED, ["avx512", "avx2"], ["avx2"], []])
def test_no_library_is_loaded_for_a_level_that_the_processor_lacks(
    host: Callable[..., Operators], caplog: pytest.LogCaptureFixture, processor: str, levels: list[str]
) -> None:
    """The best level that is built and runs is loaded; the log says if it is lower than possible or none is built."""
    operators = host(processor, *levels)
    best = next((level for level in RUNS[processor] if level in levels), kernels.REFERENCE)
    assert kernels.serving(CPU) == kernels.serving(CPU) == best
    assert operators.loaded == ([best] if best != kernels.REFERENCE else [])
    said = [record.message for record in caplog.records]
    assert len(said) == (best != RUNS[processor][0])
    assert all(word in said[0] for word in (best, RUNS[processor][0])) if said and operators.loaded else True


def test_the_environment_names_the_one_level_that_may_be_loaded(
    host: Callable[..., Operators], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is loaded without a warning although there is a better one; a level that cannot be loaded is an error, never
    replaced by another."""
    operators = host("Zen 4", "avx512_bf16", "avx2")
    monkeypatch.setenv(kernels.ONLY, "avx2")
    assert kernels.serving(CPU) == "avx2"
    assert (operators.loaded, caplog.records) == (["avx2"], [])
    for processor, level, why in (("Zen 4", "avx512", "not built"), ("Haswell", "avx512_bf16", "does not have")):
        operators = host(processor, "avx512_bf16", "avx2")
        monkeypatch.setenv(kernels.ONLY, level)
        with pytest.raises(SettingsError, match=why):
            kernels.serving(CPU)
        assert operators.loaded == []


# ---- the order of sums


@pytest.mark.parametrize(
    ("processor", "wanted", "dtype", "level", "order"),
    [
        ("Zen 4", "fastest", torch.bfloat16, "avx512_bf16", "tile32"),
        ("Zen 4", "pairs", torch.bfloat16, "avx512_bf16", "pairs"),
        ("Zen 4", "chain16", torch.bfloat16, "avx512", "chain16"),
        ("Zen 4", "chain8", torch.bfloat16, "avx2", "chain8"),
        ("Zen 4", "fastest", torch.float32, "avx512_bf16", "chain16"),
        ("Zen 4", "chain16", torch.float32, "avx512_bf16", "chain16"),
        ("Zen 4", "tile32", torch.float32, "avx512_bf16", "chain16"),
        ("Zen 4", "chain8", torch.float32, "avx2", "chain8"),
        ("Ice Lake", "fastest", torch.bfloat16, "avx512", "chain16"),
        ("Haswell", "chain8", torch.bfloat16, "avx2", "chain8"),
    ],
)
def test_an_order_is_served_by_the_best_level_that_has_it(
    host: Callable[..., Operators], processor: str, wanted: str, dtype: torch.dtype, level: str, order: str
) -> None:
    """Different processors agree on an order that the lesser one supports."""
    operators = host(processor, *NAMED)
    kernels.use(wanted, CPU, dtype)
    assert (operators.loaded, kernels.sum_order(CPU, dtype)) == ([level], order)


@pytest.mark.parametrize(
    ("processor", "levels", "wanted", "why"),
    [
        ("Haswell", NAMED, "pairs", "sum_order is pairs, and this worker can serve chain8"),
        ("Zen 4", ["avx512_bf16"], "chain8", "can serve tile32, pairs; .* --level avx2` builds"),
        ("Zen 4", [], "tile32", "can serve plain PyTorch alone; .* --level avx512_bf16` builds"),
    ],
)
def test_a_worker_that_cannot_serve_the_order_does_not_start(
    host: Callable[..., Operators], tmp_path: Path, processor: str, levels: list[str], wanted: Any, why: str
) -> None:
    """It reports what it can serve, and what would have to be built. No library and no model is loaded."""
    operators = host(processor, *levels)
    with pytest.raises(SettingsError, match=why) as refused:
        build_engine(Settings(model=str(tmp_path), device="cpu", sum_order=wanted, dtype="bfloat16"), print)
    assert (refused.value.field, operators.loaded) == ("sum_order", [])
    assert "\n" not in refused.value.message


def test_a_process_that_has_other_operators_already_says_so(host: Callable[..., Operators]) -> None:
    """torch cannot unload a library: bits of another order must not pass for those of the requested one."""
    operators = host("Zen 4", *NAMED)
    kernels.use("tile32", CPU, torch.bfloat16)
    with pytest.raises(SettingsError, match="level avx512_bf16 already"):
        kernels.use("chain8", CPU, torch.bfloat16)
    kernels.use("pairs", CPU, torch.bfloat16)
    kernels.use("fastest", CPU, torch.bfloat16)
    assert operators.used == ["tile32", "pairs", "tile32"]


def test_plain_pytorch_has_no_order_to_choose(host: Callable[..., Operators]) -> None:
    """On another device than the CPU, whatever is built; "fastest" is what it does anyway."""
    operators = host("Zen 4", *NAMED)
    kernels.use("fastest", torch.device("cuda"), torch.bfloat16)
    with pytest.raises(SettingsError, match="plain PyTorch alone"):
        kernels.use("pairs", torch.device("cuda"), torch.bfloat16)
    assert kernels.sum_order(torch.device("cuda"), torch.bfloat16) == kernels.PLAIN
    assert operators.loaded == []


def test_packed_weights_of_another_level_or_order_are_not_found(host: Callable[..., Operators]) -> None:
    """Workers of one host share them by this name."""
    names = []
    for order in ("tile32", "pairs", "chain16", "chain8"):
        host("Zen 4", *NAMED)
        kernels.use(order, CPU, torch.bfloat16)
        names.append(kernels.panels_of())
    assert len(set(names)) == 4


# ---- the real libraries

built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


@built
def test_the_log_says_what_serves(checkpoint: Callable[[str], Path]) -> None:
    """The level, the order, and what computes tiles."""
    for which, start in (("auto", f"operators: {torch.ops.tandem.isa()}, order "), ("reference", "operators: plain")):
        lines: list[str] = []
        folder = str(checkpoint("tiny-llama"))
        model = load_model(folder, dtype=torch.bfloat16, device=CPU, kernels=which, progress=lines.append)  # type: ignore[arg-type]
        (line,) = [line for line in lines if line.startswith("operators: ")]
        assert line.startswith(start)
        assert model.sum_order in line or which == "reference"
        assert (" by " in line) == (model.sum_order == "tile32")


BITS = """
import hashlib, json, sys, torch
from engine import kernels
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack

CPU, TABLE = torch.device("cpu"), list(range(16))
found = {}
for dtype in (torch.bfloat16, torch.float32):
    for order in kernels.ORDERS[kernels.serving(CPU)]:
        kernels.use(order, CPU, dtype)
        model = load_model(sys.argv[1], dtype=dtype, device=CPU)
        pages, digest = model.allocate(16, 16), hashlib.sha256()
        tokens = torch.randint(0, model.vocab_size, (200,), generator=torch.Generator().manual_seed(0)).tolist()
        for done, length in ((0, 190), (190, 191), (191, 200)):
            digest.update(model.forward(pages, pack([(tokens[:length], done, TABLE)])).numpy().tobytes())
        found[f"{torch.ops.tandem.isa()} {order} {dtype}"] = model.sum_order, digest.hexdigest()
print(json.dumps(found))
"""


@built
def test_equal_orders_are_equal_bits_and_unlike_ones_are_not(checkpoint: Callable[[str], Path]) -> None:
    """Across the levels that are built and run here, each in its own process: for prompts, a step and a chunk."""
    levels = [level for level in build.runnable() if level in kernels.ORDERS and build.library(level).exists()]
    if len(levels) < 2:
        pytest.skip("one level alone: python -m engine.kernels.build --all")
    found: dict[str, tuple[str, str]] = {}
    for level in levels:
        command = [sys.executable, "-c", BITS, str(checkpoint("tiny-gemma2"))]
        done = subprocess.run(
            command, env=os.environ | {kernels.ONLY: level}, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        of_level = json.loads(done.stdout)
        assert all(name.startswith(f"{level} ") for name in of_level)
        found |= {name: tuple(value) for name, value in of_level.items()}
    for dtype in ("torch.bfloat16", "torch.float32"):
        of_type = {name: value for name, value in found.items() if name.endswith(dtype)}
        digests = dict(of_type.values())  # order -> digest
        assert set(of_type.values()) == set(digests.items()), of_type
        assert len(digests) == len(set(digests.values())) > 1, of_type
