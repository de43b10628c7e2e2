"""LoRA adapters in a loaded model: a bounded number of slots, and linear layers that add what a row's slot holds.

    attach(model, folders, slots) ─▶ read and compare with the base ─▶ room in slots ─▶ self-check with random adapters
    put(slot, adapter) ─▶ Batch.adapters names a slot for each sequence ─▶ y += scale * (x A^T) B^T, row by row

A slot is one row of the pool: the matrices of one adapter for every layer that some adapter touches, at fixed places.
The pool, the slots' ranks and scales, and which row belongs to which slot are inputs of a recorded step (engine.flat),
so that a slot may get another adapter between any two steps. Models without adapters have nothing of this.

Which linear layers can carry an adapter is learnt, not known: those that see one row for each packed token.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine import adapters, selfcheck
from engine.adapters import Adapter, LowRank
from engine.kernels import REFERENCE
from engine.kernels.modules import Compiled
from engine.sequence import InSlot
from engine.step import Batch, current_step
from tandem.errors import CheckpointRefused

if TYPE_CHECKING:
    from engine.model import Model

NARROW, WIDE = 16, 64  # columns of a panel of A and of B (engine/kernels/lora.cpp)
BASE = -1  # the slot of a sequence without an adapter
_PLACE = "_tandem_lora"
ROWS_TRIED = (3, 1, 9)  # of two slots and without one
PROBED = [(9, 3), (0, 5)]  # (done, new): no part of this batch is as long as all its new tokens
GAP = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative to the root mean square of the result


class Place(NamedTuple):
    """Where a layer's matrices are in each slot."""

    number: int  # column in the tables of ranks and scales
    a: int  # first element
    b: int
    width: int  # in
    height: int  # out
    rank: int  # at most


class Rows(NamedTuple):
    """One step's rows by slot. `groups` is for plain PyTorch; a recording has only the tensors."""

    tensors: tuple[
        torch.Tensor, ...
    ]  # rows [total], starts [slots + 1], pool, ranks, scales: as tandem::lora_ has them
    groups: tuple[tuple[int, torch.Tensor], ...] = ()  # (slot, its rows)


