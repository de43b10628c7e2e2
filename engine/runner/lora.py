"""LoRA adapters in a loaded model: a bounded number of slots, and linear layers that add the adapter of a row's slot.

    put(slot, adapter) ─▶ Batch.adapters names a slot for each sequence ─▶ y += scale * (x A^T) B^T, row by row

A slot is one row of the pool: the matrices of one adapter for every layer that some adapter touches, at fixed places.
The pool, the slots' ranks and scales, and which row belongs to which slot are inputs of a recorded step
(engine.runner.traced_forward), so that a slot may get another adapter between any two steps. Models without adapters
are not changed.

One rank of several has the part of A and B that fits its part of the weight: of a weight cut by rows all of A and its
rows of B, of one cut by columns its columns of A and all of B. There the term is a part of the sum that follows anyway.

engine/loading/lora_attachment.py adds the slots to a model and verifies them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import nn

from engine.attention.forward_context import BASE, Batch, Rows, Terms, current_step, on_device
from engine.core.sequence import LoraSlot
from engine.kernels import replacement
from engine.parallel.weight_cut import Part

NARROW, WIDE = 16, 64  # columns of a panel of A and of B (engine/kernels/lora.cpp)
_PLACE = "_tandem_lora"


class LowRank(NamedTuple):
    """The term of one linear layer: scale * (x A^T) B^T."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class Adapter(NamedTuple):
    name: str
    folder: Path
    fingerprint: bytes  # equal in two processes if they would generate the same tokens
    layers: dict[str, LowRank]  # by the layer's name in the base model


class Place(NamedTuple):
    """Where a layer's matrices are in each slot."""

    number: int  # column in the tables of ranks and scales
    a: int  # first element
    b: int
    width: int  # in, of this rank's part
    height: int  # out, likewise
    rank: int  # at most
    whole: tuple[int, int]  # (out, in) of the whole layer
    part: Part | None = None  # of the layer's weight, where this rank has not all of it

    def own(self, layer: LowRank) -> LowRank:
        """What this rank has of a term of the whole layer."""
        if self.part is None:
            return layer
        return (
            layer._replace(b=self.part.of(layer.b)) if self.part.dim == 0 else layer._replace(a=self.part.of(layer.a))
        )


