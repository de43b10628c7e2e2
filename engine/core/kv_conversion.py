"""Decides which blocks of another layout a worker can use, and with which converters. Pure.

    the same layout        blocks are copied as they are
    the same meaning       `KvLayout.meaning` is equal: blocks of another size, elements of another type. Each has a
                           converter with a name, which the receipt and `tandem doctor` show
    another meaning        refused: another model, dtype of the model, shape of heads, recurrent states

The number of ranks does not change the layout, because a block has the heads of the whole model.
"""

from __future__ import annotations

from engine.core.kv_layout import HOST_DIGEST, KvLayout
from tandem.errors import IncompatibleLayout


def keeps_bits(source: KvLayout, target: KvLayout) -> bool:
    """Whether K and V have the same type in both, so that conversion preserves the bits."""
    return (source.dtype, source.scale_dtype) == (target.dtype, target.scale_dtype)


def converters(source: KvLayout, target: KvLayout) -> list[str]:
    """The names of the converters from `source` to `target`, none for equal layouts. Raises IncompatibleLayout with a
    sentence for each difference without a converter."""
    if source == target:
        return []
    if source.meaning() != target.meaning() or target.version != source.version:
        raise IncompatibleLayout("; ".join(target.differences(source)))
    if target.states or target.digest != HOST_DIGEST:
        raise IncompatibleLayout(
            f"{'recurrent states' if target.states else 'blocks on a GPU'} have no converter:"
            f" {'; '.join(target.differences(source))}"
        )
    names = []
    if source.block_size != target.block_size:
        names.append(f"blocks of {source.block_size} to {target.block_size} tokens")
    if not keeps_bits(source, target):
        names.append(f"{source.dtype} to {target.dtype}")
    if not names:  # another padding, say: of another version
        raise IncompatibleLayout("; ".join(target.differences(source)))
    return names
