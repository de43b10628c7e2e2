"""The retries after a failed step. Pure Python: ids and numbers.

An exception does not tell which sequence caused it, or whether the batch was merely too large. The state of the
sequences has not changed, so the step's work is retried in halves:

    [a b c d] fails ─▶ [a b] runs, [c d] fails ─▶ [c] runs, [d] fails alone: d is at fault, the others go on

A step that ran out of memory is also cut by tokens, drafts included, down to one, which is tried twice, and for a while
all steps are kept to half of what failed. A step with fewer tokens than there are streams is for some of them, in turn:
the order of the batch would give the tokens to the same ones every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from engine.core.sequence import Sequence

GOOD_STEPS = 8  # after which the number of tokens is doubled again
MOST_GOOD_STEPS = 64  # likewise, where doubling it ran out of memory again and again
PROMPTS = ""  # all prompts together take turns with the streams; no sequence has this id


class Part(NamedTuple):
    """Sequences that are retried in a separate step."""

    ids: tuple[str, ...]
    tokens: int  # at most


class Retries:
    def __init__(self, token_budget: int) -> None:
        self._most = token_budget
        self._parts: deque[Part] = deque()
        self._good, self._wanted = 0, GOOD_STEPS  # good steps since the last change, and how many it takes to double
        self._doubled = False  # since memory ran out last
        self._alone = ""  # the sequence that ran out of memory alone, with a single token
        self._turns: list[str] = []  # whose turn comes next: ids of streams, and PROMPTS
        self.tokens = token_budget  # of any step, at most

    def __bool__(self) -> bool:
        return bool(self._parts)

    def next(self, living: Container[str]) -> Part | None:
        """Takes the next part, without the sequences that have ended; None: a step may be planned freely."""
        while self._parts:
            ids, tokens = self._parts.popleft()
            if left := tuple(sequence_id for sequence_id in ids if sequence_id in living):
                return Part(left, min(tokens, self.tokens))
        return None

    def failed(self, ids: Seq[str], tokens: int, out_of_memory: bool) -> bool:
        """A step of these sequences, with this many tokens and drafts, has failed. True: it cannot be cut further, so
        its only sequence is at fault."""
        self._good = 0
        drafting = self.tokens > 1  # perhaps: the memory may have lacked for drafts, or for the model that makes them
        if out_of_memory:
            self.tokens = max(1, min(self.tokens, tokens // 2))
            self._wanted = min(MOST_GOOD_STEPS, 2 * self._wanted) if self._doubled else self._wanted
            self._doubled = False
        if len(ids) > 1:
            half = len(ids) // 2
            self._parts.extendleft((Part(tuple(ids[half:]), self._most), Part(tuple(ids[:half]), self._most)))
        elif out_of_memory and drafting:
            self._parts.appendleft(Part(tuple(ids), self.tokens))
        elif out_of_memory and self._alone != ids[0]:  # once more: another process may have used the memory
            self._alone = ids[0]
            self._parts.appendleft(Part(tuple(ids), 1))
        else:
            return True
        return False

    def succeeded(self) -> None:
        """A step has run."""
        self._alone = ""
        self._good += 1
        if self.tokens < self._most:
            if self._good >= self._wanted:
                self.tokens, self._good, self._doubled = min(self._most, 2 * self.tokens), 0, True
        elif self._good >= MOST_GOOD_STEPS:
            self._wanted, self._doubled = GOOD_STEPS, False

    def turn(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> set[str] | None:
        """The ids whose turn the next step is, if it may not have a token for each stream; None: it is everyone's.
        A turn is of as many streams as there are tokens, those that had theirs longest ago. The prompts together have
        one like a stream, so that neither waits for the end of the other."""
        if self.tokens >= self._most:
            return None
        streams, prompts = list[str](), [sequence.id for sequence in waiting]
        for sequence in running:
            (streams if sequence.num_uncomputed == 1 else prompts).append(sequence.id)
        takers = [*streams, *([PROMPTS] if prompts else [])]
        if self.tokens >= len(takers):
            return None
        line = [*(taker for taker in self._turns if taker in takers)]
        line += [taker for taker in takers if taker not in line]
        now, self._turns = line[: self.tokens], line[self.tokens :] + line[: self.tokens]
        return {*now, *prompts} - {PROMPTS} if PROMPTS in now else set(now)


class BeforeStep:
    """A sequence as it was before a step."""

    __slots__ = ("_num_computed", "_scored", "_sequence", "_tokens")

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._num_computed, self._tokens, self._scored = (
            sequence.num_computed,
            len(sequence.tokens),
            len(sequence.prompt_logprobs),
        )

    def restore(self) -> bool:
        """False: it has got tokens, on which memos of it depend by now."""
        if len(self._sequence.tokens) != self._tokens:
            return False
        self._sequence.num_computed = self._num_computed
        del self._sequence.prompt_logprobs[self._scored :]
        return True
