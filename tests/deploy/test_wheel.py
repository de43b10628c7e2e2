"""What a wheel contains for a user without a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.kernels import build
from tests.deploy.chart import ROOT

NEEDED = (
    *("cli/main.py", "demo/prompts.jsonl", "demo/model/model.safetensors", "demo/model/tokenizer.json"),
    *("engine/kernels/tiles.cpp", "engine/kernels/tiles.h", "services/router/frontend/page/index.html"),
    *("services/router/frontend/page/uplot/uPlot.iife.min.js", "services/router/frontend/page/uplot/LICENSE"),
    *("tandem/py.typed", "tandem/v1/common_pb2.py"),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel, and nothing of the checkout. Its operators need not be compiled again."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, cwd=source, check=True, timeout=120)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    cache = folder / "cache/tandem/operators"
    cache.mkdir(parents=True)
    for library in build.FOLDER.glob("*.so"):
        (cache / library.name).symlink_to(library)
    return folder


def outside(installed: Path, *command: str) -> str:
    """The output of a command in a folder that is no checkout."""
    env = {**os.environ, "PYTHONPATH": str(installed / "site"), "XDG_CACHE_HOME": str(installed / "cache")}
    done = subprocess.run(
        [sys.executable, *command], cwd=installed, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_has_everything_that_runs(installed: Path) -> None:
    """It contains the demo's model, the operators' sources and the dashboard's page, and no tests."""
    names = {str(path.relative_to(installed / "site")) for path in (installed / "site").rglob("*") if path.is_file()}
    assert set(NEEDED) <= names
    assert not [name for name in names if name.startswith(("tests/", "deploy/"))]


def test_operators_of_a_wheel_lie_in_the_users_cache(installed: Path) -> None:
    """A site-packages folder may not be writable. In the control, a checkout has them next to their sources."""
    code = "from engine.kernels import build; print(build.FOLDER); print(build.__file__)"
    folder, file = outside(installed, "-c", code).split()
    assert Path(file).is_relative_to(installed / "site")
    assert Path(folder) == installed / "cache/tandem/operators"
    assert build.FOLDER == ROOT / "engine/kernels/_build"


def test_the_demo_runs_from_a_wheel(installed: Path) -> None:
    """The demo runs with its own model and prompts, and every request is answered."""
    rows = json.loads(outside(installed, "-m", "tandem", "demo", "--output", "json"))
    assert len(rows) > 1
    assert all(row["state"] == "done" for row in rows)


def test_the_operators_are_compiled_at_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled once, into the folder, with a line in the log; without a compiler a line says so, and no error
    is raised."""
    monkeypatch.setattr(build, "FOLDER", tmp_path / "operators")
    monkeypatch.setattr(build, "known", lambda level: True)
    built: list[str] = []

    def fake(level: str) -> Path:
        built.append(level)
        build.library(level).touch()
        return build.library(level)

    monkeypatch.setattr(build, "build", fake)
    build.at_first_use()
    build.at_first_use()
    assert built == [build.runnable()[0]]


def test_without_a_compiler_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain PyTorch then serves, slower and with correct results."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    build.at_first_use()
    assert "cannot be built" in caplog.text
