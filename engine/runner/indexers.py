"""Sparse indexers in a packed step: each call chooses tokens of one sequence, by keys in that sequence's blocks.

An *indexer* (DeepSeek-V3.2, GLM-5) is the module that calls `update_indexer` of transformers' cache. It computes one
key for each token, scores all keys of the sequence for each new token, and returns the positions of the top-k;
attention gets them as `indices=` and sees only these. transformers' code handles one sequence, so the module's forward
is replaced by one that calls it for each sequence of the step:

    rows   a2 a3 a4 b6     it sees  [[a2 a3 a4]] with the keys of a0 to a4, then [[b6]] with those of b0 to b6

Like K and V, a key depends on its token and the earlier ones. So it is stored in the block of its token, after the K
and V of all calls (engine/kv/kv_cache.py), and needs no code in the prefix cache, handoffs and digests.

torch's `topk` chooses between equal scores, and the order of sums between nearly equal ones. So, as in transformers
itself, a token may see other tokens in another step: a model with indexers has no order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from engine.attention.forward_context import Batch, Step, current_step
from engine.attention.selection import NOTHING
from engine.runner.mixers import PackedModule, named, pick

TOP_K = "index_topk"  # the attribute in which transformers' indexers have it

SCORES = 1 << 20  # of a call, for each of the indexer's heads (64 of them: 256 MiB in float32)


class IndexKeys:
    """An indexer's cache: the keys of one sequence of the step up to `context`, of which the packed `rows` are the
    last."""

    def __init__(self, indexer: Indexer, step: Step, sequence: int, rows: range, context: int) -> None:
        self._indexer, self._step, self._sequence, self._rows, self._context = indexer, step, sequence, rows, context

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Stores the new tokens' keys `[1, T, dim]`; returns those of the whole context `[1, context, dim]`."""
        assert layer_idx == self._indexer.layer, f"keys of layer {layer_idx} from the indexer of {self._indexer.layer}"
        step, rows = self._step, slice(self._rows.start, self._rows.stop)
        pages = step.pages.index_keys[self._indexer.number]  # [blocks, block_size, 1, dim]
        pages[step.slot_block[rows], step.slot_offset[rows]] = indexer_key_states[0].unsqueeze(1).to(pages.dtype)
        blocks = step.tensor(step.batch.block_tables[self._sequence][: -(-self._context // pages.shape[1])])
        return pages[blocks].flatten(0, 2)[: self._context].unsqueeze(0).to(indexer_key_states.dtype)


class Indexer(PackedModule):
    """One indexer, the `number`-th of its model. It keeps keys of `dim` elements as `layer` of the cache, and its
    forward has a causal mask `[1, T, context]` in the argument `mask`."""

    def __init__(self, name: str, module: nn.Module, argument: str, mask: str, layer: int) -> None:
        super().__init__(name, module, argument)
        self.mask, self.layer = mask, layer
        self.number = self.dim = 0  # set by engine.loading.index_probe

    def packed(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Positions within its own sequence for each packed row, `[1, total, widest]`, padded with NOTHING."""
        step = current_step()
        batch, total = step.batch, sum(step.batch.query_lens)
        given = named(self.module, *args, **kwargs)
        of_tokens = {name: value for name, value in given.items() if name not in (self.argument, self.mask)}
        chosen = []
        for sequence, rows, context in _calls(batch):
            places = torch.tensor([rows])
            part = {name: pick(value, places, total) for name, value in of_tokens.items()}
            part[self.argument] = IndexKeys(self, step, sequence, rows, context)
            part[self.mask] = causal(len(rows), context, step.device)
            chosen.append(type(self.module).forward(self.module, **part)[0])  # [rows, min(top-k, context)]
        widest = max(each.shape[1] for each in chosen)
        padded = [nn.functional.pad(each, (0, widest - each.shape[1]), value=NOTHING) for each in chosen]
        return torch.cat(padded).unsqueeze(0)


class Indexers:
    """All indexers of a model, in the order of its modules."""

    def __init__(self, each: list[Indexer]) -> None:
        self.each = each
        for number, indexer in enumerate(each):
            indexer.number = number

    def switch(self, on: bool) -> None:
        for indexer in self.each:
            indexer.switch(on)

    @property
    def dims(self) -> list[int]:
        """The elements of each indexer's key."""
        return [indexer.dim for indexer in self.each]

    @contextmanager
    def choosing(self, most: int) -> Iterator[None]:
        """Lowers the top-k of every indexer to at most `most` within the block, on the packed path and on its own."""
        own = [getattr(indexer.module, TOP_K) for indexer in self.each]
        try:
            for indexer, top_k in zip(self.each, own, strict=True):
                setattr(indexer.module, TOP_K, min(top_k, most))
            yield
        finally:
            for indexer, top_k in zip(self.each, own, strict=True):
                setattr(indexer.module, TOP_K, top_k)

    def __str__(self) -> str:
        kinds = sorted({(getattr(indexer.module, TOP_K), indexer.dim) for indexer in self.each})
        each = ", ".join(f"{top_k} tokens by keys of {dim}" for top_k, dim in kinds)
        return f"{len(self.each)} sparse indexers choose {each}"


def _calls(batch: Batch) -> Iterator[tuple[int, range, int]]:
    """Index of the sequence, packed rows and tokens up to the last of these, for each call of an indexer: one for each
    sequence, or several that follow one another where it would have too many scores."""
    start = 0
    for sequence, (query, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        most = max(1, SCORES // context)
        for first in range(0, query, most):
            count = min(most, query - first)
            yield sequence, range(start + first, start + first + count), context - query + first + count
        start += query


def causal(query: int, context: int, device: torch.device) -> torch.Tensor:
    """`[1, query, context]`: what the last `query` of `context` tokens see."""
    return torch.ones(1, query, context, dtype=torch.bool, device=device).tril(context - query)


def given_mask(device: torch.device) -> torch.Tensor:
    """A mask for the model's forward, which models with indexers take apart before our modules ignore it: transformers
    makes none for an attention function that wants none."""
    return torch.zeros(1, 1, 1, 1, device=device)
