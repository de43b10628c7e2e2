"""Checks the cut at every load: all ranks together against the whole model, with the weights that will serve.

The self-check compares two paths over one rank's part, and cannot see whether the parts make up the model. So rank 0
runs one prompt through the whole model, with one layer in memory at a time (engine/loading/part_loader.py), and all
ranks run it through their parts. transformers makes the layers of the whole and Tandem reads the parts, so an error of
one does not hide in the other. In float32 the gap between the logits, in their standard deviations, must be below the
self-check's threshold: a part that is missing, taken twice or of other heads gives a gap of order one. In 16 bits the
median over the positions is held against twice what rounding alone does to this model, as the self-check has it. And
all ranks must have the same bits.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
import xxhash
from transformers import PreTrainedModel

from engine.attention import implementation
from engine.attention.forward_context import BASE, Batch
from engine.loading.self_check import FP32_THRESHOLD, NOISE_CEILING, NOISE_FACTOR, NOISE_FLOOR, perturbed
from engine.parallel.rank_group import RankGroup
from engine.runner.model_runner import ModelRunner
from tandem.errors import CheckpointRefused

LENGTH = 24  # tokens


@dataclass(frozen=True)
class Whole:
    """The whole model's logits `[LENGTH, vocab]`, and the permitted gap."""

    logits: torch.Tensor
    threshold: float


def whole(module: PreTrainedModel) -> Whole:
    """The reference, from a model that is not cut."""
    logits = _logits(module)
    if logits.dtype == torch.float32 and module.dtype == torch.float32:
        return Whole(logits, FP32_THRESHOLD)
    with perturbed(module, module.dtype):
        noise = _gap(_logits(module), logits, module.dtype)
    return Whole(logits, min(max(NOISE_FACTOR * noise, NOISE_FLOOR), NOISE_CEILING))


def check(module: PreTrainedModel, expected: Whole | None, group: RankGroup) -> str:
    """Compares the ranks' parts with the whole, which rank 0 has; returns a line. Raises CheckpointRefused on all ranks
    if they have other bits than each other, on rank 0 if they differ from the whole."""
    return _compare(module, _logits(module), expected, group)


def _compare(
    module: PreTrainedModel, logits: torch.Tensor, expected: Whole | None, group: RankGroup, rounded: bool = False
) -> str:
    group.agree(xxhash.xxh3_128(logits.numpy().tobytes()).digest(), "logits")
    if expected is None:
        return "the ranks have the same bits"
    gap, threshold = _gap(logits, expected.logits, module.dtype), math.inf if rounded else expected.threshold
    if not (gap <= threshold and math.isfinite(gap)):  # also for NaN
        raise CheckpointRefused(
            f"{type(module).__name__} cut for {group.size} ranks differs from the whole model: a gap of {gap:.1e},"
            f" threshold {threshold:.1g}; serve it by one rank"
        )
    return f"the parts make up the model: gap {gap:.1e}, threshold {threshold:.1g}"


def check_served(model: ModelRunner, expected: Whole | None, slot: int = BASE) -> str:
    """Compares the path that serves, with weights of which only packed copies are left, with the whole; returns a line.
    With the adapter in `slot`, if one is named. Raises CheckpointRefused as `check` does. Pages that round K and V are
    not compared: the self-check has done that beside weights that were not packed, and each packed weight has been
    proven; here all must be finite."""
    assert model.group is not None
    tokens = _prompt(model.module)
    blocks = -(-LENGTH // model.block_size)
    pages, batch = model.allocate(blocks), Batch()
    batch.add(tokens, 0, list(range(blocks)), list(range(LENGTH)))
    batch.adapters = [] if slot == BASE else [slot]
    return _compare(model.module, model.forward(pages, batch), expected, model.group, pages.quantised)


def _logits(module: PreTrainedModel) -> torch.Tensor:
    ids = torch.tensor([_prompt(module)])
    implementation.switch(module, "eager")
    with torch.inference_mode():
        out: torch.Tensor = module(input_ids=ids, use_cache=False).logits
    return out[0].float()


def _prompt(module: PreTrainedModel) -> list[int]:
    rng = random.Random(3)
    vocab = module.config.get_text_config().vocab_size
    return [rng.randrange(vocab) for _ in range(LENGTH)]


def _gap(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> float:
    gaps = (ours - theirs).abs().amax(dim=-1) / theirs.std(dim=-1)
    return (gaps.max() if dtype == torch.float32 else gaps.median()).item()
