"""What a fork server imports before it makes copies (tests/support/copies.py), without collections meanwhile."""

from __future__ import annotations

from importlib import import_module

from services.launch import importing

# Not NIXL: UCX, below it, reads the environment when it is loaded, and has threads.
with importing():
    for module in (
        "engine.kernels.build",
        "services.router.server",
        *(f"services.{role}.servicer" for role in ("prefill", "decode")),
        *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen3")),  # those of most tests
    ):
        import_module(module)
