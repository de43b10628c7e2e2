"""How much fits: arithmetic from a checkpoint folder, before anything is loaded. No torch.

    KV bytes per token = sum over layers of (K + V elements per token) x bytes per element
                       = 2 x layers x KV heads x head dim x bytes          for plain and grouped attention
                       = layers x (kv_lora_rank + qk_rope_head_dim) x bytes  for MLA, whose latent is what is stored
    int8 and fp8 KV: one byte an element, and a scale of two bytes for each head's K and V

The worker measures for itself what the model really stores (engine/probe.py); a test holds this file against it for
every family.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.layout import QUANTISED, SCALE_BYTES, plan_calls
from tandem.errors import CheckpointRefused, SettingsError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPES = ("auto", *QUANTISED)
_STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "I32": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides about memory, read from config.json and the weights' headers."""

    name: str
    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    context: int
    parameters: int
    stored_bytes: int
    why: str  # how the KV size was found, in words

    def block_bytes(self, block_size: int, dtype: str, kv_dtype: str = "auto") -> int:
        """Bytes of one block across all layers, with the engine's own padding. `kv_dtype` auto: as `dtype`."""
        calls = [(self.kv_heads, self.k_dim, self.v_dim)] * self.layers
        itemsize, scaled = _element(dtype, kv_dtype)
        return plan_calls(calls, block_size, itemsize, scaled=scaled)[1]

    def kv_bytes_per_token(self, dtype: str, kv_dtype: str = "auto") -> int:
        """Scales included, padding not."""
        itemsize, scaled = _element(dtype, kv_dtype)
        of_head = (self.k_dim + self.v_dim) * itemsize + (2 * SCALE_BYTES if scaled else 0)
        return self.layers * self.kv_heads * of_head

    def weight_bytes(self, dtype: str) -> int:
        return self.parameters * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one worker can hold with `memory` bytes."""

    weights: int
    kv: int  # bytes left for KV
    blocks: int
    tokens: int
    concurrency: dict[int, int]  # context length -> sequences of that length at once
    longest: dict[int, int]  # sequences at once -> longest context of each


def read_shape(folder: Path) -> Shape:
    """Raises CheckpointRefused with one sentence when the folder does not say what is needed."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointRefused(f"{folder} has no readable config.json: {error}") from error
    config = config.get("text_config") or config
    layers = _first(config, "num_hidden_layers", "n_layer", "n_layers")
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    parameters, stored, key_width = _weights(folder)
    if config.get("kv_lora_rank"):
        latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        kv_heads, k_dim, v_dim = 1, latent, rope
        why = f"latent attention: {latent} + {rope} elements per token and layer"
    else:
        k_dim = v_dim = config.get("head_dim") or hidden // heads
        # a config may carry num_key_value_heads without grouping anything (OPT): the projection's shape decides
        kv_heads = key_width // k_dim or config.get("num_key_value_heads") or heads
        why = f"2 x {kv_heads} KV heads (of {heads} heads) x {k_dim} elements per token and layer"
    return Shape(
        name=config.get("model_type", folder.name),
        layers=layers,
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        context=_first(config, "max_position_embeddings", "n_positions", "n_ctx"),
        parameters=parameters,
        stored_bytes=stored,
        why=why,
    )


def capacity(
    shape: Shape,
    *,
    memory: int,
    utilization: float,
    dtype: str,
    block_size: int,
    kv_dtype: str = "auto",
    contexts: tuple[int, ...],
    concurrencies: tuple[int, ...],
) -> Capacity:
    """What fits into `utilization` of the memory (bytes) that the weights leave.

    Raises SettingsError when the weights alone do not fit.
    """
    weights = shape.weight_bytes(dtype)
    if weights >= memory:
        raise SettingsError(
            f"the weights take {weights / 2**30:.1f} GiB as {dtype}, there are {memory / 2**30:.1f} GiB",
            field="memory",
            bound=f"over {weights / 2**30:.1f} GiB",
        )
    kv = int((memory - weights) * utilization)
    blocks = kv // shape.block_bytes(block_size, dtype, kv_dtype)
    return Capacity(
        weights=weights,
        kv=kv,
        blocks=blocks,
        tokens=blocks * block_size,
        concurrency={length: blocks // -(-length // block_size) for length in contexts},
        longest={count: min(shape.context, blocks // count * block_size) for count in concurrencies},
    )


def _element(dtype: str, kv_dtype: str) -> tuple[int, bool]:
    """Bytes of an element of K or V, and whether it has scales beside it."""
    return (1, True) if kv_dtype in QUANTISED else (DTYPE_BYTES[dtype], False)


def _weights(folder: Path) -> tuple[int, int, int]:
    """Parameters, stored bytes, and the width of a key projection (0 without one), from the files' headers."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointRefused(f"{folder} has no safetensors files; convert or download them first")
    parameters = stored = key_width = 0
    for path in files:
        try:
            with safe_open(path, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    view = tensors.get_slice(name)
                    shape = view.get_shape()
                    count = math.prod(shape)
                    if name.endswith("k_proj.weight"):
                        key_width = shape[0]
                    parameters += count
                    stored += count * _STORED_BYTES.get(view.get_dtype(), 1)
        except (SafetensorError, OSError) as error:
            raise CheckpointRefused(f"{path} is not a readable safetensors file: {error}") from error
    return parameters, stored, key_width


def _first(config: dict[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise CheckpointRefused(
        f"config.json says none of {', '.join(names)}; this kind of model is not known to the planner"
    )
