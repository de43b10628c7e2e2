"""Finds the sparse indexers of a model, and proves that each can be served by one sequence of a packed step at a time.

One forward over transformers' own cache, with a causal mask, shows which module calls `update_indexer` (the *indexer*),
and which of its arguments carry the cache and the mask. No class names are used, only the name of the top-k attribute
(engine.runner.indexers.TOP_K), which the check lowers: with at most top-k tokens sparse attention equals dense
attention, and a wrong indexer would go unnoticed.

Then each indexer runs alone, in float32, with random inputs and a low top-k: all tokens at once without a cache against
the same tokens in pieces next to another sequence, through the serving wrapper. Equal or nearly equal scores may be
chosen either way, so a small share of the choices may differ; the self-check compares the resulting logits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from engine.attention.forward_context import Batch, Step, running
from engine.kv.kv_cache import KvCache, layout_of
from engine.loading.state_probe import ODD_ERRORS, Recorder, as_float, check_layers, inputs, watched
from engine.runner.indexers import TOP_K, Indexer, Indexers, causal
from engine.runner.mixers import named, over_tensors
from tandem.errors import CheckpointRefused

KNOWN_LAYERS = (DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer)
PIECES = (5, 1, 9, 7, 1)  # tokens of each piece in the check
FEW, SIZE = 4, 4  # the top-k in the check; tokens of a block
# Share of the choices that may differ because scores are (nearly) equal. Keys that are one token late, or another
# sequence's, change half of them.
DIFFERENT = 0.1


class _IndexRecorder(Recorder):
    """transformers' cache that records the modules which store keys, and refuses any other state."""

    def note(self, name: str, layer: int) -> None:
        raise CheckpointRefused(f"its layers call {name} beside update_indexer")

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> Any:
        owner = self.owners.setdefault(layer_idx, self.inside[-1])
        if owner is not self.inside[-1] or list(self.owners.values()).count(owner) > 1:
            raise CheckpointRefused(f"the keys of layer {layer_idx} are not those of one module, or it keeps others")
        return DynamicCache.update_indexer(self, indexer_key_states, layer_idx)


def find(model: PreTrainedModel) -> Indexers | None:
    """The checked indexers of a model; None if its cache has no place for their keys. The model must be switched to
    eager attention. Raises CheckpointRefused with the reason for indexers that cannot be served."""
    try:
        cache = _IndexRecorder(model.config)
        if not any(hasattr(layer, "update_indexer") for layer in cache.layers):
            return None
    except ODD_ERRORS:
        return None  # engine.loading.state_probe reports why transformers makes no cache
    try:
        check_layers(cache, KNOWN_LAYERS)
        indexers, calls = _found(model, cache)
        for indexer, given in zip(indexers.each, calls, strict=True):
            _prove(indexer, given)
    except CheckpointRefused as error:
        raise CheckpointRefused(
            f"{type(model).__name__} has sparse indexers that KV pages do not serve: {error.message}"
        ) from error
    except ODD_ERRORS as error:
        raise CheckpointRefused(
            f"{type(model).__name__} has sparse indexers that do not run over transformers' cache: {error!r}"
        ) from error
    return indexers


@contextmanager
def standing_in(indexers: Indexers | None, forward: Any) -> Iterator[None]:
    """Inside, `forward(mask, hidden)` replaces each indexer's forward, with its mask and its first argument."""
    each = indexers.each if indexers is not None else []
    try:
        for indexer in each:

            def answer(*args: Any, indexer: Indexer = indexer, **kwargs: Any) -> torch.Tensor:
                given = named(indexer.module, *args, **kwargs)
                answered: torch.Tensor = forward(given[indexer.mask], next(iter(given.values())))
                return answered

            indexer.module.__dict__["forward"] = answer
        yield
    finally:
        for indexer in each:
            indexer.switch(False)


