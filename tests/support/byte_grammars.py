"""Sequences with a grammar over a vocabulary of the bytes, and what a model writes under one."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar

import engine.decoding.structured_output
from engine.core.sequence import Sequence
from engine.decoding.sampler import choose
from engine.decoding.structured_output import Masks, Matcher, Vocabulary, compile_spec
from tandem.sampling import GrammarSpec, Sampling

DEMO = Path(__file__).parents[2] / "demo/model"
EOS, VOCAB = 256, 290  # every byte, the end, and ids without a token
BYTES = Vocabulary.of([bytes([byte]) for byte in range(256)], VOCAB, EOS)


def schema_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def compiled(spec: GrammarSpec) -> Any:
    """Once for all sequences of a test's grammar."""
    return _compiled_once(spec, engine.decoding.structured_output.MAX_WHITESPACE)


@lru_cache(maxsize=64)
def _compiled_once(spec: GrammarSpec, _whitespace: int) -> Any:
    return compile_spec(spec, BYTES)


def sequence(spec: GrammarSpec | None, text: str = "", *, stop_ids: tuple[int, ...] = (EOS,), **how: Any) -> Sequence:
    """A sequence with a prompt of two tokens that has generated `text`."""
    tokens = [7, 8, *text.encode()]
    return Sequence(
        id=f"s{id(tokens)}",
        tokens=tokens,
        prompt_len=2,
        max_len=len(tokens) + 1000,
        stop_ids=frozenset(stop_ids),
        sampling=Sampling(grammar=spec, **how),
        grammar=compiled(spec) if spec else None,
    )


def fits(spec: GrammarSpec, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled(spec))
    return all(matcher.accept_token(byte) for byte in text.encode()) and bool(matcher.is_completed())


def step(sequences: list[Sequence], logits: torch.Tensor | None = None) -> list[Any]:
    """One choice for each sequence."""
    masks = Masks()
    if logits is None:
        logits = torch.zeros(len(sequences), VOCAB)
    filling = masks.begin(sequences, VOCAB)
    choices = choose(logits, sequences, filling)
    masks.thread().leave()
    return choices


def unpacked(bits: torch.Tensor) -> np.ndarray:
    """Of one row: 1 for each token that may come."""
    return np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[:VOCAB]


def matcher_of(one: Sequence) -> Matcher:
    """As the thread of masks makes it, once."""
    one.matcher = one.matcher or Matcher.of(one)
    matcher: Matcher = one.matcher
    return matcher


def possible(one: Sequence) -> set[int]:
    """The tokens that may come next."""
    bits = torch.zeros((1, -(-VOCAB // 32)), dtype=torch.int32)
    matcher_of(one).fill(one, bits, 0)
    return set(np.flatnonzero(unpacked(bits)).tolist())


def write(spec: GrammarSpec, seed: int, length: int = 400, *, likes: bytes = b"", by: float = 5.0) -> tuple[str, bool]:
    """What a model with constant logits writes under the grammar, and whether it ended. It prefers to close. Tokens are
    drawn here, from the masks of the product: a step of the product takes ten times as long."""
    one = sequence(spec)
    one.max_len = 10_000
    logits = np.zeros(VOCAB)
    logits[EOS] = 5.0
    for byte in b'"]},:0123456789':
        logits[byte] = 3.0
    for byte in b" \n\t\\":
        logits[byte] = -2.0
    for byte in range(128, 256):
        logits[byte] = -3.0
    for byte in likes:
        logits[byte] = by
    weights, chance, matcher = np.exp(logits), np.random.default_rng(seed), matcher_of(one)
    bits = torch.zeros((1, -(-VOCAB // 32)), dtype=torch.int32)
    while one.generated < length:
        matcher.fill(one, bits, 0)
        along = np.cumsum(weights * unpacked(bits))
        if one.append(int(np.searchsorted(along, chance.random() * along[-1], side="right"))):
            break
    text = bytes(one.tokens[2:-1]) if one.tokens[-1] == EOS else bytes(one.tokens[2:])
    return text.decode(errors="replace"), one.tokens[-1] == EOS
