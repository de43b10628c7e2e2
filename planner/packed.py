"""The memory of GPTQ, AWQ, block-wise FP8 and torchao checkpoints when served, from their headers and config.

The engine packs a weight again if one of its formats can represent it (`engine/loading/gptq_awq_fp8.py`); other weights
take the model's dtype. The result is for the compiled operators. On CUDA, 4-bit weights with zeros take about half of
it; without compiled operators or Triton, all weights take the model's dtype.
"""

from __future__ import annotations

import re
from typing import Any

from engine.core.packing_scheme import FP8, PARTS, TORCHAO, scheme_of
from engine.core.weight_formats import of_integers, weight_bytes
from planner.experts import MARK

Shapes = dict[str, tuple[int, ...]]
Codings = dict[str, tuple[str, int]]  # weights that are served over codes: their format, and columns with one scale


def unpacked(shapes: Shapes, asked: dict[str, Any]) -> tuple[Shapes, Codings]:
    """The shapes of the plain checkpoint, and which weights are served over codes. Raises CheckpointRefused for a
    scheme that the engine refuses."""
    scheme = scheme_of(asked)
    plain, coded = dict(shapes), Codings()
    format: str | None
    for name, shape in shapes.items():
        if scheme.method == FP8 and f"{name}_scale_inv" in shapes:
            layer, (n, k) = name.removesuffix(".weight"), shape
            group, format = scheme.block[1], "fp8"
            parts: tuple[str, ...] = ("weight_scale_inv",)
        elif scheme.method == TORCHAO and name.endswith("._weight_qdata"):
            layer, (n, k) = name.removesuffix("._weight_qdata"), shape
            group, format = k // shapes[f"{layer}._weight_scale"][1], _of_recipe(str(asked["quant_type"]))
            parts = ("_weight_qdata", "_weight_scale", "_weight_zero_point")
        elif scheme.method in PARTS and name.endswith(".qweight"):
            layer, (n, k) = name.removesuffix(".qweight"), scheme.dense_shape(*shape)
            group, format, parts = scheme.group, of_integers(scheme.bits, scheme.symmetric), PARTS[scheme.method]
        else:
            continue
        for part in parts:
            plain.pop(f"{layer}.{part}", None)
        plain[f"{layer}.weight"] = (n, k)
        group = group if 0 < group < k else k + k % 2
        in_place = MARK not in name or scheme.ordered  # experts have their columns as they are
        if format is not None and group % 2 == 0 and in_place:
            coded[f"{layer}.weight"] = format, group
    return plain, coded


def coded_bytes(shapes: Shapes, codings: Codings) -> int:
    """Bytes of the weights that are served over codes, by their shapes in `shapes`."""
    return sum(weight_bytes(shapes[name][0], shapes[name][1], *coding) for name, coding in codings.items())


def _of_recipe(recipe: str) -> str | None:
    """The format of torchao's codes. A header does not say whether their zeros are all 0; the recipe does."""
    if "float8" in recipe.lower():
        return "fp8"
    return of_integers(4 if re.search(r"\bint[1-4]\b", recipe) else 8, symmetric="ASYMMETRIC" not in recipe)
