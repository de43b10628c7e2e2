"""Products that are slower than torch's are found at load, reported, and measured once; fast ones are not mentioned."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import kernels
from engine.builder import build_engine
from engine.engine import Engine
from engine.kernels import modules, speed_check, weight_quantization
from engine.kernels.speed_check import ROWS, SLOW, Case, Kind, Report, kinds_of, measure, operands
from engine.kernels.weight_cache import NOTE, NOTES, WeightCache
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import make_checkpoint
from tandem.settings import Settings

CPU = torch.device("cpu")
built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)
KIND = Kind(64, 96, "float32", "", 0)


class Clock:
    """Time that passes only in products: `ours` and `theirs` are seconds of one of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ours: float, theirs: float = 1.0) -> None:
        self.now, self.threads = 0.0, set[int]()
        monkeypatch.setattr(speed_check, "thread_time", lambda: self.now)
        monkeypatch.setattr(speed_check, "operands", lambda kind: ([self._taking(ours)], [self._taking(theirs)]))

    def _taking(self, seconds: float) -> Callable[[torch.Tensor], None]:
        def product(x: torch.Tensor) -> None:
            self.now += seconds
            self.threads.add(torch.get_num_threads())

        return product


@pytest.mark.parametrize(("ours", "warns"), [(3.0, True), (1.26, True), (1.24, False), (0.5, False)])
def test_products_that_lose_by_more_than_a_fifth_are_named(
    monkeypatch: pytest.MonkeyPatch, ours: float, warns: bool
) -> None:
    """With shape, rows and ratio, in one sentence; those that lose less are not mentioned. Both on one thread."""
    clock, before = Clock(monkeypatch, ours), torch.get_num_threads()
    report = Report("Some CPU", tuple(measure([KIND])))
    assert [case.rows for case in report.cases] == list(ROWS)
    assert report.worst.ratio == pytest.approx(ours)
    assert bool(report.warning) == warns
    if warns:
        assert f"(Some CPU): 1 rows times 64 x 96 in float32 take {ours:.2f} times as long" in report.warning
    assert (clock.threads, torch.get_num_threads()) == ({1}, before)


def test_the_worst_case_is_the_one_that_is_named() -> None:
    """Of several kinds and numbers of rows; the number of slow ones is reported, too."""
    other = Kind(128, 96, "bfloat16", "int8", 96)
    ratios = {(KIND, 1): 0.5, (KIND, 8): 1.5, (other, 1): 1.1, (other, 256): 9.0}
    report = Report("x", tuple(Case(kind, rows, ratio, 1.0) for (kind, rows), ratio in ratios.items()))
    assert "256 rows times 128 x 96 in int8 take 9.00 times" in report.warning
    assert "2 of 4 measured" in report.warning


