"""The paged attention function: writes the new K and V into their slots, then attends over each context in pages.

Registered once under `paged_kv` in transformers' attention registry, with no mask function, so that models build no
mask and hand theirs over as None. The reference in plain PyTorch gathers each sequence's context through its block
table. Where the step has compiled operators, single tokens (decode) are attended by `torch.ops.tandem.attend` over the
pages as they lie; prompt chunks and latent pages stay with the reference. On CUDA a kernel that
`engine.gpu.attention.kernel_choice` chooses serves the calls that it can.

Sequences that add a single token (decode) are attended together with others of similar length; the rest one by one.
Whole blocks are gathered, and slots outside of a sequence's context are overwritten with zeros before they are masked,
so that neither another sequence's old KV nor a NaN in a recycled block can reach a result.

Where a sparse indexer has chosen the positions that each token sees (`indices`), the reference attends.

Quantised pages hold elements and scales. Writing quantises. The operators multiply a logit by the scale of its key and
a weight by that of its value; the reference multiplies the gathered elements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import AttentionInterface

from engine import kernels
from engine.attention.forward_context import Scales, Step, current_step
from engine.attention.mla import Expander, expander, expansion
from engine.attention.selection import chosen
from engine.kv.kv_cache_spec import (
    CallFacts,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    Reach,
    SlidingWindowSpec,
    first_visible,
)
from engine.kv.kv_quantization import dequantise, quantise

NAME = "paged_kv"


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    step: Step | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **known: Any,  # the probe has refused every keyword that means something which `facts` does not carry
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every attention forward.

    `query` is `[1, heads, T, k_dim]`, `key` and `value` are `[1, kv_heads, T, ...]` of the new tokens only;
    `indices [1, T, n]` the positions that a sparse indexer has chosen. Returns `[1, T, heads, v_dim]`.
    """
    step = step if step is not None else current_step()
    call = step.next_call()
    facts, k_pages, v_pages = step.facts[call], step.pages.k[call], step.pages.v[call]
    k_scales, v_scales = step.pages.k_scales[call], step.pages.v_scales[call]
    assert facts.indexed == (indices is not None), f"attention call {call} differs from what the probe saw"
    write(k_pages, k_scales, key[0].transpose(0, 1), step, facts)
    write(v_pages, v_scales, value[0].transpose(0, 1), step, facts)
    expand, weight = (expander(module), expansion(module)) if facts.latent else (None, None)
    scales = (k_scales, v_scales)
    q = query[0].transpose(0, 1)
    out = attend(q, k_pages, v_pages, scales, step, facts, sinks=s_aux, expand=expand, weight=weight, indices=indices)
    return out.unsqueeze(0), None


def write(
    pages: torch.Tensor, scales: torch.Tensor | None, new: torch.Tensor, step: Step, facts: CallFacts | None = None
) -> None:
    """Puts the new tokens' K or V, `[total, kv_heads, d]`, into their slots of `[blocks, block_size, kv_heads, d]`.

    Where there are `scales [blocks, block_size, kv_heads]`, they are quantised on the way: by the kernel of a call with
    these `facts`, if it serves it.
    """
    block, offset = step.slot_block, step.slot_offset
    if scales is None:
        if step.compiled:
            torch.ops.tandem.write.default(pages, new.to(pages.dtype), block, offset)
        else:
            pages[block, offset] = new.to(pages.dtype)
    elif step.compiled and new.dtype in kernels.DTYPES:
        torch.ops.tandem.write_quantised.default(pages, scales, new, block, offset)
    elif facts is not None and (kernel := step.cuda_kernel) is not None and kernel.refusal(facts, pages.dtype) is None:
        kernel.write_quantised(pages, scales, new, step)
    else:
        elements, own = quantise(new, pages.dtype)
        pages.view(torch.uint8)[block, offset] = elements.view(torch.uint8)  # fp8 itself cannot be indexed everywhere
        scales[block, offset] = own


