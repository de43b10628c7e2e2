"""Promises of the images: no process is root, all versions are exact, and the router's image has no torch and needs
none."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from deploy.docker import locks
from tests.deploy.chart import ROOT, example, render
from tests.deploy.test_chart import containers, pods

FOLDER = ROOT / "deploy/docker"
IMAGES = ("router", "worker", "valkey")
USER = 10001
TRACES = (
    "tandem.telemetry.tracing",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
)  # loaded only where they are switched on
ONLY = """
import importlib.abc, importlib.metadata, importlib.util, os, sys
from packaging.utils import canonicalize_name
allowed = {canonicalize_name(line.partition("==")[0]) for line in open(sys.argv[1]) if "==" in line}
owners = importlib.metadata.packages_distributions()

class Only(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        of = {canonicalize_name(one) for one in owners.get(name.partition(".")[0], ())}
        here = name.replace(".", "/")
        if "tandem-serving" in of and not (os.path.isdir(here) or os.path.isfile(f"{here}.py")):
            # Only the checkout has it, in which an editable install would find it.
            raise ModuleNotFoundError(f"no module named {name!r} in this image", name=name)
        if of and not of & (allowed | {"tandem-serving"}):
            raise ModuleNotFoundError(f"no module named {name!r} in this image", name=name)

sys.meta_path.insert(0, Only())
for module in sys.argv[2:]:
    __import__(module)
"""


def instructions(image: str) -> list[tuple[str, str]]:
    with (FOLDER / f"{image}.Dockerfile").open("rb") as file:
        return [(one["instruction"], one["value"]) for one in DockerfileParser(fileobj=file).structure]


def problems(image: list[tuple[str, str]]) -> set[str]:
    """The problems that a reviewer would report."""
    found = set()
    last = max(number for number, (name, _) in enumerate(image) if name == "FROM")
    users = [value for name, value in image[last:] if name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        found.add("root")
    bases = [value.partition(" ")[0] for name, value in image if name == "FROM"]
    arguments = dict(value.partition("=")[::2] for name, value in image if name == "ARG")
    if any(not re.search(r":(?!latest)[\w.-]+", arguments.get(base.strip("${}"), base)) for base in bases):
        found.add("base")
    for name, value in image:
        if name == "ADD":
            found.add("add")
        if name in ("ENV", "ARG") and re.search(r"(?i)token|password|secret", value):
            found.add("secret")
        if name == "COPY" and value.split()[0] == ".":
            found.add("copies everything")
        if name == "RUN" and "pip install" in value and not re.search(r"-r |-e \.|==|grep '\^torch==", value):
            found.add("pip")
        clean = "--no-install-recommends" in value and "rm -rf /var/lib/apt/lists" in value
        if name == "RUN" and "apt-get install" in value and not clean:
            found.add("apt")
        if name in ("CMD", "ENTRYPOINT") and not value.startswith("["):
            found.add("shell")  # a shell does not forward SIGTERM
    return found


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_as_it_should_be(image: str) -> None:
    """An image has no root user, a base with a version, exact packages, and a first process that receives signals."""
    assert problems(instructions(image)) == set()
    assert ("USER", f"{USER}:{USER}") in instructions(image)


def test_the_rules_find_what_they_are_for() -> None:
    """Control: each rule finds its violation."""
    wrong = [
        *(("FROM", "python:latest"), ("ADD", "x y"), ("ENV", "HUB_TOKEN=1"), ("COPY", ". /app")),
        *(("RUN", "pip install torch"), ("RUN", "apt-get install -y g++"), ("CMD", "tandem up")),
    ]
    assert problems(wrong) == {"root", "base", "add", "secret", "copies everything", "pip", "apt", "shell"}


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_copies_is_there_and_not_ignored(image: str) -> None:
    """Everything that an image copies is in this repository and passes .dockerignore."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name, value in instructions(image):
        if name != "COPY" or value.startswith("--from"):
            continue
        for source in value.split()[:-1]:
            assert (ROOT / source).exists(), source
            kept = [line[1:] for line in ignored if line[0] == "!"]
            assert any(Path(source).match(one) or Path(one) in Path(source).parents for one in kept), source


@pytest.mark.parametrize("part", ["router", "worker", "cpu"])
def test_the_locks_are_part_of_the_lock(part: str) -> None:
    """`python -m deploy.docker.locks` writes them again."""
    assert (FOLDER / f"requirements-{part}.lock").read_text() == locks.lock(part)
    assert ("torch==" in locks.lock(part)) == (part == "cpu")
    assert ("ray==" in locks.lock(part)) == (part == "worker")


def test_every_device_has_the_torch_of_the_lock_and_each_library_exactly() -> None:
    """torch's own requirements are not exact, so two builds of one image would differ. Each device with a lock is one
    that the Dockerfile accepts."""
    torch = next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("torch=="))
    cuda = [line for line in (FOLDER / "requirements-cuda13.lock").read_text().splitlines() if line[0] != "#"]
    assert cuda[0] == torch.replace("==", "===")  # `===` never accepts a CPU build
    assert all(re.fullmatch(r"[\w.-]+===?[\w.]+", line) for line in cuda)
    assert {"triton", "nvidia-nccl-cu13"} <= {line.partition("==")[0] for line in cuda}
    worker = {line.partition("==")[0] for line in locks.lock("worker").splitlines()}
    assert not worker & {line.partition("==")[0] for line in cuda}  # no version is named twice
    devices = {path.stem.removeprefix("requirements-") for path in FOLDER.glob("*.lock")} - {"router", "worker"}
    copies = [value for name, value in instructions("worker") if name == "COPY"]
    assert all(any(f"requirements-{device}.lock" in value for value in copies) for device in devices)
    assert ("ARG", "DEVICE=cuda13") in instructions("worker")


