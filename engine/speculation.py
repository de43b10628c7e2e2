"""Speculative decoding: who guesses the next tokens, and whether guessing pays.

    wanted() ─▶ scheduler.lend() ─▶ propose() ─▶ one packed step over [last token, draft 1, draft 2, ...]
        ▲                                                 │ the target's own token at each place, with the place's own
        │                                                 ▼ random number; a draft counts while it equals that token
        └──────────── verified(), took() ◀──── accepted drafts and one more token

A draft is a guess about a token that is a function of (request, position), so the stream is the same one whether a
guess was right, wrong or never made: nothing here can change a token, only how many come out of one step.

Two kinds of guess. `Ngram` continues as the text did where it last said the same. `ModelDrafter` asks a smaller model,
with the same random numbers, so that its draws tend to fall where the target's do.

A draft pays when the chance that it is right is larger than its price:

    price = (seconds that one draft adds to a step) / (seconds that a token takes without drafts)

Both are measured as the engine runs, by the number of streams: with one stream a step is bound by the weights and a
draft is nearly free; with many it is bound by arithmetic and a draft costs what a token costs, so drafting ends by
itself. The chance is a moving average of each request. The second draft counts only if the first one was right, so the
chance of the j-th is chance ** j, and a request drafts as long as that is above the price.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from engine.model import Model
from engine.sampling import sample
from engine.scheduler import Chunk
from engine.sequence import Sequence
from engine.step import Batch

FIRST_CHANCE = 0.5  # of a request that has shown nothing yet
WEIGHT = 0.2  # of one verified draft in its request's moving average
LOWEST, HIGHEST = 0.01, 0.98  # bounds of the average: it is never sure
REMEMBERED = 9  # step times whose median counts: one stall of the machine changes nothing
KNOWN = 3  # plain steps before the first drafts
EVERY = 32  # one step in so many is plain, and one drafts against the odds: both prices and every chance stay known


class Ask(NamedTuple):
    sequence: Sequence
    most: int  # drafts wanted, at most; 0 is fine
    table: list[int]  # blocks with places for all its tokens and these drafts


class Drafter(Protocol):
    def propose(self, asked: Seq[Ask]) -> list[list[int]]:
        """Drafts for each, at most as many as asked for."""
        ...

    def verified(self, sequence: Sequence) -> None:
        """Its drafts have been accepted or not; `tokens` is what is true now."""
        ...

    def forget(self, sequence_id: str) -> None: ...

    @property
    def busy(self) -> bool:
        """Whether the last proposal did work that will not come again soon; then its time says nothing."""
        ...


# ---- whether it pays


@dataclass
class _Steps:
    """Measured steps with about the same number of streams."""

    turn: int = 0
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # seconds of a step
    extra: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # seconds for each draft in it

    def price(self, streams: int) -> float:
        """0 while it is not known: to learn it, somebody must draft."""
        seconds = median(self.plain)
        return median(self.extra) * streams / seconds if self.extra and seconds > 0 else 0.0


class Speculation:
    """`tokens` is the most that one request drafts for one step; `clock` gives seconds."""

    def __init__(self, drafter: Drafter, tokens: int, clock: Callable[[], float] = perf_counter) -> None:
        self.drafter = drafter
        self.tokens = tokens
        self.clock = clock
        self._chance: dict[str, float] = {}
        self._steps: defaultdict[int, _Steps] = defaultdict(_Steps)

    def wanted(self, plan: list[Chunk]) -> list[int]:
        """How many drafts of each chunk would pay. None in a step that also computes prompts: it is bound by
        arithmetic already."""
        if any(chunk.sequence.todo != 1 for chunk in plan):
            return [0] * len(plan)
        steps = self._steps[len(plan).bit_length()]
        turn, steps.turn = steps.turn, steps.turn + 1
        if len(steps.plain) < KNOWN or turn % EVERY == 0:
            return [0] * len(plan)
        price, least = steps.price(len(plan)), int(turn % EVERY == EVERY // 2)
        chances = (self._chance.get(chunk.sequence.id, FIRST_CHANCE) for chunk in plan)
        return [max(least, worth(chance, price, self.tokens)) for chance in chances]

    def propose(self, asked: list[Ask]) -> list[list[int]]:
        return self.drafter.propose(asked) if any(ask.most for ask in asked) else [[] for _ in asked]

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """The first `accepted` drafts were right; the next one, if there was one, is known to be wrong."""
        sequence.drafted += drafted
        sequence.accepted += accepted
        chance = self._chance.get(sequence.id, FIRST_CHANCE)
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            chance += WEIGHT * (right - chance)
        self._chance[sequence.id] = min(max(chance, LOWEST), HIGHEST)
        self.drafter.verified(sequence)

    def took(self, plan: list[Chunk], drafts: int, seconds: float) -> None:
        """How long a step over this plan lasted, drafting included."""
        if any(chunk.tokens != 1 for chunk in plan) or (drafts and self.drafter.busy):
            return
        steps = self._steps[len(plan).bit_length()]
        if drafts == 0:
            steps.plain.append(seconds)
        else:
            steps.extra.append(max(0.0, seconds - median(steps.plain)) / drafts)

    def forget(self, sequence_id: str) -> None:
        self._chance.pop(sequence_id, None)
        self.drafter.forget(sequence_id)


def worth(chance: float, price: float, most: int) -> int:
    """The largest j with chance ** j >= price, at most `most`."""
    if price <= 0.0:
        return most
    return max(0, min(most, int(math.log(price) / math.log(chance))))


# ---- who guesses


SHORTEST, LONGEST = 2, 8  # tokens at the end that must have stood somewhere before, and beyond which nobody looks


class Ngram:
    """Prompt lookup: finds the end of the text earlier in it (the longest match, then the latest) and goes on as it
    went on there. A match that reaches into itself repeats with its period."""

    def __init__(self) -> None:
        self._ids: dict[str, array[int]] = {}  # a copy of each sequence's tokens that numpy can look at

    def propose(self, asked: Seq[Ask]) -> list[list[int]]:
        return [self._continue(ask.sequence, ask.most) if ask.most else [] for ask in asked]

    def verified(self, sequence: Sequence) -> None: ...

    def forget(self, sequence_id: str) -> None:
        self._ids.pop(sequence_id, None)

    @property
    def busy(self) -> bool:
        return False

    def _continue(self, sequence: Sequence, most: int) -> list[int]:
        ids = self._ids.setdefault(sequence.id, array("q"))
        ids.extend(sequence.tokens[len(ids) :])
        seen = np.frombuffer(ids, dtype=np.int64)
        last = len(seen) - 1
        ends, length = np.flatnonzero(seen[:-1] == seen[-1]), 1
        while len(ends) and length < LONGEST:
            longer = ends[ends >= length]
            longer = longer[seen[longer - length] == seen[last - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if not len(ends) or length < SHORTEST:
            return []
        end = int(ends[-1])
        period = last - end
        return [int(seen[end + 1 + place % period]) for place in range(most)]


class ModelDrafter:
    """A smaller model with the same vocabulary, with pages of its own.

    Block b of its pages belongs to whoever has block b of the target's, so that one table serves both and nobody has to
    account for its blocks. What it holds there is this class's own business: `_done` says how far a sequence has come,
    from nothing, whatever the target found in its prefix cache or got from another worker.
    """

    def __init__(self, model: Model, *, num_blocks: int, block_size: int, token_budget: int) -> None:
        self.model = model
        self.pages = model.allocate(num_blocks, block_size)
        self._budget = token_budget  # of one forward: a long prompt is caught up with in several steps
        self._done: dict[str, tuple[int, int]] = {}  # id -> (its preemptions then, leading tokens whose KV is here)
        self._busy = False

    def propose(self, asked: Seq[Ask]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in asked]
        most = [min(ask.most, self.model.max_model_len - len(ask.sequence.tokens)) for ask in asked]
        going = [index for index in range(len(asked)) if most[index] > 0]
        self._busy = False
        while going:
            going = [index for index in self._round(asked, drafts, going) if len(drafts[index]) < most[index]]
        return drafts

    def verified(self, sequence: Sequence) -> None:
        """Forgets the KV of drafts that were wrong: all tokens but the last are what they were for it."""
        preemptions, done = self._done.get(sequence.id, (0, 0))
        self._done[sequence.id] = preemptions, min(done, len(sequence.tokens) - 1)

    def forget(self, sequence_id: str) -> None:
        self._done.pop(sequence_id, None)

    @property
    def busy(self) -> bool:
        return self._busy

    def _round(self, asked: Seq[Ask], drafts: list[list[int]], going: list[int]) -> list[int]:
        """One forward: what each sequence lacks up to its last draft. Those that lacked no more got a draft."""
        batch = Batch(token_ids=[], positions=[], query_lens=[], context_lens=[], block_tables=[], logits_at=[])
        ready: list[int] = []
        for index in going:
            sequence, _, table = asked[index]
            done = self._progress(sequence)
            known = len(sequence.tokens)
            missing = sequence.tokens[done:] + drafts[index][max(0, done - known) :]
            count = min(len(missing), self._budget - len(batch.token_ids))
            if count == 0:
                continue
            # After a step with drafts it lacks two tokens at most; more is a prompt, or steps in which nobody drafted.
            self._busy |= count > 2
            batch.token_ids += missing[:count]
            batch.positions += range(done, done + count)
            batch.query_lens.append(count)
            batch.context_lens.append(done + count)
            batch.block_tables.append(table)
            self._done[sequence.id] = sequence.preemptions, done + count
            if count == len(missing):
                ready.append(index)
                batch.logits_at.append(len(batch.token_ids) - 1)
        logits = self.model.forward(self.pages, batch)
        sequences = [asked[index].sequence for index in ready]
        places = [len(one.tokens) + len(drafts[index]) for one, index in zip(sequences, ready, strict=True)]
        for index, token in zip(ready, sample(logits, [one.sampling for one in sequences], places), strict=True):
            drafts[index].append(token)
        return ready

    def _progress(self, sequence: Sequence) -> int:
        """Leading tokens whose KV is in its present blocks; a preemption took the earlier ones."""
        preemptions, done = self._done.get(sequence.id, (0, 0))
        return done if preemptions == sequence.preemptions else 0
