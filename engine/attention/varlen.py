"""Attention on CUDA by `torch.nn.attention.varlen`, reading pages in place. Not yet run on a GPU.

    FA3   the package flash-attn-3, on compute capability 9.0: blocks of any size
    FA2   included in torch: blocks of a multiple of 256 tokens

`refusal` returns why an attention call cannot be served; such calls take the reference path. `choose` tries the kernel
at load, on the device and the shapes that it will serve; a kernel that differs from the reference is not used.

The keys of a sequence are never split among several sums (`num_splits=1`). So a result does not depend on the rest of
the step, and FA2 is correct for packed chunks of different lengths, which it is not with splits. The price is a long
context in a small batch: one thread block reads all keys of a KV head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from engine.attention.forward_context import Batch, Kernel, Step
from engine.kernels import REFERENCE
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec, SlidingWindowSpec

NAME = "cuda-varlen"
DTYPES = frozenset({torch.bfloat16, torch.float16})
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
GAP = 0.04  # of a row's root mean square; roundings of 16 bits stay below 0.02, a key too many or too few is above 0.1
LONGEST = 700  # tokens of context that are tried without a window: several tiles of keys
NEEDLE, AROUND = 32.0, 8  # values around a window's edge that make one wrong key noticeable


Reference = Callable[..., torch.Tensor]  # engine.attention.paged.attend

FA3 = Kernel("FA3", 1, False)
FA2 = Kernel("FA2", 256, True)


@functools.cache
def refusal(kernel: Kernel, facts: CallFacts, dtype: torch.dtype, block_size: int) -> str | None:
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


def attend(
    kernel: Kernel, query: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, step: Step, facts: CallFacts
) -> torch.Tensor:
    """Attends packed queries over their contexts in pages; the arguments are those of `engine.attention.paged.attend`.

    `query [total, heads, d]`, pages `[blocks, block_size, kv_heads, d]` of any strides with d innermost; returns
    `[total, heads, d]`. A sequence's queries are the last of its context (the mask is aligned at the lower right).
    """
    from torch.nn.attention.varlen import varlen_attn  # not above: takes half a second, and only CUDA needs it

    left = (
        facts.reach.window - 1 if isinstance(facts.reach, SlidingWindowSpec) else -1
    )  # keys before the query's own; -1: all
    out: torch.Tensor = varlen_attn(  # type: ignore[assignment]  # a pair only where the aux output is asked for
        query,
        k_pages,
        v_pages,
        step.cu_seq_q,
        _cu_seq_k(step) if kernel.wants_cu_seq_k else None,
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


def _cu_seq_k(step: Step) -> torch.Tensor:
    """The start of each context in their concatenation, `[sequences + 1]`; computed once for a step."""
    if "cu_seq_k" not in step.plans:
        step.plans["cu_seq_k"] = F.pad(step.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    starts: torch.Tensor = step.plans["cu_seq_k"]
    return starts


def available(device: torch.device) -> Kernel | None:
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


def choose(
    facts: tuple[CallFacts, ...], dtype: torch.dtype, block_size: int, device: torch.device, reference: Reference
) -> tuple[Kernel | None, str]:
    """The implementation for a model's attention on this device, and a log line with the reason."""
    kernel = available(device)
    if kernel is None:
        return None, f"{REFERENCE}, because the device is {device.type}"
    reasons = [refusal(kernel, fact, dtype, block_size) for fact in facts]
    refused = sorted({reason for reason in reasons if reason is not None})
    served = sorted({fact for fact, reason in zip(facts, reasons, strict=True) if reason is None}, key=str)
    why = f"because of {'; '.join(refused)}"
    if served:
        problem = differs(kernel, served, dtype, block_size, device, reference)
        if problem is None:
            rest = f", {REFERENCE} for {len(facts) - reasons.count(None)} of {len(facts)} calls {why}"
            return kernel, f"{NAME} ({kernel.name}){rest if refused else ''}"
        why = f"because {kernel.name} {problem}"
    if kernel == FA3:
        restore_flash_attention_impl()
    return None, f"{REFERENCE}, {why}"


@torch.inference_mode()
def differs(
    kernel: Kernel,
    facts: Iterable[CallFacts],
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    reference: Reference,
) -> str | None:
    """Compares the kernel with the reference in float32 on random pages. Returns what is wrong, or None."""
    generator = torch.Generator(device).manual_seed(0)
    for fact in facts:
        for batch, blocks in _batches(fact, block_size):
            pages = KvCache(layout_of([fact], block_size, dtype, ""), blocks, device)
            exact = KvCache(layout_of([fact], block_size, torch.float32, ""), blocks, device)
            for ours, theirs in ((pages.k[0], exact.k[0]), (pages.v[0], exact.v[0])):
                theirs.normal_(generator=generator)
                ours.copy_(theirs)
            if isinstance(fact.reach, SlidingWindowSpec):
                _plant(pages.v[0], batch, fact.reach.window)
            for ours, theirs in ((pages.k[0], exact.k[0]), (pages.v[0], exact.v[0])):
                theirs.copy_(ours)
            shape = (len(batch.token_ids), fact.heads, fact.k_dim)
            query = torch.randn(shape, generator=generator, device=device).to(dtype)
            step = Step(batch, pages, (fact,), device)
            try:
                attended = attend(kernel, query, pages.k[0], pages.v[0], step, fact).float()
            except (RuntimeError, TypeError, ValueError) as error:
                return f"fails: {str(error).strip().partition(chr(10))[0]}"
            exact_step = Step(batch, exact, (fact,), device)
            expected = reference(query.float(), exact.k[0], exact.v[0], (None, None), exact_step, fact)
            size = expected.square().mean(dim=(1, 2), keepdim=True).sqrt()  # [total, 1, 1]
            gap = ((attended - expected).abs() / size).max().item()
            if not gap <= GAP:  # also for NaN
                return f"differs from it by {gap:.2g} for {fact.reach} attention of {batch.query_lens} new tokens"
    return None


def _plant(values: torch.Tensor, batch: Batch, window: int) -> None:
    """Makes the values around the edge of each sequence's last window large, `[blocks, block_size, kv_heads, d]`."""
    size = values.shape[1]
    for context, table in zip(batch.context_lens, batch.block_tables, strict=True):
        for position in range(max(0, context - window - AROUND), min(context, context - window + AROUND)):
            values[table[position // size], position % size] *= NEEDLE


def _batches(fact: CallFacts, block_size: int) -> list[tuple[Batch, int]]:
    """A mixed batch and one of single tokens, over scattered blocks, each with the number of blocks that it needs."""
    longest = fact.reach.window + 70 if isinstance(fact.reach, SlidingWindowSpec) else LONGEST
    shapes = [  # (done, new) of each sequence
        [(0, 37), (longest - 5, 5), (longest - 1, 1), (20, 1), (0, 1)],
        [(longest - 1, 1), (0, 1), (300, 1)],
    ]
    batches = []
    for shape in shapes:
        counts = [-(-(done + new) // block_size) for done, new in shape]
        ids = iter(sorted(range(sum(counts)), key=lambda block: block * 7919 % 10007))
        batch = Batch()
        for (done, new), count in zip(shape, counts, strict=True):
            batch.add([0] * new, done, [next(ids) for _ in range(count)])
        batches.append((batch, sum(counts)))
    return batches
