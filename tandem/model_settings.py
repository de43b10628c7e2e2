"""The settings of each model of a cluster that serves several.

    [small]                        models.toml: `tandem up --models models.toml`
    model = "demo/model"
    decode = 2

    [large]
    model = "Qwen/Qwen3-8B"
    kv_dtype = "int8"

A setting that a model's table omits is the cluster's; `served_model_name` is only in the tables. In the registry a
model's pools are a separate cluster, CLUSTER.MODEL, so their workers, sizes, leases and adapters cannot be confused
with those of another model.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.errors import SettingsError
from tandem.settings import MODEL_KEY, Settings, check_model

OWN_CLUSTER = "cluster"
MODEL_SETTINGS = frozenset(
    {
        *("model", "served_model_name", "prefill", "decode", "reasoning_format", "tool_call_format"),
        *("autoscale", "prefill_max", "decode_max", "autoscale_hold_s", "spares"),
        *("dtype", "weights", "kv_dtype", "sum_order", "threads", "kv_blocks"),
        *("device", "gpu_share", "memory_utilization", "prefill_tp", "decode_tp"),
        *("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("stream_stretch", "local_prefill", "place_by_prefix", "slo_ttft_s", "slo_tpot_s"),
        *("speculation", "speculation_tokens", "draft_model"),
        *("adapters", "adapter_slots", "adapter_root", "adapter_max_rank"),
    }
)
"""Those that one model may have for itself; all others hold for the cluster. `cluster` as well: the end of the name of
its pools in the registry, where that is not to be the model's (an upgrade to another checkpoint needs other pools)."""


def settings_of_models(settings: Settings) -> dict[str, Settings]:
    """The settings of each model by its name in `models`; the name of the only model is empty. Raises SettingsError."""
    if not settings.models:
        return {"": settings}
    if settings.served_model_name is not None:
        raise SettingsError(
            "served_model_name has the names of one model, and models names several",
            field="served_model_name",
            bound="absent, or in the table of each model",
        )
    models = {name: _own(settings, name, own) for name, own in settings.models.items()}
    workers = settings.host_workers or sum(own.prefill + own.decode for own in models.values())
    models = {name: own.model_copy(update={"host_workers": workers}) for name, own in models.items()}
    _check_pools(models)
    owners: dict[str, str] = {}
    for name, own in models.items():
        for served in {name, *own.model_names, *own.adapters}:
            if owners.setdefault(served, name) != name:
                raise SettingsError(
                    f"models.{owners[served]} and models.{name} would both be served as {served}",
                    field=f"models.{name}.served_model_name",
                    bound="names that no other model or adapter has",
                )
    return models


def model_of(cluster: str) -> str:
    """The model whose pools form this cluster; empty: it serves only one."""
    return cluster.partition(".")[2]


def read_models(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file. Raises SettingsError."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {error}", field="models", bound="a TOML file") from error
    if not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise SettingsError(f"{path} has no table for each model", field="models", bound='[name] and model = "..."')
    return tables


def name_models(folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`models` for several checkpoints without per-model settings, named after their folders. Raises SettingsError for
    equal names."""
    models: dict[str, dict[str, Any]] = {}
    for folder in folders:
        served = Settings.model_construct(model=folder).model_names[0]  # without the environment, which `load` checks
        name = re.sub(r"[^a-z0-9]+", "-", served.rpartition("/")[2].lower()).strip("-")[:31].rstrip("-")
        if not re.fullmatch(MODEL_KEY, name) or name in models:
            raise SettingsError(
                f"{folder!r:.100} gives no name that differs from the others'; name them in a file, with --models",
                field="models",
                bound="names of lower-case letters, digits and -",
            )
        models[name] = {"model": folder, "served_model_name": served}
    return models


def _check_pools(models: dict[str, Settings]) -> None:
    """Raises SettingsError for two models with the same pools' name."""
    owners: dict[str, str] = {}
    for name, own in models.items():
        if owners.setdefault(own.cluster, name) != name:
            raise SettingsError(
                f"models.{owners[own.cluster]} and models.{name} would share their workers",
                field=f"models.{name}.cluster",
                bound="a name that no other model's pools have",
            )


def _own(settings: Settings, name: str, own: dict[str, Any]) -> Settings:
    if unknown := sorted(own.keys() - MODEL_SETTINGS - {OWN_CLUSTER}):
        raise SettingsError(
            f"models.{name}.{unknown[0]}: a model has no such setting of its own",
            field=f"models.{name}.{unknown[0]}",
            bound=", ".join(sorted(MODEL_SETTINGS)),
        )
    if not own.get("model"):
        raise SettingsError(
            f"models.{name} names no model", field=f"models.{name}.model", bound="a checkpoint folder or a hub id"
        )
    pools = own.get(OWN_CLUSTER, name)
    if not isinstance(pools, str) or not re.fullmatch(MODEL_KEY, pools):
        raise SettingsError(
            f"models.{name}.cluster: {pools!r:.60}", field=f"models.{name}.cluster", bound="like the name of a model"
        )
    try:
        checked = Settings(**own)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(("models", name, *(str(part) for part in first["loc"])))
        raise SettingsError(f"{field}: {first['msg']} (got {first.get('input')!r:.100})", field=field) from None
    values = {key: getattr(checked, key) for key in own}
    named = {"served_model_name": own.get("served_model_name", name), OWN_CLUSTER: f"{settings.cluster}.{pools}"}
    result = settings.model_copy(update={**values, **named, "models": {}})
    try:
        check_model(result)
    except SettingsError as error:
        raise SettingsError(
            f"models.{name}: {error.message}", field=f"models.{name}.{error.field}", bound=error.bound
        ) from error
    return result
