"""The one command of all measurements: it starts quickly, names each of them, and ends every error in one way."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer

from loadtest import commands
from loadtest.commands import ROOMS, Measurement, main
from loadtest.harness.options import Json, Seed, expanded, names, numbers, positive
from tandem.errors import Unavailable

ROOT = Path(__file__).parents[2]
NAMES = [name for measurements in ROOMS.values() for name in measurements]


def test_help_lists_every_measurement_by_room_and_loads_no_torch() -> None:
    """In one line each; a measurement's module is imported only when it is asked for."""
    code = "import sys; from loadtest.commands import main; main(['--help']); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    *lines, torch = out.stdout.splitlines()
    assert torch == "False"
    assert [room for room in ROOMS if f"{room}:" in lines] == list(ROOMS)
    for name in NAMES:
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1, name


@pytest.mark.parametrize("name", NAMES)
def test_every_measurement_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what it measures, from its docstring, and each of its options."""
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    (measurement,) = (found[name] for found in ROOMS.values() if name in found)
    function, text = measurement.load()
    assert text.splitlines()[0] in out
    for option in inspect.signature(expanded(function)).parameters.values():
        (about,) = getattr(option.annotation, "__metadata__", (None,))
        if isinstance(about, typer.models.OptionInfo) and not about.hidden and about.default is ...:
            assert f"--{option.name.replace('_', '-')} " in out


@pytest.mark.parametrize("wrong", [[], ["no-such"], ["chaos", "--every", "many"], ["abuse", "--only", "x"], ["prefix"]])
def test_a_wrong_command_line_ends_with_2(wrong: list[str]) -> None:
    """Before anything starts."""
    assert main(wrong) == 2


@dataclass(frozen=True)
class Sizes:
    workers: Annotated[int, typer.Option(metavar="N")] = 3
    seed: Seed = 1


def test_a_dataclass_stands_for_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that several functions share are declared once; what the function returns is the exit code."""
    seen: list[object] = []

    def measure(sizes: Sizes, required: Annotated[float, typer.Option(callback=positive)], results: Json = None) -> int:
        seen[:] = [sizes, required, results]
        return 7

    monkeypatch.setattr(Measurement, "load", lambda self: (measure, "help"))
    assert main(["chaos", "--seed", "5", "--required", "0.5", "--json", "x"]) == 7
    assert seen == [Sizes(3, 5), 0.5, Path("x")]
    assert main(["chaos", "--seed", "5"]) == 2
    assert main(["chaos", "--required", "0"]) == 2


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(Unavailable("gone"), 1, "error: gone"), (KeyboardInterrupt(), 130, "stopped"), (SystemExit("no"), 1, "no")],
)
def test_every_error_has_one_way_out(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence and an exit code."""

    def measure() -> None:
        raise error

    monkeypatch.setattr(commands.Measurement, "load", lambda self: (measure, "help"))
    assert main(["chaos"]) == code
    assert said in capsys.readouterr().err


def test_lists_with_commas() -> None:
    """Names that are known, and whole numbers above 0."""
    assert names("b,a", ("a", "b")) == ("b", "a")
    assert numbers("1,20") == (1, 20)
    for wrong in ("0", "1,", "x", "1.5"):
        with pytest.raises(typer.BadParameter):
            numbers(wrong)
    with pytest.raises(typer.BadParameter, match="c: not one of a, b"):
        names("a,c", ("a", "b"))
