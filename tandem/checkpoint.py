"""Checks that a setting can name a checkpoint or an adapter, from name and folder alone: no torch, no network."""

from __future__ import annotations

from pathlib import Path

from tandem.errors import CheckpointRefused, SettingsError

ADAPTER_CONFIG = "adapter_config.json"


def folder_of(model: str) -> Path | None:
    """The folder that `model` names; None for a possible hub id, which only the hub can check.

    Raises CheckpointRefused for a path that is not a folder, and for a folder without a checkpoint.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointRefused(f"{model} has no config.json; pass the folder of a transformers checkpoint")
        return folder
    if folder.exists():
        raise CheckpointRefused(f"{model} is a file; pass the folder that holds config.json and the safetensors files")
    if folder.is_absolute() or model.startswith(".") or model.count("/") > 1 or model.endswith("/"):
        raise CheckpointRefused(
            f"there is no folder {model}; pass an existing checkpoint folder or a hub id like org/name"
        )
    return None


def hub_revision(model: str) -> tuple[str, str | None]:
    """The id and the revision (commit, tag or branch) of a hub id, which may be `org/name@revision`."""
    hub_id, _, revision = model.partition("@")
    return hub_id, revision or None


def check_adapter(name: str, folder: str) -> None:
    """Raises CheckpointRefused unless this is the folder of an adapter."""
    if not (Path(folder).expanduser() / ADAPTER_CONFIG).is_file():
        raise CheckpointRefused(f"adapter {name}: {folder} has no {ADAPTER_CONFIG}; pass a folder that PEFT has saved")


def check_adapter_root(root: Path) -> None:
    """Raises SettingsError unless this is a folder."""
    if not root.expanduser().is_dir():
        raise SettingsError(f"{root} is not a folder here", field="adapter_root", bound="a folder on every worker")
