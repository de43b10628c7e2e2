"""The tokens that one step gives to its sequences: one to each that caught up, and one more for each draft that was
right."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from engine.core.progress import Progress
from engine.core.sequence import Sequence
from engine.decoding.sampler import choose, rows_of
from engine.decoding.speculative import Speculation, agrees
from engine.decoding.structured_output import Filling
from tandem.errors import TandemError


class Run(NamedTuple):
    """A sequence that gets tokens from this step."""

    sequence: Sequence
    draft: list[int]
    row: int  # of the logits after its last token; those after each draft follow
    error: TandemError | None = None  # of its prompt's scores: it gets no token


def append_chosen(
    runs: list[Run], logits: torch.Tensor, filling: Filling | None, speculation: Speculation | None, *, compiled: bool
) -> list[Progress]:
    """Chooses the target's own token at each place, in order, with all earlier tokens known. A run continues while its
    draft was that token: only then do the next logits belong to the sequence. The KV of wrong drafts stays in slots
    beyond `num_computed`, which are overwritten before they are read."""
    progress: list[Progress] = []
    place, going = 0, runs
    while going:
        rows = [run.row + place for run in going]
        some = rows_of(logits, rows)
        masks = filling if place == 0 else None
        chosen = choose(some, [run.sequence for run in going], masks, compiled=compiled)
        still: list[Run] = []
        for run, (token, logprob, error) in zip(going, chosen, strict=True):
            sequence = run.sequence
            if run.error is not None:
                token, logprob, error = None, None, run.error
            finish = sequence.append(token) if token is not None else None
            progress.append(Progress(sequence, sequence.num_computed, token, finish, logprob, error))
            if token is None or finish is not None:
                continue
            if place < len(run.draft) and agrees(run.draft[place], token):
                sequence.num_computed += 1
                still.append(run)
        place, going = place + 1, still
    if speculation:
        tokens = Counter(item.sequence.id for item in progress)
        for sequence, draft, *_ in runs:
            if draft:
                speculation.verified(sequence, len(draft), tokens[sequence.id] - 1)
    return progress
