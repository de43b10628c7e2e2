"""Text that matches a grammar: xgrammar determines which tokens may come next, as one bit for each token.

    GrammarSpec ──Grammars.compile──▶ Compiled ──▶ Matcher of a sequence ──Masks.begin──▶ Filling ──▶ logits
                  grammars.py, once              a memo of its tokens     a thread, while the forward runs

All state is derived: from a request and its tokens, any worker computes the same bits. So preemption, handoff and
resume carry no matcher state.

Compiling and matching are native calls that cannot be interrupted, and a hostile grammar may make one last for hours.
So they run on threads that are abandoned when a call has taken too much CPU time: only that request fails, and the
thread gets what the others leave of the processor. CPU time is measured because a busy machine is no reason to refuse a
grammar. All rows of a step wait for the slowest mask, so the time counts over all tokens of a request: with a limit for
each token alone, one grammar could make every step of the worker last that long.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from time import thread_time

import numpy as np
import structlog
import torch
import xgrammar

from engine.core.sequence import Sequence
from engine.decoding.native_thread import POLL_S, LeftBehind, NativeThread
from engine.gpu import sampling
from tandem.errors import InternalError, InvalidRequest, PreconditionFailed, TandemError
from tandem.sampling import GrammarSpec, ReasoningTokens

log = structlog.get_logger(__name__)
Compiled = xgrammar.CompiledGrammar

# Of a request's masks: as much at once, and as much for each token in the long run. A typical mask takes 0.2 ms; those
# of large schemas with a vocabulary of 150,000 tokens took 4 ms on average and up to 41 ms (Zen 4).
MASK_CPU_S, TOKEN_CPU_S = 1.0, 0.02
MAX_WHITESPACE = 4  # between two parts of JSON; without a limit a small model may write white space forever

_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_WHERE = re.compile(r"^(\[[\d:]+\] )?\S+\.cc:\d+: ")  # the prefix of xgrammar's messages


class Vocabulary:
    """The text of each token: for grammars in general, and for JSON."""

    @classmethod
    def of(cls, texts: list[bytes], vocab_size: int, end: int) -> Vocabulary:
        """The vocabulary of tokens with these bytes. A token with empty bytes is never allowed."""
        return cls(xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[end]))

    def __init__(self, plain: xgrammar.TokenizerInfo) -> None:
        self.plain = plain
        # xgrammar would let raw control characters into strings of limited length, which are not JSON. It keeps line
        # ends out of them; without the other control characters no token can do it.
        texts = [b"" if _CONTROL.search(text) else text for text in plain.decoded_vocab]
        self.json = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=plain.vocab_size,
            stop_token_ids=plain.stop_token_ids,
            add_prefix_space=plain.add_prefix_space,
        )


def vocabulary(folder: Path, vocab_size: int, eos_token_ids: list[int]) -> Vocabulary:
    """The text of each token, as the detokeniser shows it: special tokens have none, so no grammar ever allows them.
    Raises PreconditionFailed."""
    from transformers import PreTrainedTokenizerFast

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise PreconditionFailed(f"a grammar needs the checkpoint's tokenizer, and {path.name} is not there")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))  # type: ignore[no-untyped-call]
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=eos_token_ids or [0]
    )
    special = {place for place, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = [""] * vocab_size
    for text, place in tokenizer.get_vocab().items():
        if place < vocab_size and place not in special:
            texts[place] = text
    plain = xgrammar.TokenizerInfo(
        texts,
        info.vocab_type,
        vocab_size=vocab_size,
        stop_token_ids=eos_token_ids or [0],
        add_prefix_space=info.add_prefix_space,
    )
    return Vocabulary(plain)


def compile_spec(spec: GrammarSpec, vocabulary: Vocabulary) -> Compiled:
    tokens = vocabulary.json if spec.kind in ("json_schema", "json", "calls") else vocabulary.plain
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    match spec.kind:
        case "json_schema":
            return compiler.compile_json_schema(spec.text, max_whitespace_cnt=MAX_WHITESPACE)
        case "json":
            return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=MAX_WHITESPACE)
        case "regex":
            return compiler.compile_regex(spec.text)
        case "ebnf":
            return compiler.compile_grammar(spec.text)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(spec.text))
            return compiler.compile_grammar("root ::= " + " | ".join(texts))
        case "calls":
            return compiler.compile_structural_tag(_calls(*json.loads(spec.text)))
    raise ValueError(f"no kind of grammar is named {spec.kind}")


def _calls(separator: str | None, calls: list[tuple[str, str, str]], style: str = "json") -> str:
    """The grammar as xgrammar's structural tag. Each schema stays separate, so that `$ref` keeps its meaning."""
    # Next to an unquoted value, white space cannot be told from white space in the value; the reader tries both.
    spaces = MAX_WHITESPACE if style == "json" else 1
    how = {"type": "json_schema", "style": style, "max_whitespace_cnt": spaces}
    tags = [
        {"type": "tag", "begin": before, "content": {**how, "json_schema": json.loads(arguments)}, "end": after}
        for before, arguments, after in calls
    ]
    one_or_more = {"separator": separator or "", "at_least_one": True, "stop_after_first": separator is None}
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "tags_with_separator", "tags": tags, **one_or_more}}
    )


