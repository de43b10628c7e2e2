"""What each image installs, exactly: the part of requirements.lock that it needs.

`python -m deploy.docker.locks` writes the locks beside this file again, after `make lock`: of the router, of the worker
without torch, and of torch for CPU. With `cuda13` it also asks pip's index for torch's CUDA build and writes what that
needs; it need not be installed here.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OLDEST = {"extra": "", "python_full_version": "3.11.0"}
HEADER = "# A part of requirements.lock, written by `python -m deploy.docker.locks`.\n"
HEADER_CUDA = "# torch for CUDA 13, and what it needs for that. Written by `python -m deploy.docker.locks cuda13`.\n"
ROUTER = (
    *("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "protobuf", "redis", "hiredis"),
    *("pydantic", "pydantic-settings", "jinja2", "httptools", "starlette", "uvicorn", "typer", "rich", "structlog"),
    *("psutil", "xxhash", "tokenizers", "huggingface_hub", "prometheus-client", "safetensors"),
    *("opentelemetry-sdk", "opentelemetry-semantic-conventions", "opentelemetry-exporter-otlp-proto-grpc"),
)


def lock(image: str) -> str:
    """The text of the lock of the router, the worker, or torch for CPU ("cpu"), which names the CPU build: no other one
    takes its place where no index has it."""
    if image == "router":
        return _part(ROUTER)
    if image == "cpu":
        return f"{HEADER}{_torch()}+cpu\n"
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return _part([Requirement(requirement).name for requirement in wanted])


def cuda() -> str:
    """The lock of torch's CUDA build and of what it needs besides the worker's lock. `===`: the build without a local
    version, even where a CPU build is configured. Raises CalledProcessError, KeyError."""
    torch = _torch().replace("==", "===")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q", "--report=-", torch]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=900).stdout)
    found = {one["metadata"]["name"]: one["metadata"]["version"] for one in report["install"]}
    worker = {canonicalize_name(line.partition("==")[0]) for line in lock("worker").splitlines()}
    new = sorted(name for name in found if canonicalize_name(name) not in worker | {"torch", "setuptools"})
    return HEADER_CUDA + "\n".join([torch, *(f"{name}=={found[name]}" for name in new)]) + "\n"


def _torch() -> str:
    """The line of requirements.lock."""
    return next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("torch=="))


def _part(roots: Sequence[str]) -> str:
    needed = _closure(roots) - {"torch", "triton"}  # torch has a lock for each device, and for CUDA brings Triton
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = [line for line in lines if "==" in line and canonicalize_name(line.partition("==")[0]) in needed]
    return HEADER + "\n".join(pinned) + "\n"


def _closure(roots: Sequence[str]) -> set[str]:
    """These and what they need in the oldest Python, as installed here."""
    closure: set[str] = set()
    unvisited = [canonicalize_name(name) for name in roots]
    while unvisited:
        name = unvisited.pop()
        if name in closure:
            continue
        closure.add(name)
        try:
            requires = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:  # only another Python needs it; it may be in the lock
            continue
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate(OLDEST):
                unvisited.append(canonicalize_name(requirement.name))
    return closure


if __name__ == "__main__":
    for image in ("router", "worker", "cpu"):
        (HERE / f"requirements-{image}.lock").write_text(lock(image))
    if "cuda13" in sys.argv[1:]:
        (HERE / "requirements-cuda13.lock").write_text(cuda())
