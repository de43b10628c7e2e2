"""Tiny checkpoints, made once per test session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.harness.random_checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint("tiny-llama")` is the folder of that checkpoint in float32; do not write into it."""
    made: dict[str, Path] = {}

    def get(shape: str) -> Path:
        if shape not in made:
            made[shape] = make_checkpoint(tmp_path_factory.mktemp(shape), shape, dtype="float32")
        return made[shape]

    return get
