"""Sequences that run in one engine to their end, and what transformers gives for them."""

from __future__ import annotations

from pathlib import Path

from engine.core.sequence import Sequence
from engine.engine import Engine
from tests.support import oracle


def asked(name: str, prompt: list[int], new: int) -> Sequence:
    """A greedy sequence of `new` tokens."""
    return Sequence(id=name, tokens=list(prompt), prompt_len=len(prompt), max_len=len(prompt) + new)


def asked_of(folder: Path, lengths: tuple[int, ...], new: int) -> list[Sequence]:
    """One for a random prompt of each length."""
    prompts = oracle.prompts(folder, list(lengths))
    return [asked(f"s{number}", prompt, new) for number, prompt in enumerate(prompts)]


def run(engine: Engine, added: list[Sequence]) -> None:
    """To their end; the books balance after every step."""
    for sequence in added:
        engine.add(sequence)
    for _ in range(1000):
        if not engine.scheduler.has_work:
            break
        engine.step()
        assert engine.check(live=engine.sequences) == []
    assert engine.pool.held == 0


def right(folder: Path, sequence: Sequence) -> bool:
    """Whether its tokens are those of transformers."""
    prompt, answer = sequence.tokens[: sequence.prompt_len], sequence.tokens[sequence.prompt_len :]
    return len(sequence.tokens) == sequence.max_len and oracle.follows(folder, prompt, answer)
