"""Random checkpoints are reproducible, and complete without a network."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from engine.loading.checkpoint import check_folder
from loadtest.harness.random_checkpoints import make_checkpoint
from tandem.checkpoint import read_json


def test_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    """The same arguments write the same bytes, another seed writes others."""
    weights = [
        (make_checkpoint(tmp_path / name, "tiny-llama", seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_a_checkpoint_is_whole_and_never_ends(tmp_path: Path) -> None:
    """In bfloat16 by default, and without an end-of-sequence token."""
    (file,) = check_folder(make_checkpoint(tmp_path, "tiny-qwen3"))
    assert {str(tensor.dtype) for tensor in load_file(file).values()} == {"torch.bfloat16"}
    assert read_json(tmp_path / "config.json").get("eos_token_id") is None
