"""What sparse attention adds to a plan: each row attends to the positions that an indexer has chosen for it.

It is a mask over the whole context, so it costs what dense attention does. Positions after the row's own are among the
chosen ones where there are fewer tokens than the indexer chooses; the plan's own mask hides them.
"""

from __future__ import annotations

import torch

NOTHING = -1  # in the place of a position, in rows that are filled up


def chosen(
    indices: torch.Tensor, rows: torch.Tensor, keys: int, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """The mask `[sequences, 1, queries, keys]`, True where seen, for `rows [sequences, queries]` of the packed tokens,
    over `keys` positions from 0. `indices [1, total, n]` are positions or NOTHING; `mask` and `causal` are a plan's."""
    own = indices[0][rows.to(indices.device)].long()  # [sequences, queries, n]
    seen = torch.zeros(*own.shape[:2], keys + 1, dtype=torch.bool, device=own.device)  # the last one is for NOTHING
    seen.scatter_(2, torch.where(own == NOTHING, keys, own), True)
    seen = seen[..., :keys].unsqueeze(1)
    if mask is not None:
        return seen & mask
    return seen.tril() if causal else seen
