"""Attention on CUDA by `torch.nn.attention.varlen`, reading pages in place. Not yet run on a GPU.

    FA3   the package flash-attn-3, on compute capability 9.0: blocks of any size
    FA2   included in torch: blocks of a multiple of 256 tokens

The keys of a sequence are never split among several sums (`num_splits=1`). So a result does not depend on the rest of
the step, and FA2 is correct for packed chunks of different lengths, which it is not with splits. The price is a long
context in a small batch: one thread block reads all keys of a KV head.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from engine.attention.forward_context import Scales, Step
from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec, SlidingWindowSpec

DTYPES = frozenset({torch.bfloat16, torch.float16})
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8


@dataclass(frozen=True)
class Varlen:
    """One implementation of `varlen_attn`."""

    name: str
    block_multiple: int  # a block's size in tokens must be a multiple of this
    wants_cu_seq_k: bool  # in addition to `seqused_k`, which determines the lengths
    absorbed: None = None  # it serves no latents

    def refusal(self, facts: CallFacts, dtype: torch.dtype, block_size: int) -> str | None:
        return refusal(self, facts, dtype, block_size)

    def attend(
        self,
        query: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        scales: Scales,
        step: Step,
        facts: CallFacts,
        sinks: torch.Tensor | None,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `engine.attention.paged.attend`: `query [total, heads, d]`, pages `[blocks, block_size, kv_heads, d]` of
        any strides with d innermost; returns `[total, heads, d]`. A sequence's queries are the last of its context (the
        mask is aligned at the lower right)."""
        from torch.nn.attention.varlen import varlen_attn  # not above: takes half a second, and only CUDA needs it

        # Keys before the query's own; -1: all.
        left = facts.reach.window - 1 if isinstance(facts.reach, SlidingWindowSpec) else -1
        out: torch.Tensor = varlen_attn(  # type: ignore[assignment]  # a pair only where the aux output is asked for
            query,
            k_pages,
            v_pages,
            step.cu_seq_q,
            _cu_seq_k(step) if self.wants_cu_seq_k else None,
            step.max_q,
            step.max_k,
            scale=facts.scaling,
            window_size=(left, 0),
            enable_gqa=facts.heads != facts.kv_heads,
            seqused_k=step.seqused_k,
            block_table=step.block_table,
            num_splits=1,
        )
        return out


FA3 = Varlen("FA3", 1, False)
FA2 = Varlen("FA2", 256, True)


@functools.cache
def refusal(kernel: Varlen, facts: CallFacts, dtype: torch.dtype, block_size: int) -> str | None:
    """Why the kernel cannot serve this attention call over pages of `dtype`; None if it can."""
    if dtype not in DTYPES:
        return f"{str(dtype).removeprefix('torch.')} is not one of its types"
    if facts.latent:
        return "latent pages"
    if facts.softcap is not None:
        return "softcap"
    if facts.sinks:
        return "sinks"
    if not isinstance(facts.reach, FullAttentionSpec | SlidingWindowSpec):
        return f"{facts.reach} reach"
    if facts.k_dim != facts.v_dim or facts.k_dim > LARGEST_HEAD or facts.k_dim % HEAD_MULTIPLE:
        return f"heads of {facts.k_dim} and {facts.v_dim} elements"
    if facts.heads % facts.kv_heads:
        return f"{facts.heads} heads for {facts.kv_heads} KV heads"
    if block_size % kernel.block_multiple:
        return f"blocks of {block_size} tokens, {kernel.name} takes multiples of {kernel.block_multiple}"
    return None


def _cu_seq_k(step: Step) -> torch.Tensor:
    """The start of each context in their concatenation, `[sequences + 1]`; computed once for a step."""
    if "cu_seq_k" not in step.plans:
        step.plans["cu_seq_k"] = F.pad(step.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    starts: torch.Tensor = step.plans["cu_seq_k"]
    return starts


def available(device: torch.device) -> Varlen | None:
    """The best kernel that this device has; None without CUDA. Switches FA3 on for the whole process."""
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) == (9, 0):
        try:
            activate_flash_attention_impl("FA3")
            return FA3
        except (ImportError, OSError, RuntimeError):  # not installed, or built for another torch
            restore_flash_attention_impl(_raise_warn=False)
    return FA2


def forget(kernel: Varlen) -> None:
    """After it has been refused: FA3 would otherwise serve other calls of the process."""
    if kernel == FA3:
        restore_flash_attention_impl()
