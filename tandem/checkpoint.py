"""Folders of checkpoints and adapters, from names and JSON files alone: no torch, no network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointRefused, SettingsError

ADAPTER_CONFIG = "adapter_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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


def weight_files(folder: Path, config: dict[str, Any]) -> list[Path]:
    """Those that transformers reads: what the config names, else a single file, else those of an index, whatever else
    is in the folder. Raises CheckpointRefused if one is missing."""
    named = config.get("transformers_weights")
    entry = folder / str(named or (SINGLE if (folder / SINGLE).is_file() else INDEX))
    if not entry.is_file():
        what = f"{entry.name}, which its config names" if named else f"{SINGLE} and no {INDEX}"
        raise CheckpointRefused(f"{folder} has no {what}; only safetensors weights are read")
    if entry.suffix != ".json":
        return [entry]
    weight_map = read_json(entry).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointRefused(f"{entry} has no weight_map; download the checkpoint again")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointRefused(f"{folder} lacks {', '.join(missing)}, which its index names; finish the download")
    return files


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointRefused if the file cannot be read or has no JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointRefused(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointRefused(f"{file} is not a JSON object")
    return content


def vocabulary_digest(ids: Mapping[str, int]) -> str:
    """Equal for two tokenizers whose ids mean the same tokens. `ids` are those of all tokens, by name."""
    by_id = sorted((token, name) for name, token in ids.items())  # by name it takes 0.8 s of 256k tokens
    return hashlib.blake2b(json.dumps(by_id).encode(), digest_size=16).hexdigest()


def check_adapter(name: str, folder: str) -> None:
    """Raises CheckpointRefused unless this is the folder of an adapter."""
    if not (Path(folder).expanduser() / ADAPTER_CONFIG).is_file():
        raise CheckpointRefused(f"adapter {name}: {folder} has no {ADAPTER_CONFIG}; pass a folder that PEFT has saved")


def check_adapter_root(root: Path) -> None:
    """Raises SettingsError unless this is a folder."""
    if not root.expanduser().is_dir():
        raise SettingsError(f"{root} is not a folder here", field="adapter_root", bound="a folder on every worker")
