"""Position rules read from the config: how long a sequence may be, and what depends on more than a token's position.

A packed forward mixes sequences, so anything that a model computes from the whole batch instead of each token's own
position makes answers depend on other requests. The probe detects most of this; this file handles the cases that only
long positions reveal.
"""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PreTrainedConfig

from tandem.errors import CheckpointRefused, SettingsError

LONGROPE = "longrope"
SHORTEST = 2  # tokens of a sequence: one of a prompt, and one after it


def max_length(config: PreTrainedConfig, wanted: int | None) -> int:
    """The longest sequence in tokens: the config's `max_position_embeddings`, or less if `wanted` is less.

    Raises SettingsError when `wanted` is below SHORTEST or beyond the config's limit, and CheckpointRefused when that
    limit is below SHORTEST.
    """
    own = _own_length(config)
    if wanted is None and own is None:
        raise SettingsError(
            f"the config of {config.model_type} states no maximum length; set max_model_len", field="max_model_len"
        )
    if own is not None and own < SHORTEST:
        raise CheckpointRefused(f"its sequences have at most {own} token, and {SHORTEST} are a prompt and an answer")
    if wanted is not None and (wanted < SHORTEST or (own is not None and wanted > own)):
        raise SettingsError(
            f"max_model_len is {wanted}; this {config.model_type} checkpoint takes {SHORTEST} to {own} tokens",
            field="max_model_len",
            bound=f"{SHORTEST}..{own}",
        )
    length = wanted if wanted is not None else own
    assert length is not None
    return length


def longest_served(config: PreTrainedConfig) -> int | None:
    """The longest sequence that neither `max_length` nor `check_positions` refuses for its length; None: any."""
    text = config.get_text_config()
    originals = [_original(rope, text) for rope in _rope_parameters(text) if _switches(rope)]
    return min((length for length in (_own_length(config), *originals) if length), default=None)


def check_positions(config: PreTrainedConfig, max_model_len: int) -> None:
    """Raises CheckpointRefused for position schemes whose result depends on the packed batch."""
    text = config.get_text_config()
    for rope in _rope_parameters(text):
        kind = _kind(rope)
        if "dynamic" in kind:
            raise CheckpointRefused(
                f"rope type {kind} changes with the longest sequence in a batch, so one request would change another's "
                "answer; it cannot be served"
            )
        original = _original(rope, text)
        if _switches(rope) and (original is None or max_model_len > original):
            raise CheckpointRefused(
                f"rope type {kind} switches its rotations for a whole batch once a sequence is longer than "
                f"{original} tokens; set max_model_len to {original} or less (it is {max_model_len})"
            )
    if getattr(text, "attn_temperature_tuning", False):
        raise CheckpointRefused(
            "attn_temperature_tuning scales queries by their place in the packed batch instead of their position, so "
            "one request would change another's answer; it cannot be served"
        )


def check_windows(config: PreTrainedConfig, seen: set[int], max_model_len: int) -> None:
    """Raises CheckpointRefused where transformers' cache drops K and V that the model's attention sees. The cache
    follows a window in the config, whether or not the masks of the model do. `seen`: the windows and chunks of the
    attention calls."""
    layers: list[Any] = DynamicCache(config=config).layers
    kept = {layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")}
    first = min(kept - seen, default=max_model_len)
    if first < max_model_len:
        shorter = f", or set max_model_len to {first} or less" if first >= SHORTEST else ""
        raise CheckpointRefused(
            f"by sliding_window or attention_chunk_size in its config, transformers keeps {first} tokens of a sequence,"
            f" and the attention of {config.model_type} has no such window: the tokens would be others than those of"
            f" transformers; remove the key from config.json{shorter}"
        )


def _own_length(config: PreTrainedConfig) -> int | None:
    own: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return own if own is not None and own > 0 else None  # -1, or 0: there is no limit


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _switches(rope: dict[str, Any]) -> bool:
    """Whether the rotations of a batch depend on whether its longest sequence is beyond the original length. PhiMoE
    multiplies those of every type but the default one by either of two scales."""
    kind = _kind(rope)
    return kind == LONGROPE or (kind != "default" and rope.get("long_mscale") != rope.get("short_mscale"))


def _original(rope: dict[str, Any], text: PreTrainedConfig) -> int | None:
    """The length that the checkpoint had before its rotations were stretched."""
    own: int | None = rope.get("original_max_position_embeddings")
    return own or getattr(text, "original_max_position_embeddings", None)


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rope settings: one dict, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested if nested else [parameters]
