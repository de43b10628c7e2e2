"""Speculative decoding: drafts the next tokens, and decides whether drafting pays.

    wanted() ─▶ scheduler.lend() ─▶ propose() ─▶ one packed step over [last token, draft 1, draft 2, ...]
        ▲                                                 │ the target's own token at each position, by that position's
        │                                                 ▼ random number; a draft counts while it equals that token
        └──────────── verified(), took() ◀──── accepted drafts and one more token

A draft is a guess about a token that is a function of (request, position), so the stream is the same whether a guess
was right, wrong or never made: drafts change only the number of tokens per step.

There are two drafters. `Ngram` continues as the text did after its last occurrence of the same tokens. `ModelDrafter`
uses a smaller model with the same random numbers, so that its draws tend to equal the target's.

Drafts pay while the expected tokens exceed their price in tokens:

    chance + chance ** 2 + ... + chance ** k  >  fixed + k * each         the j-th counts only if those before it do

The price is the time that a drafting stream (`fixed`) and each of its drafts (`each`) add to a step, in units of the
time of a token without drafts. It is measured while the engine runs, by the number of streams: with one stream a step
is bound by reading the weights and drafts are nearly free; with many it is bound by arithmetic and a draft costs as
much as a token, so that drafting ends by itself. The chance is a moving average of each request.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from engine.attention.forward_context import Batch
from engine.core.scheduler import Chunk, Scheduler
from engine.core.sequence import Sequence
from engine.decoding.sampler import sample
from engine.runner.model_runner import ModelRunner

FIRST_CHANCE = 0.5  # of a request without verified drafts
WEIGHT = 0.2  # of one verified draft in its request's moving average
LOWEST, HIGHEST = 0.01, 0.98  # bounds of the average: `worth` divides by its logarithm
REMEMBERED = 15  # measured steps of each kind from which a price is computed
STALL = 3.0  # a step that took more than this many times the sum of its parts was delayed by another process
KNOWN = 3  # plain steps before the first drafts
EVERY = 32  # one step in this many is plain, and one drafts against the odds, to keep prices and chances current


class Ask(NamedTuple):
    sequence: Sequence
    most: int  # upper limit of drafts; may be 0
    table: list[int]  # blocks with slots for all its tokens and these drafts


class Drafting(NamedTuple):
    """The drafter's running forward, or its last one."""

    number: int = 0
    tokens: int = 0  # 0: none runs


class Drafter(Protocol):
    busy: bool
    """Whether the last proposal did one-time work, so that its duration is not representative."""
    under_way: Drafting
    """For a watchdog, on any thread."""

    def propose(self, asked: Seq[Ask]) -> list[list[int]]:
        """Drafts for each sequence, at most `most` of them."""

    def verified(self, sequence: Sequence) -> None:
        """Called when the drafts of a sequence have been verified; `tokens` are its tokens now."""

    def forget(self, sequence_id: str) -> None: ...


# ---- whether it pays


@dataclass
class _Steps:
    """Measured steps with about the same number of streams."""

    count: int = 0
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # seconds of a step without drafts
    drafted: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    # (streams that drafted, drafts, seconds more than without)

    def price(self, streams: int) -> tuple[float, float]:
        """(fixed, each) in tokens. 0 while unknown, so that drafts are made and the price is learnt."""
        seconds = median(self.plain)
        if not self.drafted or seconds <= 0:
            return 0.0, 0.0
        fixed, each = fit(self.drafted)
        return fixed * streams / seconds, each * streams / seconds