def attend(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    scales: Scales,
    step: Step,
    facts: CallFacts,
    *,
    sinks: torch.Tensor | None = None,
    expand: Expander | None = None,
    weight: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends packed queries over their contexts in pages.

    `query [total, heads, d]`, `k_pages [blocks, block_size, kv_heads, k_dim]`, `v_pages` likewise; `scales` of
    quantised K and V; `sinks [heads]` are the logits of attention sinks; `weight` that of `expand`, if it is
    one product; `indices [1, total, n]` the positions that each query sees, None for all. Returns `[total, heads,
    v_dim]`.
    """
    fits = indices is None and (query.dtype == k_pages.dtype or scales[0] is not None)
    if step.compiled and fits and query.dtype in kernels.DTYPES:
        return attend_compiled(query, k_pages, v_pages, scales, step, facts, sinks, expand)
    kernel = step.cuda_kernel if fits else None
    if kernel is not None and kernel.refusal(facts, k_pages.dtype) is None:
        return kernel.attend(query, k_pages, v_pages, scales, step, facts, sinks, weight)
    outs = [
        attend_plan(query, k_pages, v_pages, scales, plan, facts, sinks, expand, indices)
        for plan in plans(step, facts.reach)
    ]
    order = packed_order(step)
    packed = torch.cat(outs) if len(outs) > 1 else outs[0]
    return packed if order is None else packed[order]


def attend_compiled(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    scales: Scales,
    step: Step,
    facts: CallFacts,
    sinks: torch.Tensor | None,
    expand: Expander | None,
) -> torch.Tensor:
    """The same in place over the pages; a token's result depends on nothing but its own sequence up to it."""
    reach = facts.reach
    window = reach.window if isinstance(reach, SlidingWindowSpec) else 0
    chunk = reach.size if isinstance(reach, ChunkedLocalAttentionSpec) else 0
    logits = sinks.float() if sinks is not None else None
    arguments = (window, chunk, facts.scaling, facts.softcap, logits)
    if expand is None:
        out = query.new_empty(query.shape[0], query.shape[1], v_pages.shape[3])
        torch.ops.tandem.attend.default(
            out, query, k_pages, v_pages, step.cu_seq_q, step.seqused_k, step.block_table, *arguments, *scales
        )
        return out
    outs = []
    for start, count, context, table in zip(
        step.cu_seq_q_host, step.batch.query_lens, step.batch.context_lens, step.batch.block_tables, strict=False
    ):
        latent = [
            latent_context(pages, own, table, context, query.dtype)
            for pages, own in zip((k_pages, v_pages), scales, strict=True)
        ]
        k, v = expand(*latent)
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [1, context, heads, d]: pages of one block
        out = query.new_empty(count, query.shape[1], v.shape[3])
        here = [torch.tensor(values, dtype=torch.int32) for values in ([0, count], [context], [[0]])]
        torch.ops.tandem.attend.default(out, query[start : start + count], unit(k), unit(v), *here, *arguments)
        outs.append(out)
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def latent_context(
    pages: torch.Tensor, scales: torch.Tensor | None, table: list[int], context: int, dtype: torch.dtype
) -> torch.Tensor:
    """A sequence's whole context out of latent pages, `[1, 1, context, d]`."""
    blocks = torch.tensor(table[: -(-context // pages.shape[1])])
    if scales is not None:
        rows = dequantise(pages.view(torch.uint8)[blocks].view(pages.dtype), scales[blocks], dtype)
    else:
        rows = pages[blocks]
    return rows.flatten(0, 1)[:context].transpose(0, 1).unsqueeze(0)


def unit(t: torch.Tensor) -> torch.Tensor:
    """With the elements of a head side by side."""
    return t if t.stride(-1) == 1 else t.contiguous()


def attend_plan(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    scales: Scales,
    plan: Plan,
    facts: CallFacts,
    sinks: torch.Tensor | None,
    expand: Expander | None,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gathers the plan's context and attends its rows over it: `[sequences * queries, heads, v_dim]`."""
    q = query[plan.rows].transpose(1, 2)  # [sequences, heads, queries, d]
    k = gather(k_pages, scales[0], plan, "k", query.dtype).transpose(1, 2)  # [sequences, kv_heads, keys, k_dim]
    v = gather(v_pages, scales[1], plan, "v", query.dtype).transpose(1, 2)  # [sequences, kv_heads, keys, v_dim]
    if indices is not None:
        mask = chosen(indices, plan.rows, k.shape[2], plan.mask, plan.causal)
        plan = replace(plan, mask=mask, causal=False)
    if expand is None:
        out = attend_dense(q, k, v, plan, facts, sinks)  # [sequences, heads, queries, v_dim]
    else:
        out = _attend_latents(q, k, v, plan, facts, sinks, expand)
    return out.transpose(1, 2).flatten(0, 1)


def _attend_latents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    facts: CallFacts,
    sinks: torch.Tensor | None,
    expand: Expander,
) -> torch.Tensor:
    """`attend_dense` over latents `k [n, 1, keys, rank]` and `v [n, 1, keys, rope_dim]`. On CPU of one sequence at a
    time: they are expanded to a hundred times as much, and nothing has measured a step of many long sequences."""
    together, outs = 1 if q.device.type == "cpu" else len(q), []
    for first in range(0, len(q), together):
        few = slice(first, first + together)
        own = plan if plan.mask is None else replace(plan, mask=plan.mask[few])
        outs.append(attend_dense(q[few], *expand(k[few], v[few]), own, facts, sinks))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


@dataclass(frozen=True)
class Plan:
    """Which packed rows attend over which blocks: one for each group of sequences, see `grouped`."""

    rows: torch.Tensor  # [sequences, queries] indices into the packed tokens
    blocks: torch.Tensor  # [sequences, blocks] ids; a shorter sequence repeats its last block
    keys: slice  # the part of the gathered tokens to keep; everything where there are several sequences
    outside: torch.Tensor | None  # [n] indices into [sequences * blocks * block_size] of what is not context
    mask: torch.Tensor | None  # [sequences, 1, queries, keys] True where seen; None where nothing needs hiding
    causal: bool  # the plain lower triangle; then `mask` is None
    scratch: dict[Any, torch.Tensor]  # gathered K and V, overwritten by each attention call: saves page faults


def plans(step: Step, reach: Reach) -> list[Plan]:
    """The step's plans for one reach, worked out at the first call."""
    if reach not in step.plans:
        step.plans[reach] = [plan(step, reach, group) for group in grouped(step)]
    step_plans: list[Plan] = step.plans[reach]
    return step_plans


def grouped(step: Step) -> list[list[int]]:
    """Sequence indices by plan: those that add one token by the power of two of their length, the others alone."""
    singles: dict[int, list[int]] = {}
    chunks: list[list[int]] = []
    for index, (queries, context) in enumerate(zip(step.batch.query_lens, step.batch.context_lens, strict=True)):
        if queries == 1:
            singles.setdefault(context.bit_length(), []).append(index)
        else:
            chunks.append([index])
    return [*singles.values(), *chunks]


def plan(step: Step, reach: Reach, group: list[int]) -> Plan:
    """The plan of one group, whose sequences all add the same number of tokens."""
    size, device = step.pages.block_size, step.device
    queries = step.batch.query_lens[group[0]]
    contexts = [step.batch.context_lens[index] for index in group]
    firsts = [first_visible(reach, context - queries) for context in contexts]  # the first key that any query sees
    count = max(-(-context // size) - first // size for context, first in zip(contexts, firsts, strict=True))
    blocks = context_blocks([step.batch.block_tables[index] for index in group], firsts, contexts, count, size)

    first, end = step.tensor(firsts).unsqueeze(1), step.tensor(contexts).unsqueeze(1)  # [sequences, 1]
    q = end - queries + torch.arange(queries, device=device)  # [sequences, queries] positions
    k = first // size * size + torch.arange(count * size, device=device)  # [sequences, count * size] positions
    keys, outside = slice(None), None
    if len(group) == 1:
        skip = firsts[0] % size
        keys = slice(skip, skip + contexts[0] - firsts[0])
        k = k[:, keys]
    else:
        outside = step.tensor(not_context(firsts, contexts, count, size))
    causal = len(group) == 1 and queries > 1 and queries == contexts[0] and isinstance(reach, FullAttentionSpec)
    mask = None
    if not causal and (queries > 1 or len(group) > 1):
        q, k = q.unsqueeze(2), k.unsqueeze(1)
        mask = ((k <= q) & (k >= first_visible(reach, q))).unsqueeze(1)
    rows = step.tensor([[step.cu_seq_q_host[index] + row for row in range(queries)] for index in group])
    return Plan(rows, step.tensor(blocks), keys, outside, mask, causal, {})


def not_context(firsts: list[int], ends: list[int], count: int, block_size: int) -> np.ndarray:
    """Where, in the tokens of `count` blocks of each sequence, those are that lie before `first` or from `end` on."""
    room = count * block_size
    places = []
    for sequence, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        skip = first % block_size
        places += [np.arange(skip) + sequence * room, np.arange(skip + end - first, room) + sequence * room]
    return np.concatenate(places)


def context_blocks(
    tables: list[list[int]], firsts: list[int], ends: list[int], count: int, block_size: int
) -> list[list[int]]:
    """For each sequence the `count` blocks that hold its positions `first` to `end - 1`, the last one repeated."""
    rows = [
        table[first // block_size : -(-end // block_size)]
        for table, first, end in zip(tables, firsts, ends, strict=True)
    ]
    return [row + [row[-1]] * (count - len(row)) for row in rows]


def gather(
    pages: torch.Tensor, scales: torch.Tensor | None, plan: Plan, which: str, dtype: torch.dtype
) -> torch.Tensor:
    """The tokens of the plan's blocks, `[sequences, keys, kv_heads, d]`, out of `[blocks, block_size, kv_heads, d]`;
    what was quantised comes in `dtype`."""
    sequences, count = plan.blocks.shape
    _, size, heads, dim = pages.shape
    blocks = plan.blocks.flatten()
    if scales is not None:
        elements = torch.index_select(pages.view(torch.uint8), 0, blocks).view(pages.dtype)  # [-1, size, heads, dim]
        tokens = dequantise(elements, scales[blocks], dtype).view(-1, heads * dim)
    else:
        key = (which, heads, dim)
        if key not in plan.scratch:
            plan.scratch[key] = pages.new_empty(sequences * count, size, heads, dim)
        into = plan.scratch[key]
        torch.index_select(pages, 0, blocks, out=into)
        tokens = into.view(-1, heads * dim)  # [sequences * count * size, heads * dim]
    if plan.outside is not None:
        tokens.index_fill_(0, plan.outside, 0)
    return tokens.view(sequences, count * size, heads, dim)[:, plan.keys]


def packed_order(step: Step) -> torch.Tensor | None:
    """Where each packed token's row lies in the concatenated plans; None when they are in order already."""
    if "order" not in step.plans:
        ends = step.cu_seq_q_host
        rows = [row for group in grouped(step) for index in group for row in range(ends[index], ends[index + 1])]
        in_order = rows == list(range(len(rows)))
        step.plans["order"] = None if in_order else step.tensor(sorted(range(len(rows)), key=rows.__getitem__))
    order: torch.Tensor | None = step.plans["order"]
    return order


def attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, facts: CallFacts, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attends `q [n, heads, queries, d]` over `k`, `v [n, kv_heads, keys, d]`; returns `[n, heads, queries, v_dim]`.

    Grouped heads: the query heads of one KV head are consecutive, so for a single query they are laid out as that many
    queries of the KV head, and nothing is repeated in memory.
    """
    n, heads, queries, _ = q.shape
    kv_heads, groups = k.shape[1], heads // k.shape[1]
    if facts.softcap is None and sinks is None:
        if queries == 1:
            q = q.reshape(n, kv_heads, groups, -1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, scale=facts.scaling)
            return out.reshape(n, heads, 1, -1)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=plan.mask, is_causal=plan.causal, scale=facts.scaling, enable_gqa=groups > 1
        )
    q = q.reshape(n, kv_heads, groups * queries, -1)
    scores = (q @ k.transpose(-1, -2)).float() * facts.scaling  # [n, kv_heads, groups * queries, keys]
    scores = scores.view(n, heads, queries, -1)
    if facts.softcap is not None:
        scores = torch.tanh(scores / facts.softcap) * facts.softcap
    if plan.mask is not None:
        scores = scores.masked_fill(~plan.mask, float("-inf"))
    elif plan.causal:
        scores = scores.masked_fill(
            ~torch.ones(queries, queries, dtype=torch.bool, device=q.device).tril(), float("-inf")
        )
    if sinks is not None:
        column = sinks.float().view(1, heads, 1, 1).expand(n, heads, queries, 1)
        scores = torch.cat([scores, column], dim=-1)  # a sink takes part in the sum and adds no value
    weights = scores.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype)
    out = weights.reshape(n, kv_heads, groups * queries, -1) @ v
    return out.view(n, heads, queries, -1)


AttentionInterface.register(NAME, paged_attention)
