"""A worker of several ranks: how many parameters each has, by the plan that transformers has for the model's class.

A rank has its part of what the plan cuts, and the whole of everything else: norms, embeddings, latent projections. KV
heads that are fewer than ranks are on several of them. The pages are shared.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from planner.capacity import Shape, tensor_shapes
from tandem.errors import SettingsError

PREFIXES = ("model.", "transformer.", "language_model.")  # of the base model in the names of a checkpoint
KV = (".k_proj", ".v_proj")
HEAD = "lm_head"


def of_ranks(shape: Shape, folder: Path, ranks: int) -> Shape:
    """The same model, served by `ranks` ranks. Raises CheckpointRefused with the reason if it cannot be cut for them,
    SettingsError for a checkpoint that is quantised."""
    if shape.ready:
        raise SettingsError("a quantised checkpoint is not served by several ranks", field="tp", bound="1")
    from engine.loading.model_loader import read_config  # imports transformers and torch: only if it is asked for
    from engine.parallel.tp_plan import CUT, check_plan

    config = read_config(folder)
    check_plan(config, ranks)
    plan = config.get_text_config().base_model_tp_plan or {}
    shapes = tensor_shapes(folder)
    own = sum(
        math.prod(size) // _parts(name, size, shape, plan, CUT, ranks)
        for name, size in shapes.items()
        if not name.startswith(HEAD)
    )
    vocab, width = next(size for name, size in shapes.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    if vocab % ranks == 0:  # a head that is tied becomes a part of its own
        own += vocab * width // ranks
    elif f"{HEAD}.weight" in shapes:
        own += vocab * width
    return replace(shape, ranks=ranks, rank_parameters=own)


def _parts(
    name: str, size: tuple[int, ...], shape: Shape, plan: dict[str, str], cut: frozenset[str], ranks: int
) -> int:
    """Of how many parts a rank has one."""
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
    return min(ranks, shape.kv_heads) if module.endswith(KV) and style == "colwise" else ranks