def _found(model: PreTrainedModel, cache: _IndexRecorder) -> tuple[Indexers, list[dict[str, Any]]]:
    """The indexers, and each one's arguments in a forward over the check's tokens."""
    tokens = sum(PIECES)
    ids, positions = inputs(model, tokens)
    own = next(model.parameters())
    mask = torch.zeros(1, 1, tokens, tokens, dtype=own.dtype, device=own.device)
    mask.masked_fill_(~causal(tokens, tokens, own.device), torch.finfo(own.dtype).min)
    calls: dict[nn.Module, dict[str, Any]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is cache for value in (*args, *kwargs.values())):
            calls[module] = named(module, *args, **kwargs)

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        with torch.inference_mode(), watched(model, cache) as arguments:
            model(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    silent = [
        number
        for number, layer in enumerate(cache.layers)
        if isinstance(layer, DynamicIndexedLayer) and layer.is_indexer_initialized != (number in cache.owners)
    ]
    if silent:
        raise CheckpointRefused(f"layer {silent[0]} does not keep its keys in the cache that it is given")
    found = []
    for name, module in model.named_modules():
        for layer in [layer for layer, owner in cache.owners.items() if owner is module]:
            found.append(_indexer(name, module, arguments.get(module, ""), layer, calls.get(module, {}), mask))
            found[-1].dim = _dim(cache.layers[layer], name, tokens, own.dtype)
    if not found:
        raise CheckpointRefused("no module keeps a key")
    return Indexers(found), [calls[indexer.module] for indexer in found]


def _indexer(
    name: str, module: nn.Module, argument: str, layer: int, given: dict[str, Any], mask: torch.Tensor
) -> Indexer:
    if not argument:
        raise CheckpointRefused(f"{name} does not get the cache as an argument")
    tokens, storage = mask.shape[-1], mask.untyped_storage().data_ptr()
    masks = [
        name
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == storage
    ]
    if len(masks) != 1 or given[masks[0]].shape != (1, tokens, tokens):
        raise CheckpointRefused(f"{name} does not get the causal mask [sequences, tokens, tokens] as an argument")
    if not isinstance(getattr(module, TOP_K, None), int):
        raise CheckpointRefused(f"{name} has no {TOP_K}, so no check can show whether what it chooses is right")
    return Indexer(name, module, argument, masks[0], layer)


def _dim(layer: Any, name: str, tokens: int, dtype: torch.dtype) -> int:
    """Elements of a key."""
    keys = layer.indexer_keys
    if (
        keys.dim() != 3
        or keys.shape[:2] != (1, tokens)
        or keys.dtype != dtype
        or layer.indexer_position_ids is not None
    ):
        raise CheckpointRefused(
            f"{name} keeps {tuple(keys.shape)} of {keys.dtype} for {tokens} tokens, not one key of {dtype} for each"
        )
    return int(keys.shape[2])


def _prove(indexer: Indexer, given: dict[str, Any]) -> None:
    """Raises CheckpointRefused if an indexer does not return top-k positions, or returns others in pieces."""
    module = copy.deepcopy(indexer.module).float()
    alone = Indexer(indexer.name, module, indexer.argument, indexer.mask, indexer.layer)
    alone.dim = indexer.dim
    given = {name: as_float(value) for name, value in given.items() if name not in (alone.argument, alone.mask)}
    tokens, device = sum(PIECES), next(module.parameters()).device
    few = min(FEW, getattr(module, TOP_K))
    with torch.inference_mode(), Indexers([alone]).choosing(few):
        mask = {alone.mask: causal(tokens, tokens, device), alone.argument: None}
        whole = type(module).forward(module, **given, **mask)
        if (
            whole.shape != (1, tokens, few)
            or whole.is_floating_point()
            or not bool(((whole >= 0) & (whole < tokens)).all())
        ):
            raise CheckpointRefused(f"{alone.name} does not give the positions of the {few} tokens that it chooses")
        pieces = _in_pieces(alone, given, device)
    differing = total = 0
    for place, (theirs, ours) in enumerate(zip(whole[0].tolist(), pieces, strict=True)):
        wanted, got = {at for at in theirs if at <= place}, {at for at in ours if 0 <= at <= place}
        if len(wanted) != min(few, place + 1):
            raise CheckpointRefused(f"{alone.name} chooses {len(wanted)} of the {place + 1} tokens up to one")
        differing, total = differing + len(wanted - got) + (len(got) != len(wanted)), total + len(wanted)
    if differing > DIFFERENT * total:
        raise CheckpointRefused(
            f"{alone.name} ({type(module).__name__}) chooses other tokens in pieces: {differing} of {total} differ"
        )


def _in_pieces(indexer: Indexer, given: dict[str, Any], device: torch.device) -> list[list[int]]:
    """The choices for each token of consecutive pieces, in steps that begin with a token of another sequence."""
    each = -(-sum(PIECES) // SIZE)
    layout = layout_of([], SIZE, torch.float32, "", index_dims=[indexer.dim])
    pages, done = KvCache(layout, 2 * each, device), 0
    tables = [list(range(each))[::-1], list(range(each, 2 * each))]
    found: list[list[int]] = []
    for turn, count in enumerate(PIECES):
        batch = Batch()
        batch.add([0], turn, tables[0])
        batch.add([0] * count, done, tables[1])
        part = {name: _rows(value, turn, done, count) for name, value in given.items()}
        step = Step(batch, pages, (), device)
        with running(step):
            chosen = indexer.packed(**part, **{indexer.mask: None, indexer.argument: None})
        found += chosen[0, 1:].tolist()
        done += count
    return found


def _rows(value: Any, other: int, start: int, count: int) -> Any:
    """The rows of one token and of a piece, from a value for each token `[1, tokens, ...]`."""
    both = slice(other, other + 1), slice(start, start + count)
    return over_tensors(lambda each: torch.cat([each[:, rows] for rows in both], dim=1), value)
