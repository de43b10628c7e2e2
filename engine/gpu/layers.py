"""The layers of a model on CUDA that Tandem's own products serve, chosen at load after a trial on the device itself.

A product must agree with torch's, and a row must have the same bits alone, among few and among many others, for every
shape of weight. If one fails, torch's products serve all, and the log says that a token's bits may depend on its batch.
Modules change their class as on CPU (engine/kernels/modules.py).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.gpu import trial
from engine.kernels import modules
from engine.kernels.replacement import Compiled

log = logging.getLogger(__name__)

NAME = "cuda (triton)"
ROWS = (1, 5, 64, 65, 200)  # row counts of the trial: one tile and several, of both kinds


def prepare(model: nn.Module, device: torch.device) -> str:
    """Marks the products and RMS norms for `engine.kernels.modules.switch`; returns a line about it."""
    if why := trial.absent(device):
        return f"torch, because {why}"
    return adopt(model)


def adopt(model: nn.Module) -> str:
    """As `prepare`, on any device."""
    from engine.gpu import products  # torch for CUDA brings Triton, the one for CPU does not
    from engine.gpu.mixture import adoption
    from engine.gpu.recurrent import norms as gated

    layers = [layer for layer in model.modules() if weight_of(layer) is not None]
    if problem := differs(layers):
        log.warning("torch's products serve, with bits that may follow from a token's batch: Triton's %s", problem)
        return f"torch, because Triton's {problem}"
    for layer in layers:
        layer.__dict__[modules.REPLACEMENT] = Linear
    norms = 0
    for module in model.modules():
        if (norm := modules.rms_norm_of(module, products.rms_norm)) is not None:
            module.__dict__.update({modules.NORM: norm, modules.REPLACEMENT: RmsNorm})
            norms += 1
        elif (with_gate := gated.gated_of(module)) is not None:
            module.__dict__.update({gated.NORM: with_gate, modules.REPLACEMENT: gated.GatedNorm})
            norms += 1
    mixtures = adoption.adopt(model)
    return f"{NAME}, {len(layers)} products and {norms} norms{mixtures and f', {mixtures}'}"


def weight_of(layer: nn.Module) -> torch.Tensor | None:
    """The weight `[n, k]` of a plain product, None of anything else."""
    return modules.weight_of(layer, trial.GAP)


@torch.inference_mode()
def differs(layers: list[nn.Module]) -> str | None:
    """The problem with a product of these layers, tried once for each type and shape of weight; None if there is
    none."""
    kinds = {}
    for layer in layers:
        weight = weight_of(layer)
        assert weight is not None
        kinds[weight.dtype, weight.shape, layer.bias is None] = layer
    for (dtype, shape, _), layer in kinds.items():
        what = f"product with a weight of {shape[0]} x {shape[1]} in {str(dtype).removeprefix('torch.')}"
        if problem := trial.failing(partial(_differs, layer, dtype, shape[1])):
            return f"{what} {problem}"
    return None


def _differs(layer: nn.Module, dtype: torch.dtype, k: int) -> str | None:
    device = next(layer.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(ROWS[-1], k, generator=generator, device=device).to(dtype)
    found = multiply(layer, x)
    return trial.differs(found, layer(x)) or trial.other_bits(
        lambda rows: (multiply(layer, rows),), (x,), (found,), ROWS
    )


def multiply(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """With the layer's own tensor and numbers, which a recording takes for constants."""
    transposed = isinstance(layer, Conv1D)
    weight = layer.weight.T if transposed else layer.weight
    n, k = (layer.nf, layer.nx) if transposed else (layer.out_features, layer.in_features)
    out: torch.Tensor = torch.ops.tandem_gpu.linear.default(x, weight, layer.bias, n, k)
    return out


class Linear(Compiled):
    """A product whose rows do not depend on each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:  # type: ignore[attr-defined]  # the module's own
            out: torch.Tensor = super().forward(x)  # type: ignore[misc]
            return out
        return multiply(self, x)


class RmsNorm(Compiled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (weight,) = self._parameters.values()  # type: ignore[attr-defined]
        if x.dtype != weight.dtype:
            out: torch.Tensor = super().forward(x)  # type: ignore[misc]
        else:
            out = torch.ops.tandem_gpu.rms_norm.default(x, weight, *self.__dict__[modules.NORM])
        return out
