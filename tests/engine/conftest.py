"""Tiny checkpoints, made once per test session, and one thread: the suite must be quick on one core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loadtest.harness.random_checkpoints import make_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint("tiny-llama")` is the folder of that checkpoint in float32; do not write into it."""
    made: dict[str, Path] = {}

    def get(shape: str) -> Path:
        if shape not in made:
            made[shape] = make_checkpoint(tmp_path_factory.mktemp(shape), shape, dtype="float32")
        return made[shape]

    return get
