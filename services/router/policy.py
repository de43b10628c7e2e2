"""Where a request goes. Pure functions over a snapshot: no clock, no sockets; the simulator runs this file.

Decode worker first: it must have room now, or nothing starts. Then the prefill worker that can hand over to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as a router knows it: its last record, and what this router has sent there since."""

    worker_id: str
    incarnation: str
    address: str
    layout_hash: str
    running: int  # requests in progress, this router's included
    max_running: int
    free_blocks: int  # blocks that can be had, this router's newest requests subtracted
    block_size: int
    max_model_len: int
    usable: bool = True  # ready, not suspected of being dead, did not just say "not now"


@dataclass(frozen=True, slots=True)
class Placement:
    decode: Candidate
    prefill: Candidate | None  # None: the decode worker prefills for itself
    why_local: str = ""


def place(
    decodes: Sequence[Candidate], prefills: Sequence[Candidate], tokens: int, ahead: int, near: str = ""
) -> Placement | None:
    """The best place for a request of `tokens` tokens with `ahead` more to reserve; None for "no room now".

    The least loaded decode worker with room, by share of its places, then by free blocks. The prefill worker with the
    fewest prompts before this one, among those whose blocks mean the same.

    `near` is the decode worker that has the KV of all tokens but those of the last block, or "". If it has room for
    what is new, nothing moves.
    """
    roomy = [
        one
        for one in decodes
        if one.usable
        and one.running < one.max_running
        and one.free_blocks * one.block_size >= (one.block_size if one.worker_id == near else tokens) + ahead
        and one.max_model_len > tokens
    ]
    for one in roomy:
        if one.worker_id == near:
            return Placement(one, None, "the KV of the prompt is there already")
    if not roomy:
        return None
    decode = min(roomy, key=lambda one: (one.running / one.max_running, -one.free_blocks, one.worker_id))
    able = [one for one in prefills if one.usable and one.layout_hash == decode.layout_hash]
    if able:
        prefill = min(able, key=lambda one: (one.running, -one.free_blocks, one.worker_id))
        return Placement(decode, prefill)
    if not prefills:
        why = "there is no prefill worker"
    elif not any(one.usable for one in prefills):
        why = "no prefill worker is ready"
    else:
        why = f"no prefill worker has the KV layout of {decode.worker_id}"
    return Placement(decode, None, why)
