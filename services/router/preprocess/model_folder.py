"""Where a checkpoint's files are, without torch."""

from __future__ import annotations

from pathlib import Path

from tandem.checkpoint import folder_of, hub_revision
from tandem.errors import CheckpointRefused


def local_folder(model: str) -> Path:
    """The folder of a checkpoint. A hub id is looked up in (or fetched into) the Hugging Face cache: tokenizer and
    template only. Raises CheckpointRefused."""
    if folder := folder_of(model):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hub_id, revision = hub_revision(model)
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=["*.json", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointRefused(
            f"{model} is neither a folder nor a model that the hub provides; check the name, or download it first"
        ) from error
