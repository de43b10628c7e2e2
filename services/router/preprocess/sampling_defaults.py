"""The checkpoint's own sampling defaults."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from tandem.errors import CheckpointRefused


class Defaults(BaseModel):
    """Sampling defaults of requests: the checkpoint's generation_config.json, read as by vLLM, then these."""

    model_config = ConfigDict(frozen=True)

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def load(cls, folder: Path) -> Defaults:
        """Raises CheckpointRefused for a file that cannot be read."""
        path = folder / "generation_config.json"
        try:
            return cls.model_validate_json(path.read_bytes()) if path.is_file() else cls()
        except (ValidationError, OSError) as error:
            raise CheckpointRefused(f"{path} cannot be read: {error}") from error