class Speculation:
    """`tokens` is the most that one request drafts for one step; `clock` returns seconds."""

    def __init__(self, drafter: Drafter, tokens: int, clock: Callable[[], float] = perf_counter) -> None:
        self.drafter = drafter
        self.tokens = tokens
        self.clock = clock
        self._chance: dict[str, float] = {}
        self._steps: defaultdict[int, _Steps] = defaultdict(_Steps)

    def wanted(self, plan: list[Chunk]) -> list[int]:
        """How many drafts of each chunk would pay. None in a step that also computes prompts: it is bound by
        arithmetic already."""
        if any(chunk.sequence.num_uncomputed != 1 for chunk in plan):
            return [0] * len(plan)
        steps = self._steps[len(plan).bit_length()]
        number, steps.count = steps.count, steps.count + 1
        if len(steps.plain) < KNOWN or number % EVERY == 0:
            return [0] * len(plan)
        (fixed, each), least = steps.price(len(plan)), int(number % EVERY == EVERY // 2)
        chances = (self._chance.get(chunk.sequence.id, FIRST_CHANCE) for chunk in plan)
        return [max(least, worth(chance, fixed, each, self.tokens)) for chance in chances]

    def drafts(self, plan: list[Chunk], scheduler: Scheduler, tokens: int) -> list[list[int]]:
        """Drafts of the tokens that follow each chunk; often none. The step has at most `tokens` with them. None under
        a grammar, whose mask for a position depends on the token before it."""
        wanted = zip(plan, self.wanted(plan), strict=True)
        most = [0 if chunk.sequence.sampling.grammar else count for chunk, count in wanted]
        lent = scheduler.lend(plan, most, tokens)
        if not any(lent):
            return [[] for _ in plan]
        each = [chunk.sequence for chunk in plan]
        tables = [scheduler.pool.table(sequence.id) for sequence in each]
        return self.drafter.propose(list(map(Ask, each, lent, tables)))

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """The first `accepted` drafts were right; the next one, if there was one, is known to be wrong."""
        sequence.drafted += drafted
        sequence.accepted += accepted
        chance = self._chance.get(sequence.id, FIRST_CHANCE)
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            chance += WEIGHT * (right - chance)
        self._chance[sequence.id] = min(max(chance, LOWEST), HIGHEST)
        self.drafter.verified(sequence)

    def took(self, plan: list[Chunk], drafts: Seq[int], seconds: float) -> None:
        """Observes the duration of a step over this plan with these numbers of drafts, drafting included."""
        total = sum(drafts)
        if any(chunk.tokens != 1 for chunk in plan) or (total and self.drafter.busy):
            return
        steps = self._steps[len(plan).bit_length()]
        if total == 0:
            steps.plain.append(seconds)
        else:
            plain = median(steps.plain)
            longest = STALL * plain * (1 + total / len(plan))
            steps.drafted.append((sum(map(bool, drafts)), total, min(seconds, longest) - plain))

    def forget(self, sequence_id: str) -> None:
        self._chance.pop(sequence_id, None)
        self.drafter.forget(sequence_id)


def worth(chance: float, fixed: float, each: float, most: int) -> int:
    """The number of drafts, at most `most`, that gains most over its price; 0 if none does. Free drafts always gain."""
    count = most if each <= 0.0 else max(0, min(most, int(math.log(each) / math.log(chance))))  # chance ** j >= each
    brings = sum(chance**place for place in range(1, count + 1))
    return count if brings >= fixed + count * each else 0


def fit(steps: Iterable[tuple[int, int, float]]) -> tuple[float, float]:
    """(fixed, each) that explain `seconds = streams * fixed + drafts * each` best, neither of them negative."""
    ss = sd = dd = st = dt = 0.0
    for streams, drafts, seconds in steps:
        ss, sd, dd = ss + streams * streams, sd + streams * drafts, dd + drafts * drafts
        st, dt = st + streams * seconds, dt + drafts * seconds
    determinant = ss * dd - sd * sd
    if determinant > 1e-9 * ss * dd:
        fixed, each = (st * dd - dt * sd) / determinant, (dt * ss - st * sd) / determinant
        if fixed >= 0.0 and each >= 0.0:
            return fixed, each
    # With a constant number of drafts per stream the two cannot be separated, and noise can make one of them negative.
    # Then only one is fitted, the one that explains more.
    return (max(0.0, st / ss), 0.0) if st * st / ss >= dt * dt / dd else (0.0, max(0.0, dt / dd))


# ---- drafters


SHORTEST, LONGEST = 2, 8  # last tokens that must occur earlier, and the longest match that is searched for


class Ngram:
    """Prompt lookup: finds an earlier occurrence of the last tokens (the longest match, then the latest) and proposes
    the tokens that followed it. A match that overlaps with itself repeats with its period."""

    def __init__(self) -> None:
        self.busy, self.under_way = False, Drafting()
        self._ids: dict[str, array[int]] = {}  # a copy of each sequence's tokens for numpy

    def propose(self, asked: Seq[Ask]) -> list[list[int]]:
        return [self._continue(ask.sequence, ask.most) if ask.most else [] for ask in asked]

    def verified(self, sequence: Sequence) -> None: ...

    def forget(self, sequence_id: str) -> None:
        self._ids.pop(sequence_id, None)

    def _continue(self, sequence: Sequence, most: int) -> list[int]:
        ids = self._ids.setdefault(sequence.id, array("q"))
        ids.extend(sequence.tokens[len(ids) :])
        tokens = np.frombuffer(ids, dtype=np.int64)
        last = len(tokens) - 1
        ends, length = np.flatnonzero(tokens[:-1] == tokens[-1]), 1
        while len(ends) and length < LONGEST:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[last - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if not len(ends) or length < SHORTEST:
            return []
        end = int(ends[-1])
        period = last - end
        return [int(tokens[end + 1 + place % period]) for place in range(most)]


class ModelDrafter:
    """A smaller model with the same vocabulary and its own pages.

    Block b of its pages belongs to the owner of the target's block b, so one table serves both and its blocks need no
    accounting. `_done` counts how many tokens of a sequence this model has computed; it computes all of them itself,
    whatever the target found in its prefix cache or received from another worker.
    """

    def __init__(self, model: ModelRunner, *, num_blocks: int, block_size: int, token_budget: int) -> None:
        self.model = model
        self.pages = model.allocate(num_blocks, block_size)
        self._budget = token_budget  # of one forward: a long prompt is caught up with in several steps
        self._done: dict[str, tuple[int, int]] = {}  # id -> (its preemptions then, leading tokens whose KV is here)
        self.busy, self.under_way = False, Drafting()

    def propose(self, asked: Seq[Ask]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in asked]
        most = [min(ask.most, self.model.max_model_len - len(ask.sequence.tokens)) for ask in asked]
        going = [index for index in range(len(asked)) if most[index] > 0]
        self.busy = False
        while going:
            going = [index for index in self._round(asked, drafts, going) if len(drafts[index]) < most[index]]
        self.under_way = Drafting(self.under_way.number + 1)  # the target's forward follows
        return drafts

    def verified(self, sequence: Sequence) -> None:
        """Forgets the KV of rejected drafts. What this model has computed is right for at most all tokens but the
        last one."""
        preemptions, done = self._done.get(sequence.id, (0, 0))
        self._done[sequence.id] = preemptions, min(done, len(sequence.tokens) - 1)

    def forget(self, sequence_id: str) -> None:
        self._done.pop(sequence_id, None)

    def _round(self, asked: Seq[Ask], drafts: list[list[int]], going: list[int]) -> list[int]:
        """One forward over the tokens of each sequence that this model has not computed, drafts included. A sequence
        without any left gets a draft."""
        batch = Batch()
        ready: list[int] = []
        for index in going:
            sequence, _, table = asked[index]
            done = self._progress(sequence)
            known = len(sequence.tokens)
            missing = sequence.tokens[done:] + drafts[index][max(0, done - known) :]
            count = min(len(missing), self._budget - len(batch.token_ids))
            if count == 0:
                continue
            # After a step with drafts it lacks at most two tokens; more means a prompt, or steps without drafts.
            self.busy |= count > 2
            batch.add(missing[:count], done, table, [count - 1] if count == len(missing) else [])
            self._done[sequence.id] = sequence.preemptions, done + count
            if count == len(missing):
                ready.append(index)
        self.under_way = Drafting(self.under_way.number + 1, len(batch.token_ids))
        logits = self.model.forward(self.pages, batch)
        sequences = [asked[index].sequence for index in ready]
        places = [len(sequence.tokens) + len(drafts[index]) for sequence, index in zip(sequences, ready, strict=True)]
        for index, token in zip(
            ready, sample(logits, [sequence.sampling for sequence in sequences], places), strict=True
        ):
            drafts[index].append(max(0, token))  # -1 (logits not finite): any draft will do, the target decides
        return ready

    def _progress(self, sequence: Sequence) -> int:
        """Leading tokens whose KV is in the sequence's present blocks; a preemption has freed earlier ones."""
        preemptions, done = self._done.get(sequence.id, (0, 0))
        return done if preemptions == sequence.preemptions else 0


def agrees(draft: int, token: int) -> bool:
    """Whether a draft is the token that the target chose at its position."""
    return draft == token
