"""Capacity arithmetic from a checkpoint folder, before anything is loaded. Does not import torch.

    KV bytes per token = sum over layers of (K + V elements per token) x bytes per element (planner/kv_calls.py)
                       = 2 x layers x KV heads x head dim x bytes          for plain and grouped attention
                       = layers x (kv_lora_rank + qk_rope_head_dim) x bytes  for MLA, whose latent is what is stored
    int8 and fp8 KV: one byte per element, and a scale of two bytes for each head's K and V of a token
    recurrent layers: no KV, and a state of fixed size for each sequence (planner/recurrent.py)
    adapters: for each slot A and B of every product but the head, in the panels of engine/runner/lora.py

A worker determines from the model itself what it stores (engine/loading/attention_probe.py); a test compares the two
for every family.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.core.kv_layout import QUANTISED, SCALE_BYTES, plan_calls, plan_parts, slot_bytes
from engine.core.packing_scheme import METHODS
from engine.core.weight_formats import BITS, of_head, weight_bytes
from planner import experts, kv_calls, packed, recurrent
from planner.kv_calls import Call, first
from planner.packed import Codings, Shapes
from planner.recurrent import NONE, States
from tandem.checkpoint import read_json, weight_files
from tandem.errors import CheckpointRefused, SettingsError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPES = ("auto", *QUANTISED)
CHECKPOINT = "checkpoint"  # weights as they are, in the model's dtype
_TOKENS = (".embed_tokens.", ".wte.", ".word_embeddings.", ".embed_in.")
_LOOKED_UP = (*_TOKENS, ".wpe.", ".embed_positions.", ".position_embeddings.")
_ROUTERS = (".gate.", ".router.", ".experts.")  # of a mixture: no plain products in transformers
_INDEX_KEYS = ".indexer.wk.weight"  # [dim, hidden]: what makes the keys of a sparse indexer
_PANEL_OF_A, _PANEL_OF_B = 16, 64  # rows (engine/kernels/lora.cpp)
_TURNED = (".c_attn.", ".c_proj.", ".c_fc.")  # GPT-2 stores these [in, out]
_STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "I32": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """What determines memory use, read from config.json and the weights' headers."""

    name: str
    layers: int
    calls: tuple[Call, ...]  # of attention, for each layer with KV
    context: int | None  # None where no position has a limit
    parameters: int
    stored_bytes: int
    why: str  # how the KV size was determined, in words
    products: int  # parameters of products, the weights that can be quantised
    quantised: dict[str, int]  # format -> bytes of these
    widths: int  # columns of all products that can have an adapter, together
    heights: int  # rows, in whole panels of B
    ready: bool = False  # quantised in the checkpoint
    coded: int | None = None  # bytes of the quantised products; None if its files do not say
    ranks: int = 1  # of one worker
    rank: Shape | None = None  # what each has, where there are several
    states: States = NONE  # of recurrent layers
    index_dims: tuple[int, ...] = ()  # elements of a key of each sparse indexer

    def block_bytes(self, block_size: int, dtype: str, kv_dtype: str = "auto") -> int:
        """Bytes of one block across all layers, with the engine's own padding. `kv_dtype` auto: as `dtype`."""
        calls = [*self.calls, *((1, dim, 0) for dim in self.index_dims)]
        itemsize, scaled = _element(dtype, kv_dtype)
        return plan_calls(calls, block_size, itemsize, scaled=scaled)[1] or plan_parts(self.state_bytes(dtype))

    def state_bytes(self, dtype: str) -> int:
        """Bytes of the recurrent states of one sequence; 0 without recurrent layers."""
        return self.states.slot_bytes(dtype, DTYPE_BYTES[dtype])

    def state_blocks(self, block_size: int, dtype: str, kv_dtype: str = "auto") -> int:
        """Blocks that a copy of these states takes, as in a handoff."""
        return -(-self.state_bytes(dtype) // self.block_bytes(block_size, dtype, kv_dtype))

    def kv_bytes_per_token(self, dtype: str, kv_dtype: str = "auto") -> int:
        """With scales, without padding."""
        itemsize, scaled = _element(dtype, kv_dtype)
        scales = 2 * SCALE_BYTES if scaled else 0
        kept = sum(heads * ((k_dim + v_dim) * itemsize + scales) for heads, k_dim, v_dim in self.calls)
        return kept + sum(self.index_dims) * itemsize

    def adapter_bytes(self, dtype: str, slots: int, rank: int) -> int:
        """Of slots for adapters of up to this rank on every product, of one worker, all of its ranks together."""
        if self.rank is not None:
            return self.ranks * self.rank.adapter_bytes(dtype, slots, rank)
        return slots * (-(-rank // _PANEL_OF_A) * _PANEL_OF_A * self.widths + rank * self.heights) * DTYPE_BYTES[dtype]

    def weight_bytes(self, dtype: str, weights: str = CHECKPOINT) -> int:
        """Of one worker, all of its ranks together."""
        if self.rank is not None:
            return self.ranks * self.rank.weight_bytes(dtype, weights)
        if self.ready and self.coded is None:
            return self.stored_bytes
        if self.coded is not None:
            return (self.parameters - self.products) * DTYPE_BYTES[dtype] + self.coded
        if weights == CHECKPOINT or (weights == "bf16" and DTYPE_BYTES[dtype] == 2):
            return self.parameters * DTYPE_BYTES[dtype]
        return (self.parameters - self.products) * DTYPE_BYTES[dtype] + self.quantised[weights]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one worker can hold with `memory` bytes."""

    weights: int
    kv: int  # bytes left for KV
    blocks: int
    tokens: int
    state_slots: int  # bytes of the slots for recurrent states
    adapters: int  # bytes of the slots for adapters
    concurrency: dict[int, int]  # context length -> sequences of that length at once
    longest: dict[int, int]  # sequences at once -> longest context of each


def read_shape(folder: Path) -> Shape:
    """Raises CheckpointRefused with one sentence when the folder does not say what is needed."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointRefused(f"{folder} has no readable config.json: {error}") from error
    asked = config.get("quantization_config") or {}
    config = config.get("text_config") or config
    kinds = config.get("layers_block_type")  # some configs have no other field for the number of layers
    layers = len(kinds) if kinds else first(config, "num_hidden_layers", "n_layer", "n_layers")
    shapes, stored, codings = tensors(folder, asked)
    states, attend = recurrent.read(shapes, config)
    index_dims = tuple(shape[0] for name, shape in shapes.items() if name.endswith(_INDEX_KEYS))
    calls, why = kv_calls.read(shapes, config, attend, len(attend) if states.convolutions else layers)
    why += f", and {len(index_dims)} sparse indexers with a key of {index_dims[0]}" if index_dims else ""
    return Shape(
        name=config.get("model_type", folder.name),
        layers=layers,
        calls=calls,
        context=_context(config, required=bool(calls)),
        **sizes(shapes, codings, ready=bool(asked), with_experts=True),
        stored_bytes=stored,
        why=why,
        ready=bool(asked),
        states=states,
        index_dims=index_dims,
    )


def sizes(shapes: Shapes, codings: Codings | None, *, ready: bool, with_experts: bool) -> dict[str, Any]:
    """The fields of a Shape that count parameters and bytes, for a model or a part of one. `with_experts`: those of a
    mixture are rounded, too."""
    products = product_shapes(shapes) if codings is None else {name: shapes[name] for name in codings}
    mixture = list(experts.matrices(shapes)) if with_experts and codings is None else []
    rounded = {
        format: _quantised(shapes, format) + sum(count * weight_bytes(n, k, format) for count, n, k in mixture)
        for format in BITS
    }
    adapted = [shape for name, shape in _oriented(product_shapes(shapes)).items() if not name.startswith("lm_head.")]
    return {
        "widths": sum(width for _, width in adapted),
        "heights": sum(-(-height // _PANEL_OF_B) * _PANEL_OF_B for height, _ in adapted),
        "parameters": sum(map(math.prod, shapes.values())),
        "products": sum(map(math.prod, [*products.values(), *mixture])),
        "quantised": {} if ready else rounded,
        "coded": None if codings is None else packed.coded_bytes(shapes, codings),
    }


def capacity(
    shape: Shape,
    *,
    memory: int,
    utilization: float,
    dtype: str,
    weights: str = CHECKPOINT,
    block_size: int,
    kv_dtype: str = "auto",
    contexts: tuple[int, ...],
    concurrencies: tuple[int, ...],
    slots: int = 0,
    adapter_slots: int = 0,
    adapter_max_rank: int = 16,
) -> Capacity:
    """What fits into the share `utilization` of the memory (bytes) that the weights, `slots` for recurrent states and
    slots for adapters leave.

    Raises SettingsError if the weights and these slots alone do not fit.
    """
    taken, states = shape.weight_bytes(dtype, weights), slots * slot_bytes(shape.state_bytes(dtype))
    adapters = shape.adapter_bytes(dtype, adapter_slots, adapter_max_rank)
    if taken >= memory:
        raise SettingsError(
            f"the weights take {taken / 2**30:.1f} GiB as {format_name(dtype, weights)},"
            f" there are {memory / 2**30:.1f} GiB",
            field="memory",
            bound=f"over {taken / 2**30:.1f} GiB",
        )
    if taken + adapters >= memory:
        raise SettingsError(
            f"{adapter_slots} slots for adapters of rank {adapter_max_rank} take {adapters / 2**30:.1f} GiB, and the"
            f" weights leave {(memory - taken) / 2**30:.1f} GiB",
            field="adapter_slots",
            bound=f"fewer than {-(-adapter_slots * (memory - taken) // adapters)}",
        )
    memory -= adapters
    if taken + states >= memory:
        raise SettingsError(
            f"{slots} slots for recurrent states take {states / 2**30:.1f} GiB, and the weights leave"
            f" {(memory - taken) / 2**30:.1f} GiB",
            field="max_num_seqs",
            bound=f"fewer than {(memory - taken) // slot_bytes(shape.state_bytes(dtype))}",
        )
    kv = int((memory - taken - states) * utilization)
    blocks, copy = kv // shape.block_bytes(block_size, dtype, kv_dtype), shape.state_blocks(block_size, dtype, kv_dtype)
    return Capacity(
        weights=taken,
        kv=kv,
        blocks=blocks,
        tokens=blocks * block_size,
        state_slots=states,
        adapters=adapters,
        concurrency={length: blocks // (-(-length // block_size) + copy) for length in contexts},
        longest={
            count: min(shape.context or sys.maxsize, max(0, blocks // count - copy) * block_size)
            for count in concurrencies
        },
    )


def _element(dtype: str, kv_dtype: str) -> tuple[int, bool]:
    """Bytes of an element of K or V, and whether there are scales."""
    return (1, True) if kv_dtype in QUANTISED else (DTYPE_BYTES[dtype], False)


def format_name(dtype: str, weights: str) -> str:
    return dtype if weights == CHECKPOINT else f"{weights}, the rest {dtype}"


def tensors(folder: Path, asked: dict[str, Any]) -> tuple[Shapes, int, Codings | None]:
    """The shapes of the parameters and their stored bytes; and of a checkpoint that is quantised as `asked`, which of
    them are served over codes; None if its files do not tell. Raises CheckpointRefused if they cannot be read."""
    shapes, stored = _weights(folder)
    if asked.get("quant_method") not in METHODS:
        return shapes, stored, None
    try:
        plain, codings = packed.unpacked(shapes, asked)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointRefused(f"{folder} has a quantization_config that is not understood: {error}") from error
    return plain, stored, codings


def _weights(folder: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Shapes of the parameters, and stored bytes, from the headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    stored = 0
    for path in weight_files(folder, read_json(folder / "config.json")):
        try:
            with safe_open(path, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    view = tensors.get_slice(name)
                    shapes[name] = tuple(view.get_shape())
                    stored += math.prod(shapes[name]) * _STORED_BYTES.get(view.get_dtype(), 1)
        except (SafetensorError, OSError) as error:
            raise CheckpointRefused(f"{path} is not a readable safetensors file: {error}") from error
    return shapes, stored


def product_shapes(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The plain matrices that a token is multiplied with, recognised by name."""
    others = (*_LOOKED_UP, *_ROUTERS)
    return {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and not any(part in f".{name}" for part in others)
    }


def _oriented(products: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """(out, in) of each."""
    turned = {name: any(part in name for part in _TURNED) for name in products}
    return {name: (shape[1], shape[0]) if turned[name] else (shape[0], shape[1]) for name, shape in products.items()}


def _quantised(shapes: dict[str, tuple[int, ...]], format: str) -> int:
    """Bytes of the products in a format. A head that is tied to the embedding becomes a separate matrix."""
    total = 0
    products = _oriented(product_shapes(shapes))
    for name, (n, k) in products.items():
        total += weight_bytes(n, k, of_head(format) if name.startswith("lm_head.") else format)
    if not any(name.startswith("lm_head.") for name in products):
        tied = (shape for name, shape in shapes.items() if any(part in f".{name}" for part in _TOKENS))
        n, k = next(tied, (0, 0))
        total += weight_bytes(n, k, of_head(format)) if n else 0
    return total


def _context(config: dict[str, Any], *, required: bool) -> int | None:
    names = ("max_position_embeddings", "n_positions", "n_ctx")
    return first(config, *names) if required or any(name in config for name in names) else None
