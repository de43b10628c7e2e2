"""Adds slots for LoRA adapters to a loaded model, and verifies that it computes correctly with them.

    attach(model, folders, slots) ─▶ read and compare with the base ─▶ places of the layers ─▶ memory of the slots
    fitting(lora, name, folder)   ─▶ an adapter that is loaded later: it must fit into a slot
    check(model) ─▶ the compiled operator against the plain one, the self-check with random adapters in the slots

A probe finds the linear layers that can have an adapter: those that process one row for each packed token.

One rank of several has its part of each adapter (engine.runner.lora). All ranks together are compared with the whole
model and a whole adapter, as the cut of the weights is (engine/loading/cut_check.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.attention.forward_context import BASE, Batch
from engine.kernels import REFERENCE, weight_quantization
from engine.kernels.replacement import Compiled
from engine.loading import cut_check, lora_loader, self_check
from engine.loading.cut_check import Whole
from engine.loading.module_loader import RankPart
from engine.parallel.rank_group import AGREEMENT, RankGroup
from engine.parallel.weight_cut import Cut
from engine.runner.lora import NARROW, WIDE, Adapter, Lora, LowRank, Place, compiled, padded, plain
from engine.runner.model_runner import ModelRunner
from tandem.errors import CheckpointRefused

ROWS_TRIED = (3, 1, 9)  # rows in the first slot, in the last one, and without an adapter
PROBED = [(9, 3), (0, 5)]  # (done, new) tokens; no part of this batch has as many rows as all new tokens together
HEADER_BYTES = 2**20  # allowed for a weights file beyond its matrices in float32
GAP = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative to the root mean square of the result


@dataclass(frozen=True)
class Wanted:
    """Adapters' folders by name, how many are in the model at a time, and the rank of others that may be loaded later;
    0: none may."""

    folders: Mapping[str, str | Path]
    slots: int
    later_rank: int

    def __bool__(self) -> bool:
        return bool(self.folders or self.later_rank)


def attach(model: ModelRunner, wanted: Wanted, cut: Cut | None = None) -> Lora:
    """Adds slots for adapters to a model on its paged path; `cut`: to a rank's part. With a `later_rank`, each slot can
    hold an adapter of that rank on every layer that can have one, so that others can be loaded later; otherwise only
    these. Raises CheckpointRefused for a folder that is not supported, or not with this model, and for ranks that have
    read different content."""
    known = [lora_loader.read(name, folder) for name, folder in wanted.folders.items()]
    if model.group is not None:
        read = repr([(adapter.name, adapter.fingerprint) for adapter in known])
        model.group.agree(xxhash.xxh3_128(read.encode()).digest(), "adapters")
    places = _places(model, known, wanted.later_rank, cut)
    if not places:
        raise CheckpointRefused(f"no layer of {type(model.module).__name__} can have an adapter; unset adapter_root")
    count = wanted.slots if wanted.later_rank else min(wanted.slots, len(known))
    lora = Lora(model.module, places, known, count, dtype=model.dtype, device=model.device)
    model.lora = lora
    model.use_paged_attention()
    return lora


def attach_checked(
    model: ModelRunner, wanted: Wanted, part: RankPart | None, say: Callable[[str], None]
) -> Whole | None:
    """`attach` and `check`, and a line about them. All ranks together are compared with the whole model; rank 0 returns
    what that computes with the adapter that is now in slot 0."""
    lora = attach(model, wanted, part.cut if part else None)
    random, report = check(model)
    say(f"{len(lora.known)} adapters in {len(lora.slots)} slots: self-check passed: {report}")
    if part is None:
        return None
    expected: Whole | None = None
    if part.again is not None:
        with part.again() as whole, _on_whole(whole, random):
            expected = cut_check.whole(whole)
    assert model.group is not None
    model.use_eager_attention()
    with lora.eagerly(0):
        say(f"with an adapter, {cut_check.check(model.module, expected, model.group)}")
    model.use_paged_attention()
    return expected


@contextmanager
def _on_whole(model: PreTrainedModel, adapter: Adapter) -> Iterator[None]:
    """Inside, a model that is not cut has the adapter on every row."""

    def add(layer: LowRank, _module: Any, args: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
        term: torch.Tensor = (args[0] @ layer.a.to(y).T) @ layer.b.to(y).T * layer.scale
        return y + term

    with ExitStack() as stack:
        for name, layer in adapter.layers.items():
            hook = functools.partial(add, layer)
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        yield


def fitting(lora: Lora, name: str, folder: Path) -> Adapter:
    """Reads an adapter and checks that it fits into a slot; returned without its matrices. Safe on any thread. Raises
    CheckpointRefused."""
    places = lora.places
    most_bytes = HEADER_BYTES + 4 * sum(place.rank * sum(place.whole) for place in places.values())
    adapter = lora_loader.read(name, folder, most_bytes)
    file = folder / lora_loader.WEIGHTS
    for layer, matrices in adapter.layers.items():
        if layer not in places:
            raise CheckpointRefused(f"{file}: {layer:.200} is not among the layers that can have an adapter here")
        place = places[layer]
        _check_shape(file, layer, matrices, place.whole)
        if matrices.rank > place.rank:
            raise CheckpointRefused(
                f"{file}: {layer:.200} has rank {matrices.rank}, and a slot has room for {place.rank}; start the"
                " workers with a larger adapter_max_rank"
            )
    return adapter._replace(layers={})


def check(model: ModelRunner) -> tuple[Adapter, self_check.Report]:
    """The self-check with random adapters in the slots, packed together with each other and the base. Leaves them
    there, for the verification of the recording; returns that in slot 0. Raises CheckpointRefused."""
    lora = model.lora
    assert lora is not None, "attach comes first"
    random = [_random(lora, seed, model.group) for seed in range(min(2, len(lora.slots)))]
    for slot, adapter in enumerate(random):
        lora.put(slot, adapter)
    if model.kernels != REFERENCE:
        _prove(lora)
    report = self_check.run(model, [0, len(random) - 1, BASE, 0])
    if not report.passed:
        raise CheckpointRefused(
            f"adapters cannot be served with {type(model.module).__name__}: the paged step with random ones"
            f" differs from the eager model with them ({report})"
        )
    return random[0], report


def _prove(lora: Lora) -> None:
    """Compares the compiled operator with the plain one in the dtype that serves, once for each shape of layer."""
    # An empty slot adds nothing.
    rows = lora.rows(Batch([], [], list(ROWS_TRIED), [], [], [], adapters=[0, len(lora.slots) - 1, BASE]))
    generator = torch.Generator().manual_seed(0)
    for place in {
        (attached.width, attached.height, attached.rank): attached for attached in lora.places.values()
    }.values():
        x = torch.randn(sum(ROWS_TRIED), place.width, generator=generator).to(lora.pool.dtype)
        with torch.inference_mode():
            ours = compiled(x.new_zeros(len(x), place.height), x, rows, place).float()
            theirs = plain(x.new_zeros(len(x), place.height), x, rows, place).float()
        # One rounding. In bfloat16, that of an element of 8 times the mean is 6 % of the mean, more than GAP.
        rounding = torch.finfo(lora.pool.dtype).eps * theirs.abs()
        allowed = GAP[lora.pool.dtype] * theirs.square().mean().sqrt() + rounding
        if not bool(((ours - theirs).abs() <= allowed).all()):  # also for NaN
            raise CheckpointRefused(
                f"the compiled operator for adapters of a weight of {place.height} x {place.width} in"
                f" {lora.pool.dtype} differs from torch's"
            )


def _places(model: ModelRunner, known: Sequence[Adapter], later_rank: int, cut: Cut | None) -> dict[str, Place]:
    """The places of the layers that some adapter changes, in the order of the model; with `later_rank`, of all layers
    that can have an adapter."""
    able = _row_by_row(model)
    linear = dict(_linear_layers(model.module))
    whole = {name: _whole(cut, name, shape) for name, shape in linear.items()}
    ranks = dict.fromkeys(able, later_rank) if later_rank else {}
    for adapter in known:
        file = adapter.folder / lora_loader.WEIGHTS
        for name, layer in adapter.layers.items():
            if name not in linear:
                raise CheckpointRefused(f"{file}: {name:.200} is not a linear layer of {type(model.module).__name__}")
            if name not in able:
                raise CheckpointRefused(
                    f"{file}: {name:.200} does not see the tokens row by row, so an adapter on it cannot be served"
                )
            _check_shape(file, name, layer, whole[name])
            ranks[name] = max(ranks.get(name, 0), layer.rank)
    places: dict[str, Place] = {}
    at = 0
    for name, (height, width) in linear.items():
        if name in ranks:
            behind = at + padded(ranks[name], NARROW) * width
            part = cut.parts.get(f"{name}.weight") if cut else None
            places[name] = Place(len(places), at, behind, width, height, ranks[name], whole[name], part)
            at = behind + padded(height, WIDE) * ranks[name]
    return places


def _whole(cut: Cut | None, name: str, shape: tuple[int, int]) -> tuple[int, int]:
    """(out, in) of the whole layer, of which this rank may have a part."""
    height, width = cut.shapes.get(f"{name}.weight", shape) if cut else shape
    return height, width


def _check_shape(file: Path, name: str, layer: LowRank, shape: tuple[int, int]) -> None:
    height, width = shape
    if (layer.b.shape[0], layer.a.shape[1]) != (height, width):
        raise CheckpointRefused(
            f"{file}: {name:.200} has lora_A {tuple(layer.a.shape)} and lora_B {tuple(layer.b.shape)},"
            f" the base's weight is {height} x {width}"
        )


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """The name and (out, in) of each linear layer, without modules that only contain one, such as a router of
    experts."""
    for name, layer in module.named_modules():
        kind: Any = type(layer)
        while issubclass(kind, Compiled):
            kind = kind.__bases__[1]
        if kind is nn.Linear:
            yield name, (layer.out_features, layer.in_features)
        elif kind is Conv1D:
            yield name, (layer.nf, layer.nx)


def _row_by_row(model: ModelRunner) -> set[str]:
    """The linear layers that are always called with one row for each packed token."""
    total = sum(new for _, new in PROBED)
    rows_of_layer: dict[str, set[int]] = {}

    def note(name: str, args: tuple[Any, ...]) -> None:
        rows = args[0].numel() // args[0].shape[-1] if args and isinstance(args[0], torch.Tensor) else 0
        rows_of_layer.setdefault(name, set()).add(rows)

    batch = Batch()
    for (done, new), table in zip(PROBED, ([0, 1, 2], [3, 4]), strict=True):
        batch.add([number % model.vocab_size for number in range(new)], done, table, [new - 1])
    with ExitStack() as stack:
        for name, _ in _linear_layers(model.module):
            layer = model.module.get_submodule(name)
            hook = functools.partial(lambda _layer, args, name: note(name, args), name=name)
            stack.callback(layer.register_forward_pre_hook(hook).remove)
        model.forward(model.allocate(5, 4), batch)
    return {name for name, rows in rows_of_layer.items() if rows == {total}}


def _random(lora: Lora, seed: int, group: RankGroup | None) -> Adapter:
    """An adapter on every layer, whose term is about as large as the output of the layer's weight. All ranks make the
    same whole one."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, place in lora.places.items():
        weight = weight_quantization.weight_in(lora.module.get_submodule(name))
        plain = isinstance(weight, torch.Tensor) and weight.is_floating_point()
        height, width = place.whole
        spread = weight.detach().float().std() if plain else torch.tensor(width**-0.5)
        if group is not None:
            spread = group.all_gather(spread.view(1), AGREEMENT).mean()
        rank = max(1, place.rank - seed)
        a = torch.randn(rank, width, generator=generator) / width**0.5
        b = torch.randn(height, rank, generator=generator) * spread * (width / rank) ** 0.5
        layers[name] = LowRank(a, b, 0.5 + 0.25 * seed)
    return Adapter(f"random {seed}", Path(), bytes([seed]), layers)
