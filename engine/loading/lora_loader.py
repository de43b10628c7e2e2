"""LoRA adapters on disk, as PEFT saves them: adapter_config.json and adapter_model.safetensors.

An adapter is defined by its tensors. The config gives the scale; every field that could mean more than
y += scale * B A x on a linear layer is refused, also an unknown one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from engine.core.block_hash import DIGEST_BYTES
from engine.loading.checkpoint import check_safetensors
from engine.runner.lora import Adapter, LowRank
from tandem.checkpoint import read_json
from tandem.errors import CheckpointRefused

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TENSOR = re.compile(rf"{re.escape(PREFIX)}(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Fields that do not change what the tensors mean; the tensors' names give their layers.
HARMLESS = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules"),
        *("fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
        *("megatron_core", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules"),
        *("task_type", "use_rslora"),
    }
)
# Values other than empty ones that request nothing. Some initialisations change the base's weights and are not here.
ALLOWED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


def read(name: str, folder: str | Path, most_bytes: int | None = None) -> Adapter:
    """`most_bytes` bounds the file of the weights, which is read as a whole. Raises CheckpointRefused with one sentence
    that names the file and the field or tensor."""
    folder = Path(folder).expanduser()
    try:
        return _read(name, folder, most_bytes)
    except OSError as error:
        raise CheckpointRefused(f"adapter {name}: {folder} cannot be read: {error.strerror}") from error


def _read(name: str, folder: Path, most_bytes: int | None) -> Adapter:
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise CheckpointRefused(f"adapter {name}: {folder} has no {file}; pass a folder that PEFT has saved")
    size = (folder / WEIGHTS).stat().st_size
    if most_bytes is not None and size > most_bytes:
        raise CheckpointRefused(
            f"{folder / WEIGHTS} has {size} bytes, and the largest adapter that fits here has {most_bytes}; start the"
            " workers with a larger adapter_max_rank"
        )
    config = _config(folder / CONFIG)
    tensors, digest = _tensors(folder / WEIGHTS)
    layers: dict[str, LowRank] = {}
    for layer in sorted({layer for layer, _ in tensors}):
        layers[layer] = _layer(layer, tensors, config, folder)
    digest.update(json.dumps([(layer, matrices.scale) for layer, matrices in layers.items()]).encode())
    return Adapter(name, folder, digest.digest(), layers)


def read_again(known: Adapter) -> Adapter:
    """Reads the adapter again from its folder. Safe on any thread. Raises CheckpointRefused if it has changed."""
    adapter = read(known.name, known.folder)
    if adapter.fingerprint != known.fingerprint:
        raise CheckpointRefused(
            f"adapter {known.name}: {known.folder} has changed since this worker first read it; unload it and load it"
            " again, or restart the workers if it is in the setting adapters"
        )
    return adapter


def _config(file: Path) -> dict[str, Any]:
    config = read_json(file)
    for field, values in ALLOWED.items():
        if config.get(field, values[0]) not in values:
            raise _refused(file, field, config[field])
    for field, value in config.items():
        if value and field not in HARMLESS and field not in ALLOWED:
            raise _refused(file, field, value)
    if "peft_type" not in config:
        raise CheckpointRefused(f"{file} names no peft_type; it is not the config of a PEFT adapter")
    for field in ("r", "lora_alpha"):
        if type(config.get(field)) not in (int, float) or not 0 < config[field] < math.inf:
            raise CheckpointRefused(f"{file}: {field} is {config.get(field)!r:.80}; it must be a number over 0")
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(field) or {}, dict):
            raise _refused(file, field, config[field])
    return config


def _refused(file: Path, field: str, value: object) -> CheckpointRefused:
    return CheckpointRefused(
        f"{file}: {field} is {value!r:.80}, which is not served; only plain LoRA on linear layers is"
    )


def _tensors(file: Path) -> tuple[dict[tuple[str, str], torch.Tensor], Any]:
    """The tensors by (layer, "A" or "B"), and a digest of the bytes from which they were read."""
    check_safetensors(file)
    content = file.read_bytes()
    try:
        found = load(content)
    except (SafetensorError, KeyError) as error:  # KeyError: a type that torch does not have
        raise CheckpointRefused(f"{file} is not a readable safetensors file ({error}); save it again") from error
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for name, tensor in found.items():
        match = TENSOR.fullmatch(name)
        if match is None:
            raise CheckpointRefused(f"{file} holds {name:.200}, which is not served; only lora_A and lora_B are")
        if tensor.dim() != 2 or tensor.dtype not in DTYPES or tensor.numel() == 0:
            raise CheckpointRefused(f"{file}: {name:.200} is {tensor.dtype} {tuple(tensor.shape)}, not a float matrix")
        tensors[match["layer"], match["part"]] = tensor
    if not tensors:
        raise CheckpointRefused(f"{file} holds no tensors")
    return tensors, hashlib.blake2b(content, digest_size=DIGEST_BYTES, person=b"tandem.lora")


def _layer(layer: str, tensors: dict[tuple[str, str], torch.Tensor], config: dict[str, Any], folder: Path) -> LowRank:
    file = folder / WEIGHTS
    a, b = tensors.get((layer, "A")), tensors.get((layer, "B"))
    if a is None or b is None:
        raise CheckpointRefused(f"{file} has only one of lora_A and lora_B for {layer:.200}")
    rank = _patterned(config, "rank_pattern", "r", layer, folder)
    alpha = _patterned(config, "alpha_pattern", "lora_alpha", layer, folder)
    if not a.shape[0] == b.shape[1] == rank:
        raise CheckpointRefused(
            f"{file}: {layer:.200} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, its rank is {rank}"
        )
    return LowRank(a, b, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _patterned(config: dict[str, Any], pattern: str, plain: str, layer: str, folder: Path) -> float:
    """The value of the first key that, as a regular expression, matches the end of the layer's name, as in PEFT."""
    for key, value in (config.get(pattern) or {}).items():
        try:
            matches = re.match(rf"(.*\.)?({key})$", layer)
        except re.error as error:
            raise CheckpointRefused(
                f"{folder / CONFIG}: {pattern} has {key!r:.80}, not a regular expression"
            ) from error
        if matches:
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise CheckpointRefused(f"{folder / CONFIG}: {pattern} has {value!r:.80}; it must be over 0")
            return float(value)
    return float(config[plain])
