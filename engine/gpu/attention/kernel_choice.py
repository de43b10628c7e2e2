"""Decides by a trial at load, on the device and shapes to be served, whether the CUDA kernel attends over pages.

A kernel that differs from the reference is not used; calls that the kernel refuses take the reference path.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from engine.attention import paged
from engine.attention.forward_context import Batch, CudaKernel, Step
from engine.attention.mla import Expanded, Expander, expander_of
from engine.gpu import trial
from engine.kernels import REFERENCE
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import CallFacts, SlidingWindowSpec
from engine.kv.kv_quantization import quantise

NAME = "cuda"
GAP = 0.04  # of a row's root mean square; roundings of 16 bits stay below 0.02, a key too many or too few is above 0.1
LONGEST = 700  # context of the trial without a window, at least: several tiles of keys
NEEDLE, AROUND = 32.0, 8  # values around a window's edge that make one wrong key noticeable


def candidate(device: torch.device, max_model_len: int, absorbed: Expanded | None) -> CudaKernel | None:
    """Tandem's own kernels, if they can run here; the trial says whether they serve."""
    if trial.absent(device):
        return None
    from engine.gpu.attention.paged_attention import TritonAttention  # torch for CPU does not bring Triton

    return TritonAttention(max_model_len, absorbed)


def choose(
    facts: tuple[CallFacts, ...],
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    max_model_len: int,
    kept: torch.dtype | None = None,
    absorbed: Expanded | None = None,
) -> tuple[CudaKernel | None, str]:
    """The implementation for a model's attention on this device, and a log line with the reason. `kept`: the type of
    quantised elements in pages; `absorbed`: what a product makes of latents in pages, if one expands them."""
    if not facts:
        return None, f"{REFERENCE}, because the model has no attention"
    kernel = candidate(device, max_model_len, absorbed)
    if kernel is None:
        return None, f"{REFERENCE}, because {trial.absent(device)}"
    reasons = [kernel.refusal(fact, kept or dtype) for fact in facts]
    refused = "; ".join(sorted({reason for reason in reasons if reason is not None}))
    served = sorted({fact for fact, reason in zip(facts, reasons, strict=True) if reason is None}, key=str)
    problem = differs(kernel, served, dtype, block_size, device, kept) if served else None
    if not served or problem is not None:
        return None, f"{REFERENCE}, because {f'{kernel.name} {problem}' if problem else f'of {refused}'}"
    rest = f", {REFERENCE} for {len(facts) - reasons.count(None)} of {len(facts)} calls because of {refused}"
    return kernel, f"{NAME} ({kernel.name}){rest if refused else ''}"


@torch.inference_mode()
def differs(
    kernel: CudaKernel,
    facts: Iterable[CallFacts],
    dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    kept: torch.dtype | None = None,
) -> str | None:
    """Compares the kernel with the reference in float32 on random pages. Returns what is wrong, or None."""
    generator = torch.Generator(device).manual_seed(0)
    for fact in facts:
        width, weight, expand, problem = _expansion(kernel, fact, dtype, generator)
        if problem is not None:
            return problem
        for batch, blocks in _batches(fact, block_size, kernel.split_keys):
            pages, exact = random_pages(fact, blocks, (dtype, kept), block_size, generator, batch)
            shape = (len(batch.token_ids), fact.heads, width)
            query = torch.randn(shape, generator=generator, device=device).to(dtype)
            sinks = torch.randn(fact.heads, generator=generator, device=device) if fact.sinks else None
            scales = pages.k_scales[0], pages.v_scales[0]
            step, exact_step = (Step(batch, each, (fact,), device) for each in (pages, exact))
            try:
                attended = kernel.attend(query, pages.k[0], pages.v[0], scales, step, fact, sinks, weight).float()
            except (RuntimeError, TypeError, ValueError) as error:
                return f"fails: {str(error).strip().partition(chr(10))[0]}"
            given = (query.float(), exact.k[0], exact.v[0], scales, exact_step, fact)
            expected = paged.attend(*given, sinks=sinks, expand=expand)
            size = expected.square().mean(dim=(1, 2), keepdim=True).sqrt()  # [total, 1, 1]
            gap = ((attended - expected).abs() / size).max().item()
            if not gap <= GAP:  # also for NaN
                return f"differs from it by {gap:.2g} for {fact.reach} attention of {batch.query_lens} new tokens"
        if kept is not None and (problem := trial.failing(partial(_writes_differ, pages, dtype))):
            return problem
    return None


