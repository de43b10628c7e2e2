"""Compares a captured step with the step itself before it serves, over another batch than the one that was captured.

On CPU every bit of logits, pages and recurrent states must be equal; on CUDA logits and states may differ by GAP. The
pages and states must be without content: the check overwrites the first blocks and zeroes them again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from engine.attention.forward_context import Batch
from engine.kv.kv_quantization import quantise

if TYPE_CHECKING:
    from engine.kv.kv_cache import KvCache
    from engine.kv.state_memory import StateMemory
    from engine.runner.model_runner import ModelRunner

# Between the captured and the uncaptured step on CUDA, whose numbers of rows may differ; none on CPU. Of the logits'
# standard deviation, and of the root mean square of a state.
GAP = 0.02


class Captured(Protocol):
    """A captured step of `rows` rows (engine/runner/captured_steps.py)."""

    rows: int

    def fill(
        self,
        token_ids: Sequence[int] = (),
        positions: Sequence[int] = (),
        tables: Sequence[list[int]] = (),
        slots: Sequence[int] = (),
    ) -> None: ...

    def call(self) -> torch.Tensor: ...

    def replay(self) -> torch.Tensor: ...


def difference(step: Captured, model: ModelRunner, pages: KvCache, spare: int) -> str | None:
    """Why the captured step is not the step itself; None if it is.

    Takes as many sequences as fit into blocks 0 and on, before the spare one, with random KV in them. Of several ranks
    the first one does what concerns the memory of all, and each compares its logits.
    """
    batch = _batch(step.rows, model, pages, spare)
    used = pages.buffer[: sum(map(len, batch.block_tables))]
    owner = model.group is None or model.group.rank == 0
    exact = pages.buffer.device.type == "cpu"
    if pages.states is not None:
        _begin_states(batch, model, pages, pages.states)
    if owner:
        _randomise_all(pages.all_heads(), len(used), step.rows)
        rows_before = _rows(batch, pages.states)
    _all_ranks(model)
    expected = _uncaptured(step, batch, model, pages)
    _all_ranks(model)
    if owner:
        after, states_after = used.clone() if exact else used, _states(batch, pages.states)
        _randomise_all(pages.all_heads(), len(used), step.rows)  # what was there before; a GPU has no room for a copy
        for slot, state in rows_before.items():
            pages.states.row(slot).copy_(state)  # type: ignore[union-attr]  # without states there are none
    _all_ranks(model)
    _fill(step, batch)
    replayed = step.replay()[: len(expected)]
    if pages.states is not None:
        pages.states.commit()
    _all_ranks(model)
    gap = ((replayed - expected).abs().amax(-1) / expected.std(-1)).max().item()
    same = torch.equal(replayed, expected) if exact else gap <= GAP
    if owner:
        same = same and (not exact or torch.equal(used, after))
        pairs = zip(_states(batch, pages.states), states_after, strict=True)
        same = same and all(_same_state(found, state, exact) for found, state in pairs)
        used.zero_()
    same = _all_ranks(model, same)
    step.fill()
    if same:
        return None
    return f"{step.rows} rows: the captured step differs from the step itself by {gap:.2g} of the logits' spread"


def _batch(rows: int, model: ModelRunner, pages: KvCache, spare: int) -> Batch:
    """One token of each sequence; where there are states, each has earlier tokens, from whose state it goes on."""
    size = pages.block_size
    per = 2 if model.max_model_len > size and spare > 1 else 1
    count, rng = min(rows, spare // per), random.Random(rows)
    first = 0 if pages.states is None else 1
    batch = Batch(slots=list(range(count)))
    for row in range(count):
        position = rng.randrange(first, min(per * size, model.max_model_len))
        batch.add([rng.randrange(model.vocab_size)], position, list(range(per * row, per * row + per)), [0])
    return batch


def _begin_states(batch: Batch, model: ModelRunner, pages: KvCache, states: StateMemory) -> None:
    """Gives each slot the state after a prompt of two tokens, which is enough for one that is not zeros."""
    count = min(2, len(batch.block_tables[0]) * pages.block_size)
    prompts = Batch(slots=batch.slots)
    for row, table in enumerate(batch.block_tables):
        prompts.add([(row + place) % model.vocab_size for place in range(count)], 0, table, [0])
    model.forward(pages, prompts)
    states.commit()


def _uncaptured(step: Captured, batch: Batch, model: ModelRunner, pages: KvCache) -> torch.Tensor:
    """Logits of the step itself, one row for each sequence. With states it is the engine's own step, which reads and
    writes all of them, whatever the capture does."""
    if pages.states is None:
        _fill(step, batch)
        return step.call()[: len(batch.token_ids)].clone()
    logits = model.forward(pages, batch)
    pages.states.commit()
    return logits


def _fill(step: Captured, batch: Batch) -> None:
    step.fill(batch.token_ids, batch.positions, batch.block_tables, batch.slots)


def _rows(batch: Batch, states: StateMemory | None) -> dict[int, torch.Tensor]:
    """Copies of the rows with the batch's states, by slot."""
    return {} if states is None else {slot: states.row(slot).clone() for slot in batch.slots}


def _states(batch: Batch, states: StateMemory | None) -> list[torch.Tensor]:
    """Copies of the batch's states, each in its type."""
    return [] if states is None else [state.clone() for slot in batch.slots for state in states.values(slot)]


def _same_state(found: torch.Tensor, expected: torch.Tensor, exact: bool) -> bool:
    if exact:
        return torch.equal(found, expected)
    apart = found.float() - expected.float()
    return bool(apart.norm() <= GAP * expected.float().norm())  # false for NaN


def _all_ranks(model: ModelRunner, yes: bool = True) -> bool:
    """Whether all ranks say yes, when all have come here."""
    return yes if model.group is None else model.group.all_say(yes)


def _randomise_all(pages: KvCache, blocks: int, seed: int) -> None:
    generator = torch.Generator(pages.buffer.device).manual_seed(seed)
    calls = zip((*pages.k, *pages.v), (*pages.k_scales, *pages.v_scales), strict=True)
    for view, scales in calls:
        _randomise(view[:blocks], None if scales is None else scales[:blocks], generator)


def _randomise(kv: torch.Tensor, scales: torch.Tensor | None, generator: torch.Generator) -> None:
    """Fills `kv [blocks, block_size, heads, dim]`, quantised where there are `scales`."""
    if scales is None:
        kv.normal_(generator=generator)
        return
    elements, own = quantise(torch.randn(kv.shape, generator=generator, device=generator.device), kv.dtype)
    kv.view(torch.uint8).copy_(elements.view(torch.uint8))  # fp8 itself cannot be copied everywhere
    scales.copy_(own)