def refusal(spec: GrammarSpec, error: Exception) -> InvalidRequest:
    what = _WHERE.sub("", str(error).strip())[:300]
    return InvalidRequest(
        f"{spec.field} cannot be compiled: {what}",
        reason="BAD_GRAMMAR",
        field=spec.field,
        bound="what xgrammar accepts",
    )


class Matcher:
    """How far a sequence's generated tokens have been matched; derived from them alone. In the reasoning before the
    text every token is allowed, special ones included, except stop tokens; but after the beginning of a header only its
    next one is."""

    __slots__ = ("_free", "_matcher", "_reasoning", "_recent", "_stop_ids", "credit_s", "matched")

    @classmethod
    def of(cls, sequence: Sequence) -> Matcher:
        """A new one, which has matched none of the sequence's tokens."""
        return cls(sequence.grammar, sequence.stop_ids, sequence.sampling.before_grammar)

    def __init__(self, compiled: Compiled, stop_ids: Iterable[int], reasoning: ReasoningTokens | None = None) -> None:
        self._stop_ids = sorted(stop_ids)
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._stop_ids)
        self._reasoning = reasoning
        self._free = reasoning is not None and reasoning.open is None  # the next token is part of the reasoning
        self._recent: tuple[int, ...] = ()  # the last tokens of the reasoning: as many as its end or a header has
        self.matched = 0  # leading tokens of the sequence, its prompt included
        self.credit_s = MASK_CPU_S  # of CPU time that its masks may take before the next token; never more than that

    def fill(self, sequence: Sequence, bits: torch.Tensor, row: int) -> None:
        """Sets the bits of the tokens that may follow the sequence's: [rows, vocab / 32] int32. A stop token may follow
        only where the text is complete. Raises InternalError if the sequence's own tokens do not match the grammar."""
        for place in range(max(self.matched, sequence.prompt_len), len(sequence.tokens)):
            self._accept(sequence.tokens[place], place - sequence.prompt_len)
            self.matched = place + 1
        if self._free:
            following = self._following()
            bits[row] = 0 if following else -1
            for token in following:
                _set_bit(bits, row, token, True)
            for token in self._stop_ids:
                _set_bit(bits, row, token, False)
            return
        self._matcher.fill_next_token_bitmask(bits, row)
        if self._reasoning is not None and self._reasoning.open is not None and not sequence.generated:
            _set_bit(bits, row, self._reasoning.open, True)

    def _accept(self, token: int, place: int) -> None:
        """Matches the token at this place of the completion."""
        reasoning = self._reasoning
        if reasoning is not None and place == 0 and token == reasoning.open:
            self._free, self._recent = True, (token,)
        elif reasoning is not None and self._free:
            longest = max(map(len, (reasoning.close, *reasoning.headers)))
            self._recent = (*self._recent, token)[-longest:]
            self._free = self._recent[-len(reasoning.close) :] != reasoning.close
        elif not self._matcher.accept_token(token):
            raise InternalError(f"token {place} does not fit the grammar of its sequence")

    def _following(self) -> set[int]:
        """The next tokens of the headers that have begun: gpt-oss would add words to the header of its answer, whose
        grammar would then never begin."""
        headers = self._reasoning.headers if self._reasoning else ()
        begun = ((header, size) for header in headers for size in range(1, len(header)))
        return {header[size] for header, size in begun if self._recent[-size:] == header[:size]}


