"""The sizes and limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    num_blocks: int
    block_size: int
    token_budget: int
    max_running: int
    stretch: float | None = None  # how many times as long as a step of one stream one with prompts may take
    beside_s: float = 0.0  # seconds that it may take also where that is less
    spare_block: bool = False  # the pages have one block more, which is never in a table; `capture` needs it
    generates: bool = True  # has all that the settings say of decoding; without, it serves a prefill worker only