class Lora:
    """`slots` has what lies in each slot. Its methods are called between two steps."""

    def __init__(self, model: Model, known: Sequence[Adapter], slots: int) -> None:
        self.model = model
        self.known = {one.name: one._replace(layers={}) for one in known}
        self.slots: list[Adapter | None] = [None] * slots
        self.places = _places(model, known)
        last = [place.b + _padded(place.height, WIDE) * place.rank for place in self.places.values()]
        options: dict[str, Any] = {"device": model.device}
        self.pool = torch.zeros(slots, max(last), dtype=model.dtype, **options)
        self.ranks = torch.zeros(slots, len(self.places), dtype=torch.int32, **options)
        self.scales = torch.zeros(slots, len(self.places), dtype=torch.float32, **options)
        for name, place in self.places.items():
            model.module.get_submodule(name).__dict__[_PLACE] = place

    # ---- what lies where

    def load(self, name: str) -> Adapter:
        """From its folder. May run on any thread. Raises CheckpointRefused if it is not what it was at the start."""
        known = self.known[name]
        found = adapters.read(name, known.folder)
        if found.fingerprint != known.fingerprint:
            raise CheckpointRefused(
                f"adapter {name}: {known.folder} has changed since this worker started; restart the workers to serve it"
            )
        return found

    def put(self, slot: int, adapter: Adapter) -> None:
        """In the place of what the slot held, which no sequence may use any more."""
        self.slots[slot] = None
        self.ranks[slot] = 0
        for name, layer in adapter.layers.items():
            self._put(slot, self.places[name], layer)
        self.slots[slot] = adapter._replace(layers={})

    def _put(self, slot: int, place: Place, layer: LowRank) -> None:
        a = torch.zeros(_padded(layer.rank, NARROW), place.width)
        a[: layer.rank] = layer.a
        b = torch.zeros(_padded(place.height, WIDE), layer.rank)
        b[: place.height] = layer.b
        for start, panels in (
            (place.a, a.view(-1, NARROW, place.width).transpose(1, 2)),  # [rank / NARROW, in, NARROW]
            (place.b, b.view(-1, WIDE, layer.rank).transpose(1, 2)),  # [out / WIDE, rank, WIDE]
        ):
            self.pool[slot, start : start + panels.numel()] = panels.reshape(-1).to(self.pool)
        self.ranks[slot, place.number] = layer.rank
        self.scales[slot, place.number] = layer.scale

    def clear(self) -> None:
        self.slots = [None] * len(self.slots)
        self.pool.zero_()
        self.ranks.zero_()
        self.scales.zero_()

    # ---- a step

    def rows(self, batch: Batch) -> Rows:
        """Which rows of a step belong to which slot."""
        count = len(self.slots)
        slots = batch.adapters or [BASE] * len(batch.query_lens)
        assert all(slot == BASE or 0 <= slot < count for slot in slots), f"slots {slots} of {count}"
        last = torch.tensor([count if slot == BASE else slot for slot in slots])
        by_row = last.repeat_interleave(torch.tensor(batch.query_lens))
        ordered, rows = by_row.sort(stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(count + 1))
        device = self.pool.device
        groups = tuple(
            (slot, rows[begin:end].to(device))
            for slot, (begin, end) in enumerate(pairwise(bounds.tolist()))
            if begin < end
        )
        return Rows((rows.to(device), bounds.to(device), self.pool, self.ranks, self.scales), groups)

    def slot_of(self, adapter: InSlot | None) -> int:
        """For Batch.adapters. AssertionError if another adapter lies in the slot: a wrong answer is worse than none."""
        if adapter is None:
            return BASE
        there = self.slots[adapter.slot]
        assert there is not None, f"slot {adapter.slot} is empty"
        assert there.fingerprint == adapter.fingerprint, f"slot {adapter.slot} has adapter {there.name} by now"
        return adapter.slot

    def switch(self, on: bool) -> None:
        """Gives the layers their adapters, or their own class back. On top of whatever else changes their class."""
        for name in self.places:
            module: Any = self.model.module.get_submodule(name)
            kind: Any = type(module)
            if on and not issubclass(kind, Adapted):
                module.__class__ = _adapted(kind)
            elif not on and issubclass(kind, Adapted):
                module.__class__ = kind.__bases__[1]

    # ---- proof

    def check(self) -> selfcheck.Report:
        """The self-check with random adapters in the slots, packed together and beside the base. Leaves them there, for
        the recording to be proven with. Raises CheckpointRefused."""
        random = [_random(self, seed) for seed in range(min(2, len(self.slots)))]
        for slot, adapter in enumerate(random):
            self.put(slot, adapter)
        if self.model.kernels != REFERENCE:
            self._prove()
        report = selfcheck.run(self.model, [0, len(random) - 1, BASE, 0])
        if not report.passed:
            raise CheckpointRefused(
                f"adapters cannot be served with {type(self.model.module).__name__}: the paged step with random ones"
                f" differs from the eager model with them ({report})"
            )
        return report

    def _prove(self) -> None:
        """Compares the compiled operator with the plain one in the dtype that serves, once for each shape of layer."""
        rows = self.rows(
            Batch([], [], list(ROWS_TRIED), [], [], [], adapters=[0, len(self.slots) - 1, BASE])
        )  # a slot that is empty adds nothing
        generator = torch.Generator().manual_seed(0)
        for place in {(one.width, one.height, one.rank): one for one in self.places.values()}.values():
            x = torch.randn(sum(ROWS_TRIED), place.width, generator=generator).to(self.pool.dtype)
            with torch.inference_mode():
                ours = _compiled(x.new_zeros(len(x), place.height), x, rows, place).float()
                theirs = _plain(x.new_zeros(len(x), place.height), x, rows, place).float()
            allowed = GAP[self.pool.dtype] * theirs.square().mean().sqrt()
            if not (ours - theirs).abs().max() <= allowed:  # also for NaN
                raise CheckpointRefused(
                    f"the compiled operator for adapters of a weight of {place.height} x {place.width} in"
                    f" {self.pool.dtype} differs from torch's"
                )

    @contextmanager
    def eagerly(self, slot: int) -> Iterator[None]:
        """Inside, the eager model has the slot's adapter in every row: what the self-check compares with."""
        with ExitStack() as stack:
            for name, place in self.places.items():
                hook = functools.partial(_beside, lora=self, slot=slot, place=place)
                if slot != BASE:
                    stack.callback(self.model.module.get_submodule(name).register_forward_hook(hook).remove)
            yield