def _set_bit(bits: torch.Tensor, row: int, token: int, value: bool) -> None:
    words = bits[row].numpy().view(np.uint32)
    bit = np.uint32(1 << (token % 32))
    words[token // 32] = words[token // 32] | bit if value else words[token // 32] & ~bit


class Filling:
    """The masks of one step. Made by Masks.begin; the sequences must not change until `wait` has returned."""

    def __init__(self, masks: Masks, rows: dict[int, Sequence], count: int, vocab_size: int) -> None:
        # One row for each sequence. A row that has not been filled allows no token.
        self.bits = torch.zeros((count, -(-vocab_size // 32)), dtype=torch.int32)
        self.rows = list(rows)  # those that have a grammar
        self.failed: dict[int, TandemError] = {}
        self._masks = masks
        self._sequences = list(rows.values())
        self._ended = threading.Event()
        self._turn = threading.Lock()  # held to begin a row, and to move the rest to a new thread
        self._at = (0, 0.0, MASK_CPU_S)  # the row, its thread's CPU time as it began, and how much more it may take
        self._start(0)

    def wait(self) -> Filling:
        """Waits until every row is filled or has failed."""
        self._masks.waits += 1
        try:
            while not self._ended.wait(POLL_S):
                self._skip_a_slow_row()
        finally:  # otherwise every later step would have the watchdog's time limit of a waiting step
            self._masks.waits += 1
        return self

    def _skip_a_slow_row(self) -> None:
        with self._turn:
            index, began, allowed = self._at
            if self._masks.thread().cpu_s() - began <= allowed:
                return
            self._attempt = object()
        self.failed[self.rows[index]] = _too_slow()
        self._masks.leave(self._sequences[index].tenant)
        self._start(index + 1)

    def _start(self, index: int) -> None:
        thread = self._masks.thread()
        self._attempt = attempt = object()
        self._at = (index, thread.cpu_s(), MASK_CPU_S)
        thread.submit(lambda: self._fill(index, attempt))

    def _fill(self, start: int, attempt: object) -> None:
        for index in range(start, len(self.rows)):
            if not self._fill_row(index, attempt):
                return  # abandoned meanwhile; another thread does the rest
        with self._turn:
            if attempt is self._attempt:
                self._ended.set()

    def _fill_row(self, index: int, attempt: object) -> bool:
        """False: the thread was abandoned."""
        sequence, row = self._sequences[index], self.rows[index]
        with self._turn:
            if attempt is not self._attempt:
                return False
            # Taken from the sequence until the row is filled: if the step fails and the sequence is retried, a thread
            # that was left may still be inside the matcher, and another one would change it, too.
            matcher, sequence.matcher = sequence.matcher, None
            unmatched = len(sequence.tokens) - max(sequence.prompt_len, matcher.matched if matcher else 0)
            allowed = (matcher.credit_s if matcher else MASK_CPU_S) + TOKEN_CPU_S * unmatched
            began = thread_time()
            self._at = (index, began, allowed)
        error: TandemError | None = None
        try:
            matcher = matcher or Matcher.of(sequence)
            matcher.fill(sequence, self.bits, row)
            left = allowed - (thread_time() - began)
            matcher.credit_s = min(MASK_CPU_S, left)
            error = _too_slow() if left < 0 else None
        except InternalError as found:
            error = found
        except Exception as found:  # a bug, here or in the library, fails its row; the thread continues
            log.exception("grammar.broken", sequence=sequence.id)
            error = InternalError(f"the grammar could not be matched: {type(found).__name__}")
        with self._turn:
            if attempt is not self._attempt:
                return False
            if error is None:
                sequence.matcher = matcher
            else:
                self.failed[row] = error
        return True


def _too_slow() -> InvalidRequest:
    return InvalidRequest(
        "the grammar takes too long to find the next token; make it less ambiguous",
        reason="GRAMMAR_TOO_COMPLEX",
        field="sampling.grammar",
        bound=f"{MASK_CPU_S:g} s of CPU time, and {TOKEN_CPU_S * 1000:g} ms more for each token",
    )


class Masks:
    """Fills the masks of each step, on a thread of its own."""

    waits = 0
    """Odd while a step waits for its masks; a watchdog reads it on another thread."""

    def __init__(self, left_behind: LeftBehind | None = None) -> None:
        self.left_behind = left_behind or LeftBehind()
        self._thread: NativeThread | None = None

    def begin(self, sequences: list[Sequence], vocab_size: int) -> Filling | None:
        """Starts to fill masks in the background; None when no sequence has a grammar."""
        rows = {row: sequence for row, sequence in enumerate(sequences) if sequence.grammar is not None}
        return Filling(self, rows, len(sequences), vocab_size) if rows else None

    def thread(self) -> NativeThread:
        self._thread = self._thread or NativeThread("grammar-masks")
        return self._thread

    def leave(self, tenant: str) -> None:
        self.left_behind.add(self.thread(), tenant)
        self._thread = None


def apply(logits: torch.Tensor, filling: Filling) -> None:
    """Makes tokens that the grammars do not allow impossible, in place: [sequences, vocab] float32."""
    if logits.device.type == "cpu":
        xgrammar.apply_token_bitmask_inplace(logits, filling.bits, vocab_size=logits.shape[-1], indices=filling.rows)
    else:
        sampling.forbid(logits, filling.bits, filling.rows)
