"""A worker of several ranks: how many parameters each has, by transformers' tensor-parallel plan of the model's class.

A rank has its part of what the plan cuts and of the vocabulary, and everything else as a whole: norms, latent
projections. If there are fewer KV heads than ranks, several ranks hold the same head. The pages are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.packing_scheme import Scheme, scheme_of
from engine.core.weight_formats import GROUP, group_of_part
from planner.capacity import CHECKPOINT, Shape, capacity, product_shapes, sizes, tensors
from planner.experts import MARK
from planner.packed import Codings, Shapes
from tandem.checkpoint import read_json
from tandem.errors import CheckpointRefused, SettingsError

KV = (".k_proj", ".v_proj")
RANKS = (1, 2, 4, 8, 16)


def of_ranks(shape: Shape, folder: Path, ranks: int, weights: str = CHECKPOINT) -> Shape:
    """The same model, served by `ranks` ranks with products in the format `weights`. Raises CheckpointRefused with the
    reason if it cannot be cut for them."""
    from engine.loading.module_loader import part_shapes, read_config  # import torch: only if they are asked for
    from engine.parallel.tp_plan import check_plan

    config = read_config(folder)
    check_plan(config, ranks)
    plan = config.get_text_config().base_model_tp_plan or {}
    asked = read_json(folder / "config.json").get("quantization_config") or {}
    shapes, _, codings = tensors(folder, asked)
    if shape.ready and codings is None:
        raise CheckpointRefused("a checkpoint that is quantised by another method is not served by several ranks")

    cut = any(name.endswith(KV) and style == "colwise" for name, style in plan.items())
    if cut and (uneven := [heads for heads, _, _ in shape.calls if heads % ranks and ranks % heads]):
        raise CheckpointRefused(f"{uneven[0]} KV heads cannot be shared evenly by {ranks} ranks")
    own = part_shapes(folder, config, shapes, ranks)
    if weights == "int4":
        _check_groups({name: (size[1], own[name][1]) for name, size in product_shapes(shapes).items()}, ranks)
    if codings is not None:
        codings = {name: coding for name, coding in codings.items() if MARK not in name}  # experts are dense in ranks
        codings = _of_part(codings, shapes, own, scheme_of(asked))
    calls = tuple((max(1, heads // ranks) if cut else heads, k_dim, v_dim) for heads, k_dim, v_dim in shape.calls)
    rank = replace(shape, calls=calls, **sizes(own, codings, ready=shape.ready, with_experts=False))
    return replace(shape, ranks=ranks, rank=rank)


def _check_groups(columns: dict[str, tuple[int, int]], ranks: int) -> None:
    """Raises CheckpointRefused, as the engine does, where a rank's columns end within a group of int4. `columns` are
    those of each product and of a rank's part."""
    for name, (whole, own) in columns.items():
        if own < whole and own % GROUP:
            raise CheckpointRefused(
                f"{name} has {whole} columns, {own} for each of {ranks} ranks, which do not end where a group of"
                f" {GROUP} columns of int4 does; plan fewer ranks, or --weights int8 or fp8"
            )


def _of_part(codings: Codings, whole: Shapes, own: Shapes, scheme: Scheme) -> Codings:
    """What of a quantised checkpoint is served over codes by a rank: where groups are broken, the engine has smaller
    ones or dense weights."""
    found = dict(codings)
    for name, (format, group) in codings.items():
        if (columns := own[name][1]) == (of_all := whole[name][1]):
            continue
        part = group_of_part(group, of_all, columns)
        if part is None or (group < of_all and not scheme.ordered):
            del found[name]
        else:
            found[name] = format, part
    return found


@dataclass(frozen=True, slots=True)
class Fit:
    """A worker of `ranks` ranks, each on its own device: the bytes on each, and how much KV fits."""

    ranks: int
    weights: int = 0
    kv: int = 0
    blocks: int = 0
    tokens: int = 0
    why_not: str = ""  # empty: it fits


def fits(
    shape: Shape,
    folder: Path,
    memory: int,
    *,
    utilization: float,
    dtype: str,
    weights: str = CHECKPOINT,
    block_size: int,
    kv_dtype: str,
    slots: int = 0,
    adapter_slots: int = 0,
    adapter_max_rank: int = 16,
) -> list[Fit]:
    """A `Fit` for each number in RANKS, for devices with `memory` bytes."""
    found: list[Fit] = []
    for ranks in RANKS:
        try:
            part = of_one_rank(of_ranks(shape, folder, ranks, weights)) if ranks > 1 else shape
            left = capacity(
                part,
                memory=memory,
                utilization=utilization,
                dtype=dtype,
                weights=weights,
                block_size=block_size,
                kv_dtype=kv_dtype,
                contexts=(),
                concurrencies=(),
                slots=slots,
                adapter_slots=adapter_slots,
                adapter_max_rank=adapter_max_rank,
            )
        except (CheckpointRefused, SettingsError) as error:
            found.append(Fit(ranks, why_not=error.message))
            continue
        why_not = "" if left.blocks else "no room for one block of KV"
        found.append(Fit(ranks, left.weights, left.kv, left.blocks, left.tokens, why_not))
    return found


def of_one_rank(shape: Shape) -> Shape:
    """What one of a worker's ranks has: its weights, and K and V of its heads."""
    return shape.rank or shape
