"""Checkpoints that are already quantised: the supported ones, and how their integers become Tandem's codes.

transformers loads them with the quantiser that their config names; compressed-tensors is the one that runs on any
machine. Its library makes the dense weight of each layer, and the codes are recovered from that and the scales: they
are used only if they give that weight bit for bit. A layer whose codes fit no format of Tandem is served from its dense
weight. All other requirements of a config, such as quantised activations, are refused.

transformers' quantisers of GPTQ and AWQ require GPTQModel, that of FP8 a GPU, and torchao's makes tensors with their
own kernels; `engine.loading.gptq_awq_fp8` reads these instead, and transformers gets the weights that they represent,
one at a time, as if they were in the file. Codes replace them under the same condition.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.core import packing_scheme
from engine.kernels import experts, weight_quantization
from engine.kernels.weight_quantization import Packer
from engine.loading import gptq_awq_fp8
from engine.loading.part_loader import WeightFiles
from engine.parallel.weight_cut import Part
from tandem.errors import CheckpointRefused

log = logging.getLogger(__name__)

METHOD = "compressed-tensors"
LIBRARY = "compressed_tensors"
KINDS = frozenset({"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"})
LEFTOVERS = (
    *("_scale", "_scale_inv", "_zero_point", "_packed", "_g_idx", "_qdata"),
    *(".qweight", ".qzeros", ".scales", ".g_idx"),
)


def check(config: PreTrainedConfig) -> str | None:
    """The method by which a checkpoint is quantised, None if it is not. Raises CheckpointRefused with what to do."""
    if getattr(config, "quantization_config", None) is None:
        return None
    quantization = _quantization(config)
    method = quantization.get("quant_method")
    if method in packing_scheme.METHODS:
        packing_scheme.scheme_of(quantization)
        return str(method)
    if method != METHOD:
        raise CheckpointRefused(
            f"the checkpoint is quantised by {method}, which is not supported here; serve one"
            f" of {', '.join((METHOD, *packing_scheme.METHODS))}, or the original one with weights = int8, int4 or fp8"
        )
    groups = list((quantization.get("config_groups") or {}).values())
    for group in groups:
        for what in ("input_activations", "output_activations"):
            if group.get(what) is not None:
                raise _refused(f"quantises {what.replace('_', ' ')} too, and only weights are served quantised")
    for what in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if quantization.get(what) and (
            what != "sparsity_config" or quantization[what].get("format", "dense") != "dense"
        ):
            raise _refused(f"has a {what}, which is not served")
    kinds = {
        kind for kind in (quantization.get("format"), *(group.get("format") for group in groups)) if kind is not None
    }
    if kinds - KINDS:
        raise _refused(f"has the format {', '.join(sorted(kinds - KINDS))}; served are {', '.join(sorted(KINDS))}")
    if importlib.util.find_spec(LIBRARY) is None:
        raise _refused(f"needs its library to be read: pip install {METHOD}")
    return METHOD


def _quantization(config: PreTrainedConfig) -> dict[str, Any]:
    section: Any = config.quantization_config
    quantization: dict[str, Any] = section if isinstance(section, dict) else section.to_dict()
    return quantization


def _refused(why: str) -> CheckpointRefused:
    return packing_scheme.refused(METHOD, why)


def read(files: list[Path], config: PreTrainedConfig, method: str | None) -> gptq_awq_fp8.Weights | None:
    """The tensors of a checkpoint that transformers does not unpack here; None if it reads the files itself. `method`:
    as `check` has it.

    Removes the quantisation from the config, so that transformers reads the checkpoint as one that is not quantised.
    """
    if method not in packing_scheme.METHODS:
        return None
    weights = gptq_awq_fp8.read(files, packing_scheme.scheme_of(_quantization(config)))
    del config.quantization_config
    return weights


def check_keys(unexpected: list[str], weights: gptq_awq_fp8.Weights | None = None) -> None:
    """Raises CheckpointRefused when the files contain scales or codes that no layer has used.

    With packed weights, no other tensor may remain either, except biases of 0 that packers add to layers without one.
    """
    if weights is not None:
        left = [name for name in unexpected if not _is_no_bias(name, weights)]
        if left:
            raise packing_scheme.refused(
                weights.method,
                f"holds {len(left)} tensors that no layer takes, such as {left[0]}: it is of another model",
            )
    names = sorted(name for name in unexpected if name.endswith(LEFTOVERS))
    if names:
        raise CheckpointRefused(
            f"{len(names)} scales or codes in the checkpoint belong to no layer, such as {names[0]}: its"
            " quantization_config does not describe its weights"
        )


def _is_no_bias(name: str, weights: gptq_awq_fp8.Weights) -> bool:
    layer, _, last = name.rpartition(".")
    return last == "bias" and layer in weights.products and not weights.tensors[name][...].any()


def adopt(
    model: PreTrainedModel,
    packer: Packer | None,
    weights: gptq_awq_fp8.Weights | None,
    parts: Mapping[str, Part] | None = None,
) -> str:
    """Converts the library's layers to plain ones; with `packer`, over packed codes where exact. Returns a summary.

    `weights` are the result of `read`, `parts` what this rank has of parameters, where the model is one of several
    ranks' part. Raises CheckpointRefused if a layer's weight is not the one that was read.
    """
    if weights is not None:
        return _adopt(model, packer, weights, parts or {})
    from compressed_tensors.compressors import ModelCompressor

    layers = [layer for layer in model.modules() if getattr(layer, "quantization_scheme", None) is not None]
    ModelCompressor.decompress_model(_compressor(model), model)
    over_codes = 0
    for layer in layers:
        if type(layer) is not nn.Linear:
            raise _refused(f"quantises a {type(layer).__name__}, and only plain linear layers are served so")
        codes = _codes(layer, packer) if packer else None
        _strip(layer)
        if codes is not None:
            weight_quantization.put(layer, codes)
            over_codes += 1
    return _line(len(layers), METHOD, over_codes)


def _line(count: int, method: str, over_codes: int) -> str:
    if widened := count - over_codes:
        log.warning(
            "%d of %d products of the %s checkpoint are widened: they take the memory of unquantised weights."
            " Codes are multiplied with by the compiled operators on CPU and by Triton on CUDA",
            *(widened, count, method),
        )
    return f"weights: {count} products of the {method} checkpoint, {over_codes} of them over its own codes"


def _adopt(
    model: PreTrainedModel, packer: Packer | None, weights: gptq_awq_fp8.Weights, parts: Mapping[str, Part]
) -> str:
    layers = dict(model.named_modules())
    if any(isinstance(layer, Conv1D) for layer in layers.values()):
        raise packing_scheme.refused(
            weights.method, "is of a model with transposed weights, which are not supported here"
        )
    accessors: Any = model  # transformers', not typed
    head = accessors.get_output_embeddings() if model.config.get_text_config().tie_word_embeddings else None
    over_codes = 0
    for name, whole in weights.products.items():
        path = name if name in layers else f"{model.base_model_prefix}.{name}"
        if path not in layers:
            continue  # transformers has merged it into another tensor, as a mixture's experts, which follow below
        layer: Any = layers[path]
        if type(layer) is not nn.Linear:
            raise packing_scheme.refused(
                weights.method, f"quantises a {type(layer).__name__}, and only linear layers are served"
            )
        if layer is head:
            raise packing_scheme.refused(weights.method, f"has {name} packed, and its config ties it to the embedding")
        product = whole.part(parts.get(f"{path}.weight"))
        if not torch.equal(product.weight().to(layer.weight.dtype), layer.weight.detach().cpu()):
            raise packing_scheme.refused(
                weights.method, f"has weights of {name} that are not what the model computes with"
            )
        codes = product.codes(packer) if packer else None
        if codes is not None:
            weight_quantization.put(layer, codes)
            over_codes += 1
    if packer is not None and not parts:
        over_codes += _adopt_experts(model, packer, weights)
    return _line(len(weights.products), weights.method, over_codes)


def _adopt_experts(model: PreTrainedModel, packer: Packer, weights: gptq_awq_fp8.Weights) -> int:
    """Replaces the experts of mixtures by their own codes where exact; returns for how many products."""
    files, adopter, over_codes = WeightFiles([], model, weights), packer.adopter(), 0
    mixtures = list(experts.found(model))
    paths = {module: path for path, module in model.named_modules()}
    for mixture in mixtures:
        products = [files.products(f"{paths[mixture]}.{name}") for name in experts.names(mixture)]
        both: list[experts.CodedStack] = []
        for each, weight, name in zip(products, experts.weights(mixture), experts.names(mixture), strict=True):
            stack = _stack_of(each, weight, name, weights.method, packer) if each is not None else None
            both += [stack] if stack is not None else []
        if len(both) == len(products):
            adopter.adopt(mixture, both)
            over_codes += sum(len(one) for each in products for one in each or ())
    return over_codes


def _stack_of(
    products: list[list[gptq_awq_fp8.Product]], weight: torch.Tensor, name: str, method: str, packer: Packer
) -> experts.CodedStack | None:
    """The codes of a stack of experts `[experts, n, k]`; None if no format represents all of them bit for bit. Raises
    CheckpointRefused if the weights are not those that were read."""
    joined = [beside for each in products if (beside := gptq_awq_fp8.beside(each)) is not None]
    if len(joined) != len(weight):
        return None
    for product, own in zip(joined, weight, strict=True):
        if not torch.equal(product.weight().to(own.dtype), own):
            raise packing_scheme.refused(
                method, f"has weights of {product.name} that are not what the model computes with"
            )
    for format, zeros in [("fp8", False)] if joined[0].fp8 else [("int4", False), ("int4", True), ("int8", False)]:
        if zeros and not packer.zeros:
            continue
        each = (product.with_zeros() if zeros else _in_place(product, format) for product in joined)
        if (stack := packer.pack_experts(each, len(joined), format, name)) is not None:
            return stack
    return None


def _in_place(product: gptq_awq_fp8.Product, format: str) -> experts.ExpertCodes | None:
    """The codes of a product with its columns in place; None if there are none."""
    found = product.coded(format)
    if found is None or not torch.equal(found.order, torch.arange(len(found.order))):
        return None
    again = weight_quantization.represented(found.codes, found.scales, found.group, format)
    same = torch.equal(again, product.weight())
    return experts.ExpertCodes(found.codes, found.scales, found.group) if same else None


def _compressor(model: PreTrainedModel) -> Any:
    quantizer: Any = model.hf_quantizer  # transformers', not typed
    return quantizer.compressor


def _codes(layer: Any, packer: Packer) -> weight_quantization.Codes | None:
    """The codes of a layer whose dense weight the library has made; None if no codes represent that weight."""
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
    codes = weight_quantization.codes_of(units.nan_to_num(0.0), format)
    again = weight_quantization.values_of(codes, format) * scales.repeat_interleave(group, 1)[:, :k]
    if not torch.equal(again.to(weight.dtype), weight):
        return None
    return packer.pack(codes, scales, group, format)


def _strip(layer: Any) -> None:
    """Removes everything from a layer but its weight, its bias and its class's own forward."""
    for name in [*layer._parameters, *layer._buffers]:
        if name not in ("weight", "bias"):
            delattr(layer, name)
    layer.__dict__.pop("forward", None)
    layer._forward_pre_hooks.clear()
    layer._forward_hooks.clear()
    for name in ("quantization_scheme", "quantization_status"):
        layer.__dict__.pop(name, None)
