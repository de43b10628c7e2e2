"""What each image installs, exactly: the part of requirements.lock that it needs.

`python -m deploy.docker.locks` writes requirements-router.lock and requirements-worker.lock again, after `make lock`.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HEADER = "# A part of requirements.lock, written by `python -m deploy.docker.locks`.\n"
ROUTER = (
    *("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "protobuf", "redis", "hiredis"),
    *("pydantic", "pydantic-settings", "jinja2", "httptools", "starlette", "uvicorn", "typer", "rich", "structlog"),
    *("psutil", "xxhash", "tokenizers", "huggingface_hub", "prometheus-client", "safetensors"),
    *("opentelemetry-sdk", "opentelemetry-semantic-conventions", "opentelemetry-exporter-otlp-proto-grpc"),
)


def lock(image: str) -> str:
    """The text of an image's lock."""
    if image == "router":
        return _part(ROUTER)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return _part([Requirement(requirement).name for requirement in wanted])


def _part(roots: Sequence[str]) -> str:
    needed = _closure(roots) - {"torch", "triton"}  # installed after the rest; torch for CUDA brings Triton
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = [line for line in lines if "==" in line and canonicalize_name(line.partition("==")[0]) in needed]
    return HEADER + "\n".join(pinned) + "\n"


def _closure(roots: Sequence[str]) -> set[str]:
    """These and what they need, as installed here. What is not installed here, no lock has either."""
    closure: set[str] = set()
    unvisited = [canonicalize_name(name) for name in roots]
    while unvisited:
        name = unvisited.pop()
        if name in closure:
            continue
        try:
            requires = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue
        closure.add(name)
        for requirement in map(Requirement, requires):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                unvisited.append(canonicalize_name(requirement.name))
    return closure


if __name__ == "__main__":
    for image in ("router", "worker"):
        (HERE / f"requirements-{image}.lock").write_text(lock(image))
