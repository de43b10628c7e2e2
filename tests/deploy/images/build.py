"""Builds the images with buildah from deploy/docker, on a machine that may have no image registry.

Everything is in one folder (STORE): the base, which debootstrap makes if none is named, images and layers. An
image has a label with the digest of its sources, so that a test knows whether it is of this checkout. pip and
apt are configured as on this machine; an image has nothing of that, except empty folders in place of mounts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dockerfile_parse import DockerfileParser

from tests.deploy.chart import ROOT

FOLDER = ROOT / "deploy/docker"
STORE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "images"
PROGRAMS = ("podman", "buildah", "runc", "catatonit")
IMAGES = ("router", "worker", "valkey")
TAG = "cpu"  # the device that every machine has
DEVICES = (TAG, "cuda13")
SOURCES = "tandem.sources"  # the label
BASE = "localhost/tandem-base:debian"
BUILD_S = 3600
# The parts of pip's configuration that a build needs: where packages are, and how they are reached.
PIP = ("index-url", "extra-index-url", "find-links", "cert", "proxy", "trusted-host", "constraint", "timeout")

Say = Callable[[str], None]


def missing() -> str | None:
    """What this machine lacks, as a sentence, or None if nothing."""
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if absent:
        return f"{', '.join(absent)} is not installed"
    return None if os.geteuid() == 0 else "only root may make a node of this machine"


def name(image: str, tag: str = TAG) -> str:
    return f"localhost/tandem-{image}:{tag}"


def tool(
    program: str, *words: str, timeout: float = 60.0, check: bool = True, env: dict[str, str] | None = None
) -> str:
    """The output of podman or buildah on STORE; of `logs` both streams. Raises RuntimeError with the tool's message."""
    options = [f"--root={STORE / 'store'}", f"--runroot={STORE / 'run'}", "--storage-driver=overlay"]
    command = [program, *options, *words]
    out = subprocess.PIPE
    both = subprocess.STDOUT if words[0] == "logs" else out
    done = subprocess.run(command, stdout=out, stderr=both, text=True, timeout=timeout, check=False, env=env)
    if check and done.returncode:
        raise RuntimeError(f"{program} {' '.join(words)}:\n{done.stdout[-4000:]}{(done.stderr or '')[-4000:]}")
    return done.stdout.strip()


def sources(image: str) -> str:
    """The digest of the Dockerfile and of everything that it copies from this repository."""
    digest = hashlib.sha256()
    dockerfile = FOLDER / f"{image}.Dockerfile"
    for path in [dockerfile, *sorted(_copied(dockerfile))]:
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _copied(dockerfile: Path) -> Iterator[Path]:
    with dockerfile.open("rb") as file:
        steps = DockerfileParser(fileobj=file).structure
    for step in steps:
        if step["instruction"] == "COPY" and not step["value"].startswith("--from"):
            for source in step["value"].split()[:-1]:
                paths = (ROOT / source).rglob("*") if (ROOT / source).is_dir() else [ROOT / source]
                yield from (one for one in paths if one.is_file() and not {"__pycache__", "_build"} & {*one.parts})


def stale(image: str, device: str = TAG) -> bool:
    """Whether STORE has no image of this checkout's sources."""
    found = tool("podman", "image", "inspect", "--format", "{{json .Labels}}", name(image, device), check=False)
    labels = json.loads(found) if found.startswith("{") else {}
    return labels.get(SOURCES) != sources(image)


def size_gb(image: str) -> float:
    return int(tool("podman", "image", "inspect", "--format", "{{.Size}}", image)) / 1e9


def base(say: Say) -> str:
    """The name of a base image made here: Debian's smallest set of packages and Python."""
    if tool("podman", "images", "--quiet", BASE):
        return BASE
    if not shutil.which("debootstrap"):
        raise RuntimeError("debootstrap is not installed: install it, or name a base with --base")
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    sites = _output("apt-get", "indextargets", "--format", "$(SITE)").split()
    with tempfile.TemporaryDirectory(dir=STORE) as folder:
        say(f"debootstrap: {release['VERSION_CODENAME']}")
        packages = "--include=ca-certificates,python3,python3-venv"
        command = [
            "debootstrap",
            "--variant=minbase",
            packages,
            release["VERSION_CODENAME"],
            f"{folder}/root",
            *sites[:1],
        ]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=BUILD_S)
        shutil.rmtree(f"{folder}/root/var/cache/apt/archives")
        (Path(folder) / "root/var/cache/apt/archives/partial").mkdir(parents=True)
        subprocess.run(["tar", "-C", f"{folder}/root", "-cf", f"{folder}/base.tar", "."], check=True, timeout=600)
        tool("podman", "import", f"{folder}/base.tar", BASE, timeout=600)
    return BASE


def build(image: str, python: str, device: str, say: Say) -> None:
    """Builds and names an image, from cached layers if nothing has changed."""
    with tempfile.TemporaryDirectory(dir=STORE) as folder:
        pip = _pip()
        (Path(folder) / "pip.conf").write_text(
            "[global]\n" + "".join(f"{key} = {value}\n" for key, value in pip.items())
        )
        (Path(folder) / "apt.conf").write_text(
            _output("apt-config", "dump", "Acquire") if shutil.which("apt-config") else ""
        )
        local = _local(pip)
        words = [
            *("bud", "--isolation=chroot", "--layers", "--file", str(FOLDER / f"{image}.Dockerfile")),
            *("--build-arg", f"PYTHON={python}", *(("--build-arg", f"DEVICE={device}") if image == "worker" else ())),
            *("--secret", f"id=pip,src={folder}/pip.conf", "--secret", f"id=apt,src={folder}/apt.conf"),
            *(f"--volume={path}:{path}:ro" for path in sorted(local)),
            *("--label", f"{SOURCES}={sources(image)}", "--tag", name(image, device), str(ROOT)),
        ]
        log = STORE / f"{image}-{device}.log"
        say(f"building {name(image, device)}; its log will be {log.name}")
        try:
            text = tool("buildah", *words, timeout=BUILD_S, env={**os.environ, "TMPDIR": folder})
        except RuntimeError as error:
            log.write_text(str(error))
            raise
        log.write_text(text)


def _pip() -> dict[str, str]:
    """pip's options on this machine, from its files and its environment, which has precedence."""
    found: dict[str, str] = {}
    lines = [line.partition("=") for line in _output(sys.executable, "-m", "pip", "config", "list").splitlines()]
    for key, _, value in sorted(lines, key=lambda line: line[0].startswith(":env:")):
        option = key.rpartition(".")[2]
        if option in PIP:
            found[option] = value.strip("'\"").replace("\\n", " ")
    return found


def _local(pip: dict[str, str]) -> set[Path]:
    """Files and folders of this machine that pip reads; for an index the folder that contains it, to which it links."""
    found = [re.fullmatch(r"(file://)?(/.*)", word) for value in pip.values() for word in value.split()]
    paths = {Path(one[2]).parent if one[1] else Path(one[2]) for one in found if one}
    return {path for path in paths if path.exists()}


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
