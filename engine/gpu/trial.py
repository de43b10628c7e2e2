"""What the trials of kernels at load have in common: whether the kernels can run, how far from torch's a result may be,
and whether a row's bits follow from its company."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence

import torch

GAP = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # relative to the root mean square
ERRORS = (RuntimeError, TypeError, ValueError)  # of a kernel that cannot be compiled, launched or called so
TURN = 7  # shift of a trial's rows, so that each is computed at another position in its tile


def absent(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on this device; None if they can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


def differs(found: torch.Tensor, expected: torch.Tensor, *, several: bool = False) -> str | None:
    """Whether a result is too far from torch's, in the type of `found`. That of `several` products one after another,
    whose rows are of very different sizes, is compared row by row, and may have twice the gap: with correct ones it was
    up to 0.045 in bfloat16."""
    wide = expected.float()
    size = wide.square().mean(-1, keepdim=True) if several else wide.square().mean()
    gap = ((found.float() - wide).abs() / size.sqrt()).max().item()
    allowed = GAP[found.dtype] * (2 if several else 1)
    return None if gap <= allowed else f"differs from torch's by {gap:.2g}"  # also for NaN


def failing(check: Callable[[], str | None], errors: tuple[type[Exception], ...] = ERRORS) -> str | None:
    """What a check finds, or how it fails."""
    try:
        return check()
    except errors as error:
        return f"fails: {str(error).strip().partition(chr(10))[0]}"


def other_bits(
    compute: Callable[..., Sequence[torch.Tensor]],
    given: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    counts: Iterable[int],
) -> str | None:
    """Whether `compute` gives a row of the tensors `given` other results than `found`, among so many rows, or at
    another position."""
    for rows in counts:
        for turn in (0, TURN):
            again = compute(*(each[:rows].roll(turn, 0) for each in given))
            if not all(torch.equal(one.roll(-turn, 0), all_[:rows]) for one, all_ in zip(again, found, strict=True)):
                return f"gives a row other bits among {rows}"
    return None
