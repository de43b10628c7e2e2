"""Tokens from logits on a GPU, by one kernel and without a sort. It chooses what plain PyTorch chooses
(tests/engine/test_gpu_sampling.py).

The rules are those of engine/decoding/sampler.py. A program has a row. It weighs the tokens in float64 once, and finds
the last token that top-k or top-p keeps by bisection over the 2^32 values of its logit: 32 times the row's tokens above
the middle are counted, or their weights added. Nothing is sorted.

Sums are added in another order than by plain PyTorch: their last bits decide a token in some 10^13, as on CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.attention.forward_context import on_device
from tandem.sampling import Sampling

TILE = 2048  # logits that a program reads at a time
WARPS = 8
TOGETHER = 16  # rows: parts of a multiple start at 16-byte alignment; for others Triton would compile a second kernel
WORKSPACE = 2**24  # weights in float64 that are kept at a time, however large batch and vocabulary are: 128 MiB

Sample = Callable[[torch.Tensor, Sequence[Sampling], Sequence[int]], torch.Tensor]


def sample(logits: torch.Tensor, sampling: Sequence[Sampling], uniform: Sequence[float]) -> torch.Tensor:
    """A token for each row of `logits [rows, vocab] float32`, int64 [rows] on their device; -1 where the largest logit
    is not finite. `uniform`: the random numbers in [0, 1) of the rows that draw. Waits for nothing."""
    from engine.gpu.sampling_kernel import choose_tokens  # torch for CUDA brings Triton, the one for CPU does not

    rows, vocab = logits.shape
    if not rows:  # a round of drafts in which no sequence is ready
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    table = [
        (how.temperature, float(how.top_k), how.top_p, how.min_p, number)
        for how, number in zip(sampling, uniform, strict=True)
    ]
    numbers = on_device(table, torch.float64, logits.device)  # [rows, 5]
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    draws = any(how.temperature > 0 for how in sampling)
    size = max(TOGETHER, WORKSPACE // vocab // TOGETHER * TOGETHER) if draws else rows
    weights = torch.empty(min(size, rows) * vocab if draws else 0, dtype=torch.float64, device=logits.device)
    for start in range(0, rows, size):  # one after another on the stream, so they can share the memory
        part = slice(start, start + size)
        choose_tokens[(len(chosen[part]),)](
            logits[part], numbers[part], weights, chosen[part], logits.stride(0), vocab, TILE=TILE, num_warps=WARPS
        )
    return chosen


def problem(device: torch.device, reference: Sample, uniform: Callable[[int, int], float]) -> str | None:
    """Compares the kernel with `reference` on this device, and compiles it before a request needs it: one kernel for
    vocabularies of a multiple of 16 tokens and another one for the rest. Returns what is wrong, or None."""
    generator = torch.Generator().manual_seed(0)
    positions = list(range(len(TRIED)))
    numbers = [uniform(how.seed, at) for how, at in zip(TRIED, positions, strict=True)]
    for more in (77, 80):
        logits = (4.0 * torch.randn(len(TRIED), 3 * TILE + more, generator=generator)).to(device)
        logits[0, 5] = torch.nan
        try:
            found = sample(logits, TRIED, numbers)
        except (RuntimeError, TypeError, ValueError) as error:
            return f"fails: {str(error).strip().partition(chr(10))[0]}"
        if not torch.equal(found, reference(logits, TRIED, positions)):
            return "chooses other tokens"
    return None


def forbid(logits: torch.Tensor, bits: torch.Tensor, rows: list[int]) -> None:
    """Makes tokens of these rows of `logits [sequences, vocab]` impossible whose bit in `bits [sequences, words] int32`
    is 0. By torch: xgrammar's kernel for CUDA would be compiled for a request, while all streams wait."""
    own = on_device(bits.numpy()[rows], torch.int32, logits.device).unsqueeze(-1)  # [rows, words, 1]
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((own >> bit) & 1 == 0).flatten(1)[:, : logits.shape[-1]]
    at = on_device(rows, torch.int64, logits.device)
    logits[at] = logits[at].masked_fill(forbidden, -torch.inf)


TRIED = [
    *(Sampling(temperature=temperature, seed=seed) for seed in range(3) for temperature in (0.0, 0.3, 1.0)),
    *(Sampling(temperature=1.0, top_k=count, seed=count) for count in (1, 5, 50, 4000)),
    *(Sampling(temperature=1.5, top_p=mass, seed=7) for mass in (0.01, 0.5, 0.95, 0.999)),
    *(Sampling(temperature=1.0, min_p=least, seed=9) for least in (0.001, 0.2)),
    *(Sampling(temperature=0.8, top_k=100, top_p=0.9, min_p=0.01, seed=seed) for seed in range(3)),
]
