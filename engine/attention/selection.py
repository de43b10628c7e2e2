"""Sparse attention as a mask: each row attends to the positions that an indexer has chosen for it.

The mask covers the whole context, so sparse attention costs as much as dense attention. If there are fewer tokens than
the indexer chooses, the chosen positions include later ones, which the plan's own mask hides.
"""

from __future__ import annotations

import torch

NOTHING = -1  # padding of rows in place of a position


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
