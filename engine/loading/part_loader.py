"""Loads one rank's part of a model, and reads only this part of the files.

    shapes (meta) ─▶ engine.parallel.weight_cut.cut ─▶ a model of this rank's shapes ─▶ transformers fills it, from
    files ─────────▶ WeightFiles.read(name, part) ──────────────────────────────────────┘ parts that are read here

transformers maps tensors of the files to parameters. Three kinds are supported: one tensor; the experts of a layer,
which become one parameter; and two such stacks side by side. A model with any other conversion is loaded whole by each
rank in turn and then cut (`load_model` reports it).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from engine import kernels
from engine.loading.gptq_awq_fp8 import Product, Weights
from engine.parallel.weight_cut import Cut, Part

STACKED = 0  # the dimension along which experts are stacked
BESIDE = 1  # the dimension along which two stacks are concatenated


class _Tensor(NamedTuple):
    """A tensor of the files."""

    key: str
    values: Any  # a slice of an open safetensors file, which reads on demand and maps nothing; or a Product


class WeightFiles:
    """The parameters of a model in a checkpoint's files; each can be read separately, whole or in part. Thread-safe."""

    def __init__(self, files: list[Path], shapes: PreTrainedModel, packed: Weights | None = None) -> None:
        """`shapes` is the model without weights, `packed` are the files' tensors where they are quantised."""
        self.others: list[str] = []  # tensors of no parameter
        self._shapes = shapes
        self._single: dict[str, _Tensor] = {}  # parameters that are one unchanged tensor
        self._made: dict[str, _Made] = {}  # of several
        mapping = get_model_conversion_mapping(shapes)
        converter_of = {
            pattern: each for each in mapping if isinstance(each, WeightConverter) for pattern in each.source_patterns
        }
        names = shapes.state_dict()
        found: dict[str, dict[str, list[_Tensor]]] = defaultdict(lambda: defaultdict(list))
        for tensor in _tensors(files) if packed is None else _unpacked(packed):
            name, pattern = _parameter_of(tensor.key, shapes, mapping, names)
            if name not in names:
                self.others.append(tensor.key)
            elif pattern is None:
                self._single[name] = tensor
            else:
                found[name][pattern].append(tensor)
        for name, stacks in found.items():
            made = _Made(converter_of[next(iter(stacks))], stacks)
            self._made[name] = made

    @property
    def strange(self) -> str | None:
        """A parameter with an unsupported conversion, whose parts cannot be read; None if there is none."""
        return next((name for name, made in self._made.items() if name in self._single or not made.understood()), None)

    @property
    def names(self) -> list[str]:
        return [*self._single, *self._made]

    def products(self, name: str) -> list[list[Product]] | None:
        """Of each expert in a stacked parameter, the products whose outputs follow one another; None if it is another
        kind of parameter, or not packed."""
        made = self._made.get(name)
        if made is None or not made.understood():
            return None
        stacks = [[tensor.values for tensor in made.stacks[own]] for own in made.converter.source_patterns]
        if not all(isinstance(each, Product) for stack in stacks for each in stack):
            return None
        return [list(each) for each in zip(*stacks, strict=True)]

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """A parameter in the files' dtype, whole as transformers makes it, or a part."""
        if name in self._single:
            return _read(self._single[name], part)
        made = self._made[name]
        return made.whole(name, self._shapes) if part is None else made.part(part)


class _Made(NamedTuple):
    """A parameter `[experts, rows, ...]` that a converter makes of tensors `[rows, ...]`."""

    converter: WeightConverter
    stacks: dict[str, list[_Tensor]]  # by pattern of their names: the tensors of each expert

    def understood(self) -> bool:
        """Whether it stacks experts of one kind, or of several kinds whose stacks it then concatenates."""
        converter = self.converter
        merge, *more = converter.operations
        if len(converter.target_patterns) != 1 or set(self.stacks) != set(converter.source_patterns):
            return False
        if not isinstance(merge, MergeModulelist) or merge.dim != STACKED:
            return False
        if len(converter.source_patterns) == 1:
            return not more
        return len(more) == 1 and isinstance(more[0], Concatenate) and more[0].dim == BESIDE

    def whole(self, name: str, model: PreTrainedModel) -> torch.Tensor:
        """By transformers."""
        converter: Any = deepcopy(self.converter)  # it accepts futures and functions
        for pattern, stack in self.stacks.items():
            for tensor in stack:
                converter.add_tensor(name, tensor.key, pattern, partial(_read, tensor, None))
        (value,) = converter.convert(name, model=model, config=model.config).values()
        made: torch.Tensor = value[0] if isinstance(value, list) else value
        return made

    def part(self, part: Part) -> torch.Tensor:
        pieces, first = [], 0
        for pattern in self.converter.source_patterns:
            stack = self.stacks[pattern]
            rows = stack[0].values.get_shape()[BESIDE - 1]
            own = _of_stack(part, first, rows)
            if own.stretches:
                pieces.append(torch.stack([_read(tensor, own) for tensor in stack], STACKED))
            first += rows
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, BESIDE)


class Deferred:
    """Replaces a tensor of a state dict; transformers reads it when it indexes it with an ellipsis."""

    def __init__(self, files: WeightFiles, name: str, part: Part | None) -> None:
        self._read = partial(files.read, name, part)

    def __getitem__(self, index: Any) -> torch.Tensor:
        assert index is ..., "transformers takes a tensor as it is"
        return self._read()


