"""Random checkpoints are reproducible, and complete without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine.loading.checkpoint import check_folder
from loadtest.harness.random_checkpoints import HYBRID, REAL, SHAPES, SPARSE, TINY, main, make_checkpoint
from tandem.checkpoint import read_json


def test_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    """The same arguments write the same bytes, another seed writes others."""
    weights = [
        (make_checkpoint(tmp_path / name, "tiny-llama", seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes a complete bfloat16 checkpoint without an end-of-sequence token."""
    assert main(["tiny-qwen3", str(tmp_path)]) == 0
    (file,) = check_folder(tmp_path)
    assert {str(tensor.dtype) for tensor in load_file(file).values()} == {"torch.bfloat16"}
    assert read_json(tmp_path / "config.json").get("eos_token_id") is None
    assert "tiny-qwen3" in capsys.readouterr().out


def test_unknown_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shape that does not exist prints the ones that do."""
    assert main(["llama-9000B", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert all(shape in printed for shape in SHAPES)
    assert len(SHAPES) == len(REAL) + len(TINY) + len(HYBRID) + len(SPARSE)