def _writes_differ(pages: KvCache, dtype: torch.dtype) -> str | None:
    """What is wrong with the kernel that writes quantised pages."""
    from engine.gpu.attention import quantised_pages  # as in `candidate`

    both = (pages.k[0], pages.k_scales[0]), (pages.v[0], pages.v_scales[0])
    found = (quantised_pages.differs(view, scales, dtype) for view, scales in both if scales is not None)
    return next((problem for problem in found if problem is not None), None)


def _expansion(
    kernel: CudaKernel, fact: CallFacts, dtype: torch.dtype, generator: torch.Generator
) -> tuple[int, torch.Tensor | None, Expander | None, str | None]:
    """Elements of a query's head; of latents a random weight that expands them, and the expansion in float32; and what
    is wrong with the kernel's products by it."""
    if not fact.latent:
        return fact.k_dim, None, None, None
    from engine.gpu.attention import latent  # as above

    sizes = kernel.absorbed
    assert sizes is not None, "a kernel that serves latents knows what they are expanded to"
    weight = latent.random_weight(fact, sizes, dtype, generator)
    expand = expander_of(weight.float(), fact.heads, sizes.plain)
    return sizes.plain + fact.v_dim, weight, expand, latent.differs(fact, sizes, dtype, generator)


def random_pages(
    fact: CallFacts,
    blocks: int,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    block_size: int,
    generator: torch.Generator,
    batch: Batch,
) -> tuple[KvCache, KvCache]:
    """Pages of random K and V in the served type, and pages with the same values in float32, or the same pages if they
    are quantised. `dtypes`: the model's, and that of quantised elements."""
    dtype, kept = dtypes
    device = generator.device
    pages = KvCache(layout_of([fact], block_size, dtype, "", kept), blocks, device)
    exact = KvCache(layout_of([fact], block_size, torch.float32, ""), blocks, device)
    for theirs in (exact.k[0], exact.v[0]):
        theirs.normal_(generator=generator)
    if isinstance(fact.reach, SlidingWindowSpec):
        _plant(exact.v[0], batch, fact.reach.window)
    for ours, scales, theirs in (
        (pages.k[0], pages.k_scales[0], exact.k[0]),
        (pages.v[0], pages.v_scales[0], exact.v[0]),
    ):
        if scales is None:
            ours.copy_(theirs)
            theirs.copy_(ours)
        else:
            elements, own = quantise(theirs, ours.dtype)
            ours.view(torch.uint8).copy_(elements.view(torch.uint8))
            scales.copy_(own)
    return pages, exact if kept is None else pages


def _plant(values: torch.Tensor, batch: Batch, window: int) -> None:
    """Makes the values around the edge of each sequence's last window large, `[blocks, block_size, kv_heads, d]`."""
    size = values.shape[1]
    for context, table in zip(batch.context_lens, batch.block_tables, strict=True):
        for position in range(max(0, context - window - AROUND), min(context, context - window + AROUND)):
            values[table[position // size], position % size] *= NEEDLE


def _batches(fact: CallFacts, block_size: int, split_keys: int) -> list[tuple[Batch, int]]:
    """A mixed batch and one of single tokens, over scattered blocks, each with the number of blocks that it needs. The
    longest sequence has more than one part of `split_keys`, so that parts are merged, too."""
    several = fact.reach.window + 70 if isinstance(fact.reach, SlidingWindowSpec) else LONGEST
    longest = max(several, split_keys + 70)
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