@pytest.mark.parametrize("image", IMAGES)
def test_what_reaches_pip_and_apt_is_mounted_and_not_kept(image: str) -> None:
    """Indexes, proxies and keys of the builder's network are secrets of a build; the base image is an argument."""
    for name, value in instructions(image):
        if name == "RUN" and re.search(r"pip install(?!.*--no-build-isolation)", value):
            assert "--mount=type=secret,id=pip,target=/etc/pip.conf" in value
        if name == "RUN" and "apt-get" in value:
            assert "--mount=type=secret,id=apt," in value
        if name == "FROM":
            assert value.startswith("${PYTHON}")


def copied(image: str, folder: Path) -> Path:
    """The files that the image copies from this repository."""
    for name, value in instructions(image):
        *sources, target = value.split()
        if name == "COPY" and not value.startswith("--from") and not target.startswith("/"):
            for source in map(Path, sources):
                to = folder / target / source.name if target.endswith("/") else folder / target
                to.parent.mkdir(parents=True, exist_ok=True)
                to.symlink_to(ROOT / source)
    return folder


def imports(folder: Path, *modules: str) -> subprocess.CompletedProcess[str]:
    """Imports in a Python that has only the packages of the router's image, and of Tandem only this folder."""
    lock = FOLDER / "requirements-router.lock"
    command = [sys.executable, "-c", ONLY, str(lock), *modules]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_the_router_needs_no_more_than_its_image_has(tmp_path: Path) -> None:
    """The router, the command line, the planner and the model download run; the controls are a worker, which needs
    torch, and an image without the engine's pure files."""
    folder = copied("router", tmp_path / "image")
    wanted = ("services.__main__", "services.router.server", "cli.main", "planner.capacity", "huggingface_hub", *TRACES)
    done = imports(folder, *wanted)
    assert done.returncode == 0, done.stderr
    assert re.search("no module named '(torch|numpy)'", imports(ROOT, "services.prefill.servicer").stderr)
    (folder / "engine/core").unlink()
    assert "engine.core" in imports(folder, *wanted).stderr


def test_images_and_chart_agree() -> None:
    """The user, the programs, and the operators of every level, for which no pod has a compiler or a folder."""
    assert any(name == "RUN" and "engine/kernels/build.py --all" in value for name, value in instructions("worker"))
    programs = set()
    for _, template in [*pods(render(example("laptop"))), *pods(render(example("ray")))]:
        assert template["spec"]["securityContext"]["runAsUser"] == USER
        for one in containers(template["spec"]):
            if "tandem-" in one["image"]:
                command = one.get("command", ["ray"])  # absent: KubeRay sets it
                programs.add((one["image"].partition(":")[0], command[0]))
            assert not any("kernels" in mount["mountPath"] for mount in one["volumeMounts"])
    known = {"tandem-router": {"python", "tandem", "hf"}, "tandem-worker": {"python", "ray"}}
    assert all(program in known[image] for image, program in programs)
