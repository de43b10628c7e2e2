"""A sequence: tokens wanted, tokens computed, and what decides when it ends.

    tokens         [ p0 p1 p2 ... p(prompt_len-1) | g0 g1 ... ]      the client's prompt, then generated tokens
    num_computed     ^^^^^^^^^^^^^^ how many leading tokens have their KV in blocks

There is no prefill phase and no decode phase. A step brings `num_computed` closer to `len(tokens)`; when they are
equal, the last position's logits give the next token, which makes `len(tokens)` one larger again.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from engine.core import block_hash
from tandem.sampling import DEFAULTS, Sampling


class Finish(StrEnum):
    STOP = "stop"  # a stop token; it is the last of `tokens` and is not shown to the client
    LENGTH = "length"


class LoraSlot(NamedTuple):
    """The adapter of a sequence, and the slot that holds it until the sequence is dropped."""

    slot: int
    fingerprint: bytes


class Logprob(NamedTuple):
    """Natural log probabilities at one place: of the chosen token, and of the most likely ones, best first."""

    chosen: float
    top_ids: list[int]
    top: list[float]


class Tally:
    """The distinct tokens of a sequence, and how often each was generated, for penalties.

    Derived from `tokens` alone, so it can be rebuilt at any time.
    """

    __slots__ = ("_counted", "_place", "counts", "ids")

    def __init__(self) -> None:
        self.ids = array("q")  # distinct tokens in the order of their first appearance
        self.counts = array("q")  # how often each was generated; 0 for one that only the prompt holds
        self._counted = 0  # leading tokens that are in here
        self._place: dict[int, int] = {}  # token -> its index in `ids`

    def catch_up(self, tokens: list[int], prompt_len: int) -> None:
        for position in range(self._counted, len(tokens)):
            place = self._place.setdefault(tokens[position], len(self.ids))
            if place == len(self.ids):
                self.ids.append(tokens[position])
                self.counts.append(0)
            self.counts[place] += position >= prompt_len
        self._counted = len(tokens)


@dataclass(eq=False, slots=True)
class Sequence:
    id: str  # also the owner's name in the block pool
    tokens: list[int]
    prompt_len: int  # of the client's prompt; a resumed sequence arrives with generated tokens after it
    max_len: int  # length at which it ends: prompt_len + max_tokens
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = DEFAULTS
    salt: bytes = b""
    tenant: str = ""
    adapter: LoraSlot | None = None  # None: the base model
    # sampling.grammar, compiled before anything is reserved (engine.decoding.structured_output.Compiled)
    grammar: Any = None
    matcher: Any = None  # how far the tokens follow the grammar; only structured_output.Filling makes one
    handoff: bool = False  # keeps its blocks after its last token, until they have been read elsewhere
    rounded: bool = False  # its KV was kept in another type before: others must not find it in the prefix cache
    num_computed: int = 0  # leading tokens whose KV is in its blocks
    cached: int = 0  # of `num_computed` at admission: tokens found in the prefix cache
    unresumed: int = 0  # tokens after those whose KV was found, too, but no copy of the recurrent states behind them
    preemptions: int = 0
    arrival: int = 0  # a number that grows with each sequence the scheduler takes
    overtaken: int = 0  # prompt tokens of later ones that were computed while this one waited
    drafted: int = 0  # tokens that were proposed and verified
    accepted: int = 0  # of them, those that were the right ones
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of prompt tokens 1, 2, ..., as far as computed
    _hashes: list[bytes] = field(default_factory=list)
    _tally: Tally | None = None

    def __post_init__(self) -> None:
        if not 0 < self.prompt_len <= len(self.tokens) < self.max_len:
            raise ValueError(
                f"sequence {self.id}: need 0 < prompt_len ({self.prompt_len}) <= tokens ({len(self.tokens)})"
                f" < max_len ({self.max_len})"
            )
        if (self.grammar is None) != (self.sampling.grammar is None):
            raise ValueError(f"sequence {self.id}: its grammar was not compiled")

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def fingerprint(self) -> bytes:
        """Of its adapter; empty for the base."""
        return self.adapter.fingerprint if self.adapter else b""

    def tally(self) -> Tally:
        """The tokens so far, counted."""
        if self._tally is None:
            self._tally = Tally()
        self._tally.catch_up(self.tokens, self.prompt_len)
        return self._tally

    def hashes(self, block_size: int) -> list[bytes]:
        """Chained hashes of the full blocks of `tokens`, extended as it grows; never more than that many."""
        while (len(self._hashes) + 1) * block_size <= len(self.tokens):
            start = len(self._hashes) * block_size
            previous = self._hashes[-1] if self._hashes else block_hash.root(self.salt, self.fingerprint)
            self._hashes.append(block_hash.extend(previous, self.tokens[start : start + block_size]))
        return self._hashes

    def contexts(self, block_size: int, states: int) -> list[bytes]:
        """What a handoff of all tokens consists of, in order: the hashes of its blocks, the last one perhaps partial,
        and of the `states` blocks with a copy of the recurrent state after the last token."""
        own = block_hash.chain(self.tokens, block_size, self.salt, adapter=self.fingerprint, partial=True)
        return own + block_hash.of_state(own[-1], len(self.tokens), states)

    def reusable(self, block_size: int) -> list[bytes]:
        """Hashes of the leading blocks that a prefix cache may give. One token is always left to compute, for its
        logits, and so is every one whose logits are wanted for `prompt_logprobs`."""
        most = len(self.tokens) - 1
        if self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len - 1:
            most = min(most, len(self.prompt_logprobs))
        return self.hashes(block_size)[: most // block_size]

    def to_score(self, count: int) -> range:
        """Positions among the next `count` whose logits give the next missing `prompt_logprobs`, in order: position p
        scores token p + 1. Tokens that were scored before a preemption are not scored again."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        return range(
            max(self.num_computed, len(self.prompt_logprobs)), min(self.num_computed + count, self.prompt_len - 1)
        )

    def ends_with(self, token: int) -> Finish | None:
        """Why this token would be the last; None if others can follow it."""
        if token in self.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.tokens) + 1 >= self.max_len else None

    def append(self, token: int) -> Finish | None:
        """Appends the sampled token; returns why it was the last, or None."""
        finish = self.ends_with(token)
        self.tokens.append(token)
        return finish
