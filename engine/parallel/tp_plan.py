"""transformers' tensor-parallel plan for a model, and the checks of it.

A plan has a style for each module or bare parameter, named as in the model, with * for the number of a layer:

    colwise                   the rows of the weight [out, in]: this rank's part of the output
    colwise_gather_output     likewise, and the outputs of all ranks are put side by side
    rowwise                   the columns, for an input that is this rank's part; the outputs are added up
    rowwise_split_input       likewise, for an input that every rank has whole
    packed_colwise, _rowwise  two such weights in one, each cut by itself: gate and up
    moe_tp_experts            a module whose output is this rank's part of a sum, like all_reduce
    KEPT                      whole on every rank

Everything here is answered from the config, before a weight is read. engine/parallel/weight_cut.py applies the plan.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from tandem.errors import CheckpointRefused, SettingsError
from tandem.settings import Settings

GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
SPLIT = frozenset({"rowwise_split_input", "rowwise_rep"})
SUMMED = frozenset({"moe_tp_experts", "all_reduce"})
# In transformers these affect only gradients, or the sharing of a table that here every rank has whole.
KEPT = frozenset(
    {
        *("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"),
        *("embedding_rowwise", "embedding_colwise"),
    }
)
CUT = frozenset({"colwise", "rowwise", "packed_colwise", "packed_rowwise", *GATHERED, *SPLIT})
KNOWN = CUT | SUMMED | KEPT
ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})  # layers that keep only K and V


# Settings that several ranks do not support, and their values that count as absent.
WITHOUT: dict[str, tuple[object, ...]] = {
    "draft_model": (None,),
    "weight_cache": ("auto", "off"),
}


def check_settings(settings: Settings, ranks: int, device: str) -> None:
    """Raises SettingsError for settings that a worker of `ranks` ranks does not support."""
    if device != "cpu":
        raise SettingsError(f"{ranks} ranks serve a worker on CPU only", field="device", bound="cpu with --tp")
    for name, absent in WITHOUT.items():
        if (value := getattr(settings, name)) not in absent:
            raise SettingsError(
                f"{name} is {value}, which a worker of {ranks} ranks does not serve",
                field=name,
                bound=f"{absent[0]} where prefill_tp or decode_tp is above 1",
            )
    if settings.flips and settings.prefill_tp != settings.decode_tp:
        raise SettingsError(
            f"workers change pools, and prefill_tp is {settings.prefill_tp} where decode_tp is {settings.decode_tp}",
            field="prefill_tp",
            bound="the same as decode_tp with autoscale",
        )


def check_plan(config: PreTrainedConfig, ranks: int) -> None:
    """Raises CheckpointRefused with the reason where a model of this config cannot be cut for `ranks` ranks."""
    text = config.get_text_config()
    kind = text.model_type
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise CheckpointRefused(f"transformers has no plan to cut {kind} for tensor parallelism; serve it by one rank")
    unknown = sorted(set(plan.values()) - KNOWN)
    if unknown:
        raise CheckpointRefused(f"the plan of {kind} has styles that Tandem does not know: {', '.join(unknown)}")
    if other := sorted({str(layer) for layer in getattr(text, "layer_types", None) or ()} - ATTENTION):
        raise CheckpointRefused(f"{kind} has layers of type {', '.join(other)}; several ranks share K and V alone")
    if not any(style in SUMMED or style.startswith("rowwise") for style in plan.values()):
        raise CheckpointRefused(f"the plan of {kind} cuts neither attention nor MLP")
    heads = text.num_attention_heads
    if not isinstance(heads, int) or heads % ranks:
        raise CheckpointRefused(f"{heads} attention heads cannot be shared by {ranks} ranks; use a number that divides")