class Adapted:
    """First base of every class that is made here; the second is the class that the layer had."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)  # type: ignore[misc]  # the layer's own
        rows = current_step().lora
        if rows is None:
            return y
        pool = rows.tensors[2]
        compiled = current_step().compiled and x.dtype == y.dtype == pool.dtype
        return (_compiled if compiled else _plain)(y, x, rows, self.__dict__[_PLACE])


@functools.cache
def _adapted(own: Any) -> Any:
    return type(own.__name__, (Adapted, own), {"__module__": own.__module__})


def _compiled(y: torch.Tensor, x: torch.Tensor, rows: Rows, place: Place) -> torch.Tensor:
    out: torch.Tensor = torch.ops.tandem.lora_.default(y, x, *rows.tensors, place.number, place.a, place.b)
    return out


def _plain(y: torch.Tensor, x: torch.Tensor, rows: Rows, place: Place) -> torch.Tensor:
    order, _, pool, ranks, scales = rows.tensors
    flat_x, flat_y = x.reshape(-1, place.width), y.view(-1, place.height)
    assert len(flat_x) == len(flat_y) == len(order), f"{len(flat_x)} rows of {len(order)} packed tokens"
    for slot, own in rows.groups:
        if rank := int(ranks[slot, place.number]):
            flat_y[own] += _product(flat_x[own], pool[slot], rank, float(scales[slot, place.number]), place)
    return y


def _product(x: torch.Tensor, words: torch.Tensor, rank: int, scale: float, place: Place) -> torch.Tensor:
    """scale * (x A^T) B^T in the type of x."""
    a = words[place.a : place.a + _padded(rank, NARROW) * place.width].view(-1, place.width, NARROW)
    b = words[place.b : place.b + _padded(place.height, WIDE) * rank].view(-1, rank, WIDE)
    down = a.transpose(1, 2).flatten(0, 1)[:rank].to(x)  # [rank, in]
    up = b.transpose(1, 2).flatten(0, 1)[: place.height].to(x)  # [out, rank]
    return (x @ down.T) @ up.T * scale


def _beside(_module: Any, args: tuple[Any, ...], y: torch.Tensor, *, lora: Lora, slot: int, place: Place) -> Any:
    rank = int(lora.ranks[slot, place.number])
    if rank == 0:
        return y
    return y + _product(args[0], lora.pool[slot], rank, float(lora.scales[slot, place.number]), place)


# ---- attach


def attach(model: Model, folders: Mapping[str, str | Path], slots: int) -> Lora:
    """Gives a model on its paged path room for adapters, at most `slots` at a time. Raises CheckpointRefused for a
    folder that is not served, or not with this model."""
    known = [adapters.read(name, folder) for name, folder in folders.items()]
    lora = Lora(model, known, min(slots, len(known)))
    model.lora = lora
    model.use_paged_attention()
    return lora


def _places(model: Model, known: Sequence[Adapter]) -> dict[str, Place]:
    """Of every layer that some adapter touches, in the order of the model."""
    able = _row_by_row(model)
    linear = dict(_linear_layers(model.module))
    ranks: dict[str, int] = {}
    for adapter in known:
        file = adapter.folder / adapters.WEIGHTS
        for name, layer in adapter.layers.items():
            if name not in linear:
                raise CheckpointRefused(f"{file}: {name:.200} is no linear layer of {type(model.module).__name__}")
            if name not in able:
                raise CheckpointRefused(
                    f"{file}: {name:.200} does not see the tokens row by row, so an adapter on it cannot be served"
                )
            height, width = linear[name]
            if (layer.b.shape[0], layer.a.shape[1]) != (height, width):
                raise CheckpointRefused(
                    f"{file}: {name:.200} has lora_A {tuple(layer.a.shape)} and lora_B {tuple(layer.b.shape)},"
                    f" the base's weight is {height} x {width}"
                )
            ranks[name] = max(ranks.get(name, 0), layer.rank)
    places: dict[str, Place] = {}
    at = 0
    for name, (height, width) in linear.items():
        if name in ranks:
            behind = at + _padded(ranks[name], NARROW) * width
            places[name] = Place(len(places), at, behind, width, height, ranks[name])
            at = behind + _padded(height, WIDE) * ranks[name]
    return places


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """The name and (out, in) of each; not of what only builds on one, such as a router of experts."""
    for name, layer in module.named_modules():
        kind: Any = type(layer)
        while issubclass(kind, Compiled):
            kind = kind.__bases__[1]
        if kind is nn.Linear:
            yield name, (layer.out_features, layer.in_features)
        elif kind is Conv1D:
            yield name, (layer.nf, layer.nx)


def _row_by_row(model: Model) -> set[str]:
    """The linear layers that are called with one row for each packed token, and with nothing else."""
    total = sum(new for _, new in PROBED)
    seen: dict[str, set[int]] = {}

    def note(name: str, args: tuple[Any, ...]) -> None:
        rows = args[0].numel() // args[0].shape[-1] if args and isinstance(args[0], torch.Tensor) else 0
        seen.setdefault(name, set()).add(rows)

    tables = [[0, 1, 2], [3, 4]]
    batch = Batch(
        token_ids=[number % model.vocab_size for number in range(total)],
        positions=[position for done, new in PROBED for position in range(done, done + new)],
        query_lens=[new for _, new in PROBED],
        context_lens=[done + new for done, new in PROBED],
        block_tables=tables,
        logits_at=[total - 1],
    )
    with ExitStack() as stack:
        for name, _ in _linear_layers(model.module):
            layer = model.module.get_submodule(name)
            hook = functools.partial(lambda _layer, args, name: note(name, args), name=name)
            stack.callback(layer.register_forward_pre_hook(hook).remove)
        model.forward(model.allocate(5, 4), batch)
    return {name for name, rows in seen.items() if rows == {total}}


def _random(lora: Lora, seed: int) -> Adapter:
    """An adapter on every layer, each term about as large as what the layer's weight gives."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, place in lora.places.items():
        weight: Any = getattr(lora.model.module.get_submodule(name), "weight", None)
        plain = isinstance(weight, torch.Tensor) and weight.is_floating_point()
        spread = weight.detach().float().std().item() if plain else place.width**-0.5
        rank = max(1, place.rank - seed)
        a = torch.randn(rank, place.width, generator=generator) / place.width**0.5
        b = torch.randn(place.height, rank, generator=generator) * spread * (place.width / rank) ** 0.5
        layers[name] = LowRank(a, b, 0.5 + 0.25 * seed)
    return Adapter(f"random {seed}", Path(), bytes([seed]), layers)


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
