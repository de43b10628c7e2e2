"""Several ranks serve quantised weights: the codes of one rank, cut, and the tokens that these codes mean."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine import kernels
from engine.core.weight_formats import BITS, of_head
from engine.kernels import weight_quantization
from engine.loading import part_loader
from engine.parallel import weight_cut
from loadtest.harness.random_checkpoints import make_checkpoint
from planner.capacity import read_shape
from planner.ranks import of_ranks
from tandem.errors import CheckpointRefused
from tests.engine.conftest import two_layers
from tests.engine.test_ranks import CUTS, engine_of, follow, greedy, random_biases

pytestmark = pytest.mark.skipif(
    kernels.serving(kernels.CPU) == kernels.REFERENCE, reason="ranks need the compiled operators"
)


def rounded(base: Path, folder: Path, format: str) -> Path:
    """A plain checkpoint in float32 with the weights that one rank's codes represent."""
    auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
    model = auto.from_pretrained(base, dtype=torch.float32)
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear:
            codes = weight_quantization.quantise(module.weight.detach(), of_head(format) if module is head else format)
            module.weight = nn.Parameter(codes.weight())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    return folder


def codes_of(module: Any) -> dict[str, torch.Tensor]:
    """What the codes below a module represent, by layer."""
    kept = {name: layer.__dict__.get(weight_quantization._CODES) for name, layer in module.named_modules()}
    return {name: codes.weight() for name, codes in kept.items() if codes is not None}


WHOLE_GROUPS: dict[str, Any] = {"intermediate_size": 128}  # 64 columns for each of two ranks


@pytest.mark.parametrize(
    ("cut", "format"),
    [
        *(("llama", format) for format in sorted(BITS)),
        *((cut, "int8") for cut in CUTS if cut != "llama"),
        ("phi3", "int4"),
    ],
)
def test_ranks_with_rounded_weights_give_the_tokens_of_transformers(cut: str, format: str, tmp_path: Path) -> None:
    """Over the weights that the codes of one rank represent, in float32, whatever is cut: a rank has its part of these
    codes, bit for bit. The planner knows their bytes."""
    shape, changes, ranks = CUTS[cut]
    changes = {**two_layers(shape), **changes, **(WHOLE_GROUPS if format == "int4" else {})}
    base = make_checkpoint(tmp_path / "base", shape, dtype="float32", **changes)
    if cut == "biases":
        random_biases(base)
    reference = rounded(base, tmp_path / "rounded", format)
    planned = of_ranks(read_shape(base), base, ranks, format)
    with engine_of(base, ranks, weights=format) as (engine, _):
        answers = greedy(engine)
        assert follow(reference, answers)
        assert engine.model.recorded is not None or engine.model.latent
        assert engine.model.weights == format
        assert planned.weight_bytes("float32", format) == pytest.approx(engine.model.weight_bytes, rel=1e-3)
        parts = parts_of(reference, ranks)
        for name, weight in codes_of(engine.model.module).items():
            assert torch.equal(weight, parts[name]), name


def parts_of(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Rank 0's part of every product of a plain checkpoint."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    group: Any = SimpleNamespace(rank=0, size=ranks)
    weight_cut.cut(model, group).take(model)
    return {name: module.weight for name, module in model.named_modules() if type(module) is nn.Linear}


def test_groups_that_ranks_would_break_are_refused(tmp_path: Path) -> None:
    """Where a rank's columns end within a group of int4, of which it could not know the scale: with the product and the
    numbers, before a weight is read, by a worker and by the planner."""
    make_checkpoint(tmp_path, "tiny-llama", dtype="float32")
    why = r"model.layers.0.mlp.down_proj\S* has 96 columns, 48 for each of 2 ranks"
    with pytest.raises(CheckpointRefused, match=why):
        of_ranks(read_shape(tmp_path), tmp_path, 2, "int4")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointRefused, match=why):
        patch.setattr(part_loader, "load", lambda *_: pytest.fail("weights were read"))
        with engine_of(tmp_path, 2, weights="int4"):
            pass