def load(shapes: PreTrainedModel, files: WeightFiles, cut: Cut, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """The model of one rank, not yet attached to the others, and transformers' report."""
    kind = type(shapes)

    def of_this_rank(self: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, *arguments, **options)
        cut.take(self)

    made: Any = type(kind.__name__, (kind,), {"__init__": of_this_rank, "__module__": kind.__module__})
    state: dict[str, Any] = {name: Deferred(files, name, cut.parts.get(name)) for name in files.names}
    state |= dict.fromkeys(files.others, torch.empty(0))  # for the report
    options = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    module, report = made.from_pretrained(None, config=shapes.config, state_dict=state, **options)
    module.__class__ = kind
    return module, report


@contextmanager
def streamed(shapes: PreTrainedModel, files: WeightFiles, loaded: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yields the whole model with one layer in memory at a time: each layer is read when it is called. `loaded`, a part
    of the model, provides dtypes and buffers."""
    for name, buffer in loaded.named_buffers():
        path, _, own = name.rpartition(".")
        shapes.get_submodule(path)._buffers[own] = buffer
    ties: dict[str, str] = getattr(shapes, "all_tied_weights_keys", None) or {}
    known = set(files.names)
    handles = []
    for prefix, unit in _units(shapes):
        places = [
            (module, own, ".".join(filter(None, (prefix, path, own))))
            for path, module in unit.named_modules()
            for own, _ in module.named_parameters(recurse=False)
        ]
        if not places:
            continue

        def fill(*_: Any, places: Any = places) -> None:
            for module, own, name in places:
                source = name if name in known else ties[name]
                dtype = loaded.get_parameter(name).dtype
                module._parameters[own] = nn.Parameter(files.read(source).to(dtype), requires_grad=False)

        def empty(*_: Any, places: Any = places) -> None:
            """Removes the weights, but keeps the device, because models move ids to the embedding's device."""
            for module, own, name in places:
                like = loaded.get_parameter(name)
                none = kernels.nothing(module._parameters[own].shape, like.dtype, like.device)
                module._parameters[own] = nn.Parameter(none, requires_grad=False)

        empty()
        handles += [unit.register_forward_pre_hook(fill), unit.register_forward_hook(empty)]
    try:
        yield shapes
    finally:
        for handle in handles:
            handle.remove()


def parameters_of(keys: Iterable[str], shapes: PreTrainedModel) -> dict[str, str]:
    """The parameters that are made of these tensors of the files, or of which they are a piece."""
    mapping, names = get_model_conversion_mapping(shapes), shapes.state_dict()
    return {key: _parameter_of(key, shapes, mapping, names)[0] for key in keys}


def _parameter_of(
    key: str, shapes: PreTrainedModel, mapping: list[Any], names: dict[str, torch.Tensor]
) -> tuple[str, str | None]:
    """The parameter of a tensor of the files, and the pattern of its conversion; None if there is no conversion."""
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    name, pattern = rename_source_key(key, renamings, converters, shapes.base_model_prefix, names)
    if name not in names and key in names:
        return rename_source_key(key, [], [], shapes.base_model_prefix, names)
    return name, pattern


def _tensors(files: list[Path]) -> list[_Tensor]:
    """Of all files, in the order in which transformers takes them."""
    tensors = []
    for path in files:
        file: Any = safe_open(path, framework="pt", backend="pread")
        tensors += [_Tensor(key, file.get_slice(key)) for key in file.keys()]  # noqa: SIM118 - not a dict
    return sorted(tensors, key=lambda tensor: dot_natural_key(tensor.key))


def _unpacked(packed: Weights) -> list[_Tensor]:
    return sorted(starmap(_Tensor, packed.tensors.items()), key=lambda tensor: dot_natural_key(tensor.key))


def _read(tensor: _Tensor, part: Part | None) -> torch.Tensor:
    view = tensor.values
    if isinstance(view, Product):
        return view.part(part).weight()
    if part is None:
        whole: torch.Tensor = view[...]
        return whole
    before = (slice(None),) * part.dim
    pieces = [view[(*before, slice(start, start + length))] for start, length in part.stretches]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.dim)


def _of_stack(part: Part, first: int, rows: int) -> Part:
    """The part of each tensor `[rows, ...]` of a stack whose rows begin at `first` of the parameter `[experts, rows,
    ...]`."""
    assert part.dim > STACKED, "experts are cut, not shared out"
    if part.dim > BESIDE:
        return Part(part.dim - 1, part.stretches)
    ends = [(max(start, first), min(start + length, first + rows)) for start, length in part.stretches]
    return Part(part.dim - 1, tuple((start - first, end - start) for start, end in ends if start < end))


def _units(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Each decoder layer, and each other module with its own parameters."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    inside = tuple(f"{name}." for name in lists)
    layers = [
        (f"{name}.{at}", layer)
        for name in lists
        if not name.startswith(inside)
        for at, layer in enumerate(model.get_submodule(name).children())
    ]
    leaves = [
        (name, module)
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside) and any(True for _ in module.parameters(recurse=False))
    ]
    return layers + leaves
