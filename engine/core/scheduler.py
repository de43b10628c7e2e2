"""Chooses the sequences of the next step, and their numbers of tokens. Pure Python: no clock, no tensors.

    add ──▶ waiting ──(room for all its tokens)──▶ running ──▶ finished, or held for hand-off
               ▲                                      │
               └────────── preempted (blocks dropped, tokens kept) ◀──┘

One budget of tokens for each step. Sequences that need one token (decode) come first; the rest of the budget goes to
prompts, in chunks. While streams run, a smaller budget for prompts bounds how long a prompt stalls them. The rest may
be lent to drafted tokens, which must never take a place, a block or a turn from another sequence.

The prompt with the fewest tokens left comes first, and every token that a later prompt computes before a waiting prompt
reduces the latter's count by one. So a short prompt does not wait for the end of a long one, equal prompts keep their
order, and later prompts delay a prompt by at most its own number of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from typing import NamedTuple, Protocol

from engine.core.block_pool import BlockPool
from engine.core.sequence import Sequence
from engine.core.state_slots import StateSlots

# Rows of logits in one step in addition to one per sequence, for prompt_logprobs and drafts. A row is as long as the
# vocabulary, so they are the largest tensor of a step.
EXTRA_LOGITS = 128


class States(Protocol):
    """The states of recurrent layers (engine.runner.sequence_states): each running sequence has a slot."""

    slots: StateSlots
    blocks: int  # blocks of a copy of one state

    def resume(self, sequence: Sequence, blocks: int) -> list[bytes] | None:
        """Gives the sequence a slot with the deepest stored state of its prefix, and returns the hashes of the blocks
        up to that state. Returns None if no slot is free or the pool cannot allocate `blocks` blocks."""

    def cut(self, sequence: Sequence, count: int) -> int:
        """How many of the next `count` tokens to compute, so that a snapshot can be stored after them."""


class Chunk(NamedTuple):
    sequence: Sequence
    tokens: int  # [num_computed, num_computed + tokens) are computed in this step


class Scheduler:
    def __init__(self, pool: BlockPool, states: States | None = None, *, token_budget: int, max_running: int) -> None:
        if token_budget < max_running:
            raise ValueError(f"token_budget {token_budget} must be at least max_running {max_running}")
        self.pool = pool
        self.states = states
        self.token_budget = token_budget
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival; the last one is preempted first
        self.preemptions = 0
        self.arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def backlog(self) -> int:
        """Prompt tokens still to be computed; of waiting prompts all, cached ones included. Safe on any thread, hence
        the copies."""
        return sum(
            sequence.num_uncomputed for sequence in (*self.waiting, *self.running) if sequence.num_uncomputed > 1
        )

    @property
    def owed(self) -> int:
        """Blocks that preempted streams wait for. Safe on any thread, likewise."""
        preempted = [sequence for sequence in tuple(self.waiting) if sequence.preemptions]
        return sum(self.pool.blocks_for(len(sequence.tokens)) for sequence in preempted)

    @property
    def reservable(self) -> int:
        """Blocks that are free or cached, less those that preempted streams wait for."""
        return max(0, self.pool.available - self.owed)

    def may_reserve(self, blocks: int) -> bool:
        """Whether a new sequence may have this many blocks. Blocks that preempted streams wait for are excluded;
        otherwise new sequences would take each block that becomes free, and a long stream would never run again."""
        return not self.owed or blocks <= self.reservable

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence. One that already owns blocks (its KV was transferred) runs at once."""
        self.arrivals += 1
        sequence.arrival = self.arrivals
        if self.pool.owns(sequence.id):
            if self.states and not self.states.slots.owns(sequence.id) and not self.states.slots.take(sequence.id):
                raise AssertionError(f"no state slot for {sequence.id}, though at most {self.max_running} may run")
            self.running.append(sequence)
        else:
            self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence; the caller handles its blocks."""
        if sequence in self.running:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def plan(
        self,
        beside: Callable[[int], int | None] = lambda _: None,
        alone: int | None = None,
        most: int | None = None,
        only: Container[str] | None = None,
    ) -> list[Chunk]:
        """The next step. Admits and preempts as room allows; every chunk returned has its blocks.

        `beside`: maximum prompt tokens of a step in which this many streams advance, too; `alone`: of any other step;
        `most`: maximum tokens in total; `only`: ids of the sequences that may take part.
        """

        def may(sequence: Sequence) -> bool:
            return only is None or sequence.id in only

        plan: list[Chunk] = []
        streams = [sequence for sequence in self.running if sequence.num_uncomputed == 1 and may(sequence)]
        budget = self.token_budget if most is None else min(most, self.token_budget)
        budget, rows = self._advance(streams, budget, EXTRA_LOGITS, plan)
        if (of_prompts := beside(len(plan)) if plan else alone) is not None:
            budget = min(budget, of_prompts)
        prompts = [sequence for sequence in self.running if sequence.num_uncomputed > 1 and may(sequence)]
        self._advance(sorted([*prompts, *filter(may, self.waiting)], key=_order), budget, rows, plan)
        self._count_overtaken([chunk for chunk in plan if chunk.sequence.num_uncomputed > 1])
        return plan

    def _advance(self, sequences: list[Sequence], budget: int, rows: int, plan: list[Chunk]) -> tuple[int, int]:
        """Adds a chunk of each to the plan, in order, within the budget of tokens and of extra rows of logits; returns
        the rest of both. The first waiting sequence that cannot be admitted stops all later ones."""
        closed = False
        waiting = set(map(id, self.waiting))  # excludes those that are preempted below
        for sequence in sequences:
            if budget == 0:
                break
            if id(sequence) in waiting:
                closed = closed or len(self.running) >= self.max_running or not self._admit(sequence)
                if closed:
                    continue
            elif sequence not in self.running:  # preempted by one before it
                continue
            count = self._stretch(sequence, budget, rows)
            if count and self._make_room(sequence, count):  # an admitted one has room
                plan.append(Chunk(sequence, count))
                budget -= count
                rows -= len(sequence.to_score(count))
        return budget, rows

    def _count_overtaken(self, plan: list[Chunk]) -> None:
        for sequence in (*self.running, *self.waiting):
            if sequence.num_uncomputed > 1:
                sequence.overtaken += sum(tokens for other, tokens in plan if other.arrival > sequence.arrival)

    def lend(self, plan: list[Chunk], wanted: list[int], tokens: int | None = None) -> list[int]:
        """The number of drafted tokens that each chunk may append, at most as wanted; extends the tables for them.
        Drafts use only the step's remaining budget, blocks without an owner, and positions below `max_len`. `tokens`:
        maximum tokens of the step in total."""
        budget = self.token_budget if tokens is None else min(tokens, self.token_budget)
        left = min(EXTRA_LOGITS, budget - sum(chunk.tokens for chunk in plan))
        lent: list[int] = []
        for (sequence, count), most in zip(plan, wanted, strict=True):
            # The step gives one token even if all drafts are wrong, so the last one before `max_len` needs no draft.
            most = max(0, min(most, left, sequence.max_len - len(sequence.tokens) - 1))
            end = sequence.num_computed + count
            if most and not self.pool.grow(sequence.id, self.pool.blocks_for(end + most)):
                most = min(most, len(self.pool.table(sequence.id)) * self.pool.block_size - end)
            lent.append(most)
            left -= most
        return lent

    def _admit(self, sequence: Sequence) -> bool:
        """Takes blocks for all tokens of the sequence, reusing the cached prefix; at least one token remains to be
        computed."""
        reusable, blocks = sequence.reusable(self.pool.block_size), self.pool.blocks_for(len(sequence.tokens))
        if self.states:
            blocks += self.states.blocks if sequence.handoff else 0
            if (resumable := self.states.resume(sequence, blocks)) is None:
                return False
            reusable = resumable
        reused = self.pool.take(sequence.id, reusable, blocks)
        if reused is None:
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.num_computed = reused * self.pool.block_size
        if sequence.preemptions == 0:
            sequence.cached = sequence.num_computed
        return True

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Takes blocks for `count` more tokens, if necessary from the youngest running sequences.

        Never from one that is already in the step's plan. Only streams can lack blocks, because a prompt gets all of
        its blocks at admission. Streams are planned in the order of `running`, so planned ones precede this one, and a
        search from the end finds this one first.
        """
        needed = self.pool.blocks_for(sequence.num_computed + count)
        while not self.pool.grow(sequence.id, needed):
            # Never one whose blocks may have been announced to another worker, because these must stay until they are
            # read.
            victim = next(s for s in reversed(self.running) if s is sequence or not s.handoff)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Drops its blocks, keeps its tokens, and lets it wait before the others. Full blocks stay cached."""
        assert not sequence.handoff, "a hand-off has all its blocks from the start and never needs more"
        self._stop(sequence)
        self.pool.drop(sequence.id)
        sequence.num_computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _stretch(self, sequence: Sequence, budget: int, rows: int) -> int:
        """How many tokens of the sequence a step computes: at most `budget`, and at most `rows` scored ones."""
        count = min(sequence.num_uncomputed, budget)
        scored = sequence.to_score(count)
        count = count if len(scored) <= rows else scored.start + rows - sequence.num_computed
        return self.states.cut(sequence, count) if self.states else count

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if self.states:
            self.states.slots.drop(sequence.id)


def _order(sequence: Sequence) -> tuple[bool, int, int]:
    """Sort key: preempted ones first, then by tokens left, less those that overtook it."""
    return not sequence.preemptions, sequence.num_uncomputed - sequence.overtaken, sequence.arrival
