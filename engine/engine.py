"""One model on one device: tokens in, tokens out. Knows no network.

    add(sequence) ──▶ step() ──▶ [Progress, ...] ──▶ step() ──▶ ... until Progress.finish
                        │
                        ├── scheduler.plan()      which sequences, how many tokens each, blocks for all of them
                        ├── model.forward()       one packed forward
                        └── choose()              a token for every sequence that caught up; masks were filled meanwhile

A prefill worker adds sequences with `handoff` and a limit of one new token: they keep their blocks until `drop`. A
decode worker reserves blocks (`reserve`), lets the KV arrive in them, and then `join`s the sequence with `done`
already at the prompt's length. There is no other difference between the two.

Not thread-safe: everything here runs on the engine's own thread (engine/loop.py).
"""

from __future__ import annotations

from typing import NamedTuple

from engine.blocks import BlockPool
from engine.grammar import Grammars, Masks
from engine.model import Model
from engine.pages import Pages
from engine.sampling import Logprob, choose
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Finish, Sequence
from engine.step import Batch
from tandem.errors import Busy, TandemError, TooLarge


class Progress(NamedTuple):
    """What one step did to one sequence."""

    sequence: Sequence
    done: int  # tokens whose KV is in blocks now
    token: int | None  # the new token, if the sequence caught up
    finish: Finish | None
    logprob: Logprob | None = None  # of the new token, if the sequence asks for it
    error: TandemError | None = None  # it caught up and no token was possible: it is over


class Engine:
    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        token_budget: int,
        max_running: int,
        grammars: Grammars | None = None,
    ) -> None:
        self.model = model
        self.pool = BlockPool(num_blocks, block_size)
        self.pages: Pages = model.allocate(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, token_budget=token_budget, max_running=max_running)
        self.sequences: dict[str, Sequence] = {}  # everything that may own blocks: running, waiting, reserved, held
        self.steps = 0
        self.grammars = grammars
        self.masks = Masks(grammars.left_behind if grammars else None)

    # ---- life of a sequence

    def add(self, sequence: Sequence) -> None:
        """Compute this sequence from its first missing token. Raises TooLarge if it can never fit."""
        self._enter(sequence)
        self.scheduler.add(sequence)

    def reserve(self, sequence: Sequence, ahead: int) -> None:
        """Blocks for all its tokens and `ahead` more, now, for KV that will arrive from elsewhere.

        `sequence.cached` tokens need not arrive: they are in this worker's prefix cache.
        Raises Busy when there is no room now, TooLarge when there never will be.
        """
        if len(self.sequences) >= self.scheduler.max_running:
            raise Busy(f"all {self.scheduler.max_running} places are taken", reason="NO_ROOM")
        self._enter(sequence)
        wanted = min(len(sequence.tokens) + ahead, sequence.limit)
        reusable = sequence.hashes(self.pool.block_size)[: (len(sequence.tokens) - 1) // self.pool.block_size]
        reused = self.pool.take(sequence.id, reusable, self.pool.blocks_for(wanted))
        if reused is None:
            del self.sequences[sequence.id]
            raise Busy(
                f"needs {self.pool.blocks_for(wanted)} blocks, {self.pool.available} can be had", reason="NO_ROOM"
            )
        sequence.cached = sequence.done = reused * self.pool.block_size

    def join(self, sequence: Sequence, first_token: int | None) -> Finish | None:
        """Let a reserved sequence run. With `first_token`, the KV of all its tokens is in its blocks by now."""
        finish = None
        if first_token is not None:
            sequence.done = len(sequence.tokens)
            self._publish(sequence, 0)
            finish = sequence.append(first_token)
        if finish is None:
            self.scheduler.add(sequence)
        else:
            self.drop(sequence.id)
        return finish

    def drop(self, sequence_id: str) -> None:
        """End a sequence wherever it stands and free what it holds. Unknown ids are fine: it has ended already."""
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return
        self.scheduler.remove(sequence)
        if self.pool.owns(sequence_id):
            self.pool.drop(sequence_id)

    # ---- the step

    def step(self) -> list[Progress]:
        """One packed forward over whatever is most useful now. Empty when nothing could run."""
        plan = self.scheduler.plan()
        if not plan:
            return []
        ready = [chunk.sequence for chunk in plan if chunk.tokens == chunk.sequence.todo]
        filling = self.masks.begin(ready, self.model.vocab_size)
        logits = self.model.forward(self.pages, self._pack(plan))  # [sequences that caught up, vocab]
        choices = iter(choose(logits, ready, filling))
        self.steps += 1
        progress: list[Progress] = []
        for sequence, count in plan:
            before, sequence.done = sequence.done, sequence.done + count
            self._publish(sequence, before)
            token, logprob, error = next(choices) if sequence.todo == 0 else (None, None, None)
            finish = sequence.append(token) if token is not None else None
            progress.append(Progress(sequence, sequence.done, token, finish, logprob, error))
            over = finish is not None or error is not None
            if over and sequence.handoff:
                self.scheduler.remove(sequence)  # out of the batch, but its blocks stay until drop()
            elif over:
                self.drop(sequence.id)
        return progress

    # ---- inside

    def _enter(self, sequence: Sequence) -> None:
        if sequence.id in self.sequences:
            raise ValueError(f"{sequence.id} is already here")
        if self.pool.blocks_for(sequence.limit) > self.pool.total:
            raise TooLarge(
                f"{sequence.limit} tokens need {self.pool.blocks_for(sequence.limit)} blocks,"
                f" this worker has {self.pool.total}; ask for fewer tokens",
                field="max_tokens",
                bound=f"prompt + max_tokens <= {self.pool.total * self.pool.block_size}",
            )
        self.sequences[sequence.id] = sequence

    def _pack(self, plan: list[Chunk]) -> Batch:
        """The chunks behind one another; logits are wanted where a chunk catches up with its sequence."""
        batch = Batch(token_ids=[], positions=[], query_lens=[], context_lens=[], block_tables=[], logits_at=[])
        for sequence, count in plan:
            end = sequence.done + count
            batch.token_ids += sequence.tokens[sequence.done : end]
            batch.positions += range(sequence.done, end)
            batch.query_lens.append(count)
            batch.context_lens.append(end)
            batch.block_tables.append(self.pool.table(sequence.id))
            if end == len(sequence.tokens):
                batch.logits_at.append(len(batch.token_ids) - 1)
        return batch

    def _publish(self, sequence: Sequence, before: int) -> None:
        """Blocks that became full between `before` and `sequence.done` are good for others now."""
        size = self.pool.block_size
        hashes = sequence.hashes(size)
        for index in range(before // size, sequence.done // size):
            self.pool.publish(sequence.id, index, hashes[index])
