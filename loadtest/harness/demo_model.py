"""The demo model of this checkout, which most measurements of the service itself use."""

from __future__ import annotations

import shutil
from pathlib import Path

DEMO = Path(__file__).parents[2] / "demo" / "model"
DEMO_VOCAB = 2048


def make_hybrid(folder: Path) -> Path:
    """A tiny random model with recurrent layers and the demo model's tokenizer; returns the folder. Without experts,
    whose choice a rounding may turn, so that small differences stay small."""
    from loadtest.harness.random_checkpoints import make_checkpoint  # needs torch, which clients do not

    make_checkpoint(folder, "tiny-qwen3-5", dtype="float32", vocab_size=DEMO_VOCAB)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder
