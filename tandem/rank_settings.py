"""How many processes serve one copy of the model, and what that excludes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings

from tandem.errors import SettingsError

# Settings that have not been made to work by several ranks, and the values with which they are as if absent.
WITHOUT: dict[str, tuple[object, ...]] = {
    "weights": ("checkpoint",),
    "kv_dtype": ("auto",),
    "adapters": ({},),
    "adapter_root": (None,),
    "draft_model": (None,),
    "weight_cache": ("auto", "off"),
    "device": ("auto", "cpu"),
    "gpu_share": (1.0,),
}


class RankSettings(BaseSettings):
    """The part of tandem.settings.Settings that says of how many ranks a worker is."""

    tp: Annotated[int, Field(ge=1, le=16)] = 1
    """Tensor parallelism: processes of one host that serve one copy of the model, as one worker. Each has its part of
    the weights and of every layer's work, by the plan that transformers has for the model. On CPU only."""
    prefill_tp: Annotated[int, Field(ge=1, le=16)] | None = None
    """Likewise of prefill workers alone, which may differ from decode workers. Absent: `tp`."""
    decode_tp: Annotated[int, Field(ge=1, le=16)] | None = None
    """Likewise of decode workers. Absent: `tp`."""

    def ranks(self, role: str) -> int:
        """Of one worker of this pool."""
        return {"prefill": self.prefill_tp, "decode": self.decode_tp}[role] or self.tp


def check_ranks(settings: RankSettings, others: Mapping[str, object]) -> None:
    """Raises SettingsError for what is not served by several ranks; `others` are all settings by name."""
    prefill, decode = settings.ranks("prefill"), settings.ranks("decode")
    if max(prefill, decode) == 1:
        return
    for name, absent in WITHOUT.items():
        if others[name] not in absent:
            raise SettingsError(
                f"{name} is {others[name]}, which is not served by workers of several ranks",
                field=name,
                bound=f"{absent[0]} with tp, prefill_tp or decode_tp above 1",
            )
    if prefill != decode and others["autoscale"] == "on":
        raise SettingsError(
            f"autoscale is on, so workers change pools, and {prefill} ranks prefill where {decode} decode",
            field="prefill_tp",
            bound="the same as decode_tp with autoscale",
        )
