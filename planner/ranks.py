"""A worker of several ranks: how many parameters each has, by the plan that transformers has for the model's class.

A rank has its part of what the plan cuts and of the vocabulary, and the whole of everything else: norms, latent
projections. KV heads that are fewer than ranks are on several of them. The pages are shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from planner.capacity import Shape, capacity, tensor_shapes
from planner.kv_calls import of_module
from tandem.errors import CheckpointRefused, SettingsError

PREFIXES = ("model.", "transformer.", "language_model.")  # of the base model in the names of a checkpoint
KV = (".k_proj", ".v_proj")
HEAD = "lm_head"
RANKS = (1, 2, 4, 8, 16)
TABLES = ("embed_tokens.weight", "wte.weight")


def of_ranks(shape: Shape, folder: Path, ranks: int) -> Shape:
    """The same model, served by `ranks` ranks. Raises CheckpointRefused with the reason if it cannot be cut for them,
    SettingsError for a checkpoint that is quantised."""
    if shape.ready:
        raise SettingsError("a quantised checkpoint is not served by several ranks", field="tp", bound="1")
    from engine.loading.module_loader import read_config  # imports transformers and torch: only if it is asked for
    from engine.parallel.tp_plan import CUT, check_plan

    config = read_config(folder)
    check_plan(config, ranks)
    text = config.get_text_config()
    plan, about = text.base_model_tp_plan or {}, text.to_dict()
    shapes = tensor_shapes(folder)

    def kv_heads(module: str) -> int:
        return of_module(module, shapes, about)[0]

    own = sum(
        math.prod(size) // _parts(name, plan, CUT, ranks, kv_heads)
        for name, size in shapes.items()
        if not name.startswith(HEAD) and not name.endswith(TABLES)
    )
    for vocab, width in (size for name, size in shapes.items() if _by_tokens(name)):
        own += vocab * width // (1 if vocab % ranks else ranks)
    cut = any(name.endswith(KV) and style == "colwise" for name, style in plan.items())
    if cut and (uneven := [heads for heads, _, _ in shape.calls if heads % ranks and ranks % heads]):
        raise CheckpointRefused(f"{uneven[0]} KV heads cannot be shared evenly by {ranks} ranks")
    calls = tuple((max(1, heads // ranks) if cut else heads, k_dim, v_dim) for heads, k_dim, v_dim in shape.calls)
    return replace(shape, ranks=ranks, rank_parameters=own, rank_calls=calls)


def _by_tokens(name: str) -> bool:
    """Whether a row is a token's: of the embedding, or of a head that is not tied to it."""
    return name.endswith(TABLES) or name == f"{HEAD}.weight"


def _parts(name: str, plan: dict[str, str], cut: frozenset[str], ranks: int, kv_heads: Callable[[str], int]) -> int:
    """Of how many parts a rank has one. `kv_heads`: of an attention module; layers may differ."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    for prefix in PREFIXES:
        module = module.removeprefix(prefix)
    pattern = ".".join("*" if part.isdigit() else part for part in module.split("."))
    style = plan.get(pattern)
    if ".experts." in pattern and style is None:  # each on its own in the files, all in one tensor in the model
        whole = pattern.partition(".experts.")[0] + ".experts"
        style = next((plan[key] for key in plan if key.startswith(f"{whole}.") and plan[key] in cut), None)
    if style not in cut or (name.endswith(".bias") and style.startswith("rowwise")):
        return 1
    if module.endswith(KV) and style == "colwise":
        return min(ranks, kv_heads(name.rpartition(".")[0].rpartition(".")[0]))
    return ranks


@dataclass(frozen=True, slots=True)
class Fit:
    """A worker of so many ranks, each on a device of its own: bytes on each, and how much KV there is room for."""

    ranks: int
    weights: int = 0
    kv: int = 0
    blocks: int = 0
    tokens: int = 0
    why_not: str = ""  # empty: it fits


def fits(
    shape: Shape, folder: Path, memory: int, *, utilization: float, dtype: str, block_size: int, kv_dtype: str
) -> list[Fit]:
    """Of each number in RANKS, where a device has `memory` bytes."""
    found: list[Fit] = []
    for ranks in RANKS:
        try:
            part = of_one_rank(of_ranks(shape, folder, ranks)) if ranks > 1 else shape
            left = capacity(
                part,
                memory=memory,
                utilization=utilization,
                dtype=dtype,
                block_size=block_size,
                kv_dtype=kv_dtype,
                contexts=(),
                concurrencies=(),
            )
        except (CheckpointRefused, SettingsError) as error:
            found.append(Fit(ranks, why_not=error.message))
            continue
        why_not = "" if left.blocks else "no room for one block of KV"
        found.append(Fit(ranks, left.weights, left.kv, left.blocks, left.tokens, why_not))
    return found


def of_one_rank(shape: Shape) -> Shape:
    """What one of a worker's ranks has: its parameters, and K and V of its heads."""
    return replace(shape, calls=shape.rank_calls, parameters=shape.rank_parameters, ranks=1)