class Lora:
    """`slots` has what lies in each slot. Its methods are called between two steps."""

    def __init__(
        self,
        module: nn.Module,
        places: dict[str, Place],
        known: Sequence[Adapter],
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`places`: of every layer of the module that one of the adapters touches."""
        self.module = module
        self.known = {adapter.name: adapter._replace(layers={}) for adapter in known}
        self.slots: list[Adapter | None] = [None] * slots
        self.places = places
        last = [place.b + padded(place.height, WIDE) * place.rank for place in self.places.values()]
        self.pool = torch.zeros(slots, max(last), dtype=dtype, device=device)
        self.ranks = torch.zeros(slots, len(self.places), dtype=torch.int32, device=device)
        self.scales = torch.zeros(slots, len(self.places), dtype=torch.float32, device=device)
        self.terms: list[Terms] = [{} for _ in range(slots)]  # the same for the host, which need not ask the device
        for name, place in self.places.items():
            module.get_submodule(name).__dict__[_PLACE] = place

    # ---- what lies where

    def put(self, slot: int, adapter: Adapter) -> None:
        """Replaces the slot's adapter, which no sequence may use any more."""
        self.empty(slot)
        for name, layer in adapter.layers.items():
            self._put(slot, self.places[name], self.places[name].own(layer))
        self.slots[slot] = adapter._replace(layers={})

    def empty(self, slot: int) -> None:
        self.slots[slot] = None
        self.ranks[slot] = 0
        self.terms[slot].clear()

    def _put(self, slot: int, place: Place, layer: LowRank) -> None:
        a = torch.zeros(padded(layer.rank, NARROW), place.width)
        a[: layer.rank] = layer.a
        b = torch.zeros(padded(place.height, WIDE), layer.rank)
        b[: place.height] = layer.b
        for start, panels in (
            (place.a, a.view(-1, NARROW, place.width).transpose(1, 2)),  # [rank / NARROW, in, NARROW]
            (place.b, b.view(-1, WIDE, layer.rank).transpose(1, 2)),  # [out / WIDE, rank, WIDE]
        ):
            self.pool[slot, start : start + panels.numel()] = panels.reshape(-1).to(self.pool)
        self.ranks[slot, place.number] = layer.rank
        self.scales[slot, place.number] = layer.scale
        self.terms[slot][place.number] = layer.rank, layer.scale

    def clear(self) -> None:
        for slot in range(len(self.slots)):
            self.empty(slot)
        self.pool.zero_()
        self.scales.zero_()

    # ---- a step

    def rows(self, batch: Batch) -> Rows:
        """Which rows of a step belong to which slot."""
        count = len(self.slots)
        slots = batch.adapters or [BASE] * len(batch.query_lens)
        assert all(slot == BASE or 0 <= slot < count for slot in slots), f"slots {slots} of {count}"
        by_row = np.repeat([count if slot == BASE else slot for slot in slots], batch.query_lens)
        order = by_row.argsort(kind="stable")
        bounds = np.searchsorted(by_row[order], np.arange(count + 1))
        rows, starts = (on_device(each, torch.int64, self.pool.device) for each in (order, bounds))
        groups = tuple(
            (slot, self.terms[slot], rows[begin:end])
            for slot, (begin, end) in enumerate(pairwise(bounds.tolist()))
            if begin < end
        )
        return Rows((rows, starts, self.pool, self.ranks, self.scales), groups)

    def slot_of(self, adapter: LoraSlot | None) -> int:
        """For Batch.adapters. AssertionError if another adapter lies in the slot: a wrong answer is worse than none."""
        if adapter is None:
            return BASE
        there = self._in(adapter.slot)
        assert there.fingerprint == adapter.fingerprint, f"slot {adapter.slot} has adapter {there.name} now"
        return adapter.slot

    def marks(self, batch: Batch) -> list[int]:
        """For each sequence of a step 64 bits of its adapter's fingerprint, by which ranks notice that one of them has
        another adapter in the slot. AssertionError if the slot is empty."""
        of = [b"" if slot == BASE else self._in(slot).fingerprint for slot in batch.adapters]
        return [int.from_bytes(fingerprint[:8], "little", signed=True) for fingerprint in of]

    def _in(self, slot: int) -> Adapter:
        there = self.slots[slot]
        assert there is not None, f"slot {slot} is empty"
        return there

    def switch(self, on: bool) -> None:
        """Switches the layers to their class with adapters, or back; independent of other changes of their class."""
        for name in self.places:
            module: Any = self.module.get_submodule(name)
            kind: Any = type(module)
            if on and not issubclass(kind, Adapted):
                module.__class__ = replacement.compiled(kind, Adapted)
            elif not on and issubclass(kind, Adapted):
                module.__class__ = kind.__bases__[1]

    @contextmanager
    def eagerly(self, slot: int) -> Iterator[None]:
        """Inside, the eager model applies the slot's adapter to every row: the reference of the self-check. Before the
        hooks that add up or gather what all ranks have."""
        with ExitStack() as stack:
            for name, place in self.places.items():
                hook = functools.partial(_beside, lora=self, slot=slot, place=place)
                if slot != BASE:
                    layer = self.module.get_submodule(name)
                    stack.callback(layer.register_forward_hook(hook, prepend=True).remove)
            yield


class Adapted:
    """First base of every class that is made here; the second is the class that the layer had."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)  # type: ignore[misc]  # the layer's own
        rows = current_step().lora
        if rows is None:
            return y
        pool = rows.tensors[2]
        fast = current_step().compiled and x.dtype == y.dtype == pool.dtype
        return (compiled if fast else plain)(y, x, rows, self.__dict__[_PLACE])


def compiled(y: torch.Tensor, x: torch.Tensor, rows: Rows, place: Place) -> torch.Tensor:
    out: torch.Tensor = torch.ops.tandem.lora_.default(y, x, *rows.tensors, place.number, place.a, place.b)
    return out


def plain(y: torch.Tensor, x: torch.Tensor, rows: Rows, place: Place) -> torch.Tensor:
    order, _, pool, _, _ = rows.tensors
    flat_x, flat_y = x.reshape(-1, place.width), y.view(-1, place.height)
    assert len(flat_x) == len(flat_y) == len(order), f"{len(flat_x)} rows of {len(order)} packed tokens"
    for slot, terms, own in rows.groups:
        if place.number in terms:
            flat_y[own] += _product(flat_x[own], pool[slot], *terms[place.number], place)
    return y


def _product(x: torch.Tensor, words: torch.Tensor, rank: int, scale: float, place: Place) -> torch.Tensor:
    """scale * (x A^T) B^T in the type of x."""
    a = words[place.a : place.a + padded(rank, NARROW) * place.width].view(-1, place.width, NARROW)
    b = words[place.b : place.b + padded(place.height, WIDE) * rank].view(-1, rank, WIDE)
    down = a.transpose(1, 2).flatten(0, 1)[:rank].to(x)  # [rank, in]
    up = b.transpose(1, 2).flatten(0, 1)[: place.height].to(x)  # [out, rank]
    return (x @ down.T) @ up.T * scale


def _beside(_module: Any, args: tuple[Any, ...], y: torch.Tensor, *, lora: Lora, slot: int, place: Place) -> Any:
    term = lora.terms[slot].get(place.number)
    return y if term is None else y + _product(args[0], lora.pool[slot], *term, place)


def sent(adapter: Adapter) -> tuple[dict[str, Any], bytes]:
    """What rank 0 sends of an adapter to the other ranks: JSON, and its matrices."""
    layers = enumerate(adapter.layers.values())
    matrices = {f"{number} {part}": each for number, (a, b, _) in layers for part, each in (("a", a), ("b", b))}
    about = {
        "name": adapter.name,
        "folder": str(adapter.folder),
        "fingerprint": adapter.fingerprint.hex(),
        "scales": {name: layer.scale for name, layer in adapter.layers.items()},
    }
    return about, save({name: each.contiguous() for name, each in matrices.items()})


def received(about: dict[str, Any], content: bytes) -> Adapter:
    """The inverse of `sent`."""
    matrices = load(content)
    layers = {
        name: LowRank(matrices[f"{number} a"], matrices[f"{number} b"], scale)
        for number, (name, scale) in enumerate(about["scales"].items())
    }
    return Adapter(about["name"], Path(about["folder"]), bytes.fromhex(about["fingerprint"]), layers)


def padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
