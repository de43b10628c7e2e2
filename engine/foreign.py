"""Checkpoints that somebody else has quantised: which are served, and how their integers come into our products.

transformers loads them with the quantiser that their config names; compressed-tensors is the one that runs on any
machine. Its library makes the dense weight of each layer, and the codes are found again from that and the scales: they
are used only where they give that very weight, bit for bit. A layer whose codes we have no format for is served from
its dense weight. Whatever else a config asks for, quantised activations above all, is refused.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.kernels import lowbit
from tandem.errors import CheckpointRefused

METHOD = "compressed-tensors"
LIBRARY = "compressed_tensors"
KINDS = frozenset({"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"})
LEFTOVERS = ("_scale", "_scale_inv", "_zero_point", "_packed", "_g_idx", ".qweight", ".qzeros", ".scales", ".g_idx")


def check(config: PreTrainedConfig) -> str | None:
    """The method by which a checkpoint is quantised, None if it is not. Raises CheckpointRefused with what to do."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    asked: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method = asked.get("quant_method")
    if method != METHOD:
        raise CheckpointRefused(
            f"the checkpoint is quantised by {method}, of which only CUDA kernels or nothing is known here; serve a"
            f" {METHOD} checkpoint of the model, or the original one with weights = int8, int4 or fp8"
        )
    groups = list((asked.get("config_groups") or {}).values())
    for group in groups:
        for what in ("input_activations", "output_activations"):
            if group.get(what) is not None:
                raise _refused(f"quantises {what.replace('_', ' ')} too, and only weights are served quantised")
    for what in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if asked.get(what) and (what != "sparsity_config" or asked[what].get("format", "dense") != "dense"):
            raise _refused(f"has a {what}, which is not served")
    kinds = {kind for kind in (asked.get("format"), *(group.get("format") for group in groups)) if kind is not None}
    if kinds - KINDS:
        raise _refused(f"has the format {', '.join(sorted(kinds - KINDS))}; served are {', '.join(sorted(KINDS))}")
    if importlib.util.find_spec(LIBRARY) is None:
        raise _refused(f"needs its library to be read: pip install {METHOD}")
    return METHOD


def _refused(why: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"the {METHOD} checkpoint {why}; or serve the original one with weights = int8, int4 or fp8"
    )


def check_keys(unexpected: list[str]) -> None:
    """Raises CheckpointRefused when the files hold scales or codes that no layer has taken: the rest means nothing."""
    names = sorted(name for name in unexpected if name.endswith(LEFTOVERS))
    if names:
        raise CheckpointRefused(
            f"{len(names)} scales or codes in the checkpoint belong to no layer, such as {names[0]}: its"
            " quantization_config does not say what its weights are"
        )


def adopt(model: PreTrainedModel, compiled: bool) -> str:
    """Makes plain layers of the library's; with `compiled`, over packed codes where exact. Says what it did."""
    from compressed_tensors.compressors import ModelCompressor

    layers = [layer for layer in model.modules() if getattr(layer, "quantization_scheme", None) is not None]
    ModelCompressor.decompress_model(_compressor(model), model)
    packed = 0
    for layer in layers:
        if type(layer) is not nn.Linear:
            raise _refused(f"quantises a {type(layer).__name__}, and only plain linear layers are served so")
        codes = _codes(layer) if compiled else None
        _strip(layer)
        if codes is not None:
            lowbit.put(layer, codes)
            packed += 1
    return f"weights: {len(layers)} products of the {METHOD} checkpoint, {packed} of them over its own codes"


def _compressor(model: PreTrainedModel) -> Any:
    quantizer: Any = model.hf_quantizer  # transformers', not typed
    return quantizer.compressor


def _codes(layer: Any) -> lowbit.Codes | None:
    """The codes of a layer whose dense weight the library has made; None where ours would not be that weight."""
    wanted, scale = layer.quantization_scheme.weights, getattr(layer, "weight_scale", None)
    weight = layer.weight.detach()
    n, k = weight.shape
    if wanted is None or scale is None or not wanted.symmetric or getattr(layer, "weight_g_idx", None) is not None:
        return None
    if wanted.num_bits > 8 or wanted.strategy not in ("channel", "group", "tensor"):
        return None
    format = "fp8" if wanted.type == "float" else "int4" if wanted.num_bits <= 4 else "int8"
    group = wanted.group_size if wanted.strategy == "group" else k + k % 2
    if group % 2 == 1 or (wanted.type == "float" and wanted.num_bits != 8):
        return None
    scales = scale.detach().float().reshape(-1, -(-k // group)).expand(n, -1).contiguous()  # [n, groups]
    units = weight.float() / scales.repeat_interleave(group, 1)[:, :k]
    codes = lowbit.codes_of(units.nan_to_num(0.0), format)
    again = lowbit.values_of(codes, format) * scales.repeat_interleave(group, 1)[:, :k]
    if not torch.equal(again.to(weight.dtype), weight):
        return None
    return lowbit.packed(codes, scales, group, format)


def _strip(layer: Any) -> None:
    """Leaves a layer its weight and bias, and its class's own forward."""
    for name in [*layer._parameters, *layer._buffers]:
        if name not in ("weight", "bias"):
            delattr(layer, name)
    layer.__dict__.pop("forward", None)
    layer._forward_pre_hooks.clear()
    layer._forward_hooks.clear()
    for name in ("quantization_scheme", "quantization_status"):
        layer.__dict__.pop(name, None)


__all__ = ["adopt", "check", "check_keys"]
