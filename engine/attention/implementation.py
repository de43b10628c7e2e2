"""Which attention function a transformers model calls."""

from __future__ import annotations

from transformers import PreTrainedModel

from tandem.errors import CheckpointRefused


def switch(model: PreTrainedModel, name: str) -> None:
    """Switches the model to the attention implementation `name`.

    transformers only warns when a model class does not use the attention interface, and the model would then run every
    step without its history; here that raises CheckpointRefused.
    """
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise CheckpointRefused(
            f"{type(model).__name__} does not use transformers' attention interface, so its KV cannot be kept in pages"
        )
