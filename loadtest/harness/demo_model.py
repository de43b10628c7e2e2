"""The demo model of this checkout, which most measurements of the service itself use."""

from __future__ import annotations

from pathlib import Path

DEMO = Path(__file__).parents[2] / "demo" / "model"
DEMO_VOCAB = 2048