def test_what_is_slow_only_once_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement slowed down by another process is repeated. Slow both times counts as slow."""

    def report(second: float) -> Report:
        found = iter([Case(KIND, 1, 2.0, 1.0), Case(KIND, 1, second, 1.0)])
        monkeypatch.setattr(speed_check, "ROWS", (1,))
        monkeypatch.setattr(speed_check, "operands", lambda kind: ([], []))
        monkeypatch.setattr(speed_check, "_time", lambda *_: next(found))
        return Report("x", tuple(measure([KIND])))

    assert (report(1.0).warning, report(1.9).worst.ratio) == ("", 1.9)


@built
@pytest.mark.parametrize("format", ["", "int8", "fp8", "int4", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_sides_multiply_the_same_matrices(dtype: str, format: str) -> None:
    """Otherwise their times could not be compared. A weight too large is cut, and has fewer copies."""
    for n, k, copies in ((64, 96, 16), (8192, 1024, 2)):
        ours, theirs = operands(Kind(n, k, dtype, format, (32 if format == "int4" else k) if format else 0))
        x = torch.randn(3, k).to(getattr(torch, dtype))
        results: list[Any] = [product(x) for product in (*ours, *theirs)]
        assert {result.shape for result in results} == {(3, n if n == 64 else 768)}
        for result in results:
            torch.testing.assert_close(result, results[-1], rtol=0.02, atol=0.02 * k**0.5)
        assert len(ours) == len(theirs) >= copies


@built
def test_real_products_are_timed() -> None:
    """Each number of rows has a time of both sides, and the whole takes no longer than a load may."""
    for case in measure([KIND, Kind(96, 64, "bfloat16", "int8", 64)]):
        assert case.ours > 0
        assert case.theirs > 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("speedcheck") / "model", "tiny-llama")


@pytest.fixture(scope="module")
def models(checkpoint: Path) -> tuple[ModelRunner, ModelRunner]:
    """One with bfloat16 weights in panels, one with int8 codes that computes in float32."""
    plain = load_model(str(checkpoint), dtype=torch.bfloat16, device=CPU)
    return plain, load_model(str(checkpoint), dtype=torch.float32, device=CPU, weights="int8")


@built
def test_each_kind_of_weight_is_timed_once(
    models: tuple[ModelRunner, ModelRunner], checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Of all layers of both models; quantised weights by their format. Small ones are left out, and the log says so."""
    monkeypatch.setattr(speed_check, "LEAST_ELEMENTS", 0)
    plain, quantised = models
    shapes = {(384, 64), (64, 64), (32, 64), (96, 64), (64, 96)}
    kinds = kinds_of([plain.module, plain.module], torch.bfloat16)
    assert kinds == sorted(Kind(n, k, "bfloat16", "", 0) for n, k in shapes)
    assert kinds_of([quantised.module], torch.float32) == sorted(Kind(n, k, "float32", "int8", k) for n, k in shapes)
    monkeypatch.setattr(speed_check, "KINDS", 2)
    with caplog.at_level(logging.INFO):
        assert [kind[:2] for kind in kinds_of([plain.module], torch.bfloat16)] == [(64, 64), (96, 64)]
    assert "of 5 kinds of weights the 2 with most elements are timed" in caplog.text
    monkeypatch.setattr(speed_check, "LEAST_ELEMENTS", 1 << 16)
    assert speed_check.run([plain.module], torch.bfloat16, None) is None
    reference = load_model(str(checkpoint), dtype=torch.bfloat16, device=CPU, kernels="reference")
    assert kinds_of([reference.module], torch.bfloat16) == []


class Loads:
    """Engines of one checkpoint, with products that take `ours` times as long as torch's, and how often that was
    measured."""

    def __init__(self, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, ours: float) -> None:
        self.measured = 0
        self._settings = {
            **{"model": str(checkpoint), "device": "cpu", "threads": 1, "kv_blocks": 16},
            **{"weight_cache": str(folder), "max_num_batched_tokens": 64},
        }
        Clock(monkeypatch, ours)
        monkeypatch.setattr(speed_check, "LEAST_ELEMENTS", 0)
        plainly = speed_check.measure

        def counted(kinds: Sequence[Kind]) -> list[Case]:
            self.measured += 1
            return plainly(kinds)

        monkeypatch.setattr(speed_check, "measure", counted)

    def __call__(self, **settings: Any) -> tuple[Engine, list[str]]:
        """An engine, and its log lines."""
        lines: list[str] = []
        return build_engine(Settings(**{**self._settings, **settings}), lines.append), lines


@built
@pytest.mark.parametrize("ours", [2.0, 0.5])
def test_a_load_warns_of_slow_products_and_the_next_one_reads_what_it_measured(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, ours: float
) -> None:
    """One warning in the log of either start, or none in both."""
    load = Loads(checkpoint, tmp_path, monkeypatch, ours)
    for _ in range(2):
        caplog.clear()
        engine, lines = load()
        assert engine.products is not None
        assert engine.products.worst.ratio == pytest.approx(ours)
        said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        assert said == ([engine.products.warning] if ours > SLOW else [])
        assert any(line.startswith(f"products: {ours:.2f} of torch's time at worst") for line in lines)
    assert load.measured == 1


@built
@pytest.mark.parametrize("what", ["processor", "library", "order", "threads", "shapes"])
def test_on_another_machine_it_is_measured_again(
    models: tuple[ModelRunner, ModelRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Or with other operators, another order, number of threads or model: other configurations' times are unused."""
    plain, quantised = models
    Clock(monkeypatch, 0.5)
    monkeypatch.setattr(speed_check, "LEAST_ELEMENTS", 0)
    asked: list[Sequence[Kind]] = []
    measure = speed_check.measure
    monkeypatch.setattr(speed_check, "measure", lambda kinds: [asked.append(kinds), *measure(kinds)][1:])

    def check(model: ModelRunner = plain) -> None:
        assert speed_check.run([model.module], model.dtype, WeightCache(tmp_path, limit=0)) is not None

    check()
    check()
    assert len(asked) == 1
    before = torch.get_num_threads()
    if what == "processor":
        monkeypatch.setattr(speed_check, "processor", lambda: ("Other CPU", "model: 7"))
    elif what == "library":
        monkeypatch.setattr(speed_check, "panels_of", lambda: "tandem-other.so tile32")
    elif what == "order":
        monkeypatch.setattr(torch.ops.tandem, "order", lambda: "another")
    elif what == "threads":
        torch.set_num_threads(before + 1)
    try:
        for _ in range(2):
            check(quantised if what == "shapes" else plain)
    finally:
        torch.set_num_threads(before)
    assert len(asked) == 2


@built
def test_without_a_cache_it_is_measured_at_each_start(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is written anywhere."""
    load = Loads(checkpoint, tmp_path, monkeypatch, 0.5)
    load(weight_cache="off")
    load(weight_cache="off")
    assert load.measured == 2
    assert list(tmp_path.iterdir()) == []


# ---- notes stored with the weights


def nothing(path: Path) -> None:
    """The control: an intact note is used."""


def cut(path: Path) -> None:
    os.truncate(path, 20)


def change(path: Path) -> None:
    path.write_text(path.read_text().replace("first", "other"))


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def of_another_key(path: Path) -> None:
    WeightCache(path.parent, 0).note("other", lambda: "first")
    os.replace(path.with_name(f"other{NOTE}"), path)


@pytest.mark.parametrize("damage", [nothing, cut, change, open_to_all, of_another_key], ids=lambda one: one.__name__)
def test_a_damaged_note_is_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """It is right afterwards; an intact one is read."""
    cache = WeightCache(tmp_path, limit=0)
    assert cache.note("key", lambda: "first") == "first"
    damage(tmp_path / f"key{NOTE}")
    wanted = "first" if damage is nothing else "second"
    assert cache.note("key", lambda: "second") == wanted
    assert cache.note("key", lambda: "third") == wanted


def test_a_note_that_cannot_be_kept_is_made_each_time(tmp_path: Path, caplog: Any) -> None:
    """Once per caller, and the log says why."""
    (tmp_path / "file").write_text("no folder")
    made: list[str] = []

    def make() -> str:
        made.append("text")
        return "text"

    assert WeightCache(tmp_path / "file", limit=0).note("key", make) == "text"
    assert made == ["text"]
    assert "not kept" in caplog.text


def test_old_notes_go(tmp_path: Path) -> None:
    """Every build of the operators has notes of its own; the folder does not fill up with them."""
    cache = WeightCache(tmp_path, limit=0)
    for number in range(NOTES + 3):
        cache.note(str(number), lambda: "text")
        os.utime(tmp_path / f"{number}{NOTE}", (number, number))
    assert len(list(tmp_path.glob(f"*{NOTE}"))) == NOTES
    assert not (tmp_path / f"0{NOTE}").exists()


def test_packed_shapes_are_those_of_modules_with_panels() -> None:
    """A module without panels or codes has none."""
    assert list(modules.packed_shapes(torch.nn.Linear(4, 4))) == []
    assert list(weight_quantization.codes_in(torch.nn.Linear(4, 4))) == []
