"""A request that waits for its workers, and the resources that its placement takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from services.router.routing.fair_queue import Waiting
from services.router.routing.placement import Begun, Placement, WorkerSnapshot
from services.router.routing.worker_table import Cached

Holders = Callable[[str], Sequence[str]]  # role -> ids of workers that have cached the most of the prompt


@dataclass(slots=True, eq=False)
class WaitingRequest(Waiting):
    ahead: int = 0  # tokens of output for which room is reserved
    kv_holder: str = ""  # the decode worker of another completion of the same prompt
    begun_with: Begun | None = None
    unsuited: Collection[tuple[str, str]] = ()  # incarnations that cannot serve this request, but others
    # Leading tokens that a worker has.
    cached: Cached = lambda record: 0
    holders: Holders = lambda role: ()  # the workers to consider first
    placement: Placement | None = None
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    alone: bool = False  # suspected of ending workers: it begins on a decode worker, which computes its prompt
    is_job: bool = False  # it asks again where it is refused, so its prompt arrives when it is placed
    computed: int = 0  # prompt tokens that were expected to be computed
    admitted: bool = False  # by its decode worker
    refused: bool = False  # this was no attempt: it will be placed again, and counts only once
    leaving: bool = False  # its answer has begun, and its wait ends: it takes room that others wait for
    unplaceable: bool = False  # no decode worker would give its remaining tokens

    def runs_on(self, worker: WorkerSnapshot) -> bool:
        """Whether the request is short enough for this decode worker, which would give its other tokens."""
        return worker.max_model_len > self.tokens and worker.continues(self.begun_with)

    def suits(self, worker: WorkerSnapshot) -> bool:
        """Whether this decode worker could take the request if it had room."""
        return self.runs_on(worker) and worker.identity not in self.unsuited

    def blocks(self, placement: Placement) -> int:
        """Blocks that the request takes on the decode worker."""
        decode = placement.decode
        tokens = decode.block_size if self._shares(placement) else self.tokens
        return -(-(tokens + self.ahead) // decode.block_size) + (decode.state_blocks if placement.prefill else 0)

    def new_tokens(self, placement: Placement) -> int:
        """Tokens that must be computed; only those of the last block where the worker holds the prompt's KV."""
        if self._shares(placement):
            return placement.decode.block_size
        return (placement.prefill or placement.decode).uncached(self.tokens)

    def _shares(self, placement: Placement) -> bool:
        return placement.prefill is None and placement.decode.worker_id == self.kv_holder
