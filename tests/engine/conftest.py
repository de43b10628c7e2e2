"""Tiny checkpoints, made once per test session. Those of TINY have two layers here, one of each kind that the family
alternates: loading, checking and recording cost as much as there are layers. Recurrent and sparse models keep four, so
that there are two layers of a kind whose states or choices could be taken for each other's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.harness.random_checkpoints import HYBRID, TINY, make_checkpoint

TWO = 2


def two_layers(shape: str) -> dict[str, Any]:
    """The changes that make a model of TINY or HYBRID one of two layers."""
    family = (TINY | HYBRID)[shape.removeprefix("tiny-")]
    changes: dict[str, Any] = {"n_layer" if "n_layer" in family else "num_hidden_layers": TWO}
    if "layer_types" in family:
        changes["layer_types"] = family["layer_types"][:TWO]
    if "first_k_dense_replace" in family:
        changes["first_k_dense_replace"] = 1
    if family["model_type"] == "llama4_text":
        changes["no_rope_layers"] = [1, 0]  # by itself the fourth
    return changes


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint("tiny-llama")` is the folder of that checkpoint in float32; do not write into it."""
    made: dict[str, Path] = {}

    def get(shape: str) -> Path:
        if shape not in made:
            changes = two_layers(shape) if shape.removeprefix("tiny-") in TINY else {}
            made[shape] = make_checkpoint(tmp_path_factory.mktemp(shape), shape, dtype="float32", **changes)
        return made[shape]

    return get
