"""What each attention call keeps of a token, from the headers of the weights and the config. Does not import torch.

The rows of a layer's K and V projections give the number of elements, which may differ between layers. If one product
computes Q, K and V, only the config gives it, the same for all layers.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tandem.errors import CheckpointRefused

Call = tuple[int, int, int]  # KV heads, elements of K and of V of each
Shapes = dict[str, tuple[int, ...]]
OTHER_KV = ("diffllama", "jetmoe")  # K and V are not of the size of their projections
_NUMBER = re.compile(r"\blayers\.(\d+)\.")
_OTHER_INPUT = re.compile(r"(?:^|[._])(?:vision|visual|audio)")


def read(shapes: Shapes, config: dict[str, Any], attend: list[str], layers: int) -> tuple[tuple[Call, ...], str]:
    """The calls, and in words how they were determined. `attend` are the modules with a K projection, `layers` is the
    number of layers with KV. Raises CheckpointRefused."""
    if (kind := config.get("model_type")) in OTHER_KV:
        raise _unknown(f"{kind} layers")
    if not layers:
        return (), "no attention"
    if config.get("kv_lora_rank"):
        latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        return ((1, latent, rope),) * layers, f"latent attention: {latent} + {rope} elements per token and layer"
    heads, dim = _heads(config)
    found = [_of_module(module, shapes, config) for module in attend if _is_a_layer(module, config)]
    kinds = Counter(found or [_of_config(config, heads, dim)])
    if len(kinds) == 1:
        (call,) = kinds
        kv_heads, k_dim, v_dim = call
        size = f"{k_dim}" if k_dim == v_dim else f"{k_dim} of K and {v_dim} of V"
        factor = "2 x " if k_dim == v_dim else ""
        return (call,) * layers, f"{factor}{kv_heads} KV heads (of {heads} heads) x {size} elements per token and layer"
    if len(found) != layers:
        raise _unknown(f"{layers - len(found)} layers without K and V of their own")
    each = (f"{count} x {h} x ({k} + {v})" for (h, k, v), count in kinds.items())
    return tuple(found), f"layers x KV heads x elements: {', '.join(each)}"


def _is_a_layer(module: str, config: dict[str, Any]) -> bool:
    """False for attention over images or sound, and for modules after the last layer, which draft tokens."""
    number, layers = _NUMBER.search(module), config.get("num_hidden_layers")
    drafts = number is not None and isinstance(layers, int) and int(number[1]) >= layers
    return not drafts and _OTHER_INPUT.search(module) is None


def _heads(config: dict[str, Any]) -> tuple[int, int]:
    """The number of query heads, and the elements of each, from the config."""
    heads = first(config, "num_attention_heads", "n_head", "n_heads")
    return heads, config.get("head_dim") or first(config, "hidden_size", "n_embd", "d_model") // heads


def _of_module(module: str, shapes: Shapes, config: dict[str, Any]) -> Call:
    """The call of one attention module, which has a K projection. Raises CheckpointRefused."""

    def rows(name: str) -> int:
        return shapes.get(f"{module}.{name}.weight", (0,))[0]

    k_rows, norm, (_, dim) = rows("k_proj"), rows("k_norm"), _heads(config)
    if norm and rows("q_norm") != rows("q_proj"):  # otherwise the norm is over all heads together
        dim = norm
    if k_rows % dim:
        raise _unknown(f"{module}, with {k_rows} rows of K")
    heads = k_rows // dim
    return heads, dim, (rows("v_proj") or k_rows) // heads  # without a V projection, V is K


def _of_config(config: dict[str, Any], heads: int, dim: int) -> Call:
    if "multi_query" in config:  # one head or all of them; other fields do not count
        return 1 if config["multi_query"] else heads, dim, dim
    return config.get("num_key_value_heads") or heads, dim, dim


def first(config: dict[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise CheckpointRefused(f"config.json has none of {', '.join(names)}; the planner does not know this kind of model")


def _unknown(what: str) -> CheckpointRefused:
    return CheckpointRefused(
        f"it has attention ({what}) whose KV this arithmetic does not know; the log of a worker's start says how large"
        " its blocks are"
    )
